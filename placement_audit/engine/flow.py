"""Follows the states of all tensors through one step, op by op, forward and backward alike.

A dispatch mode that sees DTensor ops from outside and, by entering itself again, the plain ops and
collectives inside them. It holds no opinion: it computes what is so, and writes down what ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from placement_audit.dtensor_api import (
    DTensor,
    EagerMode,
    in_backward,
    in_recompute,
    local_of,
    spec_of,
    storage_key,
)
from placement_audit.engine import beside
from placement_audit.engine.apart import Stream
from placement_audit.engine.carry import Carry
from placement_audit.engine.collectives import CollectiveCall
from placement_audit.engine.differing import Differing
from placement_audit.engine.inplace import (
    as_measured,
    fills,
    foreach_states,
    joined,
    packed,
    written,
    written_foreach,
)
from placement_audit.engine.labelled import Labelled
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.leftout import LeftOut
from placement_audit.engine.opargs import covers, flat, shares, tensors
from placement_audit.engine.optraits import OpTraits, traits_of
from placement_audit.engine.optraits import known as _traits
from placement_audit.engine.ownpart import OwnPart
from placement_audit.engine.traffic import Dims, Traffic
from placement_audit.engine.world import World
from placement_audit.model import Layout
from placement_audit.tracing import Phase

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)


def _phase_index() -> int:
    """`current_phase` as an index: an enum's hash is Python code, and this one is hashed at each op."""
    if in_backward():
        return 1
    return 2 if in_recompute() else 0


def current_phase() -> Phase:
    """Forward, backward, or activation checkpointing's second forward."""
    return PHASES[_phase_index()]


