"""PA107 to PA111, PA404: plain values that one device would hardly have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from placement_audit.measurement import Measurement
from placement_audit.rules.finding import make_finding
from placement_audit.tracing import Trace, ValueDoubt
from placement_audit.verdicts import Evidence, Finding, PathStep, Severity
from placement_audit.weigh import Contradiction


def value_findings(
    trace: Trace, m: Measurement | None, *, gradient_off: bool, update_off: bool
) -> Iterator[Finding]:
    """All of a trace; numbers decide where there are any.

    Args:
        trace: of the step.
        m: measured.
        gradient_off: a gradient was measured wrong.
        update_off: a parameter was measured wrong after clipping and a step although its gradient was right.
    """
    for x in trace.value_doubts:
        if m is not None:
            off = gradient_off if x.kind == "left_out" else _loss_off(m)
            if not (update_off if x.after_backward else off):
                continue
        match x.kind:
            case "left_out":
                yield _left_out(x)
            case "added":
                yield _counted(trace, x, sure=_sure(trace, x) or m is not None)
            case "applied":
                yield _applied(trace, x)
            case "updated":
                yield _updated(trace, x)
            case "averaged":
                yield _averaged(x)
            case _:
                yield _declared(x)


def wrong_forward(trace: Trace) -> str | None:
    """Why no gradient is one device's, by the trace alone: a sentence; None where nothing says so."""
    for x in trace.value_doubts:
        if x.kind == "left_out":
            return (
                f"log_softmax at {x.call_site} has no backward, so that no gradient before it is one device's"
            )
        if not x.after_backward and _sure(trace, x):
            return f"the forward counts {_names(x)} on each rank ({x.call_site}), so that no gradient is one device's"
    return None


def value_contradictions(trace: Trace, m: Measurement) -> Iterator[Contradiction]:
    """What the trace is sure of, and the loss does not show."""
    for x in trace.value_doubts:
        if not x.after_backward and _sure(trace, x) and not _loss_off(m):
            yield Contradiction(
                mesh_dim=x.mesh_dim,
                traced=f"{_names(x)} is counted on each rank at {x.call_site}",
                measured=f"the loss is right within {m.tolerance:.0e}",
            )


def _loss_off(m: Measurement) -> bool:
    return m.loss_error > m.tolerance


def _sure(trace: Trace, x: ValueDoubt) -> bool:
    """Another rank adds the same, whole: no number that divides it could have been missed."""
    return x.kind == "added" and bool(trace.other_ranks) and any(abs(n) == 1 for _, n in x.counted)


def _names(x: ValueDoubt) -> str:
    named = [f"the number {float(n):g}" if fqn == "1" else fqn for fqn, n in x.counted if fqn]
    return ", ".join(named) or "a complete value"


def how_often(x: ValueDoubt, size: int) -> str:
    """How often what each of ``size`` ranks adds is counted, in words."""
    (name, n), *more = x.counted
    return "not once" if more else f"{size if name == '1' else abs(n) * size} times"


def _path(x: ValueDoubt) -> tuple[PathStep, ...]:
    cause = PathStep(role="cause", kind=x.op, call_site=x.call_site, boundary=-1)
    if x.summed_at is None:
        return (cause,)
    role, kind = ("updates the parameter", "update") if x.kind == "updated" else ("sums the terms", "sum")
    return cause, PathStep(role=role, kind=kind, call_site=x.summed_at, boundary=-1)


def _finding(x: ValueDoubt, rule_id: str, *, why: str, module_fqn: str | None = None, **said: Any) -> Finding:
    """A finding of a rule: where it is, and by what evidence, is the same of all; the rest as of `make_finding`."""
    return make_finding(
        rule_id,
        param_fqn=said.pop("param_fqn", None),
        module_fqn=x.module_fqn if module_fqn is None else module_fqn,
        mesh_dim=x.mesh_dim,
        evidence=(Evidence(strength="traced", statement=why),),
        path=_path(x),
        **said,
    )


