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
from placement_audit.collectives import NAMESPACES, CollectiveCall, read_collective
from placement_audit.dtensor_api import (
    DTensor,
    TorchDispatchMode,
    in_backward,
    in_recompute,
    local_of,
    placement_of,
    spec_of,
    storage_key,
)
from placement_audit.ledger import Ledger
from placement_audit.model import Phase, State, StateKind
from placement_audit.world import World

_ADDS = frozenset({"add", "add_", "sub", "sub_", "_foreach_add_", "_foreach_add"})
_FRESH = frozenset({"empty_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_ones",
                    "new_full", "new_empty_strided", "empty_strided"})  # fmt: skip
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero_", "zero"})
_RANDOM = ("rand", "normal", "bernoulli", "dropout", "uniform", "multinomial", "exponential")
_PASSES_ON = frozenset({"t", "transpose", "view", "_to_copy", "alias", "detach", "clone", "permute", "_unsafe_view",
                        "slice", "reshape", "unsqueeze", "squeeze", "expand", "wait_tensor", "lift_fresh"})  # fmt: skip


def current_phase() -> Phase:
    """Forward, backward, or activation checkpointing's second forward."""
    if in_backward():
        return Phase.BACKWARD
    return Phase.RECOMPUTE if in_recompute() else Phase.FORWARD


