"""PA0xx: suppressions that suppress nothing. Warnings all: what they leave uncovered counts by itself."""

from __future__ import annotations

from placement_audit.rules.rule import Rule
from placement_audit.verdicts import Severity

NO_REASON = Rule(
    id="PA001",
    name="suppression-without-reason",
    severity=Severity.WARNING,
    summary="A suppression comment has no reason, or cannot be read otherwise; it suppresses nothing.",
    why="""\
A finding that is switched off for no stated reason is found again by nobody. A comment with a misspelt
rule or date looks as if it did something, and does not.""",
    how_judged="""\
Comments on the lines of the calls that the trace met: `placement-audit: ignore[RULE, ...] REASON`, and
`until YYYY-MM-DD` at its end for a last day. A table in a job file that lacks a reason is refused, as any
mistake there is. The exit status follows the finding, which still counts.""",
    bad="""\
w = weight.to_local()  # placement-audit: ignore[PA201]""",
    good="""\
w = weight.to_local()  # placement-audit: ignore[PA201] summed in our optimizer until 2027-01-31""",
    fix="""\
Say why, and name rules that `placement-audit rules` lists.""",
)

UNUSED = Rule(
    id="PA002",
    name="unused-suppression",
    severity=Severity.WARNING,
    summary="A suppression fits no finding of this run.",
    why="""\
The fault is mended, or has moved out of the suppression's reach. Left behind it will hide the next one
at that place.""",
    how_judged="""\
Nothing in this run fits it. Suppressions of rules that only numbers can find are not judged where none were
taken, nor those of rules that only a trace can find where numbers were. Comments are seen where the run passed
them: on the lines of calls between DTensor and plain tensors, collectives, losses and uses of parameters. Code that
several jobs share may need a comment in another job: it is a warning, and leaves the exit status as it is.""",
    bad="""\
[[placement_audit.suppress]]
rule = "PA202"
parameter = "layers.*.old_norm.weight"     # no parameter of that name is left
reason = "mended in the next release\"""",
    good="""\
# taken out together with the fault""",
    fix="""\
Take it out, or mend its pattern. `fnmatch` patterns: `*` goes over dots, too.""",
)

EXPIRED = Rule(
    id="PA003",
    name="expired-suppression",
    severity=Severity.WARNING,
    summary="A suppression's last day is over; the finding counts again.",
    why="""\
The date is a promise to look again. Now is then.""",
    how_judged="""\
The date is compared with the day of the audit, on the clock of the machine; the day itself still counts as in time.
The exit status follows the finding, which counts again.""",
    bad="""\
w = weight.to_local()  # placement-audit: ignore[PA201] mended in 0.3 until 2026-01-31""",
    good="""\
w = weight.to_local(grad_placements=[Partial()])""",
    fix="""\
Mend the fault, or give a new date with a new reason.""",
)

HYGIENE_RULES = (NO_REASON, UNUSED, EXPIRED)
