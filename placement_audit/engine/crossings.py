"""Boundary calls while the step runs, and what their backwards make of a gradient's state.

A boundary's backward gives a gradient a label (`to_local`) or takes one away (`from_local`). What the gradient
is stays what it was; where the label belies it, or where the value that it belongs to says more, the state tells.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from placement_audit import states
from placement_audit.engine import callsite
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.world import World
from placement_audit.model import REPLICATE, Layout, State, StateKind, TensorInfo
from placement_audit.tracing import OwnDim, Phase


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
    arrived_sketch: Any = None
    left_sketch: Any = None


@dataclass(slots=True)
class RawBoundary:
    """A boundary call while the step runs; `placement_audit.engine.trace` freezes it."""

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
    value_sketch: Any = None
    own_dims: tuple[OwnDim, ...] = ()
    name: str = ""
    scaled: bool = False
    divided: tuple[int, ...] = ()
    spanned: set[int] = field(default_factory=set)
    summed: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    grad: RawCrossing | None = field(default=None)


class Crossings:
    """The states of gradients on both sides of DTensor's boundaries."""

    def __init__(self, ledger: Ledger, world: World) -> None:
        """See the class."""
        self._ledger = ledger
        self._world = world

    def labelled(
        self, raw: RawBoundary, src: Layout, left: Layout, sid: int, kind: str, *, equal: bool
    ) -> int:
        """The state of a plain gradient that got a label.

        Args:
            raw: the boundary.
            src: the value's placements.
            left: the label.
            sid: the gradient's state.
            kind: of the boundary.
            equal: it is equal on all ranks though it is the gradient of each rank's own value.
        """
        label = dict(zip(left.dims, left.placements, strict=True))
        forward = dict(zip(src.dims, src.placements, strict=True))
        dims = self._ledger.dims

        def change(d: int, state: State) -> State:
            primal = REPLICATE if kind == "full_tensor" else forward.get(dims[d])
            placement = label.get(dims[d])
            if primal is None or placement is None:
                return state
            if primal.is_partial and (
                state.kind is StateKind.AMBIGUOUS or (equal and state.kind is StateKind.VARYING)
            ):
                # The gradient of a term of a sum is the sum's gradient: equal is complete here.
                state = State(StateKind.INVARIANT, state.scale, state.blame)
            if primal.is_shard and placement == primal:
                if state.kind is StateKind.AMBIGUOUS and d not in self._ledger.unclear:
                    # A shard fed its own rank's term alone: the sum's gradient is all of its own part's.
                    return State(StateKind.VARYING, state.scale, state.blame)
                return states.as_part(state)
            if placement.is_shard or (primal.is_shard and placement.is_partial):
                return states.blamed(states.misread(state), raw.index)
            if states.belies(placement, state):
                return states.blamed(state, raw.index)
            return state

        return self._ledger.changed(sid, change)

    def delivered(self, raw: RawBoundary, dst: Layout, sid: int, arrived_sid: int) -> int:
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
                if value[d].kind is not StateKind.VARYING:
                    self._ledger.unclear.add(d)
                return State(StateKind.AMBIGUOUS, state.scale, state.blame)
            if placement.is_shard:
                return states.as_part(state)
            if value[d].kind is StateKind.VARYING and state.kind is StateKind.INVARIANT:
                self._ledger.unclear.add(d)
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
