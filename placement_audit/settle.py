"""What a run comes to: the outcome and exit status that its findings give, without those that are suppressed."""

from __future__ import annotations

from dataclasses import replace

from placement_audit.rules.texts_readers import EVIDENCE_DISAGREES
from placement_audit.verdicts import Finding, Outcome, Report, Severity, Verdict

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


def settled(report: Report) -> Report:
    """The report with its findings in order, and the outcome and exit status that follow from them."""
    findings = tuple(sorted(report.findings, key=lambda f: (_ORDER[f.severity], f.rule_id)))
    report = replace(report, findings=findings)
    if any(f.rule_id == EVIDENCE_DISAGREES.id for f in findings):
        return replace(report, outcome=Outcome.INCOMPLETE, exit_status=3)
    if any(_counts(f) for f in findings):
        return replace(report, outcome=Outcome.FINDINGS, exit_status=1)
    if all(j.verdict is Verdict.NOT_JUDGED for j in report.judgements):
        return replace(report, outcome=Outcome.INCOMPLETE, exit_status=3)
    return replace(report, outcome=Outcome.CLEAN, exit_status=0)


def _counts(f: Finding) -> bool:
    return f.severity is Severity.ERROR and f.suppressed is None
