"""Trace in, report out: the verdict on every parameter and mesh dim. Pure; knows no torch.

A verdict sets the label of a gradient (its placement) against its actual state (`placement_audit.states`).
The rules that turn verdicts and boundaries into findings are in `placement_audit.rules`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from placement_audit.measurement import Measurement
from placement_audit.model import REPLICATE, Placement, PlacementKind, State, StateKind
from placement_audit.reading import describe, misfit, read_factor, shards_added_up
from placement_audit.rules.boundary import boundary_findings
from placement_audit.rules.departures import located
from placement_audit.rules.dtype import dtype_findings
from placement_audit.rules.gradient import gradient_findings
from placement_audit.rules.loss import loss_findings
from placement_audit.rules.measured import measured_findings
from placement_audit.rules.remedy import with_remedies
from placement_audit.rules.texts_readers import WRONG_UPDATE
from placement_audit.rules.updates import update_findings
from placement_audit.rules.values import value_contradictions, value_findings, wrong_forward
from placement_audit.settle import settled
from placement_audit.tracing import ParamRecord, Trace
from placement_audit.verdicts import GOOD, Evidence, Judgement, Outcome, Report, Verdict
from placement_audit.weigh import Contradiction, right, weigh

_NUMBERS = (
    "Numbers that differ between ranks without being tensors (an offset taken from the rank) are not seen by "
    "one rank's trace."
)
_READERS = "Readers of gradients (clipping, the optimizer) ran after the trace and were not judged."
_READERS_FOLLOWED = (
    "Of the readers of gradients (clipping, the optimizer) it shows whether they keep replicas equal, not whether "
    "their numbers are right, nor numbers that they take out of tensors (.item())."
)
BLIND_SPOTS = (
    "A forward that is not what one device would compute (a mean over a rank's own tokens, an op on a shard that "
    "needs the whole) leaves no mark in placements; only values show it.",
    "A wrong divisor in the loss, or averaging what was already averaged, leaves no mark in placements; "
    "only values show it.",
    _NUMBERS,
    _READERS,
)
"""What a trace alone can't see; part of every traced report, so that it never reads as a clean bill."""

_SAME = 1e-5
"""Relative difference below which replicas count as equal."""

MEASURED_BLIND_SPOTS = (
    "Numbers were taken of one step with one seed, in one dtype; a fault that needs other data (a capacity "
    "limit, a long sequence) does not show in it.",
)
"""What is left when real ranks were measured, too."""


def _blind_spots(trace: Trace) -> tuple[str, ...]:
    known = tuple(
        _READERS_FOLLOWED if x is _READERS and trace.readers else x
        for x in BLIND_SPOTS
        if not (trace.other_ranks and x is _NUMBERS)
    )
    if not trace.unfollowed:
        return known
    calls: Counter[str] = Counter()
    for op, _, n in trace.unfollowed:
        calls[op.removeprefix("aten.").removesuffix(".default")] += n
    named = [f"{op} ({n})" for op, n in calls.most_common(_OPS_NAMED)]
    more = f" and {len(calls) - len(named)} more" if len(calls) > len(named) else ""
    return (
        *known,
        "Plain tensors were followed from op to op by torch's sharding rules, up to calls that have no rule "
        f"without communication: {', '.join(named)}{more}. What they made was not judged as a value.",
    )


_OPS_NAMED = 5


def judge(
    trace: Trace,
    measurement: Measurement | None = None,
    *,
    apart: Mapping[str, tuple[float | None, ...]] | None = None,
) -> Report:
    """Judge a trace, and what real ranks measured of the same step, where they did.

    Args:
        trace: of the step.
        measurement: of the same step.
        apart: parameter -> how far its replicas differed before the step, by mesh dim, where ranks looked at no
            more than that.
    """
    among = _known_right(measurement)
    baseline = {d: _baseline(trace, i, d, among) for i, d in enumerate(trace.mesh.dim_names)}
    judgements = tuple(
        _judgement(trace, p, i, d, baseline[d])
        for p in trace.params
        if p.requires_grad
        for i, d in enumerate(trace.mesh.dim_names)
    )
    judgements = tuple(_disagreeing(trace, j, (apart or {}).get(j.param_fqn)) for j in judgements)
    contradictions: tuple[Contradiction, ...] = ()
    forward = wrong_forward(trace)
    if measurement is None and forward is not None:
        judgements = tuple(
            replace(j, verdict=Verdict.NOT_JUDGED, reason=forward)
            if j.verdict in (*GOOD, Verdict.NOT_JUDGED)
            else j
            for j in judgements
        )
    if measurement is not None:
        weighed = weigh(trace, judgements, measurement, scale=math.prod(baseline.values(), start=Fraction(1)))
        judgements, contradictions = weighed.judgements, weighed.contradictions
    drifts = tuple(update_findings(trace, judgements))
    findings = (
        *gradient_findings(trace, judgements),
        *boundary_findings(trace, judgements),
        *(loss_findings(trace) if measurement is None else ()),
        *dtype_findings(trace),
        *(drifts if measurement is None else ()),
    )
    if measurement is not None:
        contradictions += tuple(value_contradictions(trace, measurement))
        findings += tuple(measured_findings(trace, judgements, measurement, contradictions, drifts))
        findings = tuple(located(findings, measurement))
    spoilt = any(f.rule_id == WRONG_UPDATE.id for f in findings)
    off = any(j.verdict not in (*GOOD, Verdict.NOT_JUDGED) for j in judgements)
    findings += tuple(value_findings(trace, measurement, gradient_off=off, update_off=spoilt))
    findings = with_remedies(trace, findings, judgements, measured=measurement is not None)
    return settled(
        Report(
            outcome=Outcome.CLEAN,
            exit_status=0,
            judgements=judgements,
            findings=findings,
            blind_spots=_blind_spots(trace) if measurement is None else MEASURED_BLIND_SPOTS,
            trace=trace,
            measurement=measurement,
        )
    )


