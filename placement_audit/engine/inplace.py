"""Ops that write into tensors they are given: the memory changes for all who share it, whatever they take it for."""

from __future__ import annotations

import math
from typing import Any

import torch

from placement_audit.dtensor_api import local_of
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.opargs import covers, extent
from placement_audit.engine.optraits import OpTraits


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


def packed(ledger: Ledger, args: Any, kwargs: Any) -> None:
    """FSDP2 packed gradients into one buffer, in as many chunks as there are ranks, each with a piece of each.

    The chunks are alike, so that the first one's pieces are those of what a reduce-scatter leaves.
    """
    grads, dim, chunks, out = *args, kwargs["out"]
    sids = [ledger.get(g) for g in grads]
    if dim != 0 or not out.is_contiguous() or not covers(out):
        ledger.put(out, ledger.combine(sids, adds=False))
        return
    pieces, at = [], 0
    for g, sid in zip(grads, sids, strict=True):
        rows = -(-int(g.shape[0]) // chunks)
        end = at + rows * math.prod(g.shape[1:]) * out.element_size()
        pieces.append((at, end, sid))
        at = end
    ledger.lay(out, pieces)


def as_measured(ledger: Ledger, sid: int, ins: list[torch.Tensor]) -> int:
    """The state of a norm of gradients, or of a product of two: no gradient any more, unless one was none."""
    return ledger.as_value(sid) if all(ledger.is_grad(ledger.get(x)) for x in ins) else sid


def fills(ledger: Ledger, x: torch.Tensor, new: int) -> bool:
    """Whether nothing of what was in a tensor's memory matters once all of the tensor was overwritten.

    Many gradients may lie in one buffer, each in its place; of a forward's values see `Ledger.written`.

    Args:
        ledger: the states.
        x: the tensor.
        new: the state of what it was overwritten with.
    """
    return covers(x) or (ledger.is_grad(new) and x.is_contiguous())


def foreach_states(ledger: Ledger, traits: OpTraits, args: Any) -> list[int]:
    """The states that come of an op on lists: of each place, with what stands there in every list."""
    found = []
    for ins in _by_place(args):
        sids = [ledger.get(x) for x in ins]
        if traits.zeros:
            found.append(ledger.zero if covers(ins[0]) else sids[0])
        elif traits.copies:
            found.append(sids[-1])
        else:
            sid = ledger.combine(sids, adds=traits.adds)
            found.append(as_measured(ledger, sid, ins) if traits.measures else sid)
    return found


def written_foreach(ledger: Ledger, traits: OpTraits, args: Any) -> list[torch.Tensor]:
    """An op changed the tensors of lists, each with what stands at its place in the others; gives them."""
    places = list(zip(_by_place(args), foreach_states(ledger, traits, args), strict=True))
    changed = []
    for at in traits.changes:
        for x, (ins, sid) in zip(args[at] if at < len(args) else (), places, strict=False):
            written(ledger, traits, [x, *(y for y in ins if y is not x)], x, sid)
            changed.append(x)
    return changed


def joined(ledger: Ledger, out: torch.Tensor, ins: list[torch.Tensor]) -> None:
    """Gradients were put into one buffer, one after another: each piece of it stays what it was."""
    if not ledger.is_grad(ledger.get(out)) or not out.is_contiguous():
        return
    if any(x.shape[1:] != out.shape[1:] or x.dim() != out.dim() for x in ins):
        return
    if sum(int(x.shape[0]) for x in ins if x.dim()) != (int(out.shape[0]) if out.dim() else 0):
        return
    first, size = extent(local_of(out))[0], out.element_size()
    pieces = []
    for x in ins:
        end = first + x.numel() * size
        pieces.append((first, end, ledger.get(x)))
        first = end
    ledger.put_pieces(out, pieces)


def _by_place(args: Any) -> list[list[torch.Tensor]]:
    """What stands at each place of the first list and of those as long; a tensor by itself stands at all."""
    if not (n := len(args[0])):
        return []
    alone = [a for a in args if isinstance(a, torch.Tensor)]
    lists = [
        a for a in args if isinstance(a, list | tuple) and len(a) == n and isinstance(a[0], torch.Tensor)
    ]
    return [[*(of[i] for of in lists), *alone] for i in range(n)]
