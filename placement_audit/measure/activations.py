"""Activations and their gradients on both models: sketched while each step runs, compared afterwards."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from placement_audit.case import Case
from placement_audit.dtensor_api import in_backward, next_sequence_nr
from placement_audit.engine import callsite
from placement_audit.engine.collectives import CollectiveCall
from placement_audit.engine.intercept import RawBoundary
from placement_audit.engine.trace import Tracer
from placement_audit.engine.world import World
from placement_audit.measure.exchange import gather
from placement_audit.measure.outputs import Key, Notes, Output, noted
from placement_audit.measure.parts import Part, Reader, Unknown, assembled
from placement_audit.measure.sketch import Sketch, added, error, sketch
from placement_audit.measurement import ActivationMeasure
from placement_audit.model import StateKind
from placement_audit.tracing import Phase


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor on one device, over the global batch.

    Attributes:
        shape: its batches behind each other along tensor dim 0.
        sketch: of it.
        norm: Frobenius norm.
    """

    shape: tuple[int, ...]
    sketch: Sketch
    norm: float


@dataclass(frozen=True, slots=True)
class WholeOutput:
    """What a module put out on one device.

    Attributes:
        value: the tensor.
        grad: its gradient; None where none came, or where others that use the same tensor have a part in it.
    """

    value: Whole
    grad: Whole | None


# --------------------------------------------------------------------------- one device


@contextmanager
def on_one_device(model: nn.Module) -> Generator[dict[Key, WholeOutput]]:
    """Fill the table while the step runs on one device: on the global batch at once, or batch by batch."""

    def look(x: torch.Tensor, _key: Key, run: int, _value: Any) -> Whole:
        norm = torch.linalg.vector_norm(x.detach(), dtype=torch.float64).item() if x.numel() else 0.0
        offset = (run * x.shape[0], *[0] * (x.dim() - 1))
        return Whole(tuple(x.shape), sketch(x, offset), norm)

    notes = Notes(look)
    table: dict[Key, WholeOutput] = {}
    with noted(model, notes):
        yield table
    by_key: dict[Key, list[Output]] = {}
    for o in notes.found:
        by_key.setdefault(o.key, []).append(o)
    for key, runs in by_key.items():
        value = _stacked([o.value for o in runs], notes.runs)
        grad = None if any(o.passed_on for o in runs) else _stacked([o.grad for o in runs], notes.runs)
        if value is not None:
            table[key] = WholeOutput(value, grad)


def _stacked(runs: list[Whole | None], count: int) -> Whole | None:
    """The whole over all runs; None where a run lacks it, or where batches of different sizes make it up."""
    there = [r for r in runs if r is not None]
    if len(there) != count or len({r.shape for r in there}) != 1:
        return None
    first = there[0].shape
    norm = math.sqrt(sum(r.norm**2 for r in there))
    return Whole((count * first[0], *first[1:]), added([r.sketch for r in there]), norm)


# --------------------------------------------------------------------------- the ranks


@dataclass(slots=True, eq=False)
class Watch:
    """What one rank notes while its watched step runs.

    Attributes:
        tracer: that watches the step.
        notes: outputs and their gradients.
        roots: autograd nodes that backward began at.
        begun_at: where it was called.
        sites: number of an autograd node -> where its op was called.
        params: id of a parameter -> FQN.
        came: FQN -> when the parameter's gradient came, see `Notes.now`.
        collectives: name, and where it was called, of those that ran in backward.
        hooks: autograd nodes or parameters, and the functions that others had called with their gradients.
    """

    tracer: Tracer
    notes: Notes
    params: dict[int, str]
    roots: list[Any] = field(default_factory=list)
    begun_at: callsite.RawSite | None = None
    sites: dict[int, callsite.RawSite | None] = field(default_factory=dict)
    came: dict[str, tuple[int, int]] = field(default_factory=dict)
    collectives: list[tuple[str, callsite.RawSite | None]] = field(default_factory=list)
    hooks: list[tuple[Any, Any]] = field(default_factory=list)

    def boundaries(self) -> list[RawBoundary]:
        """Those of the forward, in call order."""
        return [b for b in self.tracer.interceptor.boundaries if b.phase is Phase.FORWARD]


