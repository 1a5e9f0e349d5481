"""Watches forked ranks: shows how far they are, ends all when one is gone, says which and where."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from placement_audit import roll
from placement_audit.errors import AuditError, IncompleteError, UsageError
from placement_audit.partial import Reader
from placement_audit.spawn import Child
from placement_audit.verdicts import Report

_POLL = 0.02
"""Seconds between two looks at the ranks."""

_GRACE = 5.0
"""Seconds that ranks have to leave once one has left, which it does when all that can have been heard."""

_BACKSTOP = 10.0
"""Seconds after the deadline when ranks whose watchdogs do not answer are ended from here."""

_DUMP = 0.3
"""Seconds that a rank has to write its stack to its log."""

_TAIL = 12
"""Lines of a log that a message shows."""


class RanksError(AuditError):
    """What the ranks told.

    Attributes:
        details: the traceback of the one that failed.
    """

    def __init__(self, message: str, details: str, exit_status: int) -> None:
        super().__init__(message)
        self.details = details
        self.exit_status = exit_status


class Watch:
    """The ranks of one run until their end.

    A rank's outbox has rank 0's `Report`, or what the ranks agreed to tell: message and details.
    """

    def __init__(
        self,
        children: Sequence[Child],
        readers: Sequence[Reader],
        *,
        timeout: float,
        tell: Callable[[str, float | None], None],
    ) -> None:
        """Nothing happens before `run`.

        Args:
            children: the ranks, by rank.
            readers: of their partial evidence.
            timeout: seconds without progress that count as hanging; the ranks' own watchdogs come first.
            tell: shows rank 0's phases.
        """
        self._children = children
        self._readers = readers
        self._timeout = timeout
        self._tell = tell
        self._trails = {c.rank: roll.Trail() for c in children}
        self._failed: list[int] = []
        self._heard = time.monotonic()

    def run(self) -> Report:
        """Watch until all have left.

        Returns:
            Rank 0's report.

        Raises:
            AuditError: there is none, and no rank is left.
        """
        ended: list[Child] = []
        leave_by: float | None = None
        while True:
            before, ended = len(ended), [c for c in self._children if c.poll()]
            self._read()
            if len(ended) > before:
                self._check_lost(ended)
            now = time.monotonic()
            if ended and leave_by is None:
                leave_by = now + _GRACE
            if len(ended) == len(self._children) or (leave_by and now > leave_by):
                return self._result()
            if now - self._heard > self._timeout + _BACKSTOP:
                message = roll.stuck_message(self._trails, self._timeout)
                self._end_rest()
                raise self._incomplete(message, 0)
            time.sleep(_POLL)

    def _read(self) -> None:
        """Take in what the ranks recorded since the last look; show rank 0's phases."""
        for rank, reader in enumerate(self._readers):
            for record in reader.new():
                self._heard = time.monotonic()
                match record["kind"]:
                    case "note":
                        self._trails[rank] = roll.Trail(phase=record["phase"], text=record["text"])
                    case "failed":
                        self._trails[rank] = replace(self._trails[rank], failed=record["message"])
                        self._failed.append(rank)
                    case "phase" if rank == 0:
                        self._tell(record["name"], record["seconds"])

    def _check_lost(self, ended: list[Child]) -> None:
        """Look for ranks that are gone without a word: by a signal, a crash, or the job's own exit.

        Raises:
            IncompleteError: there are some, and no rank had told of an error before.
        """
        values = [c.outbox.get() for c in self._children]
        # A rank that failed leaves with a status of ours, and one that is done after rank 0's report.
        ours = [IncompleteError.exit_status, UsageError.exit_status]
        if isinstance(values[0], Report):
            ours.append(0)
        lost = {c.rank: c.status for c in ended if c.status is not None and c.status not in ours}
        if lost and not any(isinstance(v, tuple) for v in values):
            message = roll.lost_message(lost, self._trails)
            self._end_rest()
            raise self._incomplete(message, min(lost))

    def _result(self) -> Report:
        """The report, once all have left; or what was told, at the latest when their time is over."""
        killed = self._end_rest()
        values = [c.outbox.get() for c in self._children]
        if isinstance(values[0], Report) and not any(c.status for c in self._children):
            return values[0]
        # The first to fail; the others may have met its end.
        show = (self._failed or killed or [None])[0]
        for child, value in zip(self._children, values, strict=True):
            if isinstance(value, tuple):
                message, details = value
                if child.status == UsageError.exit_status:
                    raise RanksError(message, details, child.status)
                error = self._incomplete(message, show)
                raise RanksError(error.message, details, error.exit_status)
        lines = ["the ranks failed and left no message.", *roll.trail_lines(self._trails)]
        raise self._incomplete("\n".join(lines), show)

    def _end_rest(self) -> list[int]:
        """End the ranks that are left, and return which; each one's log gets its stack."""
        rest = [c for c in self._children if not c.poll()]
        for child in rest:
            child.dump()
        if rest:
            time.sleep(_DUMP)
        for child in rest:
            child.kill()
        return [c.rank for c in rest]

    def _incomplete(self, message: str, rank: int | None) -> IncompleteError:
        """The message, the end of one rank's log, and where the rest is."""
        lines = [message]
        log = self._children[rank or 0].log
        text = log.read_text(errors="replace") if rank is not None and log.exists() else ""
        if text:
            lines.append(f"from the end of rank {rank}'s log:")
            lines += [f"  | {line}".rstrip() for line in _tail(text.splitlines())]
        lines.append(f"logs and partial evidence of all ranks: {log.parent}")
        return IncompleteError("\n".join(lines))


def _tail(lines: list[str]) -> list[str]:
    """The last lines of a log; of a stack in it the innermost calls, which faulthandler writes first."""
    start = max(len(lines) - _TAIL, 0)
    stacks = [i for i, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if stacks:
        start = min(start, max(stacks[-1] - 4, 0))
    return lines[start : start + _TAIL]
