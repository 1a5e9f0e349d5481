"""What speaks against an edit: the report after it set against the report before."""

from __future__ import annotations

from dataclasses import replace

import make_report as m
import pytest

from placement_audit.model import CallSite
from placement_audit.proof import setbacks
from placement_audit.verdicts import Finding, Outcome, PathStep, Report, Severity, Verdict

pytestmark = pytest.mark.unit

NORM = "layers.0.attention_norm.weight"


def report(*findings: Finding, verdict: Verdict = Verdict.OK, fqn: str = NORM) -> Report:
    """A stock report with these findings, and this verdict on one parameter on tp."""
    stock = m.stock_report(layers=1)
    judgements = tuple(
        replace(j, verdict=verdict) if (j.param_fqn, j.mesh_dim) == (fqn, "tp") else j
        for j in stock.judgements
    )
    outcome = Outcome.FINDINGS if findings else Outcome.CLEAN
    return replace(stock, judgements=judgements, findings=findings, outcome=outcome)


def finding(rule: str = "PA201", code: str = "w.to_local()", fqn: str = NORM, **changes: object) -> Finding:
    site = CallSite(path="norm.py", line=31, function=str(changes.pop("function", "forward")), code_line=code)
    base = Finding(
        rule_id=rule,
        rule_name="lost-reduction",
        severity=Severity.ERROR,
        param_fqn=fqn,
        module_fqn="layers.0",
        mesh_dim="tp",
        message="",
        expected="",
        observed="",
        evidence=(),
        path=(PathStep(role="cause", kind="to_local", call_site=site, boundary=3),),
        next_step="",
        fingerprint=f"{rule}-{fqn}-{code}",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


LOST = finding()
BEFORE = report(LOST, verdict=Verdict.LOST_REDUCTION)
MENDED = {LOST.fingerprint}
AFTER = "w.to_local(grad_placements=[Partial()])"


def test_gone_and_nothing_new() -> None:
    assert setbacks(BEFORE, report(), MENDED) == ()


def test_still_there_though_its_code_line_and_so_its_fingerprint_changed() -> None:
    after = report(finding(code=AFTER), verdict=Verdict.LOST_REDUCTION)
    assert setbacks(BEFORE, after, MENDED) == (
        f"still there: PA201 lost-reduction of {NORM} on tp at norm.py:31 in forward",
    )


def test_one_of_two_alike_is_gone() -> None:
    both = report(LOST, finding(code="v.to_local()"), verdict=Verdict.LOST_REDUCTION)
    one = report(finding(code="v.to_local()"), verdict=Verdict.LOST_REDUCTION)
    assert setbacks(both, one, MENDED) == ()
    assert setbacks(both, both, MENDED)[0].startswith("still there")


def test_another_finding_whose_line_was_edited_is_not_new() -> None:
    other = finding("PA101", severity=Severity.WARNING)
    before = report(LOST, other, verdict=Verdict.LOST_REDUCTION)
    after = report(finding("PA101", code=AFTER, severity=Severity.WARNING))
    assert setbacks(before, after, MENDED) == ()


@pytest.mark.parametrize("severity", [Severity.ERROR, Severity.WARNING])
def test_the_cause_moved(severity: Severity) -> None:
    after = report(finding(function="replicate_compute", severity=severity))
    (said,) = setbacks(BEFORE, after, MENDED)
    assert said.startswith("new: PA201")
    assert "in replicate_compute" in said


def test_a_new_note_is_no_setback() -> None:
    assert setbacks(BEFORE, report(finding("PA501", severity=Severity.NOTE)), MENDED) == ()


@pytest.mark.parametrize(
    ("was", "now", "bad"),
    [
        (Verdict.OK, Verdict.DOUBLE_REDUCTION, True),
        (Verdict.DEFERRED, Verdict.LOST_REDUCTION, True),
        (Verdict.OK, Verdict.NOT_JUDGED, True),
        (Verdict.LOST_REDUCTION, Verdict.NOT_JUDGED, True),
        (Verdict.NOT_JUDGED, Verdict.NOT_JUDGED, False),
        (Verdict.LOST_REDUCTION, Verdict.OK, False),
        (Verdict.DEFERRED, Verdict.DEFERRED, False),
        (Verdict.NOT_JUDGED, Verdict.OK, False),
    ],
)
def test_a_judgement(was: Verdict, now: Verdict, bad: bool) -> None:
    said = setbacks(report(verdict=was), report(verdict=now), set())
    assert said == ((f"worse: {NORM} on tp was {was}, is {now}",) if bad else ())


def test_deferred_is_for_numbers_to_decide() -> None:
    after = report(verdict=Verdict.DEFERRED)
    (said,) = setbacks(BEFORE, after, MENDED)
    assert said.startswith("right only if its readers reduce it")
    measured = [replace(r, measurement=object()) for r in (BEFORE, after)]  # type: ignore[arg-type]
    assert setbacks(*measured, MENDED) == ()


def test_measured_before_and_not_after() -> None:
    before = replace(BEFORE, measurement=object())  # type: ignore[arg-type]
    assert setbacks(before, report(), MENDED) == ("after it the job could not be measured",)


def test_an_audit_that_came_to_no_end() -> None:
    after = replace(report(), outcome=Outcome.INCOMPLETE)
    assert setbacks(BEFORE, after, MENDED) == ("the audit after it came to no end",)


def test_another_model() -> None:
    assert setbacks(BEFORE, m.stock_report(layers=2), MENDED) == (
        "after it the model has other parameters or mesh dims",
    )


def test_many_are_counted() -> None:
    new = [finding(fqn=f"layers.{i}.w", function="g") for i in range(9)]
    (said,) = setbacks(report(), report(*new), set())
    assert said.endswith("and 6 more")
