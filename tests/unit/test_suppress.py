"""Suppressions: what they fit, what they leave, what is wrong with them, and what the exit status makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import make_report
import pytest

from placement_audit import cli, proof
from placement_audit.config import load
from placement_audit.errors import ConfigError
from placement_audit.mend.attach import attach
from placement_audit.model import CallSite, Comment
from placement_audit.policy import Suppress
from placement_audit.report import render
from placement_audit.report.json_io import dumps, loads
from placement_audit.rules.finding import make_finding
from placement_audit.settle import settled
from placement_audit.suppress import apply, check
from placement_audit.verdicts import (
    Finding,
    Means,
    Outcome,
    PathStep,
    Remedy,
    Report,
    Severity,
    Suppressed,
    Verdict,
)

pytestmark = pytest.mark.unit

TODAY = date(2026, 12, 1)
NORMS = "layers.*.attention_norm.weight"


def declared(rule: str = "PA202", **changes: object) -> Suppress:
    return replace(Suppress(rule=rule, reason="known", path="job.toml", line=7), **changes)  # type: ignore[arg-type]


def with_comment(
    report: Report, text: str, line: int = 189, old: CallSite = make_report.TO_LOCAL_PARTIAL
) -> Report:
    """The report, with a comment at a call; by default the one that is the cause of its findings."""
    site = replace(old, comments=(Comment(line, text),))

    def moved(s: CallSite) -> CallSite:
        return site if s == old else s

    boundaries = tuple(
        replace(b, call_site=moved(b.call_site), user_site=moved(b.user_site))
        for b in report.trace.boundaries
    )
    findings = tuple(
        replace(f, path=tuple(replace(s, call_site=moved(s.call_site)) for s in f.path))
        for f in report.findings
    )
    return replace(report, trace=replace(report.trace, boundaries=boundaries), findings=findings)


def by_rule(report: Report, rule: str) -> list[Finding]:
    return [f for f in report.findings if f.rule_id == rule]


def marks(report: Report) -> set[Suppressed | None]:
    return {f.suppressed for f in by_rule(report, "PA202")}


# --------------------------------------------------------------------------- what it fits


def test_nothing_declared_changes_nothing():
    report = make_report.one_sided_report()
    assert apply(report, (), today=TODAY) == report


def test_a_rule_alone_fits_all_of_it_and_the_run_is_clean():
    report = make_report.one_sided_report()
    assert report.exit_status == 1
    found = apply(report, [declared(until=date(2027, 1, 31))], today=TODAY)
    mark = Suppressed(by=Means.CONFIG, reason="known", where="job.toml:7", until=date(2027, 1, 31))
    assert marks(found) == {mark}
    assert len(found.findings) == len(report.findings) == 13
    assert (found.outcome, found.exit_status) == (Outcome.CLEAN, 0)
    assert {j.verdict for j in found.judgements} == {Verdict.OK, Verdict.DOUBLE_REDUCTION}


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"parameter": NORMS}, {"norm.weight", *(f"layers.{i}.ffn_norm.weight" for i in range(6))}),
        ({"parameter": "norm.weight", "rule": "double-reduction"}, None),
        ({"parameter": "*norm.weight"}, set()),
        ({"parameter": "NORM.weight"}, "all"),
        ({"mesh_dim": "tp"}, set()),
        ({"mesh_dim": "fsdp"}, "all"),
        ({"place": "torchtitan/*/simple_fsdp.py"}, set()),
        ({"place": "my_model/*"}, "all"),
        ({"place": "torchtitan/*", "mesh_dim": "fsdp"}, "all"),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_every_pattern_must_fit(changes, left):
    report = make_report.one_sided_report()
    every = {f.param_fqn for f in report.findings}
    found = apply(report, [declared(**changes)], today=TODAY)
    counting = {f.param_fqn for f in by_rule(found, "PA202") if f.suppressed is None}
    wanted = every if left == "all" else every - {"norm.weight"} if left is None else left
    assert counting == wanted
    assert found.exit_status == (1 if wanted else 0)
    assert len(by_rule(found, "PA002")) == (1 if left == "all" else 0)


def test_another_rule_at_the_same_place_still_counts():
    found = apply(make_report.mixed_report(), [declared()], today=TODAY)
    assert [(f.rule_id, f.suppressed is None) for f in found.findings] == [
        ("PA201", True),
        *[("PA202", False)] * 3,
    ]
    assert (found.outcome, found.exit_status) == (Outcome.FINDINGS, 1)


def test_a_pattern_for_parameters_does_not_fit_a_finding_on_none():
    report = make_report.stock_report()
    step = PathStep(role="cause", kind="from_local", call_site=make_report.REWRAP, boundary=0)
    finding = make_finding(
        "PA102", param_fqn=None, module_fqn="layers.0", mesh_dim="tp", message="m", expected="e", observed="o",
        evidence=(), path=(step,), next_step="n",
    )  # fmt: skip
    report = settled(replace(report, findings=(finding,)))
    assert report.exit_status == 1
    assert apply(report, [declared("PA102", parameter="*")], today=TODAY).exit_status == 1
    assert apply(report, [declared("PA102")], today=TODAY).exit_status == 0


# --------------------------------------------------------------------------- comments


@pytest.mark.parametrize(
    ("text", "reason", "until"),
    [
        ("ignore[PA202] known upstream until 2027-01-31", "known upstream", date(2027, 1, 31)),
        ("ignore[PA202] known upstream", "known upstream", None),
        ("ignore[ pa201, double-reduction ] known until it is mended", "known until it is mended", None),
        ("ignore [PA202] until now nobody looked", "until now nobody looked", None),
        ("ignore[PA202] known until mended", "known until mended", None),
    ],
)
def test_a_comment_at_the_call(text, reason, until):
    found = apply(with_comment(make_report.one_sided_report(), text), (), today=TODAY)
    where = f"{make_report.WRAPPER}:189"
    assert marks(found) == {Suppressed(by=Means.COMMENT, reason=reason, where=where, until=until)}
    assert (found.exit_status, len(found.findings)) == (0, 13)


def test_a_comment_at_another_call_does_not_fit():
    report = with_comment(make_report.mixed_report(), "ignore[PA201] it is the other rule's")
    found = apply(report, (), today=TODAY)
    assert [f.suppressed for f in by_rule(found, "PA201")] == [None]
    assert len(by_rule(found, "PA002")) == 1


def test_nor_does_one_at_another_place_that_the_finding_names():
    """The other half of the pair is shared by many; the cause has a comment of its own, about something else."""
    report = with_comment(make_report.one_sided_report(), "ignore[PA202] here", 214, make_report.REWRAP)
    found = apply(with_comment(report, "ignore[PA201] there"), (), today=TODAY)
    assert marks(found) == {None}
    assert len(by_rule(found, "PA002")) == 2


def test_nor_does_one_on_that_line_of_another_file():
    report = with_comment(make_report.one_sided_report(), "ignore[PA202] here", 189, make_report.MODEL_NORM)
    found = apply(with_comment(report, "ignore[PA201] there"), (), today=TODAY)
    assert marks(found) == {None}
    assert len(by_rule(found, "PA002")) == 2


def test_a_comment_where_the_user_called_torch():
    """A call inside torch takes no comment; the user's own line does."""
    report = make_report.one_sided_report()
    user = replace(make_report.MODEL_NORM, comments=(Comment(351, "ignore[PA202] known"),))
    boundaries = tuple(
        replace(b, user_site=user) if b.call_site == make_report.TO_LOCAL_PARTIAL else b
        for b in report.trace.boundaries
    )
    report = replace(report, trace=replace(report.trace, boundaries=boundaries))
    assert apply(report, (), today=TODAY).exit_status == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ignore[PA202]", "it gives no reason"),
        ("ignore[PA202] until 2027-01-31", "it gives no reason"),
        ("ignore[PA2O2] known", "There is no rule 'PA2O2'; did you mean PA202 double-reduction"),
        ("ignore[PA202] known until 2027-02-30", "'2027-02-30' is no date; expected one such as 2027-01-31"),
        ("ignore[PA202] known until 2027-01-31.", "'2027-01-31.' is no date"),
        ("ignore[] known", "it names no rule between its brackets"),
        ("ignore PA202 known", "it does not say ignore[RULE]"),
        ("ignore[PA901] known", "PA901 is a fault of placement-audit itself and cannot be suppressed"),
        ("ignore[PA002] known", "PA002 is about suppressions and cannot be suppressed"),
    ],
)
def test_a_comment_that_cannot_be_read_is_told_and_suppresses_nothing(text, why):
    found = apply(with_comment(make_report.one_sided_report(), text), (), today=TODAY)
    (told,) = by_rule(found, "PA001")
    assert why in told.message
    assert told.severity is Severity.WARNING
    assert (told.path[0].call_site.path, told.path[0].call_site.line) == (make_report.WRAPPER, 189)
    assert marks(found) == {None}
    assert found.exit_status == 1
    assert by_rule(found, "PA002") == []


