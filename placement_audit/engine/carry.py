"""Follows what plain tensors are, placement for placement, where a bit is too coarse.

A tensor that varies along a mesh dim may be a part of what one device would have, or one term of its sum. A
complete value added to a part is right, added to a term it is counted once per rank. Placements come from where
plain tensors come from (`to_local`, declared parameters) and go through plain ops by torch's own sharding rules
(`placement_audit.engine.through`); where those would communicate, or there are none, the result is not followed.

Values are followed, not what autograd makes of them: forward, and what is done to gradients after backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.engine.collectives import CollectiveCall
from placement_audit.engine.doubts import Carried, Doubts, Vector
from placement_audit.engine.implied import Call
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.made import Makings
from placement_audit.engine.opargs import flat, tensors
from placement_audit.engine.optraits import OpTraits
from placement_audit.engine.through import Geometry, Through, followed, geometry
from placement_audit.engine.world import World
from placement_audit.model import Layout, Placement, PlacementKind, StateKind

SHARD_0 = Placement(PlacementKind.SHARD, 0)


class Carry:
    """The plain tensors of one step.

    Attributes:
        doubts: what came up.
    """

    def __init__(self, ledger: Ledger, world: World, params: Mapping[int, str]) -> None:
        """See the class.

        Args:
            ledger: tells what varies.
            world: the world mesh.
            params: storage key -> FQN.
        """
        self._ledger = ledger
        self._world = world
        self._makings = Makings(params)
        self._at: dict[int, dict[Geometry, Vector]] = {}
        self._weights: dict[int, tuple[str, set[int]]] = {}
        self._pending: tuple[CollectiveCall, tuple[int, ...] | None, Vector | None] | None = None
        self.doubts = Doubts(world, self._makings.names)
        self._through = Through(ledger, world, self._makings, self.doubts)

    @property
    def any(self) -> bool:
        """Whether anything is known of any tensor."""
        return bool(self._at) or self._makings.any

    def of_readers(self, params: Iterable[tuple[str, torch.Tensor, Layout | None]]) -> Carry:
        """Another one for the gradients' readers, which shares this one's doubts.

        Args:
            params: FQN, parameter and its gradient's layout; None for a plain one, which is laid out like the
                parameter.
        """
        new = Carry(self._ledger, self._world, {})
        new.doubts.found, new.doubts.of_readers = self.doubts.found, True
        for fqn, p, layout in params:
            if p.grad is None:
                continue
            local, own = local_of(p.grad), self._get(p)
            if layout is not None:
                new.localised(local, layout, p.grad.shape)
            elif own is not None:
                new._put(local, own)
            parts = {d for d, c in enumerate(new._get(local) or ()) if c is not None and c.placement.is_shard}
            new._weights[storage_key(local_of(p))] = fqn, parts
        return new

    # ---- where plain tensors come from

    def localised(self, x: torch.Tensor, src: Layout, whole: Sequence[int] = ()) -> None:
        """A DTensor became a plain tensor, or one was declared to be so.

        Over the batch's mesh dims only gradients are followed: whether losses are summed is the job's own affair.

        Args:
            x: the plain tensor.
            src: what it is.
            whole: shape of the whole tensor; () for unknown.
        """
        sid = self._ledger.get(x)
        states, grad = self._ledger.vector(sid), self._ledger.is_grad(sid)
        placed = dict(zip(src.dims, src.placements, strict=True))
        vector: list[Carried | None] = [None] * len(self._world.dims)
        uneven = self._uneven(x, src, whole)
        for d, name in enumerate(self._world.dims):
            p = placed.get(name)
            if p is None or not followed(p) or (d in self.doubts.batch and not grad):
                continue
            if states[d].kind is not StateKind.INVARIANT:
                vector[d] = Carried(p, p.tensor_dim in uneven)
        inner = self._get(x)
        if inner is not None:
            vector = [mine or theirs for mine, theirs in zip(vector, inner, strict=True)]
        self._put(x, tuple(vector))

    def _uneven(self, x: torch.Tensor, src: Layout, whole: Sequence[int]) -> set[int]:
        """The tensor dims that are cut into parts of different sizes."""
        sizes = dict(zip(self._world.dims, self._world.sizes, strict=True))
        parts: dict[int, int] = {}
        for name, p in zip(src.dims, src.placements, strict=True):
            if p.tensor_dim is not None:
                parts[p.tensor_dim] = parts.get(p.tensor_dim, 1) * sizes.get(name, 1)
        return {at for at, n in parts.items() if whole and x.shape[at] * n != whole[at]}

    # ---- ops

    def ran(self, func: Any, traits: OpTraits, args: Any, kwargs: Any, out: Any) -> None:
        """A plain op ran; the ledger knows its inputs as they were."""
        ins = tensors(args, kwargs)
        known = self._at and any(storage_key(local_of(x)) in self._at for x in ins)
        if not (known or traits.scales or traits.mutates or self._makings.any):
            return
        outs = flat(out)
        if not outs:
            if traits.mutates:
                for x in flat(args[0]) if args else []:
                    self._forget(x)
            return
        vectors = [self._get(x) for x in ins] if known else []
        call = Call(func, traits, args, kwargs, ins, outs)
        results = self._through.results(call, vectors) if any(vectors) else None
        made = self._makings.by(traits, args, kwargs, ins)
        for i, o in enumerate(outs):
            if traits.mutates:
                self._updated(o, vectors)
                self._forget(o)
            if results is not None:
                self._put(o, results[i])
            if made is not None:
                self._makings.put(o, made)

    def _updated(self, out: torch.Tensor, vectors: Sequence[Vector | None]) -> None:
        """A tensor was written; is it a part of a weight, and with what was made of parts alone?"""
        fqn, parts = self._weights.get(storage_key(local_of(out)), ("", ()))
        for d in parts:
            held = [v[d] for v in vectors if v is not None]
            apart = next((c for c in held if c is not None and c.broken is not None), None)
            if apart is not None:
                self.doubts.updated(apart, d, fqn)

    def differs(self, x: torch.Tensor, dims: Set[int]) -> None:
        """A tensor was made with numbers that differ between ranks: of these mesh dims nothing is known."""
        vector = self._get(x)
        if vector is not None:
            self._put(x, tuple(None if d in dims else c for d, c in enumerate(vector)))

    # ---- collectives and labels

    def with_terms(self, x: torch.Tensor) -> frozenset[int]:
        """Indices of the mesh dims along which a tensor is one term of a sum that complete values were added to."""
        vector = self._get(x) if self._at else None
        if vector is None:
            return frozenset()
        return frozenset(d for d, c in enumerate(vector) if c is not None and c.terms.value)

    def collective(
        self, call: CollectiveCall, dims: tuple[int, ...] | None, sent: torch.Tensor | None
    ) -> None:
        """A collective is about to run on a value."""
        vector = self._get(sent) if sent is not None and self._at else None
        self._pending = call, dims, vector
        if vector is None or dims is None or not call.reduces or sent is None:
            return
        after = self.doubts.of_readers or self._ledger.is_grad(self._ledger.get(sent))
        for d in dims:
            c = vector[d]
            if c is not None and c.placement.is_partial:
                self.doubts.summed(c, d, after=after)

    def landed(self, holders: Sequence[torch.Tensor]) -> None:
        """The collective has run; these hold its result."""
        if self._pending is None:
            return
        call, dims, vector = self._pending
        self._pending = None
        for x in holders:
            self._forget(x)
            if vector is None or dims is None or len(holders) != 1:
                continue
            if call.name == "all_reduce":
                self._put(x, tuple(None if d in dims else c for d, c in enumerate(vector)))
            elif call.name == "reduce_scatter" and len(dims) == 1 and call.reduce_op == "sum":
                c = vector[dims[0]]
                if c is not None and c.placement.is_partial:
                    self._put(x, tuple(Carried(SHARD_0) if d in dims else None for d in range(len(vector))))

    def declared(self, x: torch.Tensor, dst: Layout) -> tuple[int, ...]:
        """A plain tensor was given placements (`from_local`).

        Returns:
            Indices of the mesh dims along which it is complete and was divided by their ranks, to be summed.
        """
        divided, vector = [], self._get(x) if self._at else None
        for d, state in enumerate(self._ledger.vector(self._ledger.get(x))):
            label = dst.on(self._world.dims[d])
            c = vector[d] if vector is not None else None
            if label is None or label.kind is PlacementKind.STRIDED_SHARD:
                continue
            if c is not None:
                self.doubts.labelled(c, d, label)
                continue
            complete = state.kind is StateKind.INVARIANT and label.reduce_op == "sum"
            if complete and self.doubts.divided(self._makings.of(x), d):
                divided.append(d)
        return tuple(divided)

    # ---- the table

    def _get(self, x: torch.Tensor) -> Vector | None:
        x = local_of(x)
        found = self._at.get(storage_key(x))
        return None if found is None else found.get(geometry(x))

    def _put(self, x: torch.Tensor, vector: Vector) -> None:
        x = local_of(x)
        key = storage_key(x)
        if any(vector):
            self._at.setdefault(key, {})[geometry(x)] = vector
        elif key in self._at:
            self._at[key].pop(geometry(x), None)

    def _forget(self, x: torch.Tensor) -> None:
        """What lies in a tensor's memory was written over."""
        key = storage_key(local_of(x))
        self._at.pop(key, None)
        self._makings.forget(key)
