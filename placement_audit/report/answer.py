"""One sentence on one parameter and one mesh dim: where its gradient is reduced, or why it is not."""

from __future__ import annotations

from collections.abc import Sequence

from placement_audit.report.words import call_name, plural
from placement_audit.tracing import Boundary, Collective, ParamRecord, Phase, Trace
from placement_audit.verdicts import Judgement, Verdict

REDUCTIONS = ("all_reduce", "reduce_scatter")


def answer(
    trace: Trace, param: ParamRecord, way: Sequence[Boundary], mesh_dim: str, judgement: Judgement | None
) -> str:
    """Where the reduction over ``mesh_dim`` is.

    Args:
        trace: what was traced.
        param: the parameter.
        way: the boundaries that its gradient went back through, in backward order.
        mesh_dim: the world mesh dim asked about.
        judgement: the verdict there, None where there is none.
    """
    ran = _reductions(trace, way, mesh_dim)
    where = " and ".join(_runs(trace, c, mesh_dim) for c in ran)
    if param.grad is None:
        if not param.requires_grad:
            return "The parameter is not trained: it has no gradient to reduce."
        return "Backward left no gradient: there is nothing to reduce."
    verdict = judgement.verdict if judgement is not None else None
    label = param.grad.layout.on(mesh_dim) if param.grad.layout is not None else None
    if judgement is not None and verdict not in (Verdict.OK, Verdict.DEFERRED):
        return _wrong(trace, judgement, mesh_dim, where)
    if verdict is Verdict.DEFERRED or (verdict is None and label is not None and label.is_partial):
        what = "redistribute" if label is not None and label.is_shard else "reduce"
        reader = f".grad is {label} on {mesh_dim} and whoever reads it must {what} it."
        return (
            f"{where}; then {reader}" if where else f"No reduction over {mesh_dim} runs in backward: {reader}"
        )
    if where:
        return f"{where}."
    return _none_ran(trace, param, mesh_dim)


def spelled(c: Collective) -> str:
    """``256 elements, float32``."""
    return f"{plural(c.numel, 'element')}, {c.dtype}"


def _reductions(trace: Trace, way: Sequence[Boundary], mesh_dim: str) -> list[Collective]:
    on_way = {b.index for b in way}
    return [c for c in _backward_reductions(trace, mesh_dim) if c.boundary in on_way]


def _backward_reductions(trace: Trace, mesh_dim: str) -> list[Collective]:
    return [
        c
        for c in trace.collectives
        if c.phase is Phase.BACKWARD and mesh_dim in c.mesh_dims and c.name in REDUCTIONS
    ]


def _runs(trace: Trace, c: Collective, mesh_dim: str) -> str:
    assert c.boundary is not None  # _reductions keeps only those of a boundary
    call = _call(trace, c.boundary)
    return f"The {c.name.replace('_', '-')} over {mesh_dim} runs in the backward of {call}: {spelled(c)}"


def _wrong(trace: Trace, judgement: Judgement, mesh_dim: str, where: str) -> str:
    call = _call(trace, judgement.path[0]) if judgement.path else ""
    at = f" in the backward of {call}" if call else ""
    reason = judgement.reason.rstrip(".")
    ran = f" {where}." if where else ""
    match judgement.verdict:
        case Verdict.LOST_REDUCTION:
            return f"The reduction over {mesh_dim} is lost{at}: {reason}.{ran}"
        case Verdict.DOUBLE_REDUCTION:
            by = f"the label that {call} gives it" if call else "its label"
            return f"{ran.strip()} It is reduced once more because of {by}: {reason}.".strip()
        case Verdict.NOT_JUDGED:
            return f"Not judged on {mesh_dim}: {reason}.{ran}"
        case _:
            return f"The gradient has a {judgement.verdict} on {mesh_dim}{at}: {reason}.{ran}"


def _none_ran(trace: Trace, param: ParamRecord, mesh_dim: str) -> str:
    """No boundary on the way reduced over the mesh dim, and that is no fault."""
    placement = param.layout.on(mesh_dim) if param.layout is not None else None
    elsewhere = [c for c in _backward_reductions(trace, mesh_dim) if c.boundary is None]
    module = param.fqn.rpartition(".")[0]
    by_op = [c for c in elsewhere if c.module_fqn and c.module_fqn == module]
    if by_op:
        c = by_op[0]
        ran_by = f"by {c.op}" if c.op else "outside any boundary"
        name = c.name.replace("_", "-")
        return (
            f"No boundary on the parameter's way reduces over {mesh_dim}; the backward of {module} ran "
            f"{'an' if name[0] in 'aeiou' else 'a'} {name} over {mesh_dim} {ran_by}: {spelled(c)}."
        )
    if mesh_dim in trace.batch_dims and elsewhere:
        count = plural(len(elsewhere), "reduction")
        return (
            f"No boundary on the parameter's way reduces over {mesh_dim}; {count} over {mesh_dim} ran in "
            "backward outside any boundary (FSDP2 or DDP hooks, or ops)."
        )
    label = param.grad.layout.on(mesh_dim) if param.grad and param.grad.layout else None
    if placement is not None and placement.is_shard and label != placement:
        return (
            f"No reduction over {mesh_dim} is due: .grad is {label or 'a plain tensor'}, "
            f"complete on every rank, although the parameter is {placement} on {mesh_dim}."
        )
    if placement is not None and placement.is_shard:
        return (
            f"No reduction over {mesh_dim} is due: the parameter is {placement} on {mesh_dim}, "
            "and each rank's gradient is that of its own part."
        )
    return f"No reduction over {mesh_dim} is due: the gradient arrives equal on all ranks."


def _call(trace: Trace, boundary: int) -> str:
    b = trace.boundaries[boundary]
    return f"{call_name(b.kind)} at {b.call_site.path}:{b.call_site.line}"
