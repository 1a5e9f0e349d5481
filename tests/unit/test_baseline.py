"""The file of known findings: what is in it, what it hides, what it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date

import make_report
import pytest

from placement_audit import cli, pipeline
from placement_audit.baseline import apply, dumps, known_in, loads
from placement_audit.errors import ReportError
from placement_audit.model import CallSite
from placement_audit.policy import Suppress
from placement_audit.report import render
from placement_audit.report.json_io import dumps as report_dumps
from placement_audit.report.json_io import loads as report_loads
from placement_audit.rules.finding import make_finding
from placement_audit.settle import settled
from placement_audit.suppress import apply as suppressed
from placement_audit.verdicts import Finding, Means, Outcome, PathStep, Report, Severity

pytestmark = pytest.mark.unit

FILE = "baseline.json"
NORM = CallSite(path="my_model/norm.py", line=31, function="forward", code_line="w = self.weight.to_local()")


def finding(
    rule: str = "PA201", param: str = "norm.weight", site: CallSite = NORM, **changes: str
) -> Finding:
    words = {"mesh_dim": "tp", "message": "m", "expected": "e", "observed": "o", "next_step": "n", **changes}
    step = PathStep(role="cause", kind="to_local", call_site=site, boundary=0)
    return make_finding(rule, param_fqn=param, module_fqn="", evidence=(), path=(step,), **words)  # type: ignore[arg-type]


def report(*findings: Finding) -> Report:
    return settled(replace(make_report.stock_report(), findings=findings))


def again(known_of: Report, now: Report) -> Report:
    return apply(now, loads(dumps(known_in(known_of)).encode(), FILE), FILE)


def counting(r: Report) -> list[tuple[str, str | None]]:
    return [(f.rule_id, f.param_fqn) for f in r.findings if f.suppressed is None]


# --------------------------------------------------------------------------- the file


def test_one_line_a_finding_sorted_as_people_count():
    names = ["layers.10.norm.weight", "norm.weight", "layers.2.norm.weight"]
    r = report(*(finding(param=n) for n in names), finding("PA102", param="norm.weight"))
    text = dumps(known_in(r))
    lines = text.splitlines()
    assert lines[0] == '{"placement_audit_baseline": 1, "findings": ['
    assert lines[-1] == "]}"
    rows = [json.loads(line.rstrip(",")) for line in lines[1:-1]]
    assert [(row["rule"], row["parameter"]) for row in rows] == [
        ("PA102", "norm.weight"),
        ("PA201", "layers.2.norm.weight"),
        ("PA201", "layers.10.norm.weight"),
        ("PA201", "norm.weight"),
    ]
    assert list(rows[0]) == ["rule", "parameter", "mesh_dim", "place", "fingerprint"]
    assert rows[0]["place"] == "my_model/norm.py in forward"
    assert loads(text.encode(), FILE) == known_in(r)
    assert dumps(known_in(report(*reversed(r.findings)))) == text


def test_of_nothing():
    text = dumps(known_in(report()))
    assert text == '{"placement_audit_baseline": 1, "findings": []}\n'
    assert loads(text.encode(), FILE) == ()


def test_notes_suppressed_ones_and_faults_of_our_own_are_not_in_it():
    r = report(finding("PA501"), finding("PA901"), finding("PA101"), finding("PA201"))
    entries = [Suppress(rule="PA101", reason="r"), Suppress(rule="PA204", reason="unused")]
    r = suppressed(r, entries, today=date(2026, 1, 1))
    assert [f.rule_id for f in r.findings] == ["PA201", "PA901", "PA002", "PA101", "PA501"]
    assert [k.rule for k in known_in(r)] == ["PA201"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no baseline: not JSON"),
        ("[]", "is no baseline but JSON of another kind"),
        (
            report_dumps(make_report.stock_report()),
            "is no baseline but a saved report. placement-audit baseline --report",
        ),
        (
            '{"placement_audit_baseline": 2}',
            "is a baseline of version 2; this placement-audit reads version 1",
        ),
        ('{"placement_audit_baseline": 1}', "is a damaged baseline"),
        ('{"placement_audit_baseline": 1, "findings": [{"rule": "PA201"}]}', "is a damaged baseline"),
        (
            dumps(known_in(report(finding()))).replace("PA201", "PA299"),
            "of another set of rules: this placement-audit has no rule 'PA299'",
        ),
    ],
    ids=["broken", "array", "report", "version", "no findings", "half", "rules"],
)
def test_a_file_that_is_none_is_refused(text, words):
    with pytest.raises(ReportError) as caught:
        loads(text.encode(), FILE)
    assert caught.value.message.startswith(f"{FILE}: ")
    assert words in caught.value.message
    assert "placement-audit baseline" in caught.value.message


# --------------------------------------------------------------------------- what it hides


def test_only_what_is_new_counts():
    old = report(finding(), finding("PA202", param="a.weight"))
    found = again(old, report(*old.findings, finding(param="new.weight")))
    assert counting(found) == [("PA201", "new.weight")]
    assert (found.outcome, found.exit_status) == (Outcome.FINDINGS, 1)
    same = again(old, old)
    assert counting(same) == []
    assert (same.outcome, same.exit_status) == (Outcome.CLEAN, 0)
    assert {(f.suppressed.by, f.suppressed.where) for f in same.findings if f.suppressed} == {
        (Means.BASELINE, FILE)
    }
    assert same.baseline is not None
    assert (same.baseline.known, same.baseline.gone) == (2, ())


@pytest.mark.parametrize(
    "now",
    [
        finding(site=replace(NORM, line=99, span=(99, 4, 99, 20))),
        finding(message="in other words", expected="x", observed="y", next_step="z"),
        finding(site=replace(NORM, code_line=f"{NORM.code_line}  # mended in 0.3")),
        finding(site=replace(NORM, function="renamed")),
        replace(finding(), severity=Severity.WARNING),
    ],
    ids=["line", "words", "comment", "function", "severity"],
)
def test_it_outlives(now):
    assert again(report(finding()), report(now)).exit_status == 0


@pytest.mark.parametrize(
    "now",
    [
        finding("PA202"),
        finding(param="other.weight"),
        finding(mesh_dim="fsdp"),
        finding(site=replace(NORM, path="my_model/other.py")),
        finding(site=replace(NORM, code_line="w = self.weight.to_local(grad_placements=p)")),
    ],
    ids=["rule", "parameter", "mesh dim", "file", "code"],
)
def test_it_does_not_hide_another(now):
    found = again(report(finding()), report(now))
    assert found.exit_status == 1
    assert found.baseline is not None
    assert found.baseline.gone == ("PA201 of norm.weight on tp at my_model/norm.py in forward",)


def test_the_same_once_more_is_new():
    found = again(report(finding()), report(finding(), finding(site=replace(NORM, line=40))))
    assert len(counting(found)) == 1
    assert found.exit_status == 1
    assert again(report(finding(), finding()), report(finding(), finding())).exit_status == 0


def test_one_of_two_alike_is_gone():
    found = again(report(finding(), finding()), report(finding()))
    assert found.baseline is not None
    assert (found.baseline.known, len(found.baseline.gone)) == (1, 1)


def test_what_a_trace_cannot_find_is_not_gone():
    found = again(report(finding("PA207"), finding("PA106", severity=Severity.WARNING)), report())
    assert found.baseline is not None
    assert found.baseline.gone == ("PA106 of norm.weight on tp at my_model/norm.py in forward",)


def test_suppressed_since_is_not_gone_and_keeps_its_reason():
    old = report(finding())
    now = suppressed(old, [Suppress(rule="PA201", reason="mine")], today=date(2026, 1, 1))
    found = again(old, now)
    assert [f.suppressed.reason for f in found.findings if f.suppressed] == ["mine"]
    assert found.baseline is not None
    assert (found.baseline.known, found.baseline.gone) == (1, ())


def test_a_fault_of_our_own_stays_one():
    r = report(finding("PA901"), finding())
    found = again(r, r)
    assert (found.outcome, found.exit_status) == (Outcome.INCOMPLETE, 3)
    assert counting(found) == [("PA901", "norm.weight")]
    by_hand = replace(known_in(report(finding()))[0], rule="PA901", fingerprint=finding("PA901").fingerprint)
    assert counting(apply(r, [by_hand], FILE)) == [("PA201", "norm.weight"), ("PA901", "norm.weight")]


def test_marking_again_marks_anew_and_so_does_writing():
    old = report(finding(), finding("PA202"))
    once = again(old, old)
    assert again(old, once) == once
    assert known_in(once) == known_in(old)
    assert again(report(finding()), once).exit_status == 1


def test_what_it_did_is_in_the_reports():
    found = again(report(finding(), finding(param="a.weight")), report(finding()))
    assert report_loads(report_dumps(found)) == found
    lines = render(found, "text", width=200, color="never").splitlines()
    at = lines.index("baseline")
    assert lines[at + 1 : at + 4] == [
        "  known       1 finding of baseline.json",
        "  gone        PA201 of a.weight on tp at my_model/norm.py in forward",
        "              placement-audit baseline --report SAVED.json --write baseline.json takes them out; "
        "SAVED.json is this run's --format json",
    ]
    assert "  PA201       lost-reduction on tp: known (baseline baseline.json)" in lines
    assert "clean but for 1 suppressed" in lines[-1]


# --------------------------------------------------------------------------- the commands


@pytest.fixture
def saved(tmp_path):
    """A saved report of 13 findings, in the working directory."""
    (tmp_path / "saved.json").write_text(report_dumps(make_report.one_sided_report()))
    return tmp_path


def called(capsys, *args: str) -> tuple[int, str, str]:
    status = cli.main(list(args))
    out, err = capsys.readouterr()
    return status, out, err


def test_write_then_audit_with_it(saved, capsys, monkeypatch):
    monkeypatch.chdir(saved)
    assert called(capsys, "baseline", "--report", "saved.json", "--write", FILE) == (
        0,
        "baseline.json: 13 findings: 13 of PA202\n",
        "",
    )
    assert (saved / FILE).read_text().count("\n") == 15
    assert called(capsys, "report", "saved.json", "--quiet")[0] == 1
    assert called(capsys, "report", "saved.json", "--baseline", FILE, "--quiet") == (0, "", "")
    # once more, over the old one
    assert called(capsys, "baseline", "--report", "saved.json", "--write", FILE, "--quiet") == (0, "", "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["baseline", "--write", FILE], "baseline takes either --config FILE or --report SAVED.json."),
        (["baseline", "--write", FILE, "--report", "saved.json", "--config", "x"], "baseline takes either"),
        (["baseline", "--report", "saved.json"], "the following arguments are required: --write"),
        (["baseline", "--report", "saved.json", "--write", "none/b.json"], "there is no folder"),
        (
            ["baseline", "--report", "saved.json", "--write", "saved.json"],
            "saved.json: is no baseline but a saved report",
        ),
        (
            ["report", "saved.json", "--baseline", "none.json"],
            "none.json: no such file. placement-audit baseline --config",
        ),
        (["report", "saved.json", "--baseline", "saved.json"], "saved.json: is no baseline"),
        (["--config", "job.toml", "--baseline", "none.json"], "none.json: no such file."),
    ],
)
def test_usage_errors(saved, capsys, monkeypatch, args, words):
    monkeypatch.chdir(saved)
    (saved / "job.toml").write_text("")
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    status, out, err = called(capsys, *args)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("error:") == 1
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def test_an_incomplete_audit_makes_no_baseline(saved, capsys, monkeypatch):
    monkeypatch.chdir(saved)
    (saved / "saved.json").write_text(report_dumps(report(finding("PA901"))))
    status, _, err = called(capsys, "baseline", "--report", "saved.json", "--write", FILE)
    assert status == 3
    assert "baseline.json was not written" in err
    assert not (saved / FILE).exists()


def test_of_a_job(saved, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pipeline, "run", lambda config, options: make_report.one_sided_report())
    monkeypatch.chdir(saved)
    (saved / "job.toml").write_text("")
    assert called(capsys, "--config", "job.toml", "--quiet", "--output-file", "x")[0] == 1
    status, out, _ = called(capsys, "baseline", "--config", "job.toml", "--write", FILE)
    assert (status, out) == (0, "baseline.json: 13 findings: 13 of PA202\n")
    assert called(capsys, "--config", "job.toml", "--baseline", FILE, "--quiet") == (0, "", "")
