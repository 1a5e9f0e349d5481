"""The HTML page as text: nothing leaves its place, and all is there. A browser looks at it in tests/e2e."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser
from xml.etree import ElementTree

import formats_shared as shared
import make_report as m
import pytest
from hostile import CODE, NAME, hostile_report
from snapshot import assert_snapshot

from placement_audit.measurement import Measurement, ParamMeasure
from placement_audit.model import State, StateKind
from placement_audit.report import render, svg
from placement_audit.report.html import html
from placement_audit.report.lanes import lanes
from placement_audit.report.route import CARRIED, FAULT
from placement_audit.report.routes import Routes
from placement_audit.report.volume import itemsize, volumes
from placement_audit.verdicts import Finding, PathStep, Report, Verdict

pytestmark = pytest.mark.unit

VOID = {"meta", "link", "wbr", "br", "img", "input"}


class Page(HTMLParser):
    """Reads a page: its tags are balanced, its text is by heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "title" in self.open[-1:]:
            return
        self.text += data
        if self.rows and self.rows[-1] and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        return next([" ".join(c.split()) for c in r] for r in self.rows if r and r[0].startswith(name))


REPORTS: dict[str, Callable[[], Report]] = {
    "mixed": m.mixed_report,
    "stock": m.stock_report,
    "two-sided": m.two_sided_report,
    "mended": shared.mended,
    "suppressed": shared.suppressed,
    "incomplete": shared.incomplete,
    "hostile": hostile_report,
}


@pytest.mark.parametrize("name", REPORTS)
def test_one_file_balanced_and_without_script_or_network(name: str) -> None:
    text = html(REPORTS[name]())
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        assert not [a for a in attributes if a.startswith("on")], (tag, attributes)
        for link in ("src", "href", "srcset", "data", "action"):
            assert attributes.get(link) in (None, "data:,"), (tag, attributes)
    assert "url(" not in text
    assert "@import" not in text
    assert text.endswith("</html>\n")
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    named = {i for _, a in page.tags for i in (a.get("aria-labelledby") or "").split()}
    assert named <= set(ids)


def test_whole() -> None:
    text = html(m.mixed_report())
    # the style sheet is looked at, not compared
    assert_snapshot("mixed.html", re.sub(r"<style>.*?</style>", "<style></style>", text, flags=re.DOTALL))


def test_the_grid_has_placement_and_verdict_of_every_cell() -> None:
    page = Page(html(m.mixed_report()))
    assert page.rows[0] == ["parameter", "fsdp 2", "tp 2"]
    assert page.row("tok_embeddings.weight")[1:] == ["O_S(0, 2)ok", "OS(0)ok"]
    assert page.row("layers.*.ffn_norm")[1:] == [
        "OS(0)ok",
        "DRdouble reduction \N{MULTIPLICATION SIGN}2, .grad P(sum)",
    ]
    assert page.row("layers.1.attention_norm")[1:] == ["OS(0)ok", "LRlost reduction"]
    assert page.row("norm.weight")[1:] == ["OS(0)ok", "PRdeferred, .grad P(sum)"]
    assert page.row("rope.scale")[1:] == ["?-not judged", "?-not judged"]


def test_every_verdict_has_a_letter_and_a_shape_of_its_class() -> None:
    assert len(set(svg.LETTERS.values())) == len(Verdict)
    shapes = {v: re.sub(r"<text.*|class=\"[^\"]*\"", "", svg.mark(v)) for v in Verdict}
    assert shapes[Verdict.LOST_REDUCTION] == shapes[Verdict.WRONG_SCALE] == shapes[Verdict.NO_GRADIENT]
    assert (
        len({shapes[v] for v in (Verdict.OK, Verdict.DEFERRED, Verdict.LOST_REDUCTION, Verdict.NOT_JUDGED)})
        == 4
    )


def test_clean_is_not_alarming() -> None:
    text = html(m.stock_report())
    assert '<p class="verdict">Clean</p>' in text
    assert 'class="bad"' not in text
    assert "Findings" not in Page(text).text


# --------------------------------------------------------------------------- the way


def route(report: Report, rule: str):
    finding: Finding = next(f for f in report.findings if f.rule_id == rule)
    found = Routes(report).of(finding)
    assert found is not None
    return found


def test_the_false_label_is_marked_where_it_turns_false_and_after() -> None:
    found = route(m.mixed_report(), "PA201")
    marks = [(s.where.rpartition("/")[2], s.left.mark if s.left else None) for s in found.stops]
    assert marks == [
        ("simple_fsdp.py:189", CARRIED),
        ("simple_fsdp.py:190", ""),
        ("simple_fsdp.py:196", ""),
        ("simple_fsdp.py:204", ""),
        ("simple_fsdp.py:214", ""),
        ("norm.py:31", FAULT),
    ]
    assert found.stops[5].left is not None
    assert found.stops[5].left.really == "each rank its own"
    assert found.grad is not None
    assert found.grad.mark == CARRIED


