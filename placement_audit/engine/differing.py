"""What becomes of tensors that ops make with numbers, or out of tensors, that differ between ranks.

Which those are, another rank's ops have shown (`placement_audit.engine.apart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from placement_audit import states
from placement_audit.dtensor_api import accumulating, in_backward, local_of, storage_key
from placement_audit.engine.apart import NUMBERS, Stream, argument, numbers_of
from placement_audit.engine.beside import put_as_one
from placement_audit.engine.carry import Carry
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.optraits import OpTraits
from placement_audit.engine.ownpart import OwnPart

Varying = tuple[tuple[int, int], ...]
"""(Mesh dim, which argument) that differs along it."""

Told = tuple[str, list[torch.Tensor]]
"""(Name, tensors) of an op as other ranks know it."""

_KEEPS = "a first gradient is kept"
_KEPT = {"detach": 0, "clone": 0, "copy_": 1}
"""How a leaf keeps its first gradient: op -> which argument that is.

torch takes it as it is, or copies it where somebody else holds it still. A collective's thread may, for a while: it
is a matter of time, and no rank's doing, which of the two a rank does.
"""


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
    ) -> tuple[Told | None, Varying]:
        """An op is about to run; gives what others are told of it, None for nothing, and what of it differs."""
        told = _told(func, ins)
        if told is None:
            return None, ()
        numbers = numbers_of(func, args, kwargs) if not traits.collective else 0
        varying = stream.take(*told, numbers)
        self._as_one(told[1] if varying else ())
        self.given(told[1], varying)
        return told, varying

    def ran(
        self,
        stream: Stream,
        func: Any,
        traits: OpTraits,
        args: Any,
        ins: list[torch.Tensor],
        outs: list[torch.Tensor],
        begun: tuple[Told | None, Varying],
    ) -> None:
        """The op has run; ``begun`` is what `begins` gave of it."""
        told, varying = begun
        if told is None:
            return
        anew = traits.mutates or told[0] == _KEEPS
        stream.made(outs, told[1], talks=traits.collective, anew=anew)
        self._as_one(outs if varying else ())
        dims = {d for d, which in varying if which == NUMBERS}
        if dims and not traits.collective:
            keys = {storage_key(local_of(x)) for x in ins}
            for o in outs or (args[0] if traits.foreach_in_place else ()):
                alone = not traits.mutates and storage_key(local_of(o)) in keys
                self._vary(o, dims, cut=traits.views, alone=alone)
        if varying and outs and in_backward():
            self._own.cut(func._opname, args, outs[0], {d for d, _ in varying})

    def _as_one(self, xs: Sequence[torch.Tensor]) -> None:
        """On another rank the parts of these are others, or lie elsewhere."""
        for x in xs if self._ledger.pieces.period else ():
            put_as_one(self._ledger, x)

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


def _told(func: Any, ins: list[torch.Tensor]) -> Told | None:
    """An op as other ranks know it, for another rank may run another that does the same; None for nothing."""
    op, name = func._opname, str(func)
    if op == "lift_fresh":
        return name, []  # a tensor made of numbers lies at an address of no meaning
    if not in_backward():
        return name, ins
    if op == "add_":  # where gradients meet, torch adds in place if nobody else holds the first
        return name.replace("add_", "add"), ins
    if op in _KEPT and _keeps():
        return _KEEPS, [ins[_KEPT[op]]]
    return None if op == "new_empty_strided" and _keeps() else (name, ins)


def _keeps() -> bool:
    """Whether a leaf gets its first gradient now."""
    leaf = accumulating()
    return leaf is not None and leaf.grad is None
