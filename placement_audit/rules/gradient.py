"""PA2xx and PA401: findings about what a parameter's gradient turned out to be."""

from __future__ import annotations

from collections.abc import Iterator

from placement_audit.model import Placement, State, StateKind
from placement_audit.rules.finding import make_finding
from placement_audit.states import belies
from placement_audit.tracing import Boundary, Collective, ParamRecord, Phase, Trace
from placement_audit.verdicts import Finding, Judgement, PathStep, Severity, Verdict

_RULE_OF = {
    Verdict.LOST_REDUCTION: "PA201",
    Verdict.DOUBLE_REDUCTION: "PA202",
    Verdict.WRONG_SCALE: "PA203",
    Verdict.WRONG_PLACEMENT: "PA204",
    Verdict.RANKS_DISAGREE: "PA205",
    Verdict.NO_GRADIENT: "PA206",
    Verdict.WRONG_GRADIENT: "PA207",
}


def gradient_findings(trace: Trace, judgements: tuple[Judgement, ...]) -> Iterator[Finding]:
    """All findings about parameters of a judged trace."""
    params = {p.fqn: p for p in trace.params}
    reductions: dict[int, list[Collective]] = {}
    for c in trace.collectives:
        if (
            c.phase is Phase.BACKWARD
            and c.boundary is not None
            and c.name in ("all_reduce", "reduce_scatter")
        ):
            reductions.setdefault(c.boundary, []).append(c)
    first_dim = trace.mesh.dim_names[:1]
    last_wrong = _first_wrong_in_backward(trace, judgements)
    for j in judgements:
        rule_id = _RULE_OF.get(j.verdict)
        if rule_id is None:
            continue
        if j.verdict in (Verdict.NO_GRADIENT, Verdict.WRONG_GRADIENT) and j.mesh_dim not in first_dim:
            continue  # one finding a parameter: it is no matter of one mesh dim
        p = params[j.param_fqn]
        path = _path(trace, p, j, reductions) if j.verdict is not Verdict.WRONG_GRADIENT else last_wrong
        yield make_finding(
            rule_id,
            param_fqn=j.param_fqn,
            module_fqn=j.param_fqn.rpartition(".")[0],
            mesh_dim=j.mesh_dim,
            message=f"{j.verdict}: {j.reason}",
            expected=_in_words(j.expected, j.mesh_dim, summed=True),
            observed=_observed(j),
            evidence=j.evidence,
            path=path,
            next_step=_next_step(j, path),
            # A parameter that no forward used may be meant; one that was used surely misses something.
            severity=Severity.WARNING if j.verdict is Verdict.NO_GRADIENT and not p.uses else None,
        )


def _first_wrong_in_backward(trace: Trace, judgements: tuple[Judgement, ...]) -> tuple[PathStep, ...]:
    """Where numbers alone say that gradients are wrong: the last parameter of the model whose gradient is.

    Backward reaches the last parameters first, so what went wrong lies at or after the place where that
    one is used, and before the next one, whose gradient is right.
    """
    wrong = {j.param_fqn for j in judgements if j.verdict is Verdict.WRONG_GRADIENT}
    order = [p for p in trace.params if p.requires_grad]
    at = max((i for i, p in enumerate(order) if p.fqn in wrong), default=None)
    if at is None:
        return ()
    after = f"; {order[at + 1].fqn} after it is right" if at + 1 < len(order) else ""
    return tuple(
        PathStep(
            role=f"{order[at].fqn}, the first wrong one in backward order, is used here{after}",
            kind="op",
            call_site=u.call_site,
            boundary=-1,
        )
        for u in order[at].uses[:1]
    )


def _in_words(placement: Placement, mesh_dim: str, *, summed: bool) -> str:
    return f"{placement} on {mesh_dim}" + (f", summed over {mesh_dim} once" if summed else "")


