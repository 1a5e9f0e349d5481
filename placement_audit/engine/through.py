"""What placements go on from the inputs of a plain op to its results, and what is doubted on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import torch

from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.dtensor_rules import NORM_OF_A_PART
from placement_audit.engine import callsite, forms
from placement_audit.engine.doubts import Carried, Doubts, Vector
from placement_audit.engine.forms import Made
from placement_audit.engine.implied import Implied, Rules
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.made import Makings, number_added, share
from placement_audit.engine.optraits import OpTraits
from placement_audit.engine.world import World
from placement_audit.model import REPLICATE, Placement, PlacementKind, StateKind

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Where in its storage a tensor lies, and how."""


class Through:
    """The plain ops of one step."""

    def __init__(self, ledger: Ledger, world: World, makings: Makings, doubts: Doubts) -> None:
        """See the class.

        Args:
            ledger: tells what varies.
            world: the world mesh.
            makings: what complete values are made of.
            doubts: takes down what comes up.
        """
        self._ledger = ledger
        self._world = world
        self._makings = makings
        self._rules = Rules()
        self.doubts = doubts

    def results(
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
            apart = next((c for c in held if c is not None and c.broken and c.placement.is_shard), None)
            if apart is not None:
                columns.append(tuple(apart if o.is_floating_point() else None for o in outs))
                continue
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
        if traits.subtracts and len(ins) == 2 and same(*ins):
            return (None,) * len(outs)  # nothing, for the sake of its derivative
        broken = next((c.broken for c in held if c is not None and c.broken is not None), None)
        part = next((c for c in held if c is not None and c.placement.is_shard), None)
        if part is not None and self.doubts.of_readers and (implied.whole or NORM_OF_A_PART in implied.outs):
            made = Carried(part.placement, broken=(func._opname, callsite.take(4)[1]))
            return tuple(made if o.is_floating_point() else None for o in outs)
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
        number = number_added(traits, args, kwargs)
        if number and part is None and self._matters(ins):
            terms = terms.plus(Made(((forms.NUMBER, number),)))
            if at is None:
                at, op = callsite.take(4)[1], func._opname
        for i in added:
            terms = terms.plus(self._makings.of(ins[i]).times(share(traits, args, kwargs, i)))
            if at is None:
                at, op = callsite.take(4)[1], func._opname
        return tuple(
            Carried(p, uneven and p.is_shard, scale, terms, at, op, broken)
            if p is not None and followed(p)
            else None
            for p in implied.outs
        )

    def _matters(self, ins: list[torch.Tensor]) -> bool:
        """Whether a gradient flows through it, or it is one."""
        if self.doubts.of_readers or (torch.is_grad_enabled() and any(x.requires_grad for x in ins)):
            return True
        return any(self._ledger.is_grad(self._ledger.get(x)) for x in ins)


def _one(scales: Iterable[Fraction]) -> Fraction:
    """The one scale of several tensors; 1 where they differ."""
    found = set(scales)
    return found.pop() if len(found) == 1 else Fraction(1)


def followed(p: Placement) -> bool:
    """Whether it is one that rules are asked about."""
    return not p.is_replicate and p.kind is not PlacementKind.STRIDED_SHARD and p != NORM_OF_A_PART


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, seen the same way."""
    return storage_key(local_of(a)) == storage_key(local_of(b)) and geometry(a) == geometry(b)


def geometry(x: torch.Tensor) -> Geometry:
    """Of the plain tensor below it."""
    x = local_of(x)
    return int(x.storage_offset()), tuple(x.shape), x.stride()