def _counted(trace: Trace, x: ValueDoubt, *, sure: bool) -> Finding:
    size = trace.mesh.size(x.mesh_dim)
    often = how_often(x, size)
    named = [fqn for fqn, _ in x.counted if fqn not in ("", "1")]
    what = "gradients" if x.after_backward else "the forward"
    return _finding(
        x,
        "PA107",
        param_fqn=named[0] if len(named) == 1 else None,
        message=f'{_names(x)} is added to each "{x.mesh_dim}" rank\'s term of a sum, and counted {often}',
        expected=f"once: added after the sum, or divided by {size}",
        observed=f"each of the {size} ranks adds it, then the ranks are summed: {often}",
        why=f"in {what}, {x.op} adds a value that is equal on the {size} ranks to one that is "
        f'{x.carried} on "{x.mesh_dim}" by torch\'s sharding rules',
        next_step="add it after the reduction"
        if sure
        else "add it after the reduction; values decide where only some ranks add it: run with --measure",
        severity=None if sure else Severity.WARNING,
    )


def _applied(trace: Trace, x: ValueDoubt) -> Finding:
    size = trace.mesh.size(x.mesh_dim)
    of = "gradients" if x.after_backward else "values"
    return _finding(
        x,
        "PA108",
        message=f'{x.op} is applied to {of} of which each of the {size} "{x.mesh_dim}" ranks holds one term'
        + (", and the results are summed" if x.summed_at is not None else ""),
        expected="the terms summed first",
        observed=f'{x.carried} on "{x.mesh_dim}"',
        why=f"torch's sharding rule of {x.op} wants the terms summed; no collective over "
        f'"{x.mesh_dim}" came since they arose',
        next_step="reduce before; or let values decide: run with --measure",
    )


def _left_out(x: ValueDoubt) -> Finding:
    return _finding(
        x,
        "PA111",
        message="log_softmax under loss_parallel got a gradient that is not nll_loss's, and handed it on as it was",
        expected="the backward of log_softmax, or nll_loss alone behind it",
        observed=f'classes {x.carried} on "{x.mesh_dim}": its backward is left to that of nll_loss',
        why="followed from where it began, the gradient is no sum of what nll_loss's backward left",
        next_step="take log_softmax of gathered logits for what is not nll_loss: "
        "F.log_softmax(logits.redistribute(placements=[Replicate()]).to_local(), -1)",
    )


def _declared(x: ValueDoubt) -> Finding:
    return _finding(
        x,
        "PA109",
        message=f'from_local declares {x.declared} on "{x.mesh_dim}" a value that is {x.carried}',
        expected=str(x.carried),
        observed=str(x.declared),
        why="followed through the plain ops that made it, by torch's sharding rules",
        next_step="declare what it is and redistribute; or let values decide: run with --measure",
    )


def _averaged(x: ValueDoubt) -> Finding:
    return _finding(
        x,
        "PA110",
        message=f'{x.op} is taken over parts that are not of one size on the "{x.mesh_dim}" ranks',
        expected="a sum, divided by the number of elements of the whole",
        observed=f"{x.carried}, in parts of different sizes: an element of a small part weighs more",
        why=f'the whole does not divide by the ranks of "{x.mesh_dim}"; the mean of each rank\'s part '
        "is no term of the mean",
        next_step="sum, and divide by the whole's number; or let values decide: run with --measure",
    )


def _updated(trace: Trace, x: ValueDoubt) -> Finding:
    (fqn, _), *_ = x.counted
    size = trace.mesh.size(x.mesh_dim)
    return _finding(
        x,
        "PA404",
        param_fqn=fqn,
        module_fqn=fqn.rpartition(".")[0],
        message=f'the update of {fqn} is made by {x.op} of each "{x.mesh_dim}" rank\'s part, which needs the whole',
        expected="the whole gradient, or a collective",
        observed=f'{x.carried} on "{x.mesh_dim}": {size} ranks each take {x.op} of their own part',
        why=f"torch's sharding rule of {x.op} would communicate here, and nothing was communicated "
        f'over "{x.mesh_dim}" since',
        next_step="gather it before (full_tensor()); where the optimizer is meant to work block by block, suppress it",
    )
