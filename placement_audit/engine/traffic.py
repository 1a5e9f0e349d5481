"""What collectives make of states: which mesh dims a group spans, what it takes in and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from placement_audit import states
from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.engine.collectives import PEER_TO_PEER, CollectiveCall, read_collective
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.opargs import covers
from placement_audit.engine.pieces import Piece
from placement_audit.engine.world import World
from placement_audit.model import State, StateKind

Dims = tuple[int, ...] | None
"""Indices of world mesh dims; None where a group spans none of them whole."""


class Traffic:
    """The collectives of one step.

    Attributes:
        on_collective: called before each, for one that never ends is the one to name: (call, mesh dims, what is
            sent, mesh dims along which that is equal already).
        on_reduced: called with (call, what was sent, state before, state after) where a gradient changed; gives
            the state after, perhaps with more to its story, and what tells that of another (state before, state
            after), of which the collective was as well. None for nobody.
    """

    def __init__(
        self,
        ledger: Ledger,
        world: World,
        on_collective: Callable[[CollectiveCall, Dims, torch.Tensor | None, tuple[int, ...]], None],
    ) -> None:
        """See the class."""
        self._ledger = ledger
        self._world = world
        self.on_collective = on_collective
        self.on_reduced: (
            Callable[[CollectiveCall, torch.Tensor, int, int], tuple[int, Callable[[int, int], int]]] | None
        ) = None
        # The same few questions come up thousands of times; answers depend on nothing else.
        self._calls: dict[Any, tuple[CollectiveCall, Dims]] = {}
        self._results: dict[tuple[int, str, str | None, Dims, bool], int] = {}
        self._sent = ledger.invariant
        self._landed: set[int] = set()
        self._awaited: list[tuple[torch.Tensor, Dims]] = []

    def run(
        self, func: Any, args: Any, kwargs: Any, *, after_backward: bool
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run one collective op; returns its result and the tensors that hold it.

        Args:
            func: the op.
            args: its arguments.
            kwargs: likewise.
            after_backward: no backward is running: a varying gradient is then a term of a sum for sure.
        """
        call, dims = self._read(func, args)
        ledger = self._ledger
        sent = call.inputs(args)
        sids = [ledger.get(x) for x in sent] or [ledger.invariant]
        equal: tuple[int, ...] = ()
        if call.reduces:
            # Of a coalesced call one is enough to tell.
            vectors = [ledger.vector(sid) for sid in dict.fromkeys(sids)]
            equal = tuple(d for d in dims or () if any(v[d].kind is StateKind.INVARIANT for v in vectors))
        self.on_collective(call, dims, sent[0] if sent else None, equal)
        out = func(*args, **kwargs)
        if call.name in PEER_TO_PEER:
            return out, self._peer(call, dims, ledger.combine(sids, adds=False), args, out)
        holders = []
        for sources, targets in call.pairs(args, out):
            sid = (
                ledger.combine([ledger.get(x) for x in sources], adds=False) if sources else ledger.invariant
            )
            result = self._result(call, dims, sid, after_backward)
            told: Callable[[int, int], int] | None = None
            if self.on_reduced is not None and sources and result != sid and ledger.is_grad(sid):
                result, told = self.on_reduced(call, sources[0], sid, result)
            holders += targets
            self._landed.update(storage_key(local_of(x)) for x in targets)
            pieces = self._dealt(call, dims, sources, targets, told, after_backward)
            if pieces:
                ledger.lay(targets[0], pieces)
                continue
            others = self._elsewhere(call, dims, result, told, after_backward)
            for x in targets:
                ledger.written(x, result, others)
        return out, holders

    def lands(self, args: Any) -> bool:
        """Whether a copy is a collective's own: gloo brings results from memory of its own when they are waited for."""
        into, source = args[:2]
        return (
            isinstance(into, torch.Tensor)
            and storage_key(local_of(into)) in self._landed
            and not self._ledger.knows(storage_key(local_of(source)))
        )

    def _read(self, func: Any, args: Any) -> tuple[CollectiveCall, Dims]:
        """The collective and its mesh dims; functional ones name all but their tensor in plain arguments."""
        key = (func, args[1:]) if args and isinstance(args[0], torch.Tensor) else None
        try:
            found = self._calls.get(key)
        except TypeError:  # a list among them
            key = found = None
        if found is None:
            call = read_collective(func, args)
            found = call, self._dims(call)
            if key is not None and func.namespace == "_c10d_functional":
                self._calls[key] = found
        return found

    def _dims(self, call: CollectiveCall) -> Dims:
        if call.name in PEER_TO_PEER and len(call.ranks) == 1:
            return self._world.dims_to(call.ranks[0])
        return self._world.dims_of_ranks(call.ranks)

    def _dealt(
        self,
        call: CollectiveCall,
        dims: Dims,
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
        told: Callable[[int, int], int] | None,
        after_backward: bool,
    ) -> list[Piece]:
        """What a reduce-scatter deals out of a buffer of many gradients: each rank gets a piece of each."""
        if call.name != "reduce_scatter" or len(sources) != 1 or len(targets) != 1 or not covers(targets[0]):
            return []
        found = []
        for a, b, was in self._ledger.laid(sources[0], targets[0].numel() * targets[0].element_size()):
            after = self._result(call, dims, was, after_backward)
            found.append((a, b, after if told is None else told(was, after)))
        return found

    def _elsewhere(
        self,
        call: CollectiveCall,
        dims: Dims,
        result: int,
        told: Callable[[int, int], int] | None,
        after_backward: bool,
    ) -> Callable[[bool, int], int]:
        """What became of others in the memory that was written; see `Ledger.written`."""
        in_place = call.source is not None and call.source == call.target

        def others(inside: bool, was: int) -> int:
            if in_place:
                after = self._result(call, dims, was, after_backward)
                return after if told is None else told(was, after)
            return result if inside else self._ledger.combine2(was, result, adds=False)

        return others

    def _result(self, call: CollectiveCall, dims: Dims, sid: int, after_backward: bool) -> int:
        """`_after`, kept where the group is no odd one."""
        if dims is None:
            return self._after(call, dims, sid, after_backward)
        key = (sid, call.name, call.reduce_op, dims, after_backward)
        result = self._results.get(key)
        if result is None:
            result = self._results[key] = self._after(call, dims, sid, after_backward)
        return result

    def _after(self, call: CollectiveCall, dims: Dims, sid: int, after_backward: bool) -> int:
        """The state vector after a collective over ``dims``."""
        grad = self._ledger.is_grad(sid)
        sizes = self._world.sizes
        parts = self._world.parts_of_ranks(call.ranks) if dims is None else {}

        def change(d: int, state: State) -> State:
            if state.kind in (StateKind.AMBIGUOUS, StateKind.TERM) and (dims is None or d in dims):
                self._ledger.unclear.add(d)
            if dims is None or d not in dims:
                # Over a part of a mesh dim: what varies still varies; a sum of what is complete is too large.
                if d not in parts:
                    return state
                if grad and call.reduce_op is not None:
                    state = states.over_a_part(state, parts[d], call.reduce_op)
                return states.as_part(state) if call.name in _PARTING else state
            match call.name:
                case "all_reduce":
                    return states.reduced(state, sizes[d], call.reduce_op, is_grad=grad)
                case "reduce_scatter" | "reduce":
                    return states.scattered(state, sizes[d], call.reduce_op, is_grad=grad)
                case "all_gather":
                    return states.gathered(state)
                case "broadcast":
                    return states.taken_from_one(state, is_term=grad and after_backward)
                case "gather":
                    return states.as_part(states.gathered(state))
                case "all_to_all":
                    return states.exchanged(state, sizes[d], is_grad=grad)
                case _:
                    return states.as_part(state)

        return self._ledger.changed(sid, change)

    # ---- one rank to another

    def _peer(self, call: CollectiveCall, dims: Dims, sid: int, args: Any, out: Any) -> list[torch.Tensor]:
        """What is received was sent by a rank elsewhere on the mesh dims, at the same place of its program."""
        ledger = self._ledger
        if call.name == "send":
            self._sent = ledger.combine2(self._sent, sid, adds=False)
            for x, over in self._awaited:
                ledger.put(x, self._arrived(self._sent, over))
            return []
        ((_, written),) = call.pairs(args, out)
        for x in written:
            ledger.put(x, self._arrived(self._sent, dims))
            self._awaited.append((x, dims))
        return written

    def _arrived(self, sid: int, dims: Dims) -> int:
        over = range(len(self._world.dims)) if dims is None else dims
        return self._ledger.changed(sid, lambda d, s: states.as_part(s) if d in over else s)


_PARTING = ("reduce_scatter", "all_to_all", "scatter", "gather", "reduce")
"""After these ranks hold different values, whatever went in."""
