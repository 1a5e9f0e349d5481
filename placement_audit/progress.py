"""What this process is doing just now: two cheap calls for whoever works, one snapshot for whoever watches.

The tracer notes each collective before it runs it; under torchrun a watchdog thread reads the last note
when a rank hangs (`placement_audit.launch`). Alone nobody reads it. No torch, no locks: the attributes are
replaced as one tuple, which a reader in another thread sees whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment.

    Attributes:
        count: notes and phases so far; equal on ranks that are equally far.
        phase: "build", "trace", ...
        text: the last note of this phase, such as "all_reduce over tp, collective 12"; "" for none yet.
        since: monotonic clock, in seconds, when the last note was taken.
    """

    count: int = 0
    phase: str = "start"
    text: str = ""
    since: float = 0.0


class Progress:
    """The last note of this process."""

    def __init__(self) -> None:
        self._last = Snapshot(since=time.monotonic())

    def phase(self, name: str) -> None:
        """A new phase begins."""
        self._last = Snapshot(self._last.count + 1, name, "", time.monotonic())

    def note(self, text: str) -> None:
        """Something begins that may wait for other ranks: name it before it runs."""
        last = self._last
        self._last = Snapshot(last.count + 1, last.phase, text, time.monotonic())

    def snapshot(self) -> Snapshot:
        """The last note."""
        return self._last


PROGRESS = Progress()
"""This process's own."""
