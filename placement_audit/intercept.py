"""Watches the boundary calls: `to_local`, `from_local`, `redistribute`, `full_tensor`, `distribute_tensor`.

Wraps the public methods and hooks the autograd node that each call leaves behind. `local_map` is seen
through the calls it makes. Holds no opinion: it notes what was declared, what arrived and what left, and
lets the ledger know what a gradient became.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.tensor as dtensor_module
from torch.distributed.tensor import DTensor

from placement_audit import callsite, states
from placement_audit.dtensor_api import (
    dtype_name,
    in_backward,
    local_of,
    mark_node,
    marked_node,
    spec_of,
    storage_key,
    unwatched,
)
from placement_audit.flow import Flow, current_phase
from placement_audit.model import REPLICATE, Layout, State, StateKind, TensorInfo
from placement_audit.tracing import Phase

_METHODS = ("to_local", "from_local", "redistribute", "full_tensor")


@dataclass(slots=True)
class RawCrossing:
    """A gradient on its way through a boundary; filled by the two hooks."""

    order: int
    arrived: Layout | None
    arrived_sid: int
    tensor: TensorInfo
    left: Layout | None = None
    left_sid: int = 0
    arrived_print: Any = None
    left_print: Any = None


@dataclass(slots=True)
class RawBoundary:
    """A boundary call while the step runs; `placement_audit.trace` freezes it."""

    index: int
    kind: str
    phase: Phase
    site: callsite.RawSite | None
    user_site: callsite.RawSite | None
    module_fqn: str
    param_fqn: str | None
    src: Layout | None = None
    dst: Layout | None = None
    declared: Layout | None = None
    value_sid: int = 0
    tensor: TensorInfo | None = None
    value_print: Any = None
    grad: RawCrossing | None = field(default=None)


class Interceptor:
    """Records the boundary calls of one step.

    Attributes:
        boundaries: in call order.
    """

    def __init__(
        self,
        flow: Flow,
        module_fqn: Callable[[], str],
        fingerprint: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        """See the class.

        Args:
            flow: where states are kept.
            module_fqn: tells the module whose forward is running.
            fingerprint: of a local tensor's values, kept with each crossing so that ranks can be compared
                afterwards; None where there are no values.
        """
        self._fingerprint = fingerprint
        self.boundaries: list[RawBoundary] = []
        self._flow = flow
        self._ledger = flow.ledger
        self._world = flow.world
        self._module_fqn = module_fqn
        self._labelled: dict[tuple[int, int, int, str], int] = {}
        self._delivered: dict[tuple[int, int, int, int, int], int] = {}
        self._depth = 0
        self._running: list[RawBoundary] = []
        self._crossings = 0

    def running(self) -> tuple[RawBoundary | None, Phase]:
        """The boundary whose call or backward is running now, and which of the two it is.

        Inside an autograd function's forward grad mode is off, so that a call made by activation
        checkpointing's second forward would look like backward: the call itself knows better.
        """
        if self._running:
            return self._running[-1], self._running[-1].phase
        phase = current_phase()
        return (marked_node() if phase is Phase.BACKWARD else None), phase

    @contextmanager
    def installed(self) -> Generator[None]:
        """Wrap the public methods for the duration."""
        originals = {name: DTensor.__dict__[name] for name in _METHODS}
        try:
            for name, original in originals.items():
                plain = original.__func__ if isinstance(original, staticmethod) else original
                wrapper = self._function(name, plain)
                setattr(
                    DTensor, name, staticmethod(wrapper) if isinstance(original, staticmethod) else wrapper
                )
            yield
        finally:
            for name, original in originals.items():
                setattr(DTensor, name, original)

    def functions(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        """Module-level boundary calls and what to put in their place (`replaced_everywhere`)."""
        original = dtensor_module.distribute_tensor
        return {original: self._function("distribute_tensor", original)}

    def _function(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._depth or in_backward():
                return original(*args, **kwargs)
            return self._call(kind, original, args, kwargs)

        wrapped.__name__ = wrapped.__qualname__ = kind
        wrapped.__doc__ = original.__doc__
        return wrapped

    # ---- forward

    def _call(self, kind: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        site, user_site, local_map = callsite.take(2)
        phase = current_phase()
        x = args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor))
        raw = RawBoundary(
            index=len(self.boundaries),
            kind="local_map" if local_map else kind,
            phase=phase,
            site=site,
            user_site=user_site,
            module_fqn=self._module_fqn(),
            param_fqn=self._flow.params.get(storage_key(local_of(x))) if phase is Phase.FORWARD else None,
            src=self._world.layout_of(x),
            value_sid=self._ledger.get(x),
            tensor=_info(x),
        )
        raw.value_print = self._print(x)
        self.boundaries.append(raw)
        self._depth += 1
        self._running.append(raw)
        try:
            out = original(*args, **kwargs)
        finally:
            self._running.pop()
            self._depth -= 1
        raw.dst = self._world.layout_of(out)
        if raw.src is None and isinstance(out, DTensor):
            self._flow.settle(out, [x], alone=True)
        raw.declared = self._declared(raw, kwargs.get("grad_placements"), x, out)
        if raw.param_fqn is not None and raw.phase is Phase.FORWARD:
            self._flow.params[storage_key(local_of(out))] = raw.param_fqn
        if out.grad_fn is not None and torch.is_grad_enabled():
            self._hook(raw, out.grad_fn, kind)
        return out

    def _print(self, x: torch.Tensor) -> Any:
        if self._fingerprint is None:
            return None
        with unwatched():
            # As it is: a collective that is still writing it is waited for.
            return self._fingerprint(x._local_tensor if isinstance(x, DTensor) else x)

    def _declared(self, raw: RawBoundary, given: Any, x: Any, out: Any) -> Layout | None:
        if given is None:
            return None
        mesh = spec_of(x if isinstance(x, DTensor) else out).mesh
        return self._world.layout(mesh, tuple(given))

    # ---- backward

    def _hook(self, raw: RawBoundary, node: Any, kind: str) -> None:
        def crossed(outs: Any, grads: Any) -> None:
            arrived, g = grads[0], outs[0]
            if arrived is None or g is None:
                return
            raw.grad = crossing = RawCrossing(
                self._crossings, self._world.layout_of(arrived), self._ledger.get(arrived), _info(arrived)
            )
            self._crossings += 1
            crossing.arrived_print, crossing.left_print = self._print(arrived), self._print(g)
            crossing.left = self._world.layout_of(g)
            if raw.src is not None and raw.dst is None:
                self._into_dtensor(raw, g, kind)
            elif raw.src is None:
                self._out_of_dtensor(raw, g)
            crossing.left_sid = self._ledger.get(g)

        node.register_hook(crossed)
        mark_node(node, raw)

    def _into_dtensor(self, raw: RawBoundary, g: torch.Tensor, kind: str) -> None:
        """Backward of `to_local`: a plain gradient got a label. Blame the call where the label is false."""
        if raw.grad is None or raw.src is None or raw.grad.left is None:
            return
        sid = self._ledger.get(g)
        key = (sid, id(raw.src), id(raw.grad.left), kind)
        new = self._labelled.get(key)
        if new is None:
            new = self._label(raw, raw.src, raw.grad.left, sid, kind)
            if new == sid:  # nobody is blamed: the same for every call like it
                self._labelled[key] = new
        if new != sid:
            self._ledger.put_alone(g, new)

    def _label(self, raw: RawBoundary, src: Layout, left: Layout, sid: int, kind: str) -> int:
        label = dict(zip(left.dims, left.placements, strict=True))
        forward = dict(zip(src.dims, src.placements, strict=True))
        dims = self._ledger.dims

        def change(d: int, state: State) -> State:
            primal = REPLICATE if kind == "full_tensor" else forward.get(dims[d])
            placement = label.get(dims[d])
            if primal is None or placement is None:
                return state
            if primal.is_partial and state.kind is StateKind.AMBIGUOUS:
                # The gradient of a term of a sum is the sum's gradient: equal is complete here.
                state = State(StateKind.INVARIANT, state.scale, state.blame)
            if primal.is_shard and placement == primal:
                return states.as_part(state)
            if states.belies(placement, state):
                return states.blamed(state, raw.index)
            return state

        return self._ledger.changed(sid, change)

    def _out_of_dtensor(self, raw: RawBoundary, g: torch.Tensor) -> None:
        """Backward of `from_local`: the gradient of a varying plain tensor is varying."""
        if raw.grad is None or raw.dst is None:
            return
        found = self._ledger.get(g)
        sid = self._ledger.as_grad(found)
        key = (sid, raw.grad.arrived_sid, id(raw.dst), id(raw.declared), raw.value_sid)
        new = self._delivered.get(key)
        if new is None:
            new = self._deliver(raw, raw.dst, sid, raw.grad.arrived_sid)
            if new == sid:
                self._delivered[key] = new
        if new != found:
            self._ledger.put_alone(g, new)

    def _deliver(self, raw: RawBoundary, dst: Layout, sid: int, arrived_sid: int) -> int:
        forward = dict(zip(dst.dims, dst.placements, strict=True))
        value = self._ledger.vector(raw.value_sid)
        before = self._ledger.vector(arrived_sid)
        dims = self._ledger.dims

        def change(d: int, state: State) -> State:
            placement = forward.get(dims[d])
            if placement is None:
                return state
            rescaled = state.scale != before[d].scale and before[d].kind is StateKind.VARYING
            if rescaled and self._declares_partial(raw, dims[d]):
                state = states.blamed(state, raw.index)
            if placement.is_partial and self._declares_partial(raw, dims[d]):
                return _term_of_a_term(before[d], self._world.sizes[d], raw.index)
            if placement.is_partial and state.kind is StateKind.INVARIANT:
                return State(StateKind.AMBIGUOUS, state.scale, state.blame)
            if placement.is_shard:
                return states.as_part(state)
            if value[d].kind is StateKind.VARYING and state.kind is StateKind.INVARIANT:
                return State(StateKind.AMBIGUOUS, state.scale, state.blame)
            return state

        return self._ledger.changed(sid, change)

    @staticmethod
    def _declares_partial(raw: RawBoundary, mesh_dim: str) -> bool:
        declared = raw.declared.on(mesh_dim) if raw.declared is not None else None
        return declared is not None and declared.is_partial


def _term_of_a_term(arrived: State, size: int, boundary: int) -> State:
    """A value declared Partial, its gradient too: each rank's term should get the whole gradient.

    What arrives complete is divided among the ranks; what arrives as a sum still to be made is passed on
    with only this rank's term of it.
    """
    if arrived.kind is StateKind.INVARIANT:
        scale = None if arrived.scale is None else arrived.scale / size
        return states.blamed(State(StateKind.VARYING, scale, arrived.blame), boundary)
    return states.blamed(State(StateKind.LOST, arrived.scale, arrived.blame), boundary)


def _info(x: torch.Tensor) -> TensorInfo:
    shape = tuple(x.shape)
    return TensorInfo(
        global_shape=shape,
        local_shape=tuple(local_of(x).shape) if isinstance(x, DTensor) else shape,
        dtype=dtype_name(x),
    )
