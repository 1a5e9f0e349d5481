"""Traced verdicts set against what real ranks measured. Pure; knows no torch.

Where both agree a verdict has both kinds of evidence. Where only numbers can tell (a value declared
Partial, a wrong forward) the numbers decide. Where they contradict each other it is a fault of ours, and
said so (PA901): a value traced equal on all ranks that differs, a gradient traced wrong that is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from placement_audit.measurement import LARGEST, Measurement, ParamMeasure
from placement_audit.model import State, StateKind
from placement_audit.tracing import Trace
from placement_audit.verdicts import GOOD, Evidence, Judgement, Verdict

_EQUAL = (StateKind.INVARIANT, StateKind.ZERO)
"""An ambiguous gradient is no claim: it was equal where it arose, and a number that differs between ranks (the
first row of a vocabulary's shard) may have met it since, unseen."""

_SCALED = (*GOOD, Verdict.DOUBLE_REDUCTION, Verdict.WRONG_SCALE)
"""Verdicts of a gradient that is a multiple of the true one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Traced and measured evidence that can't both be right.

    Attributes:
        mesh_dim: where.
        traced: what the trace says.
        measured: what the numbers say.
        param_fqn: the parameter, if it is about one.
        boundary: index into ``Trace.boundaries``, if it is about one.
    """

    mesh_dim: str
    traced: str
    measured: str
    param_fqn: str | None = None
    boundary: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The outcome.

    Attributes:
        judgements: with measured evidence added, and decided where only numbers could.
        contradictions: faults of ours.
    """

    judgements: tuple[Judgement, ...]
    contradictions: tuple[Contradiction, ...]


def weigh(
    trace: Trace, judgements: tuple[Judgement, ...], m: Measurement, *, scale: Fraction = Fraction(1)
) -> Weighed:
    """Set the traced judgements against a measurement of the same step.

    Args:
        trace: of the step.
        judgements: traced.
        m: measured.
        scale: common factor of all gradients that the trace takes for an average over the batch's mesh dims.
    """
    measures = {p.fqn: p for p in m.params}
    by_param: dict[str, list[Judgement]] = {}
    for j in judgements:
        by_param.setdefault(j.param_fqn, []).append(j)
    out: list[Judgement] = []
    contradictions: list[Contradiction] = []
    # Replicas that differed before the step differ everywhere after it, and no trace could know.
    replicas_agree = not any(differs(p.init_spread, m.tolerance) for p in m.params)
    for fqn, js in by_param.items():
        pm = measures.get(fqn)
        if pm is None:
            out += js
            continue
        js = [replace(j, evidence=(*j.evidence, measured_evidence(pm, m, i))) for i, j in enumerate(js)]
        # A common factor that is no average over the batch is a fault, however many share it; a division by a
        # number leaves no trace, so that what the loss calls for is right, too.
        if not m.telling(pm):
            out += js
        elif right(pm, m.allowed(pm)) and m.grad_scale in (scale, m.expected_scale):
            agreed = scaled_alike(js, m, scale)
            out += js if agreed else [_measured_right(j, contradictions, replicas_agree) for j in js]
        else:
            out += _measured_wrong(trace, js, pm, m, replicas_agree)
    if replicas_agree:
        contradictions += _values_against_states(trace, m)
    return Weighed(judgements=tuple(out), contradictions=tuple(contradictions))


def right(pm: ParamMeasure, tolerance: float) -> bool:
    """Whether the assembled gradient equals the reference's and no two replicas of it differ."""
    if differs(pm.grad_spread, tolerance):
        return False
    if pm.grad_error is None:
        return pm.grad_present == pm.reference_present
    return pm.grad_error <= tolerance


def scaled_alike(js: Sequence[Judgement], m: Measurement, scale: Fraction) -> bool:
    """Whether a factor that the trace sees is the one that all gradients have and the job's loss does not call for.

    Doubled over two tp ranks and averaged over two dp ranks is what the sum over dp looks like.

    Args:
        js: a parameter's, traced.
        m: measured.
        scale: as in `weigh`.
    """
    if m.expected_scale is None or m.grad_scale == m.expected_scale:
        return False
    if all(j.verdict in GOOD for j in js) or any(j.verdict not in _SCALED or j.factor is None for j in js):
        return False
    traced = math.prod((j.factor for j in js if j.factor is not None), start=Fraction(1))
    return traced / scale == m.grad_scale / m.expected_scale


def differs(spread: tuple[float | None, ...], tolerance: float) -> bool:
    """Whether ranks that should hold the same do not, along any mesh dim."""
    return any(s is not None and not s <= tolerance for s in spread)


def measured_evidence(pm: ParamMeasure, m: Measurement, dim: int) -> Evidence:
    """One sentence on a parameter's numbers, as far as they bear on one mesh dim."""
    how = f"{m.ranks} {m.backend} ranks, {m.dtype}"
    if pm.grad_error is None:
        both = {True: "a gradient", False: "no gradient"}
        text = f"{how}: {both[pm.grad_present]} here, {both[pm.reference_present]} on one device"
        return Evidence(strength="measured", statement=text)
    ratio = "" if pm.grad_ratio is None else f", norm ratio {pm.grad_ratio:.4g}"
    text = f"{how}: relative error {pm.grad_error:.2g} (tolerance {m.allowed(pm):.0e}){ratio}"
    if m.allowed(pm) > m.tolerance:
        text += f"; rounding alone moves it by {pm.grad_noise:.2g}"
        text += "" if m.telling(pm) else ", so that these numbers tell nothing"
    spread = pm.grad_spread[dim]
    if spread is not None:
        text += f"; replicas differ by {spread:.2g}" if spread > m.tolerance else "; replicas agree"
    return Evidence(strength="measured", statement=text)


def _measured_right(j: Judgement, contradictions: list[Contradiction], replicas_agree: bool) -> Judgement:
    if j.verdict in GOOD:
        return j
    if j.verdict is Verdict.NOT_JUDGED:
        verdict = Verdict.DEFERRED if j.observed is not None and j.observed.is_partial else Verdict.OK
        return replace(
            j, verdict=verdict, factor=Fraction(1), reason="measured right; the trace could not tell"
        )
    if j.verdict is Verdict.NO_GRADIENT:
        return replace(j, verdict=Verdict.OK, reason="no gradient here, and none on one device")
    if replicas_agree:
        contradictions.append(
            Contradiction(
                mesh_dim=j.mesh_dim,
                traced=f"{j.verdict}: {j.reason}",
                measured=j.evidence[-1].statement,
                param_fqn=j.param_fqn,
            )
        )
    return j


def _measured_wrong(
    trace: Trace, js: list[Judgement], pm: ParamMeasure, m: Measurement, replicas_agree: bool
) -> list[Judgement]:
    """The trace's own verdict where it has one; else what the numbers look like."""
    if any(j.verdict not in (*GOOD, Verdict.NOT_JUDGED) for j in js):
        return js
    if not replicas_agree and not differs(pm.init_spread, m.tolerance):
        reason = (
            "replicas of other parameters differed before the step, which spoils every gradient's numbers"
        )
        return [replace(j, verdict=Verdict.NOT_JUDGED, reason=reason) for j in js]
    named = _named_by_numbers(trace, pm, m)
    if not named:
        # Not a matter of one mesh dim: the finding is told once, the verdict stands on all.
        named = {d: (Verdict.WRONG_GRADIENT, None, _how_wrong(pm, m)) for d in trace.mesh.dim_names}
    return [
        replace(j, verdict=named[j.mesh_dim][0], factor=named[j.mesh_dim][1], reason=named[j.mesh_dim][2])
        if j.mesh_dim in named
        else j
        for j in js
    ]


def _named_by_numbers(
    trace: Trace, pm: ParamMeasure, m: Measurement
) -> dict[str, tuple[Verdict, Fraction | None, str]]:
    """Mesh dim -> verdict, where numbers alone tell the mesh dim."""
    dims = trace.mesh.dim_names
    for d, spread in zip(dims, pm.init_spread, strict=True):
        if spread is not None and spread > m.tolerance:
            return {
                d: (Verdict.RANKS_DISAGREE, None, f"the replicas differed by {spread:.2g} before the step")
            }
    if _no_number(pm):
        return {}
    apart = [d for d, s in zip(dims, pm.grad_spread, strict=True) if s is not None and s > m.tolerance]
    if apart:
        reason = "the replicas hold different gradients under one label"
        return dict.fromkeys(apart, (Verdict.LOST_REDUCTION, None, reason))
    if pm.grad_error is None or pm.grad_ratio is None:
        return {}
    # Parallel to the reference: then the error is the ratio's distance from 1.
    relative = pm.grad_ratio / float(m.grad_scale)
    if abs(pm.grad_error - abs(relative - 1)) > 10 * m.tolerance * max(1.0, relative):
        return {}
    fits: dict[str, tuple[Verdict, Fraction | None, str]] = {}
    for d, size in zip(dims, trace.mesh.shape, strict=True):
        for factor, verdict in (
            (Fraction(size), Verdict.DOUBLE_REDUCTION),
            (Fraction(1, size), Verdict.WRONG_SCALE),
        ):
            if abs(relative - float(factor)) <= 10 * m.tolerance * float(factor):
                fits[d] = (verdict, factor, f"measured {factor} times the true gradient")
    # Two mesh dims of one size: the numbers can't say which.
    return fits if len(fits) == 1 else {}


def _no_number(pm: ParamMeasure) -> bool:
    """Whether the gradient is NaN or infinite somewhere, which says nothing of how replicas differ."""
    return any(s is not None and s >= LARGEST for s in pm.grad_spread)


def _how_wrong(pm: ParamMeasure, m: Measurement) -> str:
    if pm.grad_error is None:
        return "a gradient here and none on one device, or the other way round"
    if _no_number(pm):
        return "the gradient is no finite number"
    forward = " (the loss is off too: look at the forward first)" if m.loss_error > m.tolerance else ""
    return f"the numbers differ from one device's, relative error {pm.grad_error:.2g}{forward}"


def _compared(trace: Trace, m: Measurement) -> Iterator[tuple[int, str, str, bool, float]]:
    """Every traced state that has values: (boundary, of what, mesh dim, traced equal on all ranks, spread)."""
    for b in m.boundaries:
        boundary = trace.boundaries[b.index]
        pairs: list[tuple[str, tuple[State, ...], tuple[float, ...]]] = [
            ("the value", boundary.value_state, b.value_spread)
        ]
        if boundary.grad is not None and b.arrived_spread:
            pairs += [
                ("the arriving gradient", boundary.grad.arrived_state, b.arrived_spread),
                ("the gradient that left", boundary.grad.left_state, b.left_spread),
            ]
        for what, states, spreads in pairs:
            for name, state, spread in zip(trace.mesh.dim_names, states, spreads, strict=True):
                if spread < LARGEST:  # else it is no number, of which nobody can say whether it is the same
                    yield b.index, what, name, state.kind in _EQUAL, spread


def _values_against_states(trace: Trace, m: Measurement) -> list[Contradiction]:
    """Values that were traced equal on all ranks and are not."""
    return [
        Contradiction(
            mesh_dim=name,
            traced=f"{what} is equal on all ranks",
            measured=f"ranks differ by {spread:.2g} (tolerance {m.tolerance:.0e})",
            boundary=index,
        )
        for index, what, name, traced_equal, spread in _compared(trace, m)
        if traced_equal and not spread <= m.tolerance
    ]


def slots(trace: Trace, m: Measurement) -> tuple[int, int, int]:
    """(compared, equal though traced varying, differing though traced equal), over all boundaries."""
    compared = cautious = wrong = 0
    for _, _, _, traced_equal, spread in _compared(trace, m):
        equal = spread <= m.tolerance
        compared += 1
        cautious += equal and not traced_equal
        wrong += traced_equal and not equal
    return compared, cautious, wrong
