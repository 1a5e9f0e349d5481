"""PA403: replicas that their update drives apart, as a trace sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from placement_audit.model import CallSite, StateKind
from placement_audit.rules.finding import make_finding
from placement_audit.tracing import ParamRecord, Trace, UpdateRecord
from placement_audit.verdicts import GOOD, Evidence, Finding, Judgement, PathStep, Verdict

_NOT_EQUAL = (StateKind.VARYING, StateKind.MIXED, StateKind.TERM, StateKind.LOST)
_UNKNOWN = "<unknown>"


def update_findings(trace: Trace, judgements: Sequence[Judgement]) -> Iterator[Finding]:
    """Parameters whose gradients are right and whose replicas differ once those were read.

    Clipping mixes all gradients: where one is wrong along a mesh dim, what their readers make of the others is
    its doing.
    """
    params = {p.fqn: p for p in trace.params}
    wrong = {j.mesh_dim for j in judgements if j.verdict not in (*GOOD, Verdict.NOT_JUDGED)}
    for j in judgements:
        p = params[j.param_fqn]
        if j.mesh_dim in wrong or j.verdict not in GOOD or not j.expected.is_replicate or p.update is None:
            continue
        finding = _finding(p, p.update, j, trace.mesh.dim_names.index(j.mesh_dim))
        if finding is not None:
            yield finding


def _finding(p: ParamRecord, update: UpdateRecord, j: Judgement, dim: int) -> Finding | None:
    spoilt = update.grad_state is not None and update.grad_state[dim].kind in _NOT_EQUAL
    state = update.state if update.state is not None else update.grad_state if spoilt else None
    if state is None or state[dim].kind not in _NOT_EQUAL:
        return None
    what = "update" if update.state is not None else "gradient"
    deferred = j.verdict is Verdict.DEFERRED
    of_one = state[dim].kind is StateKind.LOST
    along = f"along {j.mesh_dim}"
    if spoilt:
        why = "its gradient was complete, and is then changed by what is each rank's own"
    elif deferred and of_one:
        why = "it comes of one rank's term of the gradient"
    elif deferred:
        why = "it comes of a gradient of which each rank holds its own term"
    else:
        why = "it comes of a value that is each rank's own"
    differs = f"is one rank's {along}" if of_one else f"differs between the ranks {along}"
    before = f"the gradient is {f'left {j.observed}' if deferred else 'complete'} {along} after backward"
    after = "one rank's" if of_one else "each rank's own"
    return make_finding(
        "PA403",
        param_fqn=p.fqn,
        module_fqn=p.fqn.rpartition(".")[0],
        mesh_dim=j.mesh_dim,
        message=f"the {what} of {p.fqn} {differs}: {why}",
        expected=f"{j.expected} {along}: one {what}, the same on all ranks",
        observed=f"one rank's {what} {along}" if of_one else f"each rank its own {what} {along}",
        evidence=(
            Evidence(strength="traced", statement=f"{before}; once it was read the {what} is {after}"),
        ),
        path=tuple(_path(update, spoilt=spoilt)),
        next_step=_next_step(j, spoilt=spoilt, deferred=deferred),
    )


def _path(update: UpdateRecord, *, spoilt: bool) -> Iterator[PathStep]:
    """Where the gradient was spoilt, and where the parameter was written."""
    cause = "cause: "
    if spoilt and _known(update.grad_site):
        yield _step(f"{cause}changes the gradient by what is each rank's own", update.grad_site)
        cause = ""
    if update.state is not None and _known(update.call_site):
        yield _step(f"{cause}updates the parameter", update.call_site)


def _step(role: str, site: CallSite) -> PathStep:
    return PathStep(role=role, kind="reader", call_site=site, boundary=-1)


def _known(site: CallSite | None) -> TypeGuard[CallSite]:
    return site is not None and site.path != _UNKNOWN


def _next_step(j: Judgement, *, spoilt: bool, deferred: bool) -> str:
    if spoilt or not deferred:
        first = f'reduce that value over "{j.mesh_dim}" first'
        return f"{first}; a total norm is the root of the sum of all ranks' squares"
    return (
        "read the complete gradient: p.grad.redistribute(placements=p.placements), "
        f'or p.grad.full_tensor(); its label is {j.observed} on "{j.mesh_dim}"'
    )