def test_a_place_that_hands_a_false_label_on_is_not_where_it_turned_false() -> None:
    report = m.mixed_report()
    finding = shared.lost(report)
    param = next(p for p in report.trace.params if p.fqn == finding.param_fqn)
    later = PathStep(role="hands it on", kind="to_local", call_site=m.TO_LOCAL, boundary=param.boundaries[0])
    found = Routes(report).of(replace(finding, path=(finding.path[0], later)))
    assert found is not None
    assert found.stops[0].role == "hands it on"
    assert [s.left.mark for s in found.stops if s.left] == [CARRIED, "", "", "", "", FAULT]


def test_a_label_that_turns_false_last() -> None:
    found = route(m.mixed_report(), "PA202")
    assert [s.left.mark for s in found.stops if s.left] == [FAULT, "", "", "", ""]


def test_no_label_is_called_false_that_is_true() -> None:
    """Values were wrong, labels were not: the cause is marked, and nothing is said to be other than it is labelled."""
    report = m.stock_report(layers=1)
    param = next(p for p in report.trace.params if p.fqn == "norm.weight")
    finding = replace(
        shared.lost(m.mixed_report()),
        rule_id="PA207",
        param_fqn=param.fqn,
        path=(PathStep(role="cause", kind="redistribute", call_site=m.GATHER, boundary=param.boundaries[2]),),
    )
    judgements = tuple(
        replace(j, verdict=Verdict.WRONG_GRADIENT) if j.param_fqn == param.fqn else j
        for j in report.judgements
    )
    report = replace(report, findings=(finding,), judgements=judgements)
    found = Routes(report).of(finding)
    assert found is not None
    assert [(s.left.mark, s.left.really) for s in found.stops if s.left] == [
        ("", ""),
        ("", ""),
        (FAULT, ""),
        ("", ""),
        ("", ""),
    ]
    assert found.grad is not None
    assert (found.grad.mark, found.grad.really) == (CARRIED, "")
    assert "really" not in lanes(found, "way", "tp")


def test_a_wrong_scale_is_told_though_the_label_is_true() -> None:
    report = m.stock_report(layers=1)
    at = next(i for i, p in enumerate(report.trace.params) if p.fqn == "norm.weight")
    param = report.trace.params[at]
    assert param.grad is not None
    half = replace(param.grad, state=(param.grad.state[0], State(StateKind.INVARIANT, Fraction(1, 2))))
    params = (*report.trace.params[:at], replace(param, grad=half), *report.trace.params[at + 1 :])
    judgements = tuple(
        replace(j, verdict=Verdict.WRONG_SCALE) if (j.param_fqn, j.mesh_dim) == (param.fqn, "tp") else j
        for j in report.judgements
    )
    report = replace(report, trace=replace(report.trace, params=params), judgements=judgements)
    finding = replace(shared.lost(m.mixed_report()), param_fqn=param.fqn, path=())
    found = Routes(report).of(finding)
    assert found is not None
    assert found.grad is not None
    assert found.grad.really == "complete and equal on all ranks, x1/2"


def test_where_no_gradient_came_nothing_is_drawn_as_if_it_had() -> None:
    report = m.mixed_report()
    finding = shared.lost(report)
    last = finding.path[0].boundary
    boundaries = tuple(replace(b, grad=None) if b.index == last else b for b in report.trace.boundaries)
    found = Routes(replace(report, trace=replace(report.trace, boundaries=boundaries))).of(finding)
    assert found is not None
    assert found.stops[-1].left is None
    before = lanes(route(report, "PA201"), "way", "tp").count('class="tip')
    # of two arrows into and out of that call's backward, the one below it is none any more
    assert lanes(found, "way", "tp").count('class="tip') == before - 1


def test_every_edge_of_the_way_has_its_placement_and_every_collective_its_box() -> None:
    found = route(m.mixed_report(), "PA202")
    assert [(s.before.labels, s.after.labels) for s in found.stops if s.before and s.after] == [
        ((("fsdp", "S(0)"), ("tp", "R")), ()),
        ((), (("fsdp", "S(0)"),)),
        ((("fsdp", "S(0)"),), (("fsdp", "R"),)),
        ((("fsdp", "R"),), ()),
        ((), (("tp", "R"),)),
    ]
    assert [(s.ran_forward, s.ran_backward) for s in found.stops] == [
        ((), ()),
        ((), ()),
        (
            ("all_gather over fsdp: 128 elements, float32",),
            ("reduce_scatter(sum) over fsdp: 256 elements, float32",),
        ),
        ((), ()),
        ((), ("all_reduce(sum) over tp: 256 elements, float32",)),
    ]
    drawing = lanes(found, "way", "tp")
    words = [t.text for t in ElementTree.fromstring(drawing).iter("text")]
    for text in ("fsdp S(0)", "tp R", "tp P(sum)", "all_gather over fsdp", "all_reduce(sum) over tp"):
        assert text in words
    assert words.count("tp P(sum)") == 2  # into from_local's backward, and out of to_local's
    assert drawing.count('class="cross"') == 1
    assert 'class="label fault" x="320"' in drawing


