"""Reports that the tests of several formats share: suppressed, baselined, mended, incomplete."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import make_report as m

from placement_audit.verdicts import (
    BaselineUse,
    Edit,
    EditStatus,
    Finding,
    Means,
    Outcome,
    Report,
    Severity,
    Suppressed,
    Verdict,
)

DIFF = """\
--- a/my_model/norm.py
+++ b/my_model/norm.py
@@ -1,2 +1,3 @@
 import torch
+from torch.distributed.tensor import Partial
 from torch import nn
@@ -30,3 +31,3 @@
     def forward(self, x):
-        return F.rms_norm(x.to_local(), self.shape, self.weight.to_local())
+        return F.rms_norm(x.to_local(), self.shape, self.weight.to_local(grad_placements=[Partial()]))
 # the last line stays
"""


def lost(report: Report) -> Finding:
    """The one lost reduction."""
    (found,) = [f for f in report.findings if f.rule_id == "PA201"]
    return found


def mended(*, safe: bool = True, status: EditStatus = EditStatus.SHOWN) -> Report:
    """`make_report.mixed_report` with an edit for its lost reduction."""
    report = m.mixed_report()
    edit = Edit(
        path="my_model/norm.py",
        line=31,
        diff=DIFF,
        safe=safe,
        reason="the trace knows what arrives",
        status=status,
        fingerprints=(lost(report).fingerprint,),
    )
    return replace(report, edits=(edit,))


def suppressed(by: Means = Means.CONFIG) -> Report:
    """The same without the edit, its lost reduction suppressed and its double reductions known to a baseline."""
    report = m.mixed_report()
    mark = Suppressed(by=by, reason="known, see <T-12>", where="job.toml:40", until=date(2027, 1, 31))
    known = Suppressed(by=Means.BASELINE, reason="known", where="base.json")
    return replace(
        report,
        findings=tuple(
            replace(f, suppressed=mark if f.rule_id == "PA201" else known) for f in report.findings
        ),
        baseline=BaselineUse(path="base.json", known=3, gone=("PA501 of norm.weight",)),
        outcome=Outcome.CLEAN,
        exit_status=0,
    )


def incomplete() -> Report:
    """Nothing judged."""
    report = m.stock_report(layers=1)
    judgements = tuple(
        replace(j, verdict=Verdict.NOT_JUDGED, factor=None, reason="nothing ran") for j in report.judgements
    )
    return replace(report, judgements=judgements, outcome=Outcome.INCOMPLETE, exit_status=3)


def many(severities: dict[Severity, int]) -> Report:
    """So many findings of each severity, each at a line of its own."""
    report = m.mixed_report()
    first = lost(report)
    findings = []
    for severity, count in severities.items():
        for i in range(count):
            site = replace(first.path[0].call_site, line=100 + i)
            step = replace(first.path[0], call_site=site)
            findings.append(replace(first, severity=severity, path=(step,), fingerprint=f"{severity}-{i}"))
    return replace(report, findings=tuple(findings))
