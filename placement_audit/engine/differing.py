"""What becomes of tensors that ops make with numbers, or out of tensors, that differ between ranks.

Which those are, another rank's ops have shown (`placement_audit.engine.apart`).
"""

from __future__ import annotations

from typing import Any

import torch

from placement_audit import states
from placement_audit.dtensor_api import in_backward, local_of, storage_key
from placement_audit.engine.apart import NUMBERS, Stream, argument, numbers_of
from placement_audit.engine.carry import Carry
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.optraits import OpTraits
from placement_audit.engine.ownpart import OwnPart

Varying = tuple[tuple[int, int], ...]
"""(Mesh dim, which argument) that differs along it."""


class Differing:
    """The tensors of one step that differ so."""

    def __init__(self, ledger: Ledger, carry: Carry, own: OwnPart, seeds: set[int]) -> None:
        """See the class.

        Args:
            ledger: the states.
            carry: placements of plain tensors.
            own: hears of gradients that are put in their places by the rank.
            seeds: storage keys of gradients that are equal on all ranks; what differs is taken out.
        """
        self._ledger = ledger
        self._carry = carry
        self._own = own
        self._seeds = seeds

    def begins(
        self, stream: Stream, func: Any, traits: OpTraits, args: Any, kwargs: Any, ins: list[torch.Tensor]
    ) -> Varying:
        """An op is about to run; gives what of it differs."""
        numbers = numbers_of(func, args, kwargs) if not traits.collective else 0
        varying = stream.take(str(func), _named(func, ins), numbers)
        self.given(ins, varying)
        return varying

    def ran(
        self,
        stream: Stream,
        func: Any,
        traits: OpTraits,
        args: Any,
        ins: list[torch.Tensor],
        outs: list[torch.Tensor],
        varying: Varying,
    ) -> None:
        """The op has run."""
        stream.made(outs, _named(func, ins), talks=traits.collective)
        dims = {d for d, which in varying if which == NUMBERS}
        if dims and not traits.collective:
            keys = {storage_key(local_of(x)) for x in ins}
            for o in outs or (args[0] if traits.foreach_in_place else ()):
                alone = not traits.mutates and storage_key(local_of(o)) in keys
                self._vary(o, dims, cut=traits.views, alone=alone)
        if varying and outs and in_backward():
            self._own.cut(func._opname, args, outs[0], {d for d, _ in varying})

    def given(self, ins: list[torch.Tensor], varying: Varying) -> None:
        """Tensors are about to be read, which may be others, or other pieces, on other ranks."""
        for d, which in varying:
            if which != NUMBERS:
                at, piece = argument(which)
                self._vary(ins[at], {d}, cut=piece, alone=True)

    def _vary(self, x: torch.Tensor, dims: set[int], *, cut: bool, alone: bool) -> None:
        """A tensor differs between the ranks along some mesh dims, by a number or by which tensor it is."""
        ledger = self._ledger
        self._carry.differs(x, dims)
        self._seeds.discard(storage_key(local_of(x)))
        sid = ledger.get(x)
        cut = cut and ledger.is_grad(sid)

        def differs(sid: int) -> int:
            return ledger.changed(sid, lambda d, s: states.sliced(s, is_grad=cut) if d in dims else s)

        new = differs(sid)
        if new != sid and alone:
            ledger.put_alone(local_of(x), new)
        elif new != sid:
            ledger.written(x, new, lambda _inside, was: differs(was))


def _named(func: Any, ins: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have a name: one made of numbers lies at an address of no meaning."""
    return ins if func._opname != "lift_fresh" else []