class Flow(EagerMode):
    """The mode.

    Attributes:
        ledger: the states.
        world: the world mesh.
        ops: (op, index into `PHASES`, layouts in, layouts out, by identity) -> calls.
        layouts: identity -> layout.
        random_ops: random ops seen in forward; taken as equal on all ranks.
        params: storage key -> FQN, of parameters and what was gathered, cast or re-wrapped from them.
        labelled: what DTensor's labels make of a state.
        traffic: what collectives make of it.
        on_use: called with (op, FQN, input, outputs) where a parameter meets something else in forward.
        seeding: while autograd makes the first gradient.
        seeds: storage keys of first gradients and their multiples: equal on all ranks, whatever the loss is.
        on_scaled: called with (result, factor) where a tensor is multiplied by a number; None for nobody.
        stream: takes down the plain ops, and knows whose numbers differ between ranks; None for nobody.
        carry: what plain tensors are, placement for placement.
        left_out: knows the backwards that torch leaves to another op's.
        own: gradients that are zero but in this rank's own part.
        differing: what ops make of numbers that differ between ranks.
        on_op: called at each op of the forward, but for those inside a DTensor's; None for nobody.
        on_written: called with the tensors that an op or a collective wrote in place, afterwards; None for nobody.
    """

    def __init__(
        self,
        ledger: Ledger,
        world: World,
        *,
        on_collective: Callable[[CollectiveCall, Dims, torch.Tensor | None, tuple[int, ...]], None],
        on_use: Callable[[str, str, torch.Tensor, Any], None],
    ) -> None:
        """See the class."""
        super().__init__()
        self.ledger = ledger
        self.world = world
        self.ops: Counter[tuple[Any, int, tuple[int, ...], tuple[int, ...]]] = Counter()
        self.layouts: dict[int, Layout] = {}
        self.random_ops = 0
        self.params: dict[int, str] = {}
        self.own = OwnPart(ledger, world)
        self.labelled = Labelled(ledger, world, self.own)
        self.traffic = Traffic(ledger, world, on_collective)
        self.carry = Carry(ledger, world, self.params)
        self.left_out = LeftOut(world, self.carry.doubts)
        self.seeds: set[int] = set()
        self.differing = Differing(ledger, self.carry, self.own, self.seeds)
        self.on_use = on_use
        self.seeding = False
        self.stream: Stream | None = None
        self.on_scaled: Callable[[torch.Tensor, float], None] | None = None
        self.on_op: Callable[[], None] | None = None
        self.on_written: Callable[[Sequence[torch.Tensor]], None] | None = None
        self._entered: Any = None
        self._inside = 0

    @property
    def inside_dtensor_op(self) -> bool:
        """Whether a DTensor's op is running: what runs inside is its own."""
        return bool(self._inside)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One op."""
        kwargs = kwargs or {}
        if self.on_op is not None and not self._inside and not in_backward():
            self.on_op()
        if DTensor in types:
            if self._entered is func:
                self._entered = None
                return NotImplemented
            return self._dtensor_op(func, args, kwargs)
        if self.stream is not None and not self._inside:  # a DTensor's labels say what its own numbers do
            return self._numbered(self.stream, func, args, kwargs)
        return self._plain_op(func, args, kwargs)

    # ---- DTensor ops

    def _dtensor_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        ins = tensors(args, kwargs)
        for x in ins:
            if isinstance(x, DTensor):
                self.labelled.believe(x)
        told = self.left_out.watches(func._opname)
        if told:
            self.left_out.begins(func._opname, ins)
        self._entered = func
        self._inside += 1
        try:
            out = self.call_again(func, args, kwargs)
        finally:
            self._entered = None
            self._inside -= 1
        outs = [out] if isinstance(out, torch.Tensor) else flat(out)
        if told:
            traits = _traits.get(func) or traits_of(func)
            self.left_out.ran(func._opname, traits, args, ins, outs)
        for o in outs:
            if isinstance(o, DTensor):
                self.labelled.settle(o, ins)
        phase = _phase_index()
        self.ops[func, phase, self._layouts_of(ins), self._layouts_of(outs)] += 1
        if phase == 0:
            in_keys = [storage_key(local_of(x)) for x in ins]
            self._follow_param(func, ins, in_keys, out, [storage_key(local_of(o)) for o in outs])
        return out

    def _layouts_of(self, among: list[torch.Tensor]) -> tuple[int, ...]:
        """The layouts of the DTensors among them, by identity: cheap to hash."""
        found = []
        for x in among:
            if isinstance(x, DTensor):
                spec = spec_of(x)
                layout = self.world.layout(spec.mesh, spec.placements)
                self.layouts[id(layout)] = layout
                found.append(id(layout))
        return tuple(found)

    # ---- plain ops and collectives

    def _numbered(self, stream: Stream, func: Any, args: Any, kwargs: Any) -> Any:
        """One op, of which it is known what differs between ranks: its numbers, or which tensors it is given."""
        traits = _traits.get(func) or traits_of(func)
        if traits.copies and self.traffic.lands(args):
            return func(*args, **kwargs)
        ins = flat(args) + flat(list(kwargs.values()))
        begun = self.differing.begins(stream, func, traits, args, kwargs, ins)
        out = self._plain_op(func, args, kwargs)
        if func._opname == "_local_scalar_dense" and self.ledger.is_equal(ins[0]):
            return stream.read(ins[0], out)
        self.differing.ran(stream, func, traits, args, ins, flat(out), begun)
        return out

    def given(self, what: str, ins: list[torch.Tensor]) -> None:
        """A call that is no op is about to read tensors: which ones may differ between ranks."""
        if self.stream is not None:
            self.differing.given(ins, self.stream.take(what, ins))

    def _plain_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        traits = _traits.get(func) or traits_of(func)
        if traits.collective:
            return self._collective(func, args, kwargs)
        out = func(*args, **kwargs)
        if traits.copies and self.traffic.lands(args):
            return out
        ledger = self.ledger
        if (self.carry.any or traits.scales) and not self._inside and _phase_index() == 0:
            self.carry.ran(func, traits, args, kwargs, out)
        if traits.lifts:
            ledger.put(out, ledger.invariant)
            self.params.pop(storage_key(local_of(out)), None)
            return out
        if traits.views and shares(out, args) and not ledger.has_own(args[0]):
            return out  # same storage, same state, same parameter
        ins = tensors(args, kwargs)
        outs = [out] if isinstance(out, torch.Tensor) else flat(out)
        if not outs:
            if traits.foreach_in_place:
                changed = written_foreach(ledger, traits, args)
                if traits.scales:
                    self._tell_scaled(traits, args, args[0])
                if self.on_written is not None:
                    self.on_written(changed)
            elif traits.packs:
                packed(ledger, args, kwargs)
            return out
        if traits.foreach and len(outs) == len(args[0]):
            for o, sid in zip(outs, foreach_states(ledger, traits, args), strict=True):
                ledger.put(o, sid)
                self.params.pop(storage_key(local_of(o)), None)
            return out
        in_keys = [
            x.untyped_storage()._cdata if type(x) is torch.Tensor else storage_key(local_of(x)) for x in ins
        ]
        if traits.overwrites and ins and not covers(ins[0]):
            sid = ledger.get_by(ins[0], in_keys[0])  # the rest of it is as it was
        elif traits.zeros:
            sid = ledger.zero
        elif traits.fresh or not ins:
            sid = self._fresh(traits, ins)
        else:
            sid = ledger.get_by(ins[0], in_keys[0])
            if len(ins) > 1:
                for x, key in zip(ins[1:], in_keys[1:], strict=True):
                    other = ledger.get_by(x, key)
                    if other != sid:
                        # Side by side in one gradient, a complete part and a per-rank part have no one label.
                        sid = ledger.combine2(sid, other, adds=traits.adds or traits.joins)
                if traits.into and fills(ledger, ins[-1], sid):
                    pairs = list(zip(ins[:-1], in_keys[:-1], strict=True))
                    sid = ledger.combine([ledger.get_by(x, key) for x, key in pairs], adds=traits.adds)
                elif traits.copies and fills(ledger, ins[0], ledger.get_by(ins[1], in_keys[1])):
                    sid = ledger.get_by(ins[1], in_keys[1])
        if traits.measures and ledger.is_grad(sid) and not in_backward():
            sid = as_measured(ledger, sid, ins)
        out_keys = [
            o.untyped_storage()._cdata if type(o) is torch.Tensor else storage_key(local_of(o)) for o in outs
        ]
        rows = None
        if (ledger.pieces.period or traits.puts_beside) and len(outs) == 1 and in_backward():
            rows = beside.made_by(ledger, func, traits, args, ins, outs[0])
        for o, key in zip(outs, out_keys, strict=True):
            if key not in in_keys:
                if traits.duplicates:
                    ledger.copied(o, key, ins[0], sid)
                else:
                    ledger.put_by(o, key, sid)
                if traits.joins and not in_backward():
                    joined(ledger, o, ins)
            elif traits.mutates:
                written(ledger, traits, ins, o, sid)
                if self.on_written is not None:
                    self.on_written((o,))
            elif ledger.get_by(o, key) != sid:
                # A view of an input must not rewrite the input.
                ledger.put_alone(o, sid)
        if rows is not None:
            beside.put_rows(ledger, outs[0], rows)
        if traits.scales and len(ins) - traits.into == len(outs):
            self._tell_scaled(traits, args, outs)
        if self.seeding or self.seeds:
            self._follow_seed(traits, in_keys, out_keys)
        if self.own.any and in_backward():
            self.own.ran(func, traits, ins, outs)
        if self.params and not in_backward():
            self._follow_param(func, ins, in_keys, out, out_keys)
        return out

    def _tell_scaled(self, traits: OpTraits, args: Any, outs: list[torch.Tensor]) -> None:
        number = args[1] if len(args) > 1 else None
        if self.on_scaled is not None and isinstance(number, int | float) and number:
            by = 1 / number if traits.divides else number
            for o in outs:
                self.on_scaled(o, by)

    def _follow_seed(self, traits: OpTraits, in_keys: list[int], out_keys: list[int]) -> None:
        if self.seeding and traits.ones:
            self.seeds.update(out_keys)
        elif len(in_keys) == 1 and (traits.passes_on or traits.scales):
            if in_keys[0] in self.seeds:
                self.seeds.update(out_keys)
        elif traits.mutates:
            self.seeds.difference_update(out_keys)

    def _fresh(self, traits: OpTraits, ins: list[torch.Tensor]) -> int:
        ledger = self.ledger
        if self.seeding and traits.ones and ins and current_phase() is Phase.FORWARD:
            # The first gradient: each rank's own where the loss is each rank's own. DTensor may make it
            # more than once, to learn its shape.
            return ledger.as_grad(ledger.get(ins[0]))
        if traits.random and not in_backward():
            self.random_ops += 1
        return ledger.invariant

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        after_backward = not in_backward() and not in_recompute()
        out, holders = self.traffic.run(func, args, kwargs, after_backward=after_backward)
        self.carry.landed(holders)
        for x in holders:
            self.params.pop(storage_key(local_of(x)), None)  # as in _follow_param; a boundary names it again
        if self.on_written is not None:
            self.on_written(holders)
        return out

    # ---- parameters on their way to their use

    def _follow_param(
        self, func: Any, ins: list[torch.Tensor], in_keys: list[int], out: Any, out_keys: list[int]
    ) -> None:
        params = self.params
        for x, in_key in zip(ins, in_keys, strict=True):
            if in_key not in params:
                continue
            if len(ins) == 1 and (_traits.get(func) or traits_of(func)).passes_on:
                params.update(dict.fromkeys(out_keys, params[in_key]))
                return
            if not self._inside and torch.is_grad_enabled() and current_phase() is Phase.FORWARD:
                self.on_use(func._opname, params[in_key], x, out)
        for key in out_keys:
            # A reused address must not inherit the name of what lived there before.
            if key in params and key not in in_keys:
                del params[key]
