"""What the judge says, as plain data: judgements, findings and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from enum import StrEnum
from fractions import Fraction

from placement_audit.measurement import Measurement
from placement_audit.model import CallSite, Placement
from placement_audit.tracing import Trace

SCHEMA_VERSION = "1"
"""Version of the JSON report; a change that breaks readers raises it."""


class Verdict(StrEnum):
    """Of one parameter on one mesh dim."""

    OK = "ok"
    DEFERRED = "deferred"
    LOST_REDUCTION = "lost reduction"
    DOUBLE_REDUCTION = "double reduction"
    WRONG_SCALE = "wrong scale"
    WRONG_PLACEMENT = "wrong placement"
    RANKS_DISAGREE = "ranks disagree"
    WRONG_GRADIENT = "wrong gradient"
    NO_GRADIENT = "no gradient"
    NOT_JUDGED = "not judged"


GOOD = (Verdict.OK, Verdict.DEFERRED)
"""The verdicts on a gradient that is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Why a verdict is what it is.

    Attributes:
        strength: "traced" or "measured".
        statement: one sentence with its numbers.
    """

    strength: str
    statement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on one parameter and one mesh dim.

    Attributes:
        param_fqn: the parameter.
        mesh_dim: the world mesh dim.
        verdict: see `Verdict`.
        placement: the parameter's own placement there; None where its mesh has no such dim (replicated).
        expected: placement that its gradient should have.
        observed: placement that it has; None for no gradient or a plain gradient.
        factor: the gradient read through its label over the true one; None where it is no multiple of it.
        reason: one sentence.
        path: indices into ``Trace.boundaries`` that made it so, the cause first.
        evidence: see `Evidence`.
    """

    param_fqn: str
    mesh_dim: str
    verdict: Verdict
    placement: Placement | None
    expected: Placement
    observed: Placement | None
    factor: Fraction | None
    reason: str
    path: tuple[int, ...]
    evidence: tuple[Evidence, ...]


class Severity(StrEnum):
    """Only errors change the exit status: a warning is about code that is right by luck or other means."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep:
    """One place on the gradient's way that a finding names.

    Attributes:
        role: "cause" or what the place did, in a few words.
        kind: the boundary's kind.
        call_site: where.
        boundary: index into ``Trace.boundaries``.
    """

    role: str
    kind: str
    call_site: CallSite
    boundary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What one boundary call should say, so that the finding goes away.

    Attributes:
        call_site: the call.
        kind: the boundary's kind.
        argument: "grad_placements", "in_grad_placements" (local_map) or "placements" (from_local).
        placements: what the argument should be, one placement for each dim of the tensor's own mesh; several such
            rows for ``in_grad_placements``, one for each DTensor argument. () where no placements are right.
        safe: whether it follows from the algebra alone; else only shown.
        why: why it is safe, why it is not, or why there are none; one sentence.
    """

    call_site: CallSite
    kind: str
    argument: str
    placements: tuple[tuple[Placement, ...], ...]
    safe: bool
    why: str


HYGIENE = "PA0"
"""How the ids of rules begin that are about suppressions, and not about the job."""


class Means(StrEnum):
    """What says that a finding does not count."""

    CONFIG = "config"
    COMMENT = "comment"
    BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressed:
    """Why a finding does not count.

    Attributes:
        by: see `Means`.
        reason: in the user's words.
        where: the file and line that says so; the baseline's file.
        until: the last day that it holds; None for no end.
    """

    by: Means
    reason: str
    where: str
    until: date | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault of one parameter (or of one boundary) on one mesh dim.

    Attributes:
        rule_id: "PA201".
        rule_name: "lost-reduction".
        severity: see `Severity`.
        param_fqn: None for a boundary that is not on a parameter's way.
        module_fqn: where the boundary ran; "" where unknown.
        mesh_dim: the world mesh dim.
        message: one sentence.
        expected: in words and placements.
        observed: in words and placements.
        evidence: see `Evidence`.
        path: the places, the cause first; may be empty.
        next_step: what to do.
        fingerprint: stable across runs and line shifts.
        remedy: what the call should say; None where no one call can mend it.
        suppressed: why it does not count; None where it does.
    """

    rule_id: str
    rule_name: str
    severity: Severity
    param_fqn: str | None
    module_fqn: str
    mesh_dim: str
    message: str
    expected: str
    observed: str
    evidence: tuple[Evidence, ...]
    path: tuple[PathStep, ...]
    next_step: str
    fingerprint: str
    remedy: Remedy | None = None
    suppressed: Suppressed | None = None


class EditStatus(StrEnum):
    """What became of an edit."""

    SHOWN = "shown"
    PROVEN = "proven"
    APPLIED = "applied"
    REJECTED = "not kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A remedy as a change to a file.

    Attributes:
        path: of the file, relative to the folder that the diff is for.
        line: of the call, in the file as it was.
        diff: unified, as ``git apply`` takes it; "" where no edit can be made.
        safe: whether ``--fix`` may apply it, once it is proven.
        reason: why it is safe, why not, or why there is none; one sentence.
        status: see `EditStatus`.
        proof: what showed that it mends, or what kept it from being kept; "" where nothing was tried.
        fingerprints: of the findings that it is for.
    """

    path: str
    line: int
    diff: str
    safe: bool
    reason: str
    status: EditStatus = EditStatus.SHOWN
    proof: str = ""
    fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineUse:
    """What a baseline did to a report.

    Attributes:
        path: its file.
        known: findings that it knows, and which so do not count.
        gone: those in it that were not found again, in words.
    """

    path: str
    known: int
    gone: tuple[str, ...] = ()


class Outcome(StrEnum):
    """Of a whole run; suppressed findings do not count."""

    CLEAN = "clean"
    FINDINGS = "findings"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a report format may show.

    Attributes:
        schema_version: of the JSON form.
        outcome: see `Outcome`.
        exit_status: 0 clean, 1 findings, 3 incomplete or nothing audited.
        judgements: by parameter (model order), then mesh dim (mesh order).
        findings: errors first, then by rule, place and parameter.
        blind_spots: fault classes that the evidence at hand cannot see, whole sentences.
        trace: what was judged.
        measurement: what real ranks showed; None where only a trace was had.
        edits: what would mend findings, or did, once a place.
        baseline: what a baseline did to it; None where none was given.
    """

    schema_version: str = field(default=SCHEMA_VERSION)
    outcome: Outcome
    exit_status: int
    judgements: tuple[Judgement, ...]
    findings: tuple[Finding, ...]
    blind_spots: tuple[str, ...]
    trace: Trace
    measurement: Measurement | None = None
    edits: tuple[Edit, ...] = ()
    baseline: BaselineUse | None = None
