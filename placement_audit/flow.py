"""Follows the states of all tensors through one step, op by op, forward and backward alike.

A dispatch mode that sees DTensor ops from outside and, by entering itself again, the plain ops and
collectives inside them. It holds no opinion: it computes what is so, and writes down what ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from placement_audit import states
from placement_audit.collectives import CollectiveCall, read_collective
from placement_audit.dtensor_api import (
    DTensor,
    EagerMode,
    in_backward,
    in_recompute,
    local_of,
    spec_of,
    storage_key,
)
from placement_audit.ledger import Ledger
from placement_audit.model import Layout, State, StateKind
from placement_audit.opargs import covers, flat, shares, tensors
from placement_audit.optraits import OpTraits, traits_of
from placement_audit.optraits import known as _traits
from placement_audit.tracing import Phase
from placement_audit.world import World

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
        on_collective: called before each collective: (call, mesh dims, what is sent, dims already equal).
        on_use: called with (op, FQN, input, outputs) where a parameter meets something else in forward.
        seeding: while autograd makes the first gradient.
    """

    def __init__(
        self,
        ledger: Ledger,
        world: World,
        *,
        on_collective: Callable[
            [CollectiveCall, tuple[int, ...] | None, torch.Tensor | None, tuple[int, ...]], None
        ],
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
        self.on_collective = on_collective
        self.on_use = on_use
        self.seeding = False
        self._entered: Any = None
        self._inside = 0
        # The same few questions come up thousands of times; answers depend on nothing else.
        self._plans: dict[tuple[int, int, bool], list[tuple[int, Any, State]]] = {}
        self._relabels: dict[tuple[int, int, int], int] = {}
        self._calls: dict[Any, tuple[CollectiveCall, tuple[int, ...] | None]] = {}
        self._results: dict[tuple[int, str, str | None, tuple[int, ...] | None], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One op."""
        kwargs = kwargs or {}
        if DTensor in types:
            if self._entered is func:
                self._entered = None
                return NotImplemented
            return self._dtensor_op(func, args, kwargs)
        return self._plain_op(func, args, kwargs)

    # ---- DTensor ops

    def _dtensor_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._entered = func
        self._inside += 1
        try:
            out = self.call_again(func, args, kwargs)
        finally:
            self._entered = None
            self._inside -= 1
        ins = tensors(args, kwargs)
        outs = [out] if isinstance(out, torch.Tensor) else flat(out)
        for o in outs:
            if isinstance(o, DTensor):
                self.settle(o, ins)
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

    def settle(self, out: DTensor, ins: list[torch.Tensor], *, alone: bool = False) -> None:
        """Bring a DTensor's state in line with its placements, except where an input's label already lied.

        Args:
            out: the DTensor, result of an op or of `from_local`.
            ins: what it was made from.
            alone: it shares its storage with a plain tensor that must keep its own state.
        """
        local = local_of(out)
        sid = self.ledger.get(local)
        spec = spec_of(out)
        plan_key = (id(self.world.layout(spec.mesh, spec.placements)), sid, alone)
        plan = self._plans.get(plan_key)
        if plan is None:
            plan = self._plans[plan_key] = self._settle_plan(spec, sid, alone)
        if not plan:
            return
        new = {d: state for d, label, state in plan if alone or not self._belied(ins, d, label)}
        if new:
            settled = tuple(new.get(d, state) for d, state in enumerate(self.ledger.vector(sid)))
            write = self.ledger.put_alone if alone else self.ledger.put
            write(local, self.ledger.sid(settled, grad=self.ledger.is_grad(sid)))

    def _settle_plan(self, spec: Any, sid: int, alone: bool) -> list[tuple[int, Any, State]]:
        """(mesh dim, label, settled state) where label and state differ."""
        vector = self.ledger.vector(sid)
        plan = []
        for span, placement in zip(self.world.dims_of_mesh(spec.mesh), spec.placements, strict=True):
            for d in span or ():
                if not placement.is_replicate():
                    settled = states.as_part(vector[d])
                else:
                    settled = vector[d] if alone else states.gathered(vector[d])
                if settled is not vector[d]:
                    plan.append((d, placement, settled))
        return plan

    def _belied(self, ins: list[torch.Tensor], dim: int, label: Any) -> bool:
        """Whether an input has the same sort of label along a mesh dim and its state gives it the lie."""
        for x in ins:
            if not isinstance(x, DTensor):
                continue
            spec = spec_of(x)
            for span, placement in zip(self.world.dims_of_mesh(spec.mesh), spec.placements, strict=True):
                if not span or dim not in span:
                    continue
                equal = self.ledger.kind(self.ledger.get(x), dim) in (StateKind.INVARIANT, StateKind.ZERO)
                if (placement.is_replicate() and label.is_replicate() and not equal) or (
                    placement.is_partial() and label.is_partial() and equal
                ):
                    return True
        return False

    # ---- plain ops and collectives

    def _plain_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        traits = _traits.get(func) or traits_of(func)
        if traits.collective:
            return self._collective(func, args, kwargs)
        out = func(*args, **kwargs)
        ledger = self.ledger
        if traits.views and not ledger.any_own and shares(out, args):
            return out  # same storage, same state, same parameter
        ins = tensors(args, kwargs)
        outs = [out] if isinstance(out, torch.Tensor) else flat(out)
        if not outs:
            if traits.foreach_in_place:
                self._foreach_in_place(traits, args)
            return out
        in_keys = [
            x.untyped_storage()._cdata if type(x) is torch.Tensor else storage_key(local_of(x)) for x in ins
        ]
        if traits.zeros:
            sid = ledger.zero
        elif traits.fresh or not ins:
            sid = self._fresh(traits, ins)
        else:
            sid = ledger.get_by(ins[0], in_keys[0])
            if len(ins) > 1:
                for x, key in zip(ins[1:], in_keys[1:], strict=True):
                    other = ledger.get_by(x, key)
                    if other != sid:
                        sid = ledger.combine2(sid, other, adds=traits.adds)
                if traits.copies and covers(ins[0]):
                    sid = ledger.get_by(ins[1], in_keys[1])
        out_keys = [
            o.untyped_storage()._cdata if type(o) is torch.Tensor else storage_key(local_of(o)) for o in outs
        ]
        for o, key in zip(outs, out_keys, strict=True):
            if key not in in_keys or traits.mutates:
                ledger.put_by(o, key, sid)
            elif ledger.get_by(o, key) != sid:
                # A view of an input must not rewrite the input.
                ledger.put_alone(o, sid)
        if self.params and not in_backward():
            self._follow_param(func, ins, in_keys, out, out_keys)
        return out

    def _fresh(self, traits: OpTraits, ins: list[torch.Tensor]) -> int:
        ledger = self.ledger
        if self.seeding and traits.ones and ins and current_phase() is Phase.FORWARD:
            # The first gradient: each rank's own where the loss is each rank's own. DTensor may make it
            # more than once, to learn its shape.
            return ledger.as_grad(ledger.get(ins[0]))
        if traits.random and not in_backward():
            self.random_ops += 1
        return ledger.invariant

    def _foreach_in_place(self, traits: OpTraits, args: Any) -> None:
        ledger = self.ledger
        others = [a for a in args[1:] if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor)]
        for i, x in enumerate(args[0]):
            sids = [ledger.get(x), *(ledger.get(o[i]) for o in others)]
            if traits.copies:
                ledger.put(x, sids[-1])
            elif not traits.zeros:
                ledger.put(x, ledger.combine(sids, adds=traits.adds))

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        call, dims = self._read(func, args)
        ins = tensors(args, kwargs)
        sent = call.inputs(ins)
        ledger = self.ledger
        sid = ledger.combine([ledger.get(x) for x in sent], adds=False) if sent else ledger.invariant
        equal: tuple[int, ...] = ()
        if call.reduces:
            vector = ledger.vector(sid)
            equal = tuple(d for d in dims or () if vector[d].kind is StateKind.INVARIANT)
        # Told before it runs: a collective that never ends is the one to name.
        self.on_collective(call, dims, sent[0] if sent else None, equal)
        out = func(*args, **kwargs)
        key = (sid, call.name, call.reduce_op, dims)
        result = self._results.get(key)
        if result is None:
            result = self._results[key] = self._after(call, dims, sid)
        for o in call.outputs(ins, flat(out)):
            ledger.put(o, result)
            self.params.pop(storage_key(local_of(o)), None)  # as in _follow_param; a boundary names it again
        return out

    def _read(self, func: Any, args: Any) -> tuple[CollectiveCall, tuple[int, ...] | None]:
        """The collective and its mesh dims; functional ones name all but their tensor in plain arguments."""
        key = (func, args[1:]) if args and isinstance(args[0], torch.Tensor) else None
        try:
            found = self._calls.get(key)
        except TypeError:  # a list among them
            key = found = None
        if found is None:
            call = read_collective(func, args)
            found = call, self.world.dims_of_ranks(call.ranks)
            if key is not None and func.namespace == "_c10d_functional":
                self._calls[key] = found
        return found

    def _after(self, call: CollectiveCall, dims: tuple[int, ...] | None, sid: int) -> int:
        """The state vector after a collective over ``dims``."""
        grad = self.ledger.is_grad(sid)
        sizes = self.world.sizes

        def change(d: int, state: State) -> State:
            if dims is None or d not in dims:
                return state
            if call.name == "all_reduce":
                return states.reduced(state, sizes[d], call.reduce_op, is_grad=grad)
            if call.name == "reduce_scatter":
                return states.scattered(state, sizes[d], call.reduce_op, is_grad=grad)
            if call.name in ("all_gather", "broadcast"):
                return states.gathered(state)
            return states.exchanged(state)

        return self.ledger.changed(sid, change)

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
            break
        for key in out_keys:
            # A reused address must not inherit the name of what lived there before.
            if key in params and key not in in_keys:
                del params[key]

    # ---- relabels

    def relabelled(
        self, local: torch.Tensor, result: torch.Tensor, current: Any, target: Any
    ) -> torch.Tensor:
        """State after DTensor moved ``local`` from one set of placements to another (`relabelling`)."""
        ledger = self.ledger
        sid = ledger.get(local)
        mesh: DeviceMesh = current.mesh
        src = self.world.layout(mesh, current.placements)
        dst = self.world.layout(mesh, target.placements)
        key = (sid, id(src), id(dst))
        new = self._relabels.get(key)
        if new is None:
            new = self._relabels[key] = self._relabel(sid, src, dst)
        if storage_key(local_of(result)) == storage_key(local_of(local)):
            ledger.put_alone(result, new)
        else:
            ledger.put(result, new)
        return result

    def _relabel(self, sid: int, src: Layout, dst: Layout) -> int:
        ledger = self.ledger
        before, after = (dict(zip(x.dims, x.placements, strict=True)) for x in (src, dst))
        grad = ledger.is_grad(sid)

        def change(d: int, state: State) -> State:
            name = self.world.dims[d]
            if name not in before:
                return state
            return states.relabel(state, before[name], after[name], self.world.sizes[d], is_grad=grad)

        return ledger.changed(sid, change)