def _observed(j: Judgement) -> str:
    if j.verdict is Verdict.NO_GRADIENT:
        return "no gradient"
    label = str(j.observed) if j.observed is not None else "a plain tensor (counts as Replicate())"
    what = {
        Verdict.LOST_REDUCTION: f"not summed over {j.mesh_dim}",
        Verdict.DOUBLE_REDUCTION: f"summed over {j.mesh_dim} once too often",
        Verdict.RANKS_DISAGREE: "different on its ranks",
    }.get(j.verdict)
    factor = f"{j.factor} times the true gradient" if j.factor not in (None, 1) else None
    return ", ".join(x for x in (f"{label} on {j.mesh_dim}", what, factor) if x)


# --------------------------------------------------------------------------- the places


def _path(
    trace: Trace, p: ParamRecord, j: Judgement, reductions: dict[int, list[Collective]]
) -> tuple[PathStep, ...]:
    """The blamed calls, the cause first, then the partner on the parameter's own way."""
    dim = trace.mesh.dim_names.index(j.mesh_dim)
    steps = [
        PathStep(
            role=("cause: " if n == 0 else "") + _role(trace.boundaries[i], dim, j),
            kind=called(trace.boundaries[i]),
            call_site=trace.boundaries[i].call_site,
            boundary=i,
        )
        for n, i in enumerate(j.path)
    ]
    named = set(j.path)
    for i in p.boundaries:
        b = trace.boundaries[i]
        partner = None if i in named else _partner(b, dim, j, reductions.get(i, []))
        if partner is not None:
            steps.append(PathStep(role=partner, kind=called(b), call_site=b.call_site, boundary=i))
    if not steps:
        # Nothing on the way is to blame: the reduction that is due stands nowhere. Say where the use is.
        steps += [
            PathStep(
                role=f"used here by {u.op}{f' in {u.module_fqn}' if u.module_fqn else ''}; "
                "nothing reduces its gradient",
                kind="op",
                call_site=u.call_site,
                boundary=-1,
            )
            for u in p.uses[:1]
        ]
    return tuple(steps)


def called(b: Boundary) -> str:
    """What a boundary is called by those who wrote it."""
    return f"{b.kind} {b.name}" if b.name else b.kind


def _is_code_of_its_own(b: Boundary) -> bool:
    """An autograd function, or a collective on a gradient: no label says what it does."""
    return b.kind == "autograd_function" or b.phase is Phase.BACKWARD


def _role(b: Boundary, dim: int, j: Judgement) -> str:
    """What a blamed boundary did to the gradient."""
    if b.grad is None:
        return "changed the gradient"
    arrived, left = b.grad.arrived_state[dim], b.grad.left_state[dim]
    if j.verdict is Verdict.WRONG_PLACEMENT and b.phase is Phase.BACKWARD:
        return "adds up the gradients of different shards"
    if _is_code_of_its_own(b):
        return _own_role(b, arrived, left)
    label = b.grad.left.on(j.mesh_dim) if b.grad.left is not None else None
    if label is not None and belies(label, left):
        return f"labels the gradient {label} although it is {_really(left)}"
    if label is not None and label.is_partial and StateKind.VARYING is left.kind and arrived.blame:
        return f"labels the gradient {label}, which makes up for the label before"
    if arrived.kind is StateKind.MIXED and left.scale is None:
        return _SUMS_A_PART_AGAIN
    if arrived.scale != left.scale:
        ratio = (
            f"{left.scale / arrived.scale}" if left.scale is not None and arrived.scale else "another scale"
        )
        return f"changes the gradient's placement and scales it by {ratio}"
    return "passes the gradient on"


_SUMS_A_PART_AGAIN = (
    "sums a gradient of which a part is complete already: that part counts once for each rank"
)


