"""The whole way of one parameter's gradient, forward and back: "where is my all-reduce?"."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence

from placement_audit.errors import UsageError
from placement_audit.model import Layout, Placement, State, StateKind, TensorInfo
from placement_audit.report.answer import answer, spelled
from placement_audit.report.words import (
    column,
    evidence_text,
    labelled,
    layout_text,
    listed,
    mesh_text,
    plural,
    wrapped,
)
from placement_audit.states import belies
from placement_audit.tracing import Boundary, Collective, GradCrossing, ParamRecord, Phase, Trace
from placement_audit.verdicts import Judgement, Report

WIDTH = 110
"""Columns of the running text; code lines and paths stand as they are."""

_MARGIN = " " * 5

_STATES = {
    StateKind.ZERO: "zero",
    StateKind.INVARIANT: "complete and equal on all ranks",
    StateKind.VARYING: "each rank its own",
    StateKind.AMBIGUOUS: "equal on all ranks, complete or one term of a sum",
    StateKind.MIXED: "a complete part plus each rank's own",
    StateKind.LOST: "incomplete, terms of other ranks are gone",
    StateKind.TERM: "each rank its own term",
}
"""Plain words for what a gradient really is along a mesh dim."""


def explain_param(source: Report | Trace, fqn: str) -> str:
    """Every step that the gradient of one parameter takes, and where it is reduced.

    Args:
        source: a report, or a trace alone (then without expectation and verdict).
        fqn: the parameter's name, or the end of it where only one ends so.

    Returns:
        Lines of text, the answer for each mesh dim last.

    Raises:
        UsageError: no parameter, or more than one, has this name; the message names the near ones.
    """
    report = source if isinstance(source, Report) else None
    trace = source.trace if isinstance(source, Report) else source
    param = find_param(trace, fqn)
    judgements = {j.mesh_dim: j for j in report.judgements if j.param_fqn == param.fqn} if report else {}
    way = backward_way(trace, param, judgements)
    lines = [*_head(trace, param), "", "forward", *_forward(trace, param)]
    if way:
        lines += ["", "backward", *_backward(trace, param, way)]
    lines += ["", *_end(trace, param, judgements), ""]
    for mesh_dim in trace.mesh.dim_names:
        text = answer(trace, param, way, mesh_dim, judgements.get(mesh_dim))
        lines += labelled(mesh_dim, text, width=WIDTH, indent=0)
    return "\n".join(lines) + "\n"


def find_param(trace: Trace, fqn: str) -> ParamRecord:
    """The parameter named ``fqn``, or the only one whose name ends so.

    Raises:
        UsageError: none, or more than one.
    """
    by_name = {p.fqn: p for p in trace.params}
    if fqn in by_name:
        return by_name[fqn]
    ending = [name for name in by_name if name.endswith(f".{fqn}")]
    if len(ending) == 1:
        return by_name[ending[0]]
    if ending:
        shown = ending[:5] + (["..."] if len(ending) > 5 else [])
        raise UsageError(f"{len(ending)} parameters end in {fqn!r}; say which: {', '.join(shown)}")
    near = difflib.get_close_matches(fqn, by_name, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"The model has no parameter {fqn!r} among its {len(by_name):,}.{hint}")


# --------------------------------------------------------------------------- the steps


def forward_boundaries(trace: Trace, param: ParamRecord) -> list[Boundary]:
    """Calls on the parameter, in the order of forward."""
    found = (trace.boundaries[i] for i in param.boundaries)
    return [b for b in found if b.phase is Phase.FORWARD]


def backward_way(trace: Trace, param: ParamRecord, judgements: dict[str, Judgement]) -> list[Boundary]:
    """Boundaries that the gradient went back through, in the order of backward.

    Those of the parameter, and those that a verdict names though they are upstream of it.
    """
    named = {i for j in judgements.values() for i in j.path}
    indices = sorted({*param.boundaries, *named} & set(range(len(trace.boundaries))))
    crossed = [(b.grad.order, b) for b in (trace.boundaries[i] for i in indices) if b.grad is not None]
    return [b for _, b in sorted(crossed, key=lambda item: item[0])]


def _head(trace: Trace, param: ParamRecord) -> Iterator[str]:
    shape = " x ".join(f"{n:,}" for n in param.tensor.global_shape) or "scalar"
    yield param.fqn
    yield from column("placements", [layout_text(param.layout)])
    yield from labelled("shape", f"{shape}, {param.tensor.dtype}", width=WIDTH)
    yield from labelled("mesh", mesh_text(trace.mesh, trace.run.world_size), width=WIDTH)
    yield from labelled("model", trace.run.model, width=WIDTH)
    yield from labelled("evidence", evidence_text(trace.run), width=WIDTH)


def _forward(trace: Trace, param: ParamRecord) -> Iterator[str]:
    number = 0
    for b in forward_boundaries(trace, param):
        number += 1
        yield _step(number, b.kind, b.src, b.dst, b.tensor)
        yield from _site(b, code=True)
        if b.grad_declared is not None:
            yield f"{_MARGIN}declares its gradient: {layout_text(b.grad_declared)}"
        yield from _collectives(trace, b, Phase.FORWARD)
    for use in param.uses:
        number += 1
        where = f" in {use.module_fqn}" if use.module_fqn else ""
        yield f"{number:3}. {use.op}{where}: {layout_text(use.layout)} -> {layout_text(use.result)}"
        yield f"{_MARGIN}{use.call_site}"
        if use.call_site.code_line:
            yield f"{_MARGIN}{use.call_site.code_line}"
    if number == 0:
        yield "  the forward crossed no boundary with it and used it in no op that was seen"
    again = [b for b in trace.boundaries if b.param_fqn == param.fqn and b.phase is Phase.RECOMPUTE]
    if again:
        yield f"  {plural(len(again), 'call')} ran again in recompute (activation checkpointing)"


def _backward(trace: Trace, param: ParamRecord, way: Sequence[Boundary]) -> Iterator[str]:
    own = set(param.boundaries)
    forward = {b.index: number for number, b in enumerate(forward_boundaries(trace, param), 1)}
    for number, b in enumerate(way, len(forward) + len(param.uses) + 1):
        grad = b.grad
        assert grad is not None  # backward_way keeps only boundaries that a gradient crossed
        of = f"{b.kind}, step {forward[b.index]}" if b.index in forward else b.kind
        yield _step(number, f"backward of {of}", grad.arrived, grad.left, grad.tensor)
        yield from _site(b, code=b.index not in forward)
        if b.index not in own:
            yield f"{_MARGIN}not a call on the parameter itself, but its gradient came through here"
        yield from _collectives(trace, b, Phase.BACKWARD)
        changes = [f"{d} {_change(d, trace.mesh.dim_names, grad)}" for d in trace.mesh.dim_names]
        yield from wrapped("; ".join(changes), head=f"{_MARGIN}really: ", width=WIDTH)
        for d, state in zip(trace.mesh.dim_names, grad.left_state, strict=True):
            label = grad.left.on(d) if grad.left is not None else None
            if label is not None and belies(label, state):
                # a lie told by an earlier call travels on: only the call that is to blame says it anew
                first = not state.blame or b.index in state.blame
                head = "FALSE LABEL" if first else "still a false label"
                yield f"{_MARGIN}{head}: leaves as {label} on {d}, really {state_text(state, None)}"


def _end(trace: Trace, param: ParamRecord, judgements: dict[str, Judgement]) -> Iterator[str]:
    if param.grad is None:
        yield from labelled(".grad", "none", width=WIDTH, indent=0)
    else:
        layout, dims = param.grad.layout, trace.mesh.dim_names
        yield from column(".grad", [f"{layout_text(layout)}   ({param.grad.dtype})"], indent=0)
        states = [
            f"{d} {state_text(s, layout.on(d) if layout else None)}"
            for d, s in zip(dims, param.grad.state, strict=True)
        ]
        yield from labelled("really", "; ".join(states), width=WIDTH, indent=0)
    if judgements:
        dims = tuple(judgements)
        expected = Layout(dims, tuple(j.expected for j in judgements.values()))
        yield from column("expected", [layout_text(expected)], indent=0)
        for i, (d, j) in enumerate(judgements.items()):
            text = f"{d} {j.verdict}" + (f": {j.reason}" if j.reason else "")
            yield from labelled("" if i else "verdict", text, width=WIDTH, indent=0)
    elif not param.requires_grad:
        yield from labelled("verdict", "not trained (requires_grad is False)", width=WIDTH, indent=0)


# --------------------------------------------------------------------------- the lines of a step


def _step(number: int, what: str, src: Layout | None, dst: Layout | None, tensor: TensorInfo) -> str:
    size = f"{plural(math.prod(tensor.local_shape), 'element')}, {tensor.dtype}"
    return f"{number:3}. {what}: {layout_text(src)} -> {layout_text(dst)}   ({size})"


def _site(b: Boundary, *, code: bool) -> Iterator[str]:
    yield f"{_MARGIN}{b.call_site}"
    if code and b.call_site.code_line:
        yield f"{_MARGIN}{b.call_site.code_line}"
    if code and b.user_site != b.call_site:
        yield f"{_MARGIN}called from {b.user_site}"


def _collectives(trace: Trace, b: Boundary, phase: Phase) -> Iterator[str]:
    for c in trace.collectives:
        if c.boundary == b.index and c.phase is phase:
            yield f"{_MARGIN}{collective_text(c)}"


def collective_text(c: Collective) -> str:
    """``all_reduce(sum) over tp: 256 elements, float32``."""
    over = listed(c.mesh_dims) or f"a group of {len(c.group_ranks)} ranks"
    equal = f"; what it summed was already equal over {listed(c.already_equal)}" if c.already_equal else ""
    op = f"({c.reduce_op})" if c.reduce_op else ""
    return f"{c.name}{op} over {over}: {spelled(c)}{equal}"


def _change(mesh_dim: str, trace_dims: Sequence[str], grad: GradCrossing) -> str:
    at = trace_dims.index(mesh_dim)
    arrived = grad.arrived.on(mesh_dim) if grad.arrived is not None else None
    left = grad.left.on(mesh_dim) if grad.left is not None else None
    before, after = state_text(grad.arrived_state[at], arrived), state_text(grad.left_state[at], left)
    # a label that comes or goes with a plain tensor is no change of what the gradient is
    if state_text(grad.arrived_state[at], None) == state_text(grad.left_state[at], None):
        return after if left is not None else before
    return f"{before} -> {after}"


def state_text(state: State, label: Placement | None) -> str:
    """Plain words; a true label tells a term of a sum from a part of a shard."""
    words = _STATES[state.kind]
    if state.kind is StateKind.VARYING and label is not None and not label.is_replicate:
        words += " term of the sum" if label.is_partial else " part"
    if state.scale is None:
        return f"{words}, parts of different scale"
    return words if state.scale == 1 else f"{words}, x{state.scale}"