def _disagreeing(trace: Trace, j: Judgement, spreads: tuple[float | None, ...] | None) -> Judgement:
    """The verdict on a parameter whose replicas were none before the step."""
    spread = spreads[trace.mesh.dim_names.index(j.mesh_dim)] if spreads else None
    if spread is None or spread <= _SAME or j.verdict not in (*GOOD, Verdict.NOT_JUDGED):
        return j
    reason = f"the replicas differed by {spread:.2g} before the step"
    return replace(
        j,
        verdict=Verdict.RANKS_DISAGREE,
        factor=None,
        reason=reason,
        evidence=(*j.evidence, Evidence(strength="measured", statement=reason)),
    )


def _known_right(measurement: Measurement | None) -> frozenset[str]:
    """Parameters whose gradients numbers prove."""
    if measurement is None:
        return frozenset()
    m = measurement
    return frozenset(p.fqn for p in m.params if m.telling(p) and right(p, m.allowed(p)))


def _baseline(trace: Trace, dim: int, name: str, among: frozenset[str]) -> Fraction:
    """The scale that counts as right on a mesh dim.

    1, or on a mesh dim that the batch is spread over the average's 1/n where most parameters have it: sum and
    average can't be told apart by placements, only a parameter that differs from the others can.

    Args:
        trace: of the step.
        dim: index of the mesh dim.
        name: of it.
        among: the parameters to ask, where numbers say whose gradients are right; empty for all.
    """
    if name not in trace.batch_dims:
        return Fraction(1)
    size = trace.mesh.shape[dim]
    factors = Counter(
        read_factor(_label(p, name), p.grad.state[dim], size)
        for p in trace.params
        if p.requires_grad and p.grad and (not among or p.fqn in among)
    )
    average = Fraction(1, size)
    return average if factors[average] > factors[Fraction(1)] else Fraction(1)


def _label(p: ParamRecord, mesh_dim: str) -> Placement:
    """The gradient's placement; a mesh dim outside its mesh, or a plain gradient, counts as Replicate."""
    layout = p.grad.layout if p.grad is not None else None
    return (layout.on(mesh_dim) if layout is not None else None) or REPLICATE


def _judgement(trace: Trace, p: ParamRecord, dim: int, name: str, baseline: Fraction) -> Judgement:
    size = trace.mesh.shape[dim]
    placement = p.layout.on(name) if p.layout is not None else None
    expected = placement or REPLICATE
    if p.grad is None:
        used = "the forward used it" if p.uses else "the forward did not use it"
        return Judgement(
            param_fqn=p.fqn,
            mesh_dim=name,
            verdict=Verdict.NO_GRADIENT,
            placement=placement,
            expected=expected,
            observed=None,
            factor=None,
            reason=f"backward left no gradient, and {used}",
            path=(),
            evidence=(Evidence(strength="traced", statement=f".grad is None after backward; {used}"),),
        )
    state = _decided(trace, p, dim, name)
    label = _label(p, name)
    factor = read_factor(label, state, size)
    verdict, reason = _verdict(trace, p, name, expected, label, state, factor, baseline, size)
    added_up = shards_added_up(trace, p, dim) if label.is_shard and verdict in GOOD else None
    if added_up is not None:
        verdict, factor = Verdict.WRONG_PLACEMENT, None
        reason = f"the gradients of the {size} ranks' different shards were added up"
    return Judgement(
        param_fqn=p.fqn,
        mesh_dim=name,
        verdict=verdict,
        placement=placement,
        expected=expected,
        observed=label if p.grad.layout is not None and p.grad.layout.on(name) is not None else None,
        factor=factor,
        reason=reason,
        path=state.blame if added_up is None else (added_up, *(i for i in state.blame if i != added_up)),
        evidence=(Evidence(strength="traced", statement=describe(label, state, factor, name, size)),),
    )


