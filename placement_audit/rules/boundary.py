"""PA1xx: findings about what a boundary call declares, whatever its parameter's gradient came to."""

from __future__ import annotations

from collections.abc import Iterator

from placement_audit.model import Placement, StateKind
from placement_audit.reading import misfit
from placement_audit.rules.finding import make_finding
from placement_audit.states import belies
from placement_audit.tracing import Boundary, Phase, Trace
from placement_audit.verdicts import GOOD, Evidence, Finding, Judgement, PathStep, Severity


def boundary_findings(trace: Trace, judgements: tuple[Judgement, ...]) -> Iterator[Finding]:
    """All PA1xx findings of a trace."""
    wrong = {(i, j.mesh_dim) for j in judgements if j.verdict not in GOOD for i in j.path}
    for b in trace.boundaries:
        if b.phase is not Phase.FORWARD:
            continue
        for dim, name in enumerate(trace.mesh.dim_names):
            yield from _declared_values(trace, b, dim, name)
            yield from _declared_gradients(trace, b, name)
            if (b.index, name) not in wrong:
                yield from _cancelled_label(b, dim, name)
    yield from _summed_twice_in_forward(trace)


def _step(b: Boundary, role: str = "cause") -> tuple[PathStep, ...]:
    return (PathStep(role=role, kind=b.kind, call_site=b.call_site, boundary=b.index),)


def _declared_values(trace: Trace, b: Boundary, dim: int, name: str) -> Iterator[Finding]:
    """`from_local`: does the value fit the placement it is given?"""
    declared = b.dst.on(name) if b.src is None and b.dst is not None else None
    if declared is None or b.kind == "distribute_tensor":  # which makes its placement true, by a broadcast
        return
    size = trace.mesh.shape[dim]
    kind = b.value_state[dim].kind
    if declared.is_replicate and kind is StateKind.VARYING:
        yield make_finding(
            "PA102",
            param_fqn=b.param_fqn,
            module_fqn=b.module_fqn,
            mesh_dim=name,
            message=f'from_local declares Replicate on "{name}" a value that differs on its {size} ranks',
            expected="Shard or Partial, or a collective first",
            observed=str(declared),
            evidence=(
                Evidence(
                    strength="traced",
                    statement=f'the value was computed from tensors that vary along "{name}", '
                    f"and no collective over it came since",
                ),
            ),
            path=_step(b),
            next_step=f'declare what the value is on "{name}", or all-reduce / all-gather it before',
        )
    complete = kind is StateKind.INVARIANT and name not in b.divided
    if declared.is_partial and declared.reduce_op == "sum" and complete:
        yield make_finding(
            "PA103",
            param_fqn=b.param_fqn,
            module_fqn=b.module_fqn,
            mesh_dim=name,
            message=f'from_local declares Partial on "{name}" a value that is equal on its {size} ranks',
            expected=f"each rank's own term, or the value divided by {size}",
            observed=f"the same value on all {size} ranks: counted {size} times unless divided before",
            evidence=(
                Evidence(
                    strength="traced", statement=f'nothing that varies along "{name}" went into the value'
                ),
            ),
            path=_step(b),
            next_step="values decide: run with --measure, or add it on one side of the reduction only",
        )


def _declared_gradients(trace: Trace, b: Boundary, name: str) -> Iterator[Finding]:
    """``grad_placements`` that can't fit the forward placement."""
    told = misfit(b, name)
    if told is None:
        return
    declared, forward = told
    yield make_finding(
        "PA104",
        param_fqn=b.param_fqn,
        module_fqn=b.module_fqn,
        mesh_dim=name,
        message=f'{b.kind} declares the gradient {declared} on "{name}" for a tensor that is {forward}',
        expected=_fitting(forward),
        observed=str(declared),
        evidence=(
            Evidence(strength="traced", statement="the local gradient has the shape of the forward's part"),
        ),
        path=_step(b),
        next_step=f'give grad_placements that fit {forward} on "{name}"',
        # No gradient came through here, so that none is wrong for it.
        severity=None if b.grad is not None else Severity.WARNING,
    )


def _fitting(forward: Placement) -> str:
    return str(forward) if forward.is_shard else "Replicate() or Partial(sum)"


def _cancelled_label(b: Boundary, dim: int, name: str) -> Iterator[Finding]:
    """A gradient's label that is false, and yet no parameter came out wrong for it."""
    if b.grad is None or b.grad.left is None or b.src is None or b.dst is not None:
        return
    label = b.grad.left.on(name)
    state = b.grad.left_state[dim]
    if label is None or state.kind is StateKind.LOST or not belies(label, state):
        return
    arrived = b.grad.arrived_state[dim]
    if arrived.blame and label.is_replicate:
        return
    really = (
        "equal on all ranks and complete" if state.kind is StateKind.INVARIANT else "each rank's own term"
    )
    yield make_finding(
        "PA101",
        param_fqn=b.param_fqn,
        module_fqn=b.module_fqn,
        mesh_dim=name,
        message=f'{b.kind} labels the gradient {label} on "{name}" although it is {really}; '
        "another label makes up for it, so that no parameter's gradient is wrong",
        expected="Partial(sum)" if label.is_replicate else "Replicate()",
        observed=str(label),
        evidence=(
            Evidence(strength="traced", statement=f"the gradient arrived {arrived.kind} along the mesh dim"),
        ),
        path=_step(b),
        next_step="make both labels true: a change to either alone breaks the gradient",
    )


def _summed_twice_in_forward(trace: Trace) -> Iterator[Finding]:
    for c in trace.collectives:
        if c.phase is not Phase.FORWARD:
            continue
        for name in c.already_equal:
            owner = trace.boundaries[c.boundary] if c.boundary is not None else None
            carries = owner is not None and owner.kind == "autograd_function" and owner.grad is not None
            site = owner.call_site if owner is not None else c.call_site
            path = ()
            if site is not None:
                path = (
                    PathStep(
                        role="cause",
                        kind=c.name,
                        call_site=site,
                        boundary=-1 if owner is None else owner.index,
                    ),
                )
            yield make_finding(
                "PA105",
                param_fqn=None,
                module_fqn=c.module_fqn,
                mesh_dim=name,
                message=f'{c.name}(sum) over "{name}" of a value that is already equal on its ranks',
                expected="each rank's own term",
                observed=f"the same value on every rank: the result is {trace.mesh.size(name)} times it",
                evidence=(Evidence(strength="traced", statement=f"{c.numel} elements, {c.dtype}"),),
                path=path,
                next_step="fine for counting ranks; else drop the collective or divide",
                # What is counted for its own sake has no gradient.
                severity=Severity.WARNING if carries else None,
            )
