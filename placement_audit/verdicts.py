"""What the judge says, as plain data: judgements, findings and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
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


class Outcome(StrEnum):
    """Of a whole run."""

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
    """

    schema_version: str = field(default=SCHEMA_VERSION)
    outcome: Outcome
    exit_status: int
    judgements: tuple[Judgement, ...]
    findings: tuple[Finding, ...]
    blind_spots: tuple[str, ...]
    trace: Trace
    measurement: Measurement | None = None