@contextmanager
def watched(
    case: Case, tracer: Tracer, params: Mapping[str, nn.Parameter], shapes: Mapping[Key, tuple[int, ...]]
) -> Generator[Watch]:
    """Watch the activations of the step that ``tracer`` runs while this is open.

    Args:
        case: what runs.
        tracer: not yet run.
        params: the model's, by FQN.
        shapes: what the modules put out on one device, over the global batch.
    """
    reader = Reader(tracer.world, case.batch_dims)
    ledger = tracer.flow.ledger

    def kinds(x: torch.Tensor) -> tuple[StateKind, ...]:
        return tuple(s.kind for s in ledger.vector(ledger.get(x)))

    def look(x: torch.Tensor, key: Key, _run: int, value: Any) -> Part | Unknown | None:
        shape = shapes.get(key)
        if shape is None or isinstance(value, Unknown):
            return value
        return reader.read(x, kinds(x), shape, value)

    def cross(x: torch.Tensor) -> Part | Unknown | None:
        labelled = isinstance(x, DTensor) and x.dtype.is_floating_point and x.dim()
        return reader.read(x, kinds(x), None) if labelled else None

    watch = Watch(
        tracer=tracer,
        notes=Notes(look),
        params={id(p): fqn for fqn, p in reversed(list(params.items()))},
    )
    watch.notes.clock = lambda: len(watch.collectives)
    sites = watch.sites
    told = tracer.flow.traffic.on_collective

    def on_collective(call: CollectiveCall, *rest: Any) -> None:
        if in_backward():
            watch.collectives.append((call.name, callsite.take(1)[0]))
        told(call, *rest)

    def on_op() -> None:
        number = next_sequence_nr() - 1
        if number not in sites:
            sites[number] = callsite.take(2)[1]

    def came(fqn: str) -> Any:
        def hook(_grad: torch.Tensor) -> None:
            watch.came[fqn] = watch.notes.now()

        return hook

    handles = [p.register_hook(came(watch.params[id(p)])) for p in params.values() if p.requires_grad]
    tracer.interceptor.sketch = cross
    tracer.flow.on_op = on_op
    tracer.flow.traffic.on_collective = on_collective
    try:
        with noted(case.model, watch.notes), _backward(watch), _hooks(watch):
            yield watch
    finally:
        tracer.flow.traffic.on_collective = told
        tracer.interceptor.sketch = None
        tracer.flow.on_op = None
        for h in handles:
            h.remove()


@contextmanager
def _backward(watch: Watch) -> Generator[None]:
    """Note what backward begins at."""
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = tensors if isinstance(tensors, list | tuple) else [tensors]
        watch.roots += [t.grad_fn for t in given if t.grad_fn is not None]
        watch.begun_at = callsite.take(1)[1]
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


@contextmanager
def _hooks(watch: Watch) -> Generator[None]:
    """Note what hooks others put on gradients."""
    original = torch.Tensor.register_hook

    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        watch.hooks.append((self.grad_fn if self.grad_fn is not None else self, hook))
        return original(self, hook)

    torch.Tensor.register_hook = register_hook
    try:
        yield
    finally:
        torch.Tensor.register_hook = original


# --------------------------------------------------------------------------- both


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """All activations, on every rank the same.

    Attributes:
        rows: in forward order.
        reference: by key.
    """

    rows: dict[Key, ActivationMeasure]
    reference: dict[Key, WholeOutput]


def compare_activations(watch: Watch, reference: Mapping[Key, WholeOutput], world: World) -> Compared:
    """Set what the ranks hold against one device; collective.

    Args:
        watch: this rank's.
        reference: rank 0's; not read on the others.
        world: the world mesh.
    """
    mine = [(o.key, o.value, o.grad, o.passed_on) for o in watch.notes.found] if watch.notes.runs == 1 else []
    ranks = gather((mine, dict(reference)))
    theirs = ranks[0][1]
    tables = [{key: (value, grad, passed) for key, value, grad, passed in notes} for notes, _ in ranks]
    rows = {}
    for key, _, _, passed in ranks[0][0]:
        there = theirs.get(key)
        if there is None:
            continue
        if any(key not in t for t in tables):
            value = grad = "not every rank made this call"
        else:
            value = _error([t[key][0] for t in tables], there.value, world)
            if passed or there.grad is None:
                grad = "passed on as it came, or without a gradient on one device"
            else:
                grad = _error([t[key][1] for t in tables], there.grad, world)
        fqn, call, output = key
        rows[key] = ActivationMeasure(
            fqn=fqn,
            call=call,
            output=output,
            value_error=value if isinstance(value, float) else None,
            grad_error=grad if isinstance(grad, float) else None,
            why_not=next((x for x in (value, grad) if isinstance(x, str)), ""),
        )
    return Compared(rows=rows, reference=theirs)


def _error(parts: list[Part | Unknown | None], whole: Whole, world: World) -> float | str:
    """The worst over the replicas; where it can't be told, why."""
    for p in parts:
        if not isinstance(p, Part):
            return p.why if p is not None else "no gradient came"
    there = [p for p in parts if isinstance(p, Part)]
    if len({(p.shape, p.adds) for p in there}) > 1:
        return "the ranks' labels differ"
    if there[0].shape != whole.shape:
        return f"{there[0].shape} where one device has {whole.shape}"
    return max(error(s, whole.sketch, whole.norm) for s in assembled(there, world))


def same_as(parts: list[Part | Unknown | None], whole: Whole, world: World, within: float) -> bool:
    """Whether the ranks' parts of a tensor make up one that one device has."""
    found = _error(parts, whole, world)
    return isinstance(found, float) and found <= within
