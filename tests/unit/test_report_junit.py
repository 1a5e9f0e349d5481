"""JUnit XML, read back as CI services read it."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import formats_shared as shared
import make_report as m
import pytest
from hostile import NAME, hostile_report
from snapshot import assert_snapshot

from placement_audit.report import render
from placement_audit.report.junit import junit
from placement_audit.verdicts import Report, Severity, Verdict

pytestmark = pytest.mark.unit

Cases = dict[str, ElementTree.Element]


def cases(report: Report) -> Cases:
    """Test cases by name; the counts of every suite are right, and no name comes twice."""
    root = ElementTree.fromstring(junit(report))
    found = root.findall("testsuite/testcase")
    for at, own in ((root, found), *((s, s.findall("testcase")) for s in root.findall("testsuite"))):
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(at.get(attribute, "-1")) == sum(c.find(tag) is not None for c in own)
        assert int(at.get("tests", "-1")) == len(own)
    out = {c.get("name", ""): c for c in found}
    assert len(out) == len(found)
    return out


def outcome(case: ElementTree.Element) -> str:
    return next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")


def test_a_case_for_each_kind_of_parameter_and_mesh_dim() -> None:
    outcomes = {name: outcome(case) for name, case in cases(m.mixed_report()).items()}
    assert {name: o for name, o in outcomes.items() if o != "passed"} == {
        "layers.1.attention_norm.weight on tp": "failure",
        "layers.*.ffn_norm.weight (3) on tp": "failure",
        "rope.scale on fsdp": "skipped",
        "rope.scale on tp": "skipped",
    }
    assert outcomes["norm.weight on tp"] == "passed"  # deferred
    assert len(outcomes) == 2 * 14 + 1
    assert outcomes["the audit is complete"] == "passed"


def test_a_failure_is_the_findings_block() -> None:
    failure = cases(m.mixed_report())["layers.1.attention_norm.weight on tp"].find("failure")
    assert failure is not None
    assert failure.get("message") == "lost reduction: expected Replicate(), observed Replicate()"
    assert failure.text is not None
    assert failure.text.startswith(
        "PA201 lost-reduction   layers.1.attention_norm.weight   mesh dim tp   error\n"
    )
    assert "my_model/norm.py:31 in forward\n" in failure.text


def test_a_fault_is_told_once() -> None:
    root = ElementTree.fromstring(junit(m.mixed_report()))
    assert root.get("failures") == "2"
    assert [s.get("name") for s in root] == ["gradients", "audit"]


def test_a_finding_of_no_parameter_is_a_case_of_its_own() -> None:
    report = m.mixed_report()
    finding = replace(shared.lost(report), param_fqn=None)
    report = replace(report, findings=(*report.findings, finding))
    case = cases(report)["PA201 lost-reduction on tp at my_model/norm.py:31"]
    assert outcome(case) == "failure"


def test_a_warning_passes_and_is_heard() -> None:
    report = m.stock_report(layers=1)
    warning = replace(shared.lost(m.mixed_report()), severity=Severity.WARNING, param_fqn="norm.weight")
    case = cases(replace(report, findings=(warning,)))["PA201 lost-reduction on tp at my_model/norm.py:31"]
    assert outcome(case) == "passed"
    assert "is never summed over tp" in case.findtext("system-out", "")


def test_a_wrong_verdict_without_a_finding_still_fails() -> None:
    report = m.stock_report(layers=1)
    bad = replace(report.judgements[0], verdict=Verdict.WRONG_SCALE, reason="3 times")
    report = replace(report, judgements=(bad, *report.judgements[1:]))
    failure = cases(report)["tok_embeddings.weight on fsdp"].find("failure")
    assert failure is not None
    assert failure.text == "3 times"


def test_an_error_on_a_right_gradient_fails_too() -> None:
    report = m.stock_report(layers=1)
    error = replace(shared.lost(m.mixed_report()), param_fqn="norm.weight", rule_id="PA901")
    root = ElementTree.fromstring(junit(replace(report, findings=(error,))))
    assert root.get("failures") == "1"


def test_what_is_suppressed_is_skipped_and_says_why() -> None:
    found = cases(shared.suppressed())
    skipped = found["layers.1.attention_norm.weight on tp"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == (
        "lost reduction, suppressed: known, see <T-12> (config job.toml:40, until 2027-01-31)"
    )
    assert [n for n, c in found.items() if outcome(c) == "failure"] == []


def test_an_incomplete_audit_is_an_error() -> None:
    error = cases(shared.incomplete())["the audit is complete"].find("error")
    assert error is not None
    assert error.get("message", "").startswith("incomplete: nothing was audited")


def test_not_judged_is_skipped_with_the_reason() -> None:
    skipped = cases(m.mixed_report())["rope.scale on tp"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "requires_grad is False: it is not trained."


def test_hostile_text_stays_text() -> None:
    shown = NAME.replace("\x1b", "\\x1b")
    case = cases(hostile_report())[f"layers.1.{shown}.weight on tp"]
    assert shown in case.findtext("failure", "")
    assert case.get("classname") == f"model {shown}"


def test_whole() -> None:
    text = render(m.mixed_report(), "junit")
    assert text.endswith("</testsuites>\n")
    assert_snapshot("mixed.junit.xml", text)
