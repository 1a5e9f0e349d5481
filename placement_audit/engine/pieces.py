"""States of pieces of a storage, by bytes: many gradients may lie in one buffer. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable

Piece = tuple[int, int, int]
"""(first byte, one after the last, state)."""


class Pieces:
    """The storages that are not in one state all over.

    Attributes:
        of: storage -> its pieces, in order; what lies in none is in the state of the rest.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.of: dict[int, list[Piece]] = {}

    def forget(self, key: int) -> None:
        """The storage is in one state again, or is another one at the same address."""
        self.of.pop(key, None)

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