def test_only_the_mesh_dim_that_is_wrong_is_marked() -> None:
    drawing = ElementTree.fromstring(lanes(route(m.mixed_report(), "PA202"), "way", "tp"))
    marked = [t.text for t in drawing.iter("text") if "fault" in (t.get("class") or "")]
    assert marked == ["tp P(sum)", "really complete and", "equal on all ranks"]


def test_a_finding_that_names_no_call_has_no_drawing() -> None:
    report = m.mixed_report()
    report = replace(report, findings=(replace(shared.lost(report), path=(), param_fqn=None),))
    assert Routes(report).of(report.findings[0]) is None
    assert "<figure>" not in html(report)


def test_a_finding_of_a_module_shows_its_calls() -> None:
    report = m.mixed_report()
    finding = replace(shared.lost(report), param_fqn=None)
    found = Routes(report).of(finding)
    assert found is not None
    assert [s.where for s in found.stops] == ["my_model/norm.py:31"]


# --------------------------------------------------------------------------- numbers


def test_bytes_by_mesh_dim() -> None:
    report = m.stock_report(layers=1)
    by_name = {v.over: v for v in volumes(report.trace)}
    assert list(by_name) == ["fsdp", "tp"]
    for name, volume in by_name.items():
        ours = [c for c in report.trace.collectives if c.mesh_dims == (name,)]
        assert (volume.count, volume.sent) == (len(ours), sum(c.numel * 4 for c in ours))
    tp = [(t.phase.value, t.name, t.count, t.sent) for t in by_name["tp"].rows]
    assert tp == [("forward", "all_gather", 1, 4194304), ("backward", "all_reduce(sum)", 4, 3088)]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("bool", 1),
        ("complex64", 8),
        ("uint8", 1),
        ("odd", None),
    ],
)
def test_item_sizes(dtype: str, size: int | None) -> None:
    assert itemsize(dtype) == size


def test_an_unknown_dtype_is_not_counted_as_nothing() -> None:
    report = m.stock_report(layers=1)
    odd = tuple(replace(c, dtype="odd") for c in report.trace.collectives)
    page = Page(html(replace(report, trace=replace(report.trace, collectives=odd))))
    assert page.row("reduce_scatter(sum)")[-1] == "unknown"


def test_measured_numbers_the_worst_of_each_kind() -> None:
    report = m.mixed_report()

    def param(fqn: str, error: float | None, ratio: float) -> ParamMeasure:
        return ParamMeasure(
            fqn=fqn,
            grad_error=error,
            grad_ratio=ratio,
            grad_present=True,
            reference_present=True,
            local_error=None,
            grad_spread=(),
            init_spread=(),
            step_error=1e-7,
            sgd_error=None,
        )

    measured = Measurement(
        ranks=4,
        device_type="cpu",
        backend="gloo",
        seed=1,
        dtype="float32",
        model="",
        tolerance=1e-5,
        step_tolerance=1e-4,
        loss=1.0,
        reference_loss=1.0,
        loss_error=0.0,
        grad_scale=Fraction(1),
        grad_norm=None,
        reference_grad_norm=None,
        params=(
            param("layers.0.ffn_norm.weight", 3e-7, 1.0),
            param("layers.2.ffn_norm.weight", 1.0, 2.0),
            param("norm.weight", float("nan"), 1.0),
            param("output.weight", 1e-6, 1.0),
        ),
        boundaries=(),
        seconds=1.0,
    )
    page = Page(html(replace(report, measurement=measured)))
    rows = [[" ".join(c.split()) for c in r] for r in page.rows if len(r) == 5]
    assert rows[1:] == [
        ["layers.*.ffn_norm.weight \N{MULTIPLICATION SIGN} 3", "wrong 1.0e+00", "2", "1.0e-07", "-"],
        ["norm.weight", "wrong nan", "1", "1.0e-07", "-"],
        ["output.weight", "1.0e-06", "1", "1.0e-07", "-"],
    ]


# --------------------------------------------------------------------------- marks and text


def test_what_is_suppressed_is_told_and_counts_no_more() -> None:
    page = Page(html(shared.suppressed()))
    assert "known, see <T-12> (config job.toml:40, until 2027-01-31)" in page.text
    assert "3 findings of base.json are known." in page.text
    assert "Findings" not in page.text


def test_an_edit_is_shown_with_its_diff() -> None:
    text = Page(html(shared.mended())).text
    assert "+from torch.distributed.tensor import Partial\n" in text
    assert "safe, --fix proves and applies it: the trace knows what arrives" in " ".join(text.split())


def test_hostile_text_stays_text() -> None:
    text = html(hostile_report())
    page = Page(text)
    shown = NAME.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
    assert f"layers.1.{shown}.weight" in page.text
    # where the finding points, in the drawing, and in the way in words
    assert page.text.count(CODE) == 3
    assert "49" not in page.text  # {{ 7*7 }}
    assert "\x1b" not in text


def test_render_is_html() -> None:
    report = m.mixed_report()
    assert render(report, "html") == html(report)
