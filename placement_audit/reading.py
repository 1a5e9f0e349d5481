"""What a gradient's state comes to under its label: how many times the true gradient, and in words. No torch."""

from __future__ import annotations

from fractions import Fraction

from placement_audit.model import Placement, State, StateKind
from placement_audit.tracing import Boundary, ParamRecord, Phase, Trace


def read_factor(label: Placement, state: State, size: int) -> Fraction | None:
    """How many times the true gradient a reader gets who trusts the label; None where it is no multiple.

    Args:
        label: the gradient's placement on the mesh dim.
        state: what it really is.
        size: ranks along the mesh dim.
    """
    if state.scale is None or state.kind in (StateKind.MIXED, StateKind.LOST, StateKind.AMBIGUOUS):
        return None
    if state.kind is StateKind.ZERO:
        return Fraction(1)
    complete = state.kind is StateKind.INVARIANT
    if label.is_partial:
        if label.reduce_op == "avg":
            return state.scale if complete else state.scale / size
        return state.scale * size if complete else state.scale
    if label.is_replicate and not complete:
        return None
    return state.scale


def describe(label: Placement, state: State, factor: Fraction | None, mesh_dim: str, size: int) -> str:
    """One sentence on a gradient: its label, what it really is, what a reader gets."""
    ranks = f'the {size} "{mesh_dim}" ranks'
    match state.kind:
        case StateKind.INVARIANT | StateKind.ZERO:
            what = f"{ranks} hold the same gradient"
        case StateKind.VARYING:
            what = f"{ranks} each hold their own part"
        case StateKind.AMBIGUOUS:
            what = f"{ranks} hold equal gradients of a value that was declared Partial"
        case StateKind.MIXED:
            what = f"{ranks} hold a complete part plus a part of their own"
        case _:
            what = f"terms of {ranks} were dropped"
    scale = "" if state.scale == 1 else f", scaled by {state.scale}"
    if state.scale is None:
        scale = ", parts of it scaled otherwise than others" if state.kind is not StateKind.MIXED else ""
    read = "" if factor is None or factor == 1 else f"; read so, it is {factor} times the true gradient"
    return f"{what}{scale}; its label is {label}{read}"


def misfit(b: Boundary, mesh_dim: str) -> tuple[Placement, Placement] | None:
    """What a boundary declares its gradient to be and what its tensor is, where the two cannot go together.

    The local gradient has the shape of the local tensor: a shard's is that shard, and of what is none it is none.

    Args:
        b: the boundary.
        mesh_dim: along which.

    Returns:
        (declared, the tensor's); None where they fit, or nothing was declared.
    """
    declared = b.grad_declared.on(mesh_dim) if b.grad_declared is not None else None
    side = b.src if b.src is not None else b.dst
    forward = side.on(mesh_dim) if side is not None else None
    if declared is None or forward is None or declared == forward:
        return None
    return (declared, forward) if declared.is_shard or forward.is_shard else None


def shards_added_up(trace: Trace, p: ParamRecord, dim: int) -> int | None:
    """The collective by hand that added up different shards' gradients; None where there was none.

    A shard's gradient is each rank's own, so that a reduction over its mesh dim is the one thing that can make it
    equal there. One that is equal for another reason (it was set by hand) is nobody's fault.

    Args:
        trace: of the step.
        p: a shard along the mesh dim.
        dim: index of the mesh dim.

    Returns:
        An index into ``trace.boundaries``, the last such collective's.
    """
    if p.grad is None or p.grad.state[dim].kind is not StateKind.INVARIANT:
        return None
    for i in reversed(p.boundaries):
        b = trace.boundaries[i]
        if b.phase is Phase.BACKWARD and b.kind == "all_reduce" and b.grad is not None:
            arrived, left = b.grad.arrived_state[dim].kind, b.grad.left_state[dim].kind
            if arrived is StateKind.VARYING and left is StateKind.INVARIANT:
                return i
    return None