# --------------------------------------------------------------------------- unused and expired


@pytest.mark.parametrize(("day", "status"), [(31, 0), (30, 1)])
def test_the_last_day_still_counts_as_in_time(day, status):
    entry = declared(until=date(2027, 1, day))
    found = apply(make_report.one_sided_report(), [entry], today=date(2027, 1, 31))
    assert found.exit_status == status
    told = by_rule(found, "PA003")
    assert len(told) == status
    if told:
        assert "held until 2027-01-30, and today is 2027-01-31" in told[0].message
        assert marks(found) == {None}


def test_expired_beside_one_in_time():
    old = declared(until=date(2026, 1, 1), line=3)
    found = apply(make_report.one_sided_report(), [old, declared(parameter="*")], today=TODAY)
    assert {m.where for m in marks(found) if m} == {"job.toml:7"}
    assert found.exit_status == 0
    assert len(by_rule(found, "PA003")) == 1


def test_an_expired_one_that_fits_nothing_is_unused_only():
    found = apply(make_report.stock_report(), [declared(until=date(2026, 1, 1))], today=TODAY)
    assert [f.rule_id for f in found.findings] == ["PA002"]
    assert (found.outcome, found.exit_status) == (Outcome.CLEAN, 0)


def test_unused_ones_are_told_apart():
    two = [declared(line=7), declared("PA201", line=12)]
    found = apply(make_report.stock_report(), two, today=TODAY)
    assert [f.message.partition(" at ")[2] for f in by_rule(found, "PA002")] == [
        "job.toml:7 fits no finding of this run",
        "job.toml:12 fits no finding of this run",
    ]
    assert len({f.fingerprint for f in found.findings}) == 2


