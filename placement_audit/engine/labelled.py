"""What DTensor's labels make of a state: the results of its ops, and its relabels."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from placement_audit import states
from placement_audit.dtensor_api import DTensor, local_of, spec_of, storage_key
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.ownpart import OwnPart
from placement_audit.engine.world import World
from placement_audit.model import Layout, State, StateKind


class Labelled:
    """Brings states in line with placements, where those are to be believed."""

    def __init__(self, ledger: Ledger, world: World, own: OwnPart) -> None:
        """See the class."""
        self.ledger = ledger
        self._own = own
        self.world = world
        # The same few questions come up thousands of times; answers depend on nothing else.
        self._plans: dict[tuple[int, int, bool], list[tuple[int, Any, State]]] = {}
        self._relabels: dict[tuple[int, int, int, tuple[int, ...]], int] = {}
        self._false: dict[tuple[int, int], tuple[int, ...]] = {}

    def believe(self, x: DTensor) -> None:
        """Take a DTensor that nothing in the trace made for what its placements say.

        FSDP2 gathers a parameter into memory of its own from before the trace, and not by an op on DTensors.
        """
        local = local_of(x)
        if not self.ledger.knows(storage_key(local)):
            self.ledger.put(local, self.ledger.invariant)
            self.settle(x, [])

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
        cut = () if alone or not self.ledger.is_grad(sid) else self._cut(spec, ins)
        if not (plan or cut):
            return
        new = {d: state for d, label, state in plan if alone or not self._belied(ins, d, label)}
        new.update(cut)
        if new:
            settled = tuple(new.get(d, state) for d, state in enumerate(self.ledger.vector(sid)))
            write = self.ledger.put_alone if alone else self.ledger.put
            write(local, self.ledger.sid(settled, grad=self.ledger.is_grad(sid)))

    def _settle_plan(self, spec: Any, sid: int, alone: bool) -> list[tuple[int, Any, State]]:
        """(mesh dim, label, settled state) where label and state differ."""
        vector = self.ledger.vector(sid)
        apart = self.world.dims_apart(spec.mesh, spec.placements)
        plan = [(d, placement, states.as_part(vector[d])) for d, placement in apart.items()]
        if not alone:
            placed = zip(self.world.dims_of_mesh(spec.mesh), spec.placements, strict=True)
            whole = [(d, p) for span, p in placed if p.is_replicate() for d in span or ()]
            plan += [(d, p, states.gathered(vector[d])) for d, p in whole]
        return [(d, placement, settled) for d, placement, settled in plan if settled is not vector[d]]

    def _cut(self, spec: Any, ins: list[torch.Tensor]) -> list[tuple[int, State]]:
        """(mesh dim, state) where an op made parts, or terms, with what is labelled whole and is one term of a sum.

        Each rank's result has its own term alone in it; what the others' terms make of its part is gone.
        """
        found = []
        for x in ins:
            false = self._falsely_whole(x) if isinstance(x, DTensor) else ()
            if false:
                placed = zip(self.world.dims_of_mesh(spec.mesh), spec.placements, strict=True)
                apart = {d for span, p in placed if not p.is_replicate() for d in span or ()}
                vector = self.ledger.vector(self.ledger.get(x))
                found += [(d, states.misread(vector[d])) for d in false if d in apart]
        return found

    def _falsely_whole(self, x: DTensor) -> tuple[int, ...]:
        """Mesh dims along which a gradient is labelled Replicate and is each rank's own."""
        sid = self.ledger.get(x)
        spec = spec_of(x)
        layout = self.world.layout(spec.mesh, spec.placements)
        key = (id(layout), sid)
        found = self._false.get(key)
        if found is None:
            vector = self.ledger.vector(sid) if self.ledger.is_grad(sid) else ()
            found = self._false[key] = tuple(
                d
                for d, state in enumerate(vector)
                if state.kind is StateKind.VARYING
                and (label := layout.on(self.world.dims[d])) is not None
                and label.is_replicate
            )
        return found

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

    def relabelled(
        self, local: torch.Tensor, result: torch.Tensor, current: Any, target: Any
    ) -> torch.Tensor:
        """State after DTensor moved ``local`` from one set of placements to another (`relabelling`)."""
        ledger = self.ledger
        sid = ledger.get(local)
        mesh: DeviceMesh = current.mesh
        src = self.world.layout(mesh, current.placements)
        dst = self.world.layout(mesh, target.placements)
        kept = self._kept(local, dst) if self._own.any else ()
        key = (sid, id(src), id(dst), kept)
        new = self._relabels.get(key)
        if new is None:
            new = self._relabels[key] = self._relabel(sid, src, dst, kept)
        if storage_key(local_of(result)) == storage_key(local_of(local)):
            ledger.put_alone(result, new)
        else:
            ledger.put(result, new)
        return result

    def _kept(self, local: torch.Tensor, dst: Layout) -> tuple[int, ...]:
        """Mesh dims along which a rank keeps all that it has of a gradient."""
        shards = ((d, dst.on(name)) for d, name in enumerate(self.world.dims))
        return tuple(d for d, p in shards if p is not None and self._own.keeps(local, d, p.tensor_dim))

    def _relabel(self, sid: int, src: Layout, dst: Layout, kept: tuple[int, ...]) -> int:
        ledger = self.ledger
        before, after = (dict(zip(x.dims, x.placements, strict=True)) for x in (src, dst))
        grad = ledger.is_grad(sid)

        def change(d: int, state: State) -> State:
            name = self.world.dims[d]
            if name not in before:
                return state
            if d in kept and before[name].is_replicate and state.kind is StateKind.VARYING:
                return state
            return states.relabel(state, before[name], after[name], self.world.sizes[d], is_grad=grad)

        return ledger.changed(sid, change)