def _own_role(b: Boundary, arrived: State, left: State) -> str:
    whose = "its backward" if b.phase is not Phase.BACKWARD else "it"
    if left.kind is StateKind.LOST and arrived.kind is not StateKind.LOST:
        return f"{whose} hands on one rank's term of the gradient, and the other ranks' terms are gone"
    if arrived.kind is StateKind.MIXED and left.scale is None:
        return _SUMS_A_PART_AGAIN
    if arrived.scale is not None and left.scale is not None and arrived.scale != left.scale:
        if left.scale > arrived.scale:
            return f"{whose} sums a gradient that is complete already"
        return f"the forward sums what is equal already, and {whose} does not: {left.scale / arrived.scale} of it"
    return "changes the gradient's scale"


def _really(state: State) -> str:
    match state.kind:
        case StateKind.INVARIANT:
            return "already complete and equal on all ranks"
        case StateKind.VARYING:
            return "each rank's own term"
        case StateKind.MIXED:
            return "a complete part plus a per-rank term"
        case _:
            return "incomplete"


def _partner(b: Boundary, dim: int, j: Judgement, ran: list[Collective]) -> str | None:
    """The other half of a pair: who reduced already, or who left it to a later label."""
    if b.grad is None:
        return None
    if j.verdict is Verdict.DOUBLE_REDUCTION:
        for c in ran:
            if j.mesh_dim in c.mesh_dims:
                where = f"{c.name} over {j.mesh_dim} in this call's backward"
                return f"already reduced it: {where}, {c.numel} elements {c.dtype}"
    declared = b.grad_declared.on(j.mesh_dim) if b.grad_declared is not None else None
    unreduced = b.grad.left_state[dim].kind is StateKind.VARYING
    if (
        j.verdict is Verdict.LOST_REDUCTION
        and b.src is None
        and declared
        and declared.is_partial
        and unreduced
    ):
        return "hands the gradient on unreduced (grad_placements Partial), so that a later label must say so"
    return None


def _next_step(j: Judgement, path: tuple[PathStep, ...]) -> str:
    cause = path[0].kind if path and path[0].boundary >= 0 else None
    mesh_dim = j.mesh_dim
    if cause is not None and cause.startswith("autograd_function"):
        if j.verdict is Verdict.LOST_REDUCTION:
            return f'sum the gradient over "{mesh_dim}" in the backward of the function above'
        return f'make the backward of the function above fit its forward on "{mesh_dim}": one sum on the whole way'
    match j.verdict:
        case Verdict.LOST_REDUCTION if cause in ("to_local", "full_tensor"):
            return f'give this {cause} grad_placements with Partial() on "{mesh_dim}"; explain PA201 for more'
        case Verdict.LOST_REDUCTION if cause == "local_map":
            return f'give this local_map in_grad_placements with Partial() on "{mesh_dim}"'
        case Verdict.LOST_REDUCTION:
            return f'make the parameter a DTensor, Replicate() on "{mesh_dim}", or all-reduce its .grad'
        case Verdict.DOUBLE_REDUCTION if len(path) > 1:
            return (
                f'take Partial() on "{mesh_dim}" out of the first call\'s grad_placements, '
                "or give the same grad_placements to the second"
            )
        case Verdict.DOUBLE_REDUCTION:
            return f'take one of the reductions over "{mesh_dim}" out'
        case Verdict.WRONG_SCALE if j.factor is None:
            return (
                f'sum over "{mesh_dim}" only what was not summed before: the gradient of each micro-batch by itself, '
                "or all of them after the last"
            )
        case Verdict.WRONG_SCALE:
            return f'check the calls above: one divides by the size of "{mesh_dim}" what was not summed'
        case Verdict.WRONG_PLACEMENT if cause == "all_reduce":
            return f'reduce it over a group that does not span "{mesh_dim}"'
        case Verdict.WRONG_PLACEMENT:
            return "redistribute the gradient to the parameter's placement before it is read"
        case Verdict.WRONG_GRADIENT:
            return (
                "no reduction explains it: look for a local mean over a shard, a wrong divisor, own backwards"
            )
        case Verdict.RANKS_DISAGREE:
            return f'declare the parameter\'s real placement on "{mesh_dim}"'
        case _:
            return "check for detach, no_grad or an unused branch between the parameter and the loss"
