"""States of pieces of a storage, by bytes: many gradients may lie in one buffer, or one in parts. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Piece = tuple[int, int, int]
"""(first byte, one after the last, state)."""

Rows = tuple[int, tuple[tuple[int, int, int], ...]]
"""A tensor dim, and along it (first index, one after the last, state), in order and without a gap."""

Place = tuple[int, Sequence[tuple[int, int]], int]
"""Of a tensor in its storage: its first byte, (length, stride in bytes) of each tensor dim, bytes of an element."""


class Pieces:
    """The storages that are not in one state all over.

    Attributes:
        of: storage -> its pieces, in order; what lies in none is in the state of the rest.
        period: storage -> after how many bytes its pieces begin again: it is one gradient, cut along a tensor dim.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.of: dict[int, list[Piece]] = {}
        self.period: dict[int, int] = {}

    def forget(self, key: int) -> None:
        """The storage is in one state again, or is another one at the same address."""
        self.of.pop(key, None)
        self.period.pop(key, None)

    def reach(self, key: int, x: Place) -> tuple[int, int]:
        """The bytes within one period that a tensor's elements lie between: (first, one after the last)."""
        first, dims, size = x
        period = self.period[key]
        begin = first % period
        end = begin + size + sum((n - 1) * step for n, step in dims if step % period)
        return (begin, end) if end <= period else (0, period)

    def rows(self, key: int, x: Place, rest: int) -> tuple[int, list[tuple[int, int, list[int]]]] | None:
        """Along which of a tensor's dims its pieces lie, and at which indices; None where that is along none.

        Args:
            key: the storage.
            x: the tensor.
            rest: the state of what was never written down apart.

        Returns:
            Tensor dim, and along it (first index, one after the last, all states there).
        """
        first, dims, size = x
        period = self.period[key]
        apart = [(step, i) for i, (n, step) in enumerate(dims) if n > 1 and step % period]
        if not apart:
            return None
        step, dim = max(apart)
        length = dims[dim][0]
        inner = size + sum((dims[i][0] - 1) * other for other, i in apart if i != dim)
        begin = first % period
        end = begin + (length - 1) * step + inner
        if end > period:
            return None
        found = [
            (max(0, (a - begin - inner) // step + 1), min(length, -(-(b - begin) // step)), sid)
            for a, b, sid in self.over(key, begin, end, rest)
        ]
        cuts = sorted({0, length, *(a for a, _, _ in found), *(b for _, b, _ in found)})
        return dim, [(i, j, [sid for a, b, sid in found if a < j and i < b]) for i, j in pairwise(cuts)]

    def cut(self, key: int, x: Place, rows: Rows) -> None:
        """Write down a tensor that is all of its storage and in different states along one of its dims."""
        _, dims, _ = x
        at, found = rows
        length, step = dims[at]
        period = length * step
        nested = all(
            other < step or other % period == 0 for n, other in (*dims[:at], *dims[at + 1 :]) if n > 1
        )
        if nested:
            self.of[key] = [(a * step, b * step, sid) for a, b, sid in found]
            self.period[key] = period

    def over(self, key: int, first: int, end: int, rest: int) -> list[Piece]:
        """What lies in a range of bytes, in order.

        Args:
            key: the storage.
            first: first byte.
            end: one after the last.
            rest: the state of what was never written down apart.
        """
        found: list[Piece] = []
        at = first
        for a, b, sid in self.of.get(key, ()):
            if b <= first or a >= end:
                continue
            if a > at:
                found.append((at, a, rest))
            at = min(b, end)
            found.append((max(a, first), at, sid))
        if at < end:
            found.append((at, end, rest))
        return found

    def put(self, key: int, first: int, end: int, pieces: Iterable[Piece]) -> None:
        """Write down a range of bytes; the rest stays as it was."""
        before = [(a, min(b, first), sid) for a, b, sid in self.of.get(key, ()) if a < first]
        after = [(max(a, end), b, sid) for a, b, sid in self.of.get(key, ()) if b > end]
        merged: list[Piece] = []
        for a, b, sid in (*before, *pieces, *after):
            if merged and merged[-1][1:] == (a, sid):
                merged[-1] = (merged[-1][0], b, sid)
            else:
                merged.append((a, b, sid))
        self.of[key] = merged
