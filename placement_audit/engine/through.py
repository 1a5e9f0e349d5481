"""What placements go on from the inputs of a plain op to its results, and what is doubted on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.dtensor_rules import NORM_OF_A_PART
from placement_audit.engine import callsite, forms
from placement_audit.engine.doubts import Carried, Doubts, Vector
from placement_audit.engine.forms import Made
from placement_audit.engine.implied import Call, Implied, Rules
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.made import Makings, number_added, share
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

    def results(self, call: Call, vectors: Sequence[Vector | None]) -> list[Vector]:
        """What comes out of an op.

        Args:
            call: the op.
            vectors: what is known of each of its inputs.
        """
        states = [self._ledger.vector(self._ledger.get(x)) for x in call.ins]
        columns: list[tuple[Carried | None, ...]] = []
        for d, ranks in enumerate(self._world.sizes):
            held = [None if v is None else v[d] for v in vectors]
            known = [
                c is not None or s[d].kind in (StateKind.INVARIANT, StateKind.ZERO)
                for c, s in zip(held, states, strict=True)
            ]
            apart = next((c for c in held if c is not None and c.broken and c.placement.is_shard), None)
            if apart is not None:
                columns.append(_all(call, apart))
            elif not any(held) or not all(known):
                columns.append((None,) * len(call.outs))
            else:
                given = [REPLICATE if c is None else c.placement for c in held]
                implied = self._rules.of(call, ranks, given)
                nothing = [i for i, s in enumerate(states) if s[d].kind is StateKind.ZERO]
                columns.append(self._column(call, d, held, implied, nothing))
        return list(zip(*columns, strict=True))

    def _column(
        self, call: Call, d: int, held: list[Carried | None], implied: Implied, nothing: list[int]
    ) -> tuple[Carried | None, ...]:
        """What comes out along one mesh dim.

        Args:
            call: the op.
            d: index of the mesh dim.
            held: what is known of each input.
            implied: what the op does to placements.
            nothing: inputs that are zero.
        """
        name = call.func._opname
        if call.traits.subtracts and len(call.ins) == 2 and same(*call.ins):
            return _all(call, None)  # nothing, for the sake of its derivative
        there = [c for c in held if c is not None]
        broken = next((c.broken for c in there if c.broken is not None), None)
        part = next((c for c in there if c.placement.is_shard), None)
        if part is not None and self.doubts.of_readers and (implied.whole or NORM_OF_A_PART in implied.outs):
            return _all(call, Carried(part.placement, broken=(name, callsite.take(1)[1])))
        if not implied.followed:
            self.doubts.unfollowed[str(call.func), d] += 1
            doubted = implied.applied and broken is None and call.outs[0].is_floating_point()
            if not doubted or not self._matters(call.ins):
                return _all(call, None)
            term = next(c for i, c in enumerate(held) if i in implied.applied and c is not None)
            return _all(call, self.doubts.applied(d, name, term.placement))
        uneven = next((c for c in there if c.uneven), None)
        if uneven is not None and any(p is not None and p.reduce_op == "avg" for p in implied.outs):
            if self._matters(call.ins):
                self.doubts.averaged(d, name, uneven.placement)
            return _all(call, None)
        made = self._with_terms(call, held, [i for i in implied.added if i not in nothing])
        if made is None:
            return _all(call, None)
        return tuple(
            replace(made, placement=p, uneven=uneven is not None and p.is_shard, broken=broken)
            if p is not None and followed(p)
            else None
            for p in implied.outs
        )

    def _with_terms(self, call: Call, held: list[Carried | None], added: list[int]) -> Carried | None:
        """The scale of what comes out, and the complete values in it; None where those are of no matter.

        Args:
            call: the op.
            held: what is known of each input.
            added: complete inputs that are added to a term.
        """
        traits = call.traits
        number = number_added(traits, call.args, call.kwargs)
        matters = self._matters(call.ins)
        into_weights = traits.mutates and self.doubts.of_readers and 0 in added
        if added and (into_weights or not matters):
            return None

        def share_of(i: int) -> Fraction:
            return share(traits, call.args, call.kwargs, i)

        there = [(i, c) for i, c in enumerate(held) if c is not None]
        scales = {c.scale * share_of(i) if traits.scales else c.scale for i, c in there}
        first = next((c for _, c in there if c.terms.value), None)
        terms = forms.EMPTY
        for i, c in there:
            terms = terms.plus(c.terms.times(share_of(i)))
        for i in added:
            terms = terms.plus(self._makings.of(call.ins[i]).times(share_of(i)))
        if number and matters and not any(c.placement.is_shard for _, c in there):
            terms = terms.plus(Made(((forms.NUMBER, number),)))
        if first is not None:
            at, op = first.at, first.op
        else:
            at, op = (callsite.take(1)[1], call.func._opname) if terms.value else (None, "")
        scale = scales.pop() if len(scales) == 1 else Fraction(1)
        return Carried(there[0][1].placement, scale=scale, terms=terms, at=at, op=op)

    def _matters(self, ins: list[torch.Tensor]) -> bool:
        """Whether a gradient flows through it, or it is one."""
        if self.doubts.of_readers or (torch.is_grad_enabled() and any(x.requires_grad for x in ins)):
            return True
        return any(self._ledger.is_grad(self._ledger.get(x)) for x in ins)


def _all(call: Call, made: Carried | None) -> tuple[Carried | None, ...]:
    """The same of all results that are numbers at all."""
    return tuple(made if o.is_floating_point() else None for o in call.outs)


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
