"""Follows what plain tensors are, placement for placement, where a bit is too coarse.

A tensor that varies along a mesh dim may be a part of what one device would have, or one term of its sum. A
complete value added to a part is right, added to a term it is counted once per rank. Placements come from where
plain tensors come from (`to_local`, declared parameters, the batch) and go through plain ops by torch's own
sharding rules; where those would communicate, or there are none, the result is not followed.

Values are followed, not what autograd makes of them: forward, and what is done to gradients after backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction
from typing import Any

import torch

from placement_audit import callsite, forms
from placement_audit.collectives import CollectiveCall
from placement_audit.doubts import Carried, Doubts
from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.implied import Implied, Rules
from placement_audit.ledger import Ledger
from placement_audit.made import Makings, share
from placement_audit.model import REPLICATE, Layout, Placement, PlacementKind, StateKind
from placement_audit.opargs import flat, tensors
from placement_audit.optraits import OpTraits
from placement_audit.world import World

SHARD_0 = Placement(PlacementKind.SHARD, 0)


Vector = tuple[Carried | None, ...]
Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]


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
        self._rules = Rules()
        self._makings = Makings(params)
        self._at: dict[int, dict[Geometry, Vector]] = {}
        self._pending: tuple[CollectiveCall, tuple[int, ...] | None, Vector | None] | None = None
        self.doubts = Doubts(world, self._makings.names)

    @property
    def any(self) -> bool:
        """Whether anything is known of any tensor."""
        return bool(self._at) or self._makings.any

    def of_readers(self, params: Iterable[tuple[torch.Tensor, Layout | None]]) -> Carry:
        """Another one for the gradients' readers, which shares this one's doubts.

        Args:
            params: each with its gradient's layout; None for a plain one, which is laid out like the parameter.
        """
        new = Carry(self._ledger, self._world, {})
        new.doubts.found, new.doubts.of_readers = self.doubts.found, True
        for p, layout in params:
            if p.grad is None:
                continue
            local, own = local_of(p.grad), self._get(p)
            if layout is not None:
                new.localised(local, layout, p.grad.shape)
            elif own is not None:
                new._put(local, own)
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
            if p is None or not _followed(p) or (d in self.doubts.batch and not grad):
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
        results = self._results(func, traits, args, kwargs, ins, vectors, outs) if any(vectors) else None
        made = self._makings.by(traits, args, kwargs, ins)
        for i, o in enumerate(outs):
            if traits.mutates:
                self._forget(o)
            if results is not None:
                self._put(o, results[i])
            if made is not None:
                self._makings.put(o, made)

    def _results(
        self,
        func: Any,
        traits: OpTraits,
        args: Any,
        kwargs: Any,
        ins: list[torch.Tensor],
        vectors: Sequence[Vector | None],
        outs: list[torch.Tensor],
    ) -> list[Vector]:
        states = [self._ledger.vector(self._ledger.get(x)) for x in ins]
        columns: list[tuple[Carried | None, ...]] = []
        for d, ranks in enumerate(self._world.sizes):
            held = [None if v is None else v[d] for v in vectors]
            known = [
                c is not None or s[d].kind in (StateKind.INVARIANT, StateKind.ZERO)
                for c, s in zip(held, states, strict=True)
            ]
            if not any(held) or not all(known):
                columns.append((None,) * len(outs))
                continue
            zero = [s[d].kind is StateKind.ZERO for s in states]
            given = [REPLICATE if c is None else c.placement for c in held]
            implied = self._rules.of(
                func, ranks, args, kwargs, given, outs, passes_on=traits.passes_on, adds=traits.adds
            )
            columns.append(self._column(func, traits, d, args, kwargs, ins, held, zero, implied, outs))
        return list(zip(*columns, strict=True))

    def _column(
        self,
        func: Any,
        traits: OpTraits,
        d: int,
        args: Any,
        kwargs: Any,
        ins: list[torch.Tensor],
        held: list[Carried | None],
        zero: list[bool],
        implied: Implied,
        outs: list[torch.Tensor],
    ) -> tuple[Carried | None, ...]:
        """What comes out along one mesh dim."""
        if traits.subtracts and len(ins) == 2 and _same(*ins):
            return (None,) * len(outs)  # nothing, for the sake of its derivative
        broken = next((c.broken for c in held if c is not None and c.broken is not None), None)
        if not implied.followed:
            self.doubts.unfollowed[str(func), d] += 1
            if (
                not implied.applied
                or broken is not None
                or not outs[0].is_floating_point()
                or not self._matters(ins)
            ):
                return (None,) * len(outs)
            term = next(c for i, c in enumerate(held) if i in implied.applied and c is not None)
            made = self.doubts.applied(d, func._opname, term.placement)
            return tuple(made if o.is_floating_point() else None for o in outs)
        uneven = any(c is not None and c.uneven for c in held)
        if uneven and any(p is not None and p.reduce_op == "avg" for p in implied.outs):
            if self._matters(ins):
                self.doubts.averaged(
                    d, func._opname, next(c.placement for c in held if c is not None and c.uneven)
                )
            return (None,) * len(outs)
        first = next((c for c in held if c is not None and c.terms.value), None)
        terms, at, op = forms.EMPTY, None, ""
        scales = {c.scale * share(traits, args, kwargs, i) for i, c in enumerate(held) if c is not None}
        scale = scales.pop() if traits.scales and len(scales) == 1 else _one(c.scale for c in held if c)
        if first is not None:
            at, op = first.at, first.op
            for i, c in enumerate(held):
                if c is not None:
                    terms = terms.plus(c.terms.times(share(traits, args, kwargs, i)))
        added = [i for i in implied.added if not zero[i]]
        into_weights = traits.mutates and self.doubts.of_readers and 0 in added
        if added and (into_weights or not self._matters(ins)):
            return (None,) * len(outs)
        for i in added:
            terms = terms.plus(self._makings.of(ins[i]).times(share(traits, args, kwargs, i)))
            if at is None:
                at, op = callsite.take(4)[1], func._opname
        return tuple(
            Carried(p, uneven and p.is_shard, scale, terms, at, op, broken)
            if p is not None and _followed(p)
            else None
            for p in implied.outs
        )

    def _matters(self, ins: list[torch.Tensor]) -> bool:
        """Whether a gradient flows through it, or it is one."""
        if self.doubts.of_readers or (torch.is_grad_enabled() and any(x.requires_grad for x in ins)):
            return True
        return any(self._ledger.is_grad(self._ledger.get(x)) for x in ins)

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
        return None if found is None else found.get(_geometry(x))

    def _put(self, x: torch.Tensor, vector: Vector) -> None:
        x = local_of(x)
        key = storage_key(x)
        if any(vector):
            self._at.setdefault(key, {})[_geometry(x)] = vector
        elif key in self._at:
            self._at[key].pop(_geometry(x), None)

    def _forget(self, x: torch.Tensor) -> None:
        """What lies in a tensor's memory was written over."""
        key = storage_key(local_of(x))
        self._at.pop(key, None)
        self._makings.forget(key)


def _one(scales: Iterable[Fraction]) -> Fraction:
    """The one scale of several tensors; 1 where they differ."""
    found = set(scales)
    return found.pop() if len(found) == 1 else Fraction(1)


def _followed(p: Placement) -> bool:
    """Whether it is one that rules are asked about."""
    return not p.is_replicate and p.kind is not PlacementKind.STRIDED_SHARD


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage_key(local_of(a)) == storage_key(local_of(b)) and _geometry(a) == _geometry(b)


def _geometry(x: torch.Tensor) -> Geometry:
    x = local_of(x)
    return int(x.storage_offset()), tuple(x.shape), x.stride()
