"""The text report: whole outputs, and what must hold at any width and in any terminal."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import make_report as m
import pytest
from snapshot import assert_snapshot

from placement_audit.errors import UsageError
from placement_audit.model import CallSite, MeshSpec
from placement_audit.report import COLORS, FORMATS, render
from placement_audit.tracing import ParamRecord, RunRecord
from placement_audit.verdicts import Finding, Outcome, Report, Severity, Verdict

pytestmark = pytest.mark.unit

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def text(report: Report, **kwargs: Any) -> str:
    return render(report, "text", **{"color": "never", **kwargs})


# --------------------------------------------------------------------------- whole outputs


@pytest.mark.parametrize("width", [80, 120, 200])
def test_everything_at_once(width: int) -> None:
    assert_snapshot(f"mixed_{width}.txt", text(m.mixed_report(), width=width))


def test_stock() -> None:
    assert_snapshot("stock_200.txt", text(m.stock_report()))


def test_one_sided_fix() -> None:
    assert_snapshot("one_sided_200.txt", text(m.one_sided_report()))


def test_two_sided_fix() -> None:
    assert_snapshot("two_sided_120.txt", text(m.two_sided_report(), width=120))


def test_colors() -> None:
    assert_snapshot("mixed_120.ansi", text(m.mixed_report(), width=120, color="always"))


# --------------------------------------------------------------------------- widths


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 133, 160, 200, 400])
def test_no_name_path_or_code_line_is_ever_cut(width: int) -> None:
    out = text(m.mixed_report(), width=width)
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    for line in (
        "torchtitan/experiments/simple_fsdp/simple_fsdp.py:189 in replicate_compute",
        "return F.rms_norm(x.to_local(), self.shape, self.weight.to_local())",
    ):
        assert re.search(rf"^ *{re.escape(line)}$", out, re.MULTILINE)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_keeps_to_the_width(width: int) -> None:
    table = text(m.mixed_report(), width=width).split("\n\n")[1]
    assert table.startswith("parameter")
    assert max(map(len, table.splitlines())) <= width


def test_a_long_name_is_folded_not_cut() -> None:
    name = "layers.0." + "very_long_module_name." * 8 + "weight"
    report = renamed(m.stock_report(layers=1), "tok_embeddings.weight", name)
    table = text(report, width=80).split("\n\n")[1]
    assert name in re.sub(r" +1  ok\n|\n", "", table)


def test_an_expectation_of_its_own_keeps_its_column() -> None:
    report = m.stock_report(layers=1)
    assert "placements = expected" in text(report, width=100)
    first, *rest = report.judgements
    report = replace(report, judgements=(replace(first, expected=m.shard(1)), *rest))
    out = text(report, width=100)
    assert "placements = expected" not in out
    assert "    expected grad fsdp S(1)  tp S(0)\n" in out


def test_no_word_is_cut() -> None:
    word = "a/very/long/path/" * 6 + "file.toml"
    report = with_run(m.stock_report(layers=1), config_path=word, notes=(f"The file {word} was read.",))
    assert text(report, width=60).count(word) == 2


def test_width_defaults_to_200_without_a_terminal() -> None:
    assert text(m.mixed_report()) == text(m.mixed_report(), width=200)


def test_width_follows_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert text(m.mixed_report()) == text(m.mixed_report(), width=80)


@pytest.mark.parametrize("columns", ["", "0", "wide", "-3"])
def test_senseless_columns_count_as_none(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert text(m.mixed_report()) == text(m.mixed_report(), width=200)


def test_width_holds_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert plain(text(m.mixed_report(), width=120, color="always")) == text(m.mixed_report(), width=120)


# --------------------------------------------------------------------------- color


def test_color_changes_no_word() -> None:
    always = text(m.mixed_report(), color="always")
    assert "\x1b[" in always
    assert plain(always) == text(m.mixed_report())


def test_auto_has_no_color_outside_a_terminal() -> None:
    assert "\x1b[" not in render(m.mixed_report(), "text")


@pytest.mark.parametrize(
    ("tty", "env", "colored"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {}, False),
    ],
)
def test_auto(monkeypatch: pytest.MonkeyPatch, tty: bool, env: dict[str, str], colored: bool) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in render(m.mixed_report(), "text", color="auto")) is colored


def test_always_wins_over_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    colored = text(m.mixed_report(), color="always")
    monkeypatch.setenv("NO_COLOR", "1")
    assert text(m.mixed_report(), color="always") == colored


def test_deferred_is_calm() -> None:
    out = text(m.two_sided_report(), color="always")
    assert "\x1b[36mdeferred (tp)" in out
    assert "31m" not in out


def test_formats_and_colors() -> None:
    assert FORMATS == ("text", "json", "sarif", "junit", "markdown", "github", "html")
    assert COLORS == ("auto", "always", "never")
    with pytest.raises(UsageError, match="Unknown report format 'xml'; expected one of text, json"):
        render(m.stock_report(layers=1), "xml")


# --------------------------------------------------------------------------- single lines


def last_line(report: Report) -> str:
    return text(report).splitlines()[-1]


def test_summary_of_findings() -> None:
    line = "13 findings at 1 place in 57 parameters on mesh fsdp 2 x tp 2, 1.6 s"
    assert last_line(m.one_sided_report()) == line


def test_summary_of_one_finding_of_each_kind() -> None:
    report = m.mixed_report()
    first, second = report.findings[:2]
    report = replace(report, findings=(first, replace(second, severity=Severity.WARNING)))
    line = "2 findings (1 error and 1 warning) at 2 places in 31 parameters (1 not judged) on mesh"
    assert last_line(report).startswith(line)


def test_summary_of_findings_without_a_place() -> None:
    report = m.mixed_report()
    report = replace(report, findings=(replace(report.findings[0], path=()),))
    assert last_line(report).startswith("1 finding in 31 parameters (1 not judged) on mesh")


def test_summary_of_clean() -> None:
    line = "clean: 57 parameters judged, 114 verdicts: 114 ok; on mesh fsdp 2 x tp 2, 1.6 s"
    assert last_line(m.stock_report()) == line


def test_summary_of_clean_with_a_warning() -> None:
    report = m.mixed_report()
    warning = replace(report.findings[0], severity=Severity.WARNING)
    report = replace(report, findings=(warning,), outcome=Outcome.CLEAN, exit_status=0)
    assert last_line(report).endswith("1.6 s; 1 warning")


def test_summary_of_incomplete() -> None:
    report = replace(m.mixed_report(), outcome=Outcome.INCOMPLETE, exit_status=3)
    line = "incomplete: 30 parameters judged (1 not judged); on mesh fsdp 2 x tp 2, 1.6 s"
    assert last_line(report) == line


def test_nothing_audited() -> None:
    report = m.stock_report(layers=1)
    mesh = MeshSpec(device_type="meta", dim_names=(), shape=())
    trace = replace(report.trace, params=(), boundaries=(), collectives=(), batch_dims=(), mesh=mesh)
    report = replace(report, trace=trace, judgements=(), outcome=Outcome.INCOMPLETE, exit_status=3)
    out = text(report)
    assert out.endswith("incomplete: nothing was audited; on mesh 1 rank, 1.6 s\n")
    assert "verdict" not in out


def test_brackets_are_no_markup() -> None:
    name = "blocks[red].weight"
    report = renamed(m.stock_report(layers=1), "tok_embeddings.weight", name)
    assert name in text(report, color="always")


def test_the_worst_verdict_stands_first() -> None:
    report = m.stock_report(layers=1)
    changed = {
        "fsdp": {"verdict": Verdict.DOUBLE_REDUCTION, "factor": Fraction(2)},
        "tp": {"verdict": Verdict.LOST_REDUCTION, "factor": None},
    }
    judgements = tuple(
        replace(j, **changed[j.mesh_dim]) if j.param_fqn == "norm.weight" else j for j in report.judgements
    )
    out = text(replace(report, judgements=judgements))
    assert "lost reduction (tp); double reduction (fsdp, x2)\n" in out


def test_a_parameter_without_gradient() -> None:
    report = m.stock_report(layers=1)
    params = with_param(report, "norm.weight", grad=None)
    judgements = tuple(
        replace(j, verdict=Verdict.NO_GRADIENT, observed=None, factor=None)
        if j.param_fqn == "norm.weight"
        else j
        for j in report.judgements
    )
    report = replace(report, trace=replace(report.trace, params=params), judgements=judgements)
    assert re.search(r"^norm\.weight .* none +no gradient$", text(report), re.MULTILINE)


def test_a_plain_gradient() -> None:
    report = m.stock_report(layers=1)
    grad = report.trace.params[0].grad
    assert grad is not None
    params = with_param(report, "tok_embeddings.weight", grad=replace(grad, layout=None))
    report = replace(report, trace=replace(report.trace, params=params))
    assert re.search(r"^tok_embeddings\.weight .* plain tensor +ok$", text(report), re.MULTILINE)


def test_an_untrained_parameter_has_no_verdict() -> None:
    report = m.stock_report(layers=1)
    params = with_param(report, "norm.weight", requires_grad=False, grad=None)
    judgements = tuple(j for j in report.judgements if j.param_fqn != "norm.weight")
    report = replace(report, trace=replace(report.trace, params=params), judgements=judgements)
    assert re.search(r"^norm\.weight +1  fsdp S\(0\)  tp R .* none +not trained$", text(report), re.MULTILINE)


def test_an_ok_gradient_with_another_label_is_explained() -> None:
    report = m.stock_report(layers=1)
    judgements = tuple(
        replace(j, observed=m.REPLICATE, reason="complete on every rank")
        if (j.param_fqn, j.mesh_dim) == ("tok_embeddings.weight", "tp")
        else j
        for j in report.judgements
    )
    out = text(replace(report, judgements=judgements))
    assert "on tp: ok, though .grad is Replicate(): complete on every rank" in out


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.13.0+cpu", "optimizers of torch 2.13.0 do;"),
        ("2.14.1", "optimizers of torch 2.14.1 do;"),
        ("3.0", "optimizers of torch 3.0 do;"),
        ("2.10.0", "torch 2.10 leave it as it is;"),
        ("2.9", "torch 2.10 leave it as it is;"),
        (None, "torch 2.10 leave it as it is;"),
    ],
)
def test_who_must_reduce_depends_on_torch(version: str | None, said: str) -> None:
    versions = (("torch", version),) if version else ()
    out = text(with_run(m.two_sided_report(), versions=versions))
    assert said in " ".join(out.split())


def test_without_a_config() -> None:
    report = with_run(m.stock_report(layers=1), config_path="", overrides=(), notes=(), versions=())
    out = text(report)
    assert out.startswith("placement-audit 0.1.0\n")
    assert re.search(r"^  config +none$", out, re.MULTILINE)


def test_real_ranks_are_named_as_evidence() -> None:
    report = with_run(
        m.stock_report(layers=1), backend="gloo", device_type="cpu", evidence=("traced", "measured")
    )
    assert "traced and measured: 4 ranks on gloo, cpu tensors" in text(report)


# --------------------------------------------------------------------------- findings of other kinds


def note(**changes: object) -> Finding:
    site = CallSite(path="my_model/loss.py", line=7, function="loss", code_line="dist.all_reduce(x)")
    base = m.mixed_report().findings[0]
    return replace(
        base,
        **{
            "rule_id": "PA105",
            "rule_name": "reduced-twice-in-forward",
            "severity": Severity.NOTE,
            "param_fqn": None,
            "module_fqn": "layers.0.attention",
            "message": "all_reduce(sum) of what is equal already",
            "path": (replace(base.path[0], kind="all_reduce", call_site=site, boundary=-1),),
            **changes,
        },
    )


def test_a_note_stands_among_the_notes() -> None:
    report = replace(m.stock_report(layers=1), findings=(note(),))
    notes = text(report).split("\nnotes\n")[1].split("\n\n")[0]
    assert notes.startswith(
        "  PA105       reduced-twice-in-forward on tp: all_reduce(sum) of what is equal already\n"
        "              layers.0.attention\n"
        "              my_model/loss.py:7 in loss\n"
    )


def test_deferred_notes_are_said_once() -> None:
    report = m.two_sided_report()
    notes = tuple(
        note(rule_id="PA401", rule_name="deferred-reduction", param_fqn=j.param_fqn)
        for j in report.judgements
        if j.verdict is Verdict.DEFERRED
    )
    assert text(replace(report, findings=notes)) == text(report)


@pytest.mark.parametrize(
    ("modules", "head"),
    [
        (["layers.0.attention"], "PA105 reduced-twice-in-forward   module layers.0.attention   mesh dim tp"),
        ([""], "PA105 reduced-twice-in-forward   mesh dim tp"),
        (
            ["layers.0.attention", ""],
            "PA105 reduced-twice-in-forward   module layers.0.attention   mesh dim tp",
        ),
        (["a", "b"], "PA105 reduced-twice-in-forward   2 kinds of module   mesh dim tp"),
    ],
)
def test_a_finding_about_no_parameter_names_its_module(modules: list[str], head: str) -> None:
    findings = tuple(note(severity=Severity.WARNING, module_fqn=name) for name in modules)
    report = replace(m.stock_report(layers=1), findings=findings, outcome=Outcome.FINDINGS, exit_status=1)
    assert f"\n{head}   warning\n" in text(report)


def test_the_verdict_is_not_said_twice() -> None:
    report = m.mixed_report()
    finding = replace(report.findings[0], message="lost reduction: nothing summed them")
    out = text(replace(report, findings=(finding,)))
    assert "  what        nothing summed them\n" in out


def test_the_factor_is_not_said_twice() -> None:
    report = m.one_sided_report(layers=1)
    assert "  factor      2:" in text(report)
    findings = tuple(replace(f, observed="2 times the true gradient") for f in report.findings)
    assert "  factor  " not in text(replace(report, findings=findings))


def test_many_kinds_of_parameter_are_counted() -> None:
    report = m.mixed_report()
    findings = tuple(replace(report.findings[0], param_fqn=f"module_{c}.weight") for c in "abcdefghijklmno")
    out = text(replace(report, findings=findings))
    assert "              module_l.weight\n              and 3 more\n" in out


def test_commands_stay_on_one_line() -> None:
    for width in range(60, 140, 7):
        assert "placement-audit explain PA202\n" in text(m.one_sided_report(layers=1), width=width)


# --------------------------------------------------------------------------- helpers


def plain(colored: str) -> str:
    return "".join(line.rstrip() + "\n" for line in ANSI.sub("", colored).splitlines())


def with_run(report: Report, **changes: Any) -> Report:
    run: RunRecord = replace(report.trace.run, **changes)
    return replace(report, trace=replace(report.trace, run=run))


def with_param(report: Report, named: str, **changes: Any) -> tuple[ParamRecord, ...]:
    return tuple(replace(p, **changes) if p.fqn == named else p for p in report.trace.params)


def renamed(report: Report, fqn: str, name: str) -> Report:
    judgements = tuple(replace(j, param_fqn=name) if j.param_fqn == fqn else j for j in report.judgements)
    params = with_param(report, fqn, fqn=name)
    return replace(report, judgements=judgements, trace=replace(report.trace, params=params))