def _decided(trace: Trace, p: ParamRecord, dim: int, name: str) -> State:
    """The state of a gradient; an ambiguous one is known where the parameter was divided to be added to a sum.

    Divided by the ranks, each rank's part of it is as much of the gradient as autograd knows of the division.
    """
    assert p.grad is not None
    state, size = p.grad.state[dim], trace.mesh.shape[dim]
    shares = [x for x in trace.shares if (x.param_fqn, x.mesh_dim) == (p.fqn, name)]
    if state.kind is not StateKind.AMBIGUOUS or state.scale is None or len(shares) != 1:
        return state
    (share,) = shares
    if share.value * size != 1 or not share.grad:
        return state
    return State(StateKind.INVARIANT, state.scale * share.grad, state.blame)


def _verdict(
    trace: Trace,
    p: ParamRecord,
    name: str,
    expected: Placement,
    label: Placement,
    state: State,
    factor: Fraction | None,
    baseline: Fraction,
    size: int,
) -> tuple[Verdict, str]:
    foreign = [d for d in (p.layout.dims if p.layout else ()) if d not in trace.mesh.dim_names]
    if foreign:
        return (
            Verdict.NOT_JUDGED,
            f"the parameter's mesh has a dim over {foreign[0]}, which is no dim of the world mesh",
        )
    if PlacementKind.STRIDED_SHARD in (label.kind, expected.kind) and label.is_shard and label != expected:
        return Verdict.WRONG_PLACEMENT, f"the gradient is {label}, the parameter {expected}"
    if state.kind is StateKind.AMBIGUOUS:
        return Verdict.NOT_JUDGED, (
            "a value equal on all ranks, or one added to a per-rank term, is summed over them: whether the "
            "gradient is complete or one of its terms is for values to decide"
        )
    if state.kind is StateKind.LOST:
        told = next((m for i in state.blame if (m := misfit(trace.boundaries[i], name))), None)
        if told is not None:
            return (
                Verdict.WRONG_PLACEMENT,
                f"on its way the gradient of what is {told[1]} was labelled {told[0]}",
            )
        return Verdict.LOST_REDUCTION, f"some of the {size} ranks' terms were dropped before they were summed"
    if state.kind is StateKind.MIXED:
        if label.is_partial:
            return (
                Verdict.DOUBLE_REDUCTION,
                "a complete part and a per-rank part were added up; summing counts the first twice",
            )
        return (
            Verdict.LOST_REDUCTION,
            "a complete part and a per-rank part were added up; summed or not, one of them is wrong",
        )
    if state.scale is None:
        return Verdict.WRONG_SCALE, "parts of different scale were added up"
    if factor is None:
        if _declared_replicate_while_varying(trace, p, name):
            return (
                Verdict.RANKS_DISAGREE,
                "the parameter itself was declared Replicate while its value varies",
            )
        rest = "" if state.scale == 1 else f", and it is scaled by {state.scale}"
        return (
            Verdict.LOST_REDUCTION,
            f"each of the {size} ranks holds its own term, nothing summed them{rest}",
        )
    if factor == baseline:
        if label.is_partial:
            return Verdict.DEFERRED, "right once reduced: whoever reads .grad must sum it over this mesh dim"
        if label.is_shard and label != expected:
            return Verdict.DEFERRED, f"right once redistributed: .grad is {label}, the parameter {expected}"
        if expected.is_shard and label.is_replicate:
            return Verdict.OK, "complete on every rank, although the parameter is a shard"
        return Verdict.OK, "average over the batch's mesh dim" if factor != 1 else "complete"
    if factor > 1:
        return Verdict.DOUBLE_REDUCTION, f"{factor} times the true gradient"
    return Verdict.WRONG_SCALE, f"{factor} times the true gradient" + (
        "" if baseline == 1 else f" where the other parameters have {baseline}"
    )


def _declared_replicate_while_varying(trace: Trace, p: ParamRecord, name: str) -> bool:
    dim = trace.mesh.dim_names.index(name)
    for i in p.boundaries:
        b = trace.boundaries[i]
        there = b.dst.on(name) if b.src is None and b.dst is not None else None
        if there is not None and there.is_replicate and b.value_state[dim].kind is StateKind.VARYING:
            return True
    return False
