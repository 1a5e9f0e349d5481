"""Ops that write into tensors they are given: the memory changes for all who share it, whatever they take it for."""

from __future__ import annotations

from typing import Any

import torch

from placement_audit.ledger import Ledger
from placement_audit.opargs import covers
from placement_audit.optraits import OpTraits


def written(ledger: Ledger, traits: OpTraits, ins: list[torch.Tensor], out: torch.Tensor, new: int) -> None:
    """An op wrote a tensor.

    Args:
        ledger: the states.
        traits: of the op.
        ins: what went in, the written tensor first.
        out: the written tensor.
        new: its state now.
    """

    def others(inside: bool, was: int) -> int:
        if traits.copies or traits.overwrites:
            return new if inside else ledger.combine2(was, new, adds=False)
        return ledger.combine([was, *(ledger.get(x) for x in ins[1:])], adds=traits.adds)

    ledger.written(out, new, others)


def written_foreach(ledger: Ledger, traits: OpTraits, args: Any) -> None:
    """An op wrote the tensors of its first list, each with what stands at its place in the others."""
    lists = [a for a in args[1:] if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor)]
    for i, x in enumerate(args[0]):
        ins = [x, *(others[i] for others in lists)]
        sids = [ledger.get(y) for y in ins]
        if traits.zeros:
            sid = ledger.zero if covers(x) else sids[0]
        else:
            sid = sids[-1] if traits.copies else ledger.combine(sids, adds=traits.adds)
        written(ledger, traits, ins, x, sid)
