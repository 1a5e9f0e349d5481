"""Two saved reports side by side: what counts as a difference, how it is told, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from io import BytesIO, TextIOWrapper

import make_report
import pytest

from placement_audit import cli
from placement_audit.model import CallSite
from placement_audit.report.compare import Change, Traffic, compare
from placement_audit.report.json_io import dumps
from placement_audit.tracing import Collective, ParamRecord, Phase
from placement_audit.verdicts import Report, Verdict

pytestmark = pytest.mark.unit

STOCK = make_report.stock_report()
NORMS = ["layers.*.attention_norm.weight (6)", "layers.*.ffn_norm.weight (6)", "norm.weight"]


def with_run(report: Report, **changes: object) -> Report:
    trace = report.trace
    return replace(report, trace=replace(trace, run=replace(trace.run, **changes)))  # type: ignore[arg-type]


def with_params(report: Report, change: Callable[[ParamRecord], ParamRecord | None]) -> Report:
    params = tuple(new for p in report.trace.params if (new := change(p)) is not None)
    return replace(report, trace=replace(report.trace, params=params))


def is_gather(c: Collective) -> bool:
    return c.name == "all_gather" and c.phase is Phase.FORWARD and c.mesh_dims == ("fsdp",)


def with_collectives(report: Report, **changes: object) -> Report:
    """The all-gathers of the forward over fsdp changed."""
    rows = tuple(
        replace(c, **changes) if is_gather(c) else c  # type: ignore[arg-type]
        for c in report.trace.collectives
    )
    return replace(report, trace=replace(report.trace, collectives=rows))


def test_a_report_is_the_same_as_itself():
    for report in (STOCK, make_report.mixed_report()):
        found = compare(report, report)
        assert found.same
        assert (found.params, found.collectives, found.boundaries, found.appeared, found.gone) == ((),) * 5


def test_versions_times_and_lines_are_no_difference():
    new = with_run(
        STOCK, versions=(("python", "3.12"), ("torch", "9.9")), phases=(("trace", 99.0),), config_path="x"
    )

    def moved(s: CallSite) -> CallSite:
        return replace(s, line=s.line + 7)

    boundaries = tuple(replace(b, call_site=moved(b.call_site)) for b in new.trace.boundaries)
    new = replace(new, trace=replace(new.trace, boundaries=boundaries))
    found = compare(STOCK, new)
    assert found.same
    assert Change("torch", dict(STOCK.trace.run.versions)["torch"], "9.9") in found.versions
    assert Change("torchtitan", dict(STOCK.trace.run.versions)["torchtitan"], "-") in found.versions


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"model": "other"}, Change("model", STOCK.trace.run.model, "other")),
        ({"evidence": ("traced", "measured")}, Change("evidence", "traced", "traced, measured")),
        ({"overrides": ("--x", "1")}, Change("overrides", "--training.seq_len 128", "--x 1")),
    ],
    ids=["model", "evidence", "overrides"],
)
def test_another_run_is_a_difference_by_itself(changes, wanted):
    found = compare(STOCK, with_run(STOCK, **changes))
    assert not found.same
    assert [c for c in found.run if c.differs] == [wanted]


def test_verdicts_and_placements_folded():
    found = compare(STOCK, make_report.one_sided_report())
    assert not found.same
    assert [str(c.group) for c in found.params] == NORMS
    (changes,) = {c.changes for c in found.params}
    assert changes == (
        Change("tp verdict", "ok", "double reduction, x2"),
        Change("tp observed grad", "R", "P(sum)"),
    )
    (fault,) = found.appeared
    assert (fault.rule_id, fault.mesh_dim, fault.count) == ("PA202", "tp", 13)
    assert [str(g) for g in fault.groups] == NORMS
    assert found.gone == ()
    back = compare(make_report.one_sided_report(), STOCK)
    assert (back.appeared, back.gone) == ((), found.appeared)
    assert Change("outcome", "clean", "findings") in found.run


def test_a_few_of_many_are_named():
    def half(p: ParamRecord) -> ParamRecord:
        few = p.fqn in ("layers.1.ffn_norm.weight", "layers.2.ffn_norm.weight")
        return replace(p, tensor=replace(p.tensor, dtype="bfloat16")) if few else p

    found = compare(STOCK, with_params(STOCK, half))
    assert [(str(c.group), c.changes) for c in found.params] == [
        ("layers.{1-2}.ffn_norm.weight (2)", (Change("dtype", "float32", "bfloat16"),))
    ]


def norm(change: Callable[[ParamRecord], ParamRecord | None]) -> Callable[[ParamRecord], ParamRecord | None]:
    return lambda p: change(p) if p.fqn == "norm.weight" else p


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (norm(lambda p: None), Change("parameter", "there", "-")),
        (norm(lambda p: replace(p, grad=None)), Change("grad dtype", "float32", "-")),
        (norm(lambda p: replace(p, requires_grad=False)), Change("trained", "yes", "no")),
        (
            norm(lambda p: replace(p, tensor=replace(p.tensor, global_shape=(8, 9)))),
            Change("shape", "256", "8 x 9"),
        ),
    ],
    ids=["gone", "no gradient", "frozen", "shape"],
)
def test_what_changes_of_a_parameter(change, wanted):
    found = compare(STOCK, with_params(STOCK, change))
    assert [(str(c.group), c.changes) for c in found.params] == [("norm.weight", (wanted,))]
    assert not found.same


def test_placements_and_factors_by_mesh_dim():
    j = next(j for j in STOCK.judgements if j.param_fqn == "norm.weight" and j.mesh_dim == "fsdp")
    new = replace(
        j, placement=None, expected=make_report.REPLICATE, factor=Fraction(1, 2), verdict=Verdict.WRONG_SCALE
    )
    found = compare(STOCK, replace(STOCK, judgements=tuple(new if x is j else x for x in STOCK.judgements)))
    assert found.params[0].changes == (
        Change("fsdp verdict", "ok", "wrong scale, x1/2"),
        Change("fsdp placement", "S(0)", "-"),
        Change("fsdp expected grad", "S(0)", "R"),
    )


# --------------------------------------------------------------------------- traffic


def gathers(report: Report) -> list[Traffic]:
    return [t for t in compare(STOCK, report).collectives if t.what.startswith("all_gather")]


def test_bytes_are_of_one_rank_in_the_dtype_that_was_sent():
    those = [c for c in STOCK.trace.collectives if is_gather(c)]
    assert {c.dtype for c in those} == {"float32"}
    n, sent = len(those), sum(c.numel for c in those)
    assert gathers(with_collectives(STOCK, dtype="bfloat16")) == [
        Traffic(phase="forward", what="all_gather over fsdp in bfloat16", count=(0, n), sent=(0, 2 * sent)),
        Traffic(phase="forward", what="all_gather over fsdp in float32", count=(n, 0), sent=(4 * sent, 0)),
    ]
    assert gathers(with_collectives(STOCK, numel=10)) == [
        Traffic(
            phase="forward", what="all_gather over fsdp in float32", count=(n, n), sent=(4 * sent, 40 * n)
        )
    ]
    assert gathers(with_collectives(STOCK, dtype="float8_e4m3fn"))[1].sent == (0, sent)
    assert gathers(with_collectives(STOCK, dtype="float4"))[1].sent == (0, None)
    assert gathers(with_collectives(STOCK, phase=Phase.RECOMPUTE))[0].phase == "forward"
    assert gathers(with_collectives(STOCK, phase=Phase.RECOMPUTE))[1].phase == "recompute"


def test_boundaries():
    trace = replace(STOCK.trace, boundaries=STOCK.trace.boundaries[:-1])
    (change,) = compare(STOCK, replace(STOCK, trace=trace)).boundaries
    kind = STOCK.trace.boundaries[-1].kind
    count = sum(b.kind == kind for b in STOCK.trace.boundaries)
    assert change == Change(f"{kind}, forward", str(count), str(count - 1))


# --------------------------------------------------------------------------- the command


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(dumps(STOCK))
    (tmp_path / "b.json").write_text(dumps(make_report.one_sided_report()))
    (tmp_path / "c.json").write_text(dumps(with_run(STOCK, versions=(("torch", "9.9"),))))
    return tmp_path


def called(capsys, *args: str) -> tuple[int, str, str]:
    status = cli.main(["diff", *args])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_text(saved, capsys):
    status, out, err = called(capsys, "a.json", "b.json")
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == "versions"
    assert lines[1:3] == [
        f"  placement-audit  {STOCK.trace.run.tool_version}",
        f"  python           {dict(STOCK.trace.run.versions)['python']}",
    ]
    at = lines.index("parameters")
    assert lines[at + 1 : at + 4] == [
        "  layers.*.attention_norm.weight (6)",
        "    tp verdict        ok -> double reduction, x2",
        "    tp observed grad  R -> P(sum)",
    ]
    assert "  outcome       clean -> findings" in lines
    assert "  PA202 double-reduction on tp: 13 findings" in lines
    assert "findings that are gone" not in lines
    assert lines[-1].startswith("different: 13 parameters, ")
    assert "13 new findings, 1 setting or outcome" in lines[-1]
    assert "\x1b" not in out


def test_the_same(saved, capsys):
    status, out, _ = called(capsys, "a.json", "c.json")
    assert status == 0
    assert out.splitlines()[-1] == "the same"
    assert "  torch       2.13.0 -> 9.9" in out.splitlines() or "-> 9.9" in out
    assert called(capsys, "a.json", "c.json", "--quiet") == (0, "", "")
    status, out, _ = called(capsys, "a.json", "b.json", "--quiet")
    assert (status, out.splitlines()[0]) == (1, "versions")


def test_json(saved, capsys):
    status, out, _ = called(capsys, "a.json", "b.json", "--format", "json", "--output-file", "out.json")
    assert (status, out) == (1, "")
    raw = json.loads((saved / "out.json").read_text())
    assert (raw["schema_version"], raw["same"]) == ("1", False)
    assert list(raw) == [
        "schema_version", "same", "versions", "run", "params", "collectives", "boundaries", "appeared", "gone"
    ]  # fmt: skip
    assert raw["params"][2] == {
        "group": {"name": "norm.weight", "fqns": ["norm.weight"]},
        "changes": [
            {"what": "tp verdict", "before": "ok", "after": "double reduction, x2"},
            {"what": "tp observed grad", "before": "R", "after": "P(sum)"},
        ],
    }
    assert json.loads(called(capsys, "a.json", "a.json", "--format", "json")[1])["same"] is True


def test_colors(saved, capsys):
    assert (
        "\x1b[31mclean\x1b[0m -> \x1b[32mfindings"
        in called(capsys, "a.json", "b.json", "--color", "always")[1]
    )


def test_one_from_standard_input(saved, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO((saved / "a.json").read_bytes())))
    assert called(capsys, "-", "a.json")[0] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["a.json"], "the following arguments are required: AFTER.json"),
        (["a.json", "none.json"], "none.json: no such file"),
        (["-", "-"], "only one of the two reports can come from standard input"),
        (["a.json", "b.json", "--format", "html"], "invalid choice: 'html'"),
        (["a.json", "b.json", "--output-file", "none/x"], "there is no folder"),
    ],
)
def test_usage_errors(saved, capsys, args, words):
    status, out, err = called(capsys, *args)
    assert (status, out) == (2, "")
    assert words in err