class Flow(TorchDispatchMode):
    """The mode.

    Attributes:
        ledger: the states.
        world: the world mesh.
        ops: (op, phase, placements in, placements out) -> calls.
        random_ops: random ops seen in forward; taken as equal on all ranks.
        params: storage key -> FQN, of parameters and what was gathered, cast or re-wrapped from them.
        on_collective: called with each collective.
        on_use: called with (op, FQN, input, outputs) where a parameter meets something else in forward.
        seeding: while autograd makes the first gradient.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay quiet while compiled code is built."""
        return True

    def __init__(
        self,
        ledger: Ledger,
        world: World,
        *,
        on_collective: Callable[[CollectiveCall, tuple[int, ...] | None, torch.Tensor | None, tuple[int, ...]], None],
        on_use: Callable[[str, str, torch.Tensor, Any], None],
    ) -> None:
        """See the class."""
        super().__init__()
        self.ledger = ledger
        self.world = world
        self.ops: Counter[tuple[Any, Phase, tuple[Any, ...], tuple[Any, ...]]] = Counter()
        self.random_ops = 0
        self.params: dict[int, str] = {}
        self.on_collective = on_collective
        self.on_use = on_use
        self.seeding = False
        self._entered: Any = None

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
        TorchDispatchMode.__enter__(self)
        try:
            out = func(*args, **kwargs)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)
            self._entered = None
        ins = _tensors(args, kwargs)
        outs = _flat(out)
        phase = current_phase()
        for o in outs:
            if isinstance(o, DTensor):
                self.settle(o, ins)
        self.ops[func, phase, _specs(ins), _specs(outs)] += 1
        if self.params and phase is Phase.FORWARD:
            self._follow_param(func._opname, ins, out)
        return out

    def settle(self, out: DTensor, ins: list[torch.Tensor], *, alone: bool = False) -> None:
        """Bring a DTensor's state in line with its placements, except where an input's label already lied.

        Args:
            out: the DTensor, result of an op or of `from_local`.
            ins: what it was made from.
            alone: it shares its storage with a plain tensor that must keep its own state.
        """
        local = local_of(out)
        sid = self.ledger.get(local)
        vector = self.ledger.vector(sid)
        spec = spec_of(out)
        new: list[State] | None = None
        for span, placement in zip(self.world.dims_of_mesh(spec.mesh), spec.placements, strict=True):
            for d in span or ():
                state = vector[d]
                if not placement.is_replicate():
                    settled = states.as_part(state)
                else:
                    settled = state if alone else states.gathered(state)
                if settled is state or (not alone and self._belied(ins, d, placement)):
                    continue
                new = new or list(vector)
                new[d] = settled
        if new is not None:
            write = self.ledger.put_alone if alone else self.ledger.put
            write(local, self.ledger.sid(tuple(new), grad=self.ledger.is_grad(sid)))

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
        out = func(*args, **kwargs)
        name = func._opname
        ledger = self.ledger
        ins = _tensors(args, kwargs)
        outs = [out] if isinstance(out, torch.Tensor) else _flat(out)
        if func.namespace in NAMESPACES:
            call = read_collective(func, args)
            if call is not None:
                self._collective(call, ins, outs)
                return out
        if not outs:
            if name.startswith("_foreach") and name.endswith("_"):
                self._foreach_in_place(name, args)
            return out
        if name in _ZEROS:
            sid = ledger.zero
        elif not ins or name in _FRESH:
            sid = self._fresh(name, ins)
        else:
            sids = [ledger.get(x) for x in ins]
            sid = ledger.combine(sids, adds=name in _ADDS) if len(sids) > 1 else sids[0]
            if name == "copy_" and len(ins) == 2 and _covers(ins[0]):
                sid = sids[1]
        self._write(name, ins, outs, sid)
        if self.params:
            self._follow_param(name, ins, out)
        return out

    def _fresh(self, name: str, ins: list[torch.Tensor]) -> int:
        ledger = self.ledger
        if self.seeding and name == "ones_like" and ins:
            # The first gradient: each rank's own where the loss is each rank's own.
            self.seeding = False
            return ledger.as_grad(ledger.get(ins[0]))
        if any(r in name for r in _RANDOM) and not in_backward():
            self.random_ops += 1
        return ledger.invariant

    def _write(self, name: str, ins: list[torch.Tensor], outs: list[torch.Tensor], sid: int) -> None:
        """Write the result down; a view of an input must not rewrite the input."""
        ledger = self.ledger
        for o in outs:
            shares = False
            if ins:
                key = storage_key(local_of(o))
                shares = any(storage_key(local_of(x)) == key for x in ins)
            if shares and not (name.endswith("_") and not name.endswith("__")):
                ledger.put_alone(o, sid)
            else:
                ledger.put(o, sid)

    def _foreach_in_place(self, name: str, args: Any) -> None:
        ledger = self.ledger
        mine = args[0]
        others = [a for a in args[1:] if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor)]
        for i, x in enumerate(mine):
            sids = [ledger.get(x), *(ledger.get(o[i]) for o in others)]
            if name == "_foreach_copy_":
                ledger.put(x, sids[-1])
            elif name != "_foreach_zero_":
                ledger.put(x, ledger.combine(sids, adds=name in _ADDS))

    def _collective(self, call: CollectiveCall, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
        dims = self.world.dims_of_ranks(call.ranks)
        ledger = self.ledger
        sids = [ledger.get(x) for x in call.inputs(ins)]
        sid = ledger.combine(sids, adds=False) if sids else ledger.invariant
        grad = ledger.is_grad(sid)
        sizes = self.world.sizes
        vector = ledger.vector(sid)
        equal: tuple[int, ...] = ()
        if call.reduces:
            equal = tuple(d for d in dims or () if vector[d].kind is StateKind.INVARIANT)

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

        result = ledger.changed(sid, change)
        for o in call.outputs(ins, outs):
            ledger.put(o, result)
        self.on_collective(call, dims, ins[0] if ins else None, equal)

    # ---- parameters on their way to their use

    def _follow_param(self, name: str, ins: list[torch.Tensor], out: Any) -> None:
        params = self.params
        for x in ins:
            fqn = params.get(storage_key(local_of(x)))
            if fqn is None:
                continue
            if len(ins) == 1 and name in _PASSES_ON:
                if isinstance(out, torch.Tensor):
                    params[storage_key(local_of(out))] = fqn
                return
            if current_phase() is Phase.FORWARD:
                self.on_use(name, fqn, x, out)
            break
        for o in _flat(out):
            # A reused address must not inherit the name of what lived there before.
            key = storage_key(local_of(o))
            if key in params and not any(storage_key(local_of(x)) == key for x in ins):
                del params[key]

    # ---- relabels

    def relabelled(self, local: torch.Tensor, result: torch.Tensor, current: Any, target: Any) -> torch.Tensor:
        """State after DTensor moved ``local`` from one set of placements to another (`redistribute_hook`)."""
        ledger = self.ledger
        sid = ledger.get(local)
        grad = ledger.is_grad(sid)
        vector = list(ledger.vector(sid))
        mesh: DeviceMesh = current.mesh
        pairs = zip(self.world.dims_of_mesh(mesh), current.placements, target.placements, strict=True)
        for span, src, dst in pairs:
            if src == dst:
                continue
            for d in span or ():
                vector[d] = states.relabel(
                    vector[d], placement_of(src), placement_of(dst), self.world.sizes[d], is_grad=grad
                )
        new = ledger.sid(tuple(vector), grad=grad)
        if storage_key(local_of(result)) == storage_key(local_of(local)):
            ledger.put_alone(result, new)
        else:
            ledger.put(result, new)
        return result


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an op's arguments, lists of them included."""
    found = []
    for a in args:
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif isinstance(a, list | tuple):
            found += [b for b in a if isinstance(b, torch.Tensor)]
    for a in kwargs.values():
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif isinstance(a, list | tuple):
            found += [b for b in a if isinstance(b, torch.Tensor)]
    return found


def _flat(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, list | tuple):
        return [x for o in out for x in _flat(o)]
    return []


def _specs(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """(mesh, placements) of the DTensors among them."""
    return tuple([(s.mesh.mesh_dim_names, s.placements) for s in (spec_of(x) for x in tensors if isinstance(x, DTensor))])


def _covers(x: torch.Tensor) -> bool:
    """Whether the tensor is all of its storage."""
    return x.numel() * x.element_size() == x.untyped_storage().nbytes()