@pytest.mark.parametrize(("rule", "told"), [("PA207", 0), ("PA402", 0), ("PA106", 1), ("PA201", 1)])
def test_what_a_trace_cannot_find_is_not_told_as_unused(rule, told):
    found = apply(make_report.stock_report(), [declared(rule)], today=TODAY)
    assert len(by_rule(found, "PA002")) == told


def test_marking_again_marks_anew():
    report = make_report.one_sided_report()
    first = apply(report, [declared(), declared("PA201")], today=TODAY)
    assert apply(first, [declared(), declared("PA201")], today=TODAY) == first
    assert apply(first, (), today=TODAY) == report


# --------------------------------------------------------------------------- the outcome


def test_a_fault_of_our_own_stays_one():
    report = make_report.stock_report()
    finding = make_finding(
        "PA901", param_fqn="norm.weight", module_fqn="", mesh_dim="tp", message="m", expected="e", observed="o",
        evidence=(), path=(), next_step="n",
    )  # fmt: skip
    report = settled(replace(report, findings=(finding,)))
    assert (report.outcome, report.exit_status) == (Outcome.INCOMPLETE, 3)
    assert apply(report, (), today=TODAY).exit_status == 3
    with pytest.raises(ConfigError, match=r"job\.toml:7: .*PA901 is a fault of placement-audit itself"):
        apply(report, [declared("PA901")], today=TODAY)


def test_nothing_judged_is_incomplete_and_suppressing_does_not_make_it_clean():
    report = make_report.one_sided_report()
    nothing = tuple(replace(j, verdict=Verdict.NOT_JUDGED) for j in report.judgements)
    report = settled(replace(report, judgements=nothing))
    assert report.exit_status == 1
    assert apply(report, [declared()], today=TODAY).exit_status == 3


def test_a_few_that_are_not_judged_leave_a_run_clean():
    report = make_report.stock_report()
    few = tuple(replace(j, verdict=Verdict.NOT_JUDGED) for j in report.judgements[:2])
    report = settled(replace(report, judgements=(*few, *report.judgements[2:])))
    assert (report.outcome, report.exit_status) == (Outcome.CLEAN, 0)


