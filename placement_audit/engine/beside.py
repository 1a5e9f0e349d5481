"""Gradients side by side in one tensor: the parts of what a forward took apart, each in a state of its own.

The backward of `split`, `chunk` and of slices puts the parts' gradients back into one, and where the forward had
joined the same tensors before, takes it apart again: a latent that tp has summed beside a rotary part that it has
not (multi-head latent attention) is no mixture until something reads across both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.opargs import covers, place_of
from placement_audit.engine.optraits import OpTraits
from placement_audit.engine.pieces import Rows


def rows_of(ledger: Ledger, x: torch.Tensor) -> Rows | None:
    """Along which tensor dim a gradient is in different states, and in which; None where it is in one."""
    x = local_of(x)
    key = storage_key(x)
    if key not in ledger.pieces.period or ledger.has_own(x):
        return None
    found = ledger.pieces.rows(key, place_of(x), ledger.rest(key))
    if found is None:
        return None
    dim, rows = found
    return dim, tuple((i, j, ledger.combine(sids, adds=True)) for i, j, sids in rows)


def put_rows(ledger: Ledger, x: torch.Tensor, rows: Rows) -> None:
    """Write down a gradient, put as one already, that is in different states along a tensor dim."""
    x = local_of(x)
    if covers(x) and len({sid for *_, sid in rows[1]}) > 1 and ledger.is_grad(ledger.get(x)):
        ledger.pieces.cut(storage_key(x), place_of(x), rows)


def put_as_one(ledger: Ledger, x: torch.Tensor) -> None:
    """Take a gradient for one again that is in different states along a tensor dim.

    Where its parts lie depends on the rank: what is zero here is not zero there.
    """
    x = local_of(x)
    key = storage_key(x)
    if key in ledger.pieces.period:
        ledger.put(x, ledger.combine([sid for *_, sid in ledger.pieces.of[key]], adds=True))


def made_by(
    ledger: Ledger, func: Any, traits: OpTraits, args: Any, ins: Sequence[torch.Tensor], out: torch.Tensor
) -> Rows | None:
    """What an op of the backward makes of gradients side by side, its inputs' states being as before it ran.

    Args:
        ledger: the states.
        func: the op.
        traits: of it.
        args: its arguments.
        ins: the tensors among them.
        out: its result.

    Returns:
        The result's parts; None where it is in one state, or not known to be in several.
    """
    if traits.joins:
        return _joined(ledger, func._opname, args, ins, out)
    if traits.puts_beside:
        return _put_back(ledger, func._opname, args, out)
    same = traits.duplicates or traits.copies or traits.pointwise
    if not same or traits.zeros or traits.fresh or traits.into:
        return None
    return _place_by_place(ledger, ins[1:] if traits.copies else ins, out, adds=traits.adds)


def _joined(
    ledger: Ledger, op: str, args: Any, ins: Sequence[torch.Tensor], out: torch.Tensor
) -> Rows | None:
    dim = (args[1] if len(args) > 1 else 0) % out.dim()
    rows, at = [], 0
    for x in ins:
        length = 1 if op == "stack" else x.shape[dim] if x.dim() == out.dim() else 0
        rows += _moved(rows_of(ledger, x) if op != "stack" else None, dim, at, length, ledger.get(x))
        at += length
    return (dim, tuple(rows)) if at == out.shape[dim] else None


def _put_back(ledger: Ledger, op: str, args: Any, out: torch.Tensor) -> Rows | None:
    grad, dim, start = args[0], args[2] % out.dim(), args[3]
    whole = out.shape[dim]
    one = op == "select_backward"
    if not one and args[5] != 1:
        return None
    start = min(start + whole if start < 0 else start, whole)
    end = start + (1 if one else grad.shape[dim])
    inside = _moved(None if one else rows_of(ledger, grad), dim, start, end - start, ledger.get(grad))
    rows = ((0, start, ledger.zero), *inside, (end, whole, ledger.zero))
    return (dim, tuple(row for row in rows if row[0] < row[1])) if end <= whole else None


def _moved(rows: Rows | None, dim: int, at: int, length: int, sid: int) -> list[tuple[int, int, int]]:
    """The parts of a tensor that begins at another's index ``at`` along ``dim``."""
    if rows is None or rows[0] != dim:
        return [(at, at + length, sid)] if length else []
    return [(at + i, at + j, s) for i, j, s in rows[1]]


def _place_by_place(
    ledger: Ledger, ins: Sequence[torch.Tensor], out: torch.Tensor, *, adds: bool
) -> Rows | None:
    """The parts of what depends, at each place, on what stands there in every input."""
    found = [rows_of(ledger, x) if x.shape == out.shape else None for x in ins]
    dims = {rows[0] for rows in found if rows is not None}
    if len(dims) != 1:
        return None
    (dim,) = dims
    length = out.shape[dim]
    parts = [
        rows[1] if rows is not None else ((0, length, ledger.get(x)),)
        for rows, x in zip(found, ins, strict=True)
    ]
    cuts = sorted({i for part in parts for row in part for i in row[:2]})
    return dim, tuple(
        (
            i,
            j,
            ledger.combine([next(s for a, b, s in part if a <= i < b) for part in parts], adds=adds),
        )
        for i, j in pairwise(cuts)
    )