def test_an_edit_leaves_suppressed_findings_alone():
    report = make_report.one_sided_report()
    remedy = Remedy(
        call_site=make_report.TO_LOCAL_PARTIAL, kind="to_local", argument="grad_placements", placements=(),
        safe=False, why="none",
    )  # fmt: skip
    report = replace(report, findings=tuple(replace(f, remedy=remedy) for f in report.findings))
    assert len(attach(report, [])[0].edits) == 1
    assert attach(apply(report, [declared()], today=TODAY), [])[0].edits == ()


def test_a_suppression_that_an_edit_makes_unused_is_no_setback():
    before = apply(make_report.one_sided_report(), [declared(mesh_dim="tp")], today=TODAY)
    after = apply(make_report.stock_report(), [declared(mesh_dim="tp")], today=TODAY)
    assert by_rule(after, "PA002")
    assert proof.setbacks(before, after, [f.fingerprint for f in before.findings]) == ()


# --------------------------------------------------------------------------- reports


def test_json_keeps_the_marks():
    report = apply(
        with_comment(make_report.one_sided_report(), "ignore[PA202] x until 2027-01-31"), (), today=TODAY
    )
    assert loads(dumps(report)) == report
    raw = json.loads(dumps(report))["findings"][0]["suppressed"]
    assert raw == {
        "by": "comment",
        "reason": "x",
        "where": f"{make_report.WRAPPER}:189",
        "until": "2027-01-31",
    }


def test_a_report_from_before_there_were_marks_can_be_read():
    raw = json.loads(dumps(make_report.one_sided_report()))
    del raw["baseline"]
    for finding in raw["findings"]:
        del finding["suppressed"]
    for site in raw["trace"]["tables"]["sites"]:
        del site["comments"]
    for finding in raw["findings"]:
        for step in finding["path"]:
            del step["call_site"]["comments"]
    assert loads(json.dumps(raw)) == make_report.one_sided_report()


def test_text_has_them_in_a_section_of_their_own():
    entry = declared(parameter="*.ffn_norm.weight", until=date(2027, 1, 31))
    text = render(
        apply(make_report.one_sided_report(), [entry], today=TODAY), "text", width=200, color="never"
    )
    lines = text.splitlines()
    at = lines.index("suppressed")
    assert lines[at + 1 : at + 4] == [
        "  PA202       double-reduction on tp: known (config job.toml:7, until 2027-01-31)",
        "              layers.*.ffn_norm.weight (6)",
        f"              {make_report.WRAPPER}:189 in replicate_compute",
    ]
    assert "PA202 double-reduction   7 parameters   mesh dim tp   error" in lines
    assert lines[-1].startswith("7 findings at 1 place, 6 more suppressed, in 57 parameters"), lines[-1]


def test_what_is_wrong_with_a_suppression_is_at_its_line_which_is_no_call():
    found = apply(make_report.stock_report(), [declared("PA203")], today=TODAY)
    lines = render(found, "text", width=200, color="never").splitlines()
    at = lines.index("PA002 unused-suppression   warning")
    assert lines[at + 4 : at + 6] == [
        "  where       job.toml:7 in placement_audit.suppress",
        '              rule = "PA203"',
    ]
    annotation = render(found, "github").splitlines()[0]
    assert annotation.startswith("::warning file=job.toml,line=7,title=PA002 unused-suppression::")
    assert "%0Aat job.toml:7 in placement_audit.suppress%0Anext: " in annotation
    page = render(found, "html")
    assert "job.<wbr>toml:7 in placement_<wbr>audit.<wbr>suppress" in page
    assert "config: cause" not in page


def test_a_suppressed_warning_is_not_counted():
    step = PathStep(role="cause", kind="from_local", call_site=make_report.REWRAP, boundary=0)
    finding = make_finding(
        "PA101", param_fqn="norm.weight", module_fqn="", mesh_dim="tp", message="m", expected="e", observed="o",
        evidence=(), path=(step,), next_step="n",
    )  # fmt: skip
    report = replace(make_report.stock_report(), findings=(finding,))
    assert render(report, "text", width=200, color="never").splitlines()[-1].endswith("; 1 warning")
    found = apply(report, [declared("PA101")], today=TODAY)
    last = render(found, "text", width=200, color="never").splitlines()[-1]
    assert last.startswith("clean but for 1 suppressed: ")
    assert "warning" not in last


def test_text_of_a_run_where_all_are_suppressed():
    entries = [declared(), declared("PA201")]
    text = render(
        apply(make_report.one_sided_report(), entries, today=TODAY), "text", width=200, color="never"
    )
    assert "clean but for 13 suppressed: " in text.splitlines()[-1]
    assert "13 double reduction" in text.splitlines()[-1]
    assert "PA002 unused-suppression   warning" in text
    assert "PA202 double-reduction   13 parameters" not in text, "in full only where it counts"
    assert text.splitlines()[-1].endswith("; 1 warning")
    assert "  where       job.toml:7 in placement_audit.suppress" in text


def test_the_command_exits_as_the_marks_say(tmp_path, capsys):
    path = tmp_path / "saved.json"
    path.write_text(dumps(apply(make_report.one_sided_report(), [declared()], today=TODAY)))
    assert cli.main(["report", str(path)]) == 0
    assert "suppressed" in capsys.readouterr().out
    path.write_text(dumps(make_report.one_sided_report()))
    assert cli.main(["report", str(path)]) == 1


# --------------------------------------------------------------------------- the table in a job file

TABLE = '[model]\nname = "x"\n\n[[placement_audit.suppress]]\nrule = "PA501"\nreason = "as released"\n'


def test_the_table(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        f'{TABLE}until = 2027-01-31\n\n[[ placement_audit . suppress ]]\nrule = "lost-reduction"\nreason = "r"\n'
        'parameter = "layers.*"\nmesh_dim = "tp"\nplace = "a/*.py"\n'
    )
    config = load(str(path))
    assert config.job == {"model": {"name": "x"}}
    assert config.suppress == (
        Suppress(rule="PA501", reason="as released", until=date(2027, 1, 31), path=str(path), line=4),
        Suppress(
            rule="lost-reduction",
            reason="r",
            parameter="layers.*",
            mesh_dim="tp",
            place="a/*.py",
            path=str(path),
            line=9,
        ),
    )
    check(config.suppress)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("reason = 'r'", "entry 1 (line 1): rule is missing: a rule's id or name"),
        ("rule = 'PA501'", "entry 1 (line 1): reason is missing: why the finding is not to count"),
        (
            "rule = 'PA501'\nreason = ' '",
            'reason: expected why the finding is not to count, as a string; got " "',
        ),
        (
            "rule = 'PA501'\nreason = 1",
            "reason: expected why the finding is not to count, as a string; got 1 (integer)",
        ),
        ("rule = 'PA501'\nreason = 'r'\nparam = 'x'", "param: unknown key. Did you mean 'parameter'?"),
        (
            "rule = 'PA501'\nreason = 'r'\nuntil = '2027-01-31'",
            'until: expected a date without quotes, such as 2027-01-31; got "2027-01-31" (string)',
        ),
        (
            "rule = 'PA501'\nreason = 'r'\nuntil = 2027-01-31T00:00:00",
            "until: expected a date without quotes",
        ),
    ],
)
def test_mistakes_in_the_table_are_told(tmp_path, line, words):
    path = tmp_path / "job.toml"
    path.write_text(f"[[placement_audit.suppress]]\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{path}: placement_audit.suppress")


def test_no_table_at_all_where_tables_are_expected(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[placement_audit]\nsuppress = "PA501"\n')
    with pytest.raises(ConfigError, match=r'expected tables .* got "PA501" \(string\)'):
        load(str(path))


def test_an_unknown_rule_is_told_before_the_audit(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "job.toml"
    path.write_text(TABLE.replace("PA501", "PA5O1"))
    assert cli.main(["--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{path}:4: placement_audit.suppress: rule: There is no rule 'PA5O1'" in err
    assert Path(path).exists()


def test_a_comment_does_not_change_the_fingerprint():
    def made(code: str, line: int = 3) -> str:
        site = CallSite(path="a.py", line=line, function="f", code_line=code)
        return make_finding(
            "PA201", param_fqn="w", module_fqn="", mesh_dim="tp", message=str(line), expected="e", observed="o",
            evidence=(), path=(PathStep(role="cause", kind="to_local", call_site=site, boundary=0),), next_step="n",
        ).fingerprint  # fmt: skip

    assert made("y = x.to_local()") == made("y = x.to_local()  # placement-audit: ignore[PA201] why", line=9)
    assert made("y = x.to_local(") == made("y = x.to_local(  # why")
    assert made('y = f("#", x.to_local())') != made('y = f("')
