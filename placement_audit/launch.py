"""One rank of several, under torchrun or `placement_audit.ranks`: nobody hangs, one message, one status.

Ranks talk through the launcher's key-value store (`placement_audit.store`), never through the process group
under audit, which may be what hangs. Each rank has a watchdog thread. It looks four times a second whether
another rank failed or hangs, and ends its process even while the main thread waits in a collective:

- A rank that raises posts its error; all ranks leave with its status, and one of them tells it.
- A rank without progress (`placement_audit.progress`) for the timeout calls the roll: every watchdog posts
  how far its rank is and where its main thread stands; who is furthest behind, or does not answer, hung.
- A rank that is killed can post nothing: the others' failures say that it gave no answer, and where it was
  seen last. torchrun's SIGTERM, which follows at once, has to wait until that is told.
- At the end the ranks compare their judgements; rank 0 writes, the others wait until it has, for torchrun
  kills them all at the first non-zero exit.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from placement_audit import roll
from placement_audit.config import RankEnv
from placement_audit.errors import AuditError, IncompleteError
from placement_audit.failure import Failure, place_of_thread
from placement_audit.partial import PARTIAL
from placement_audit.progress import PROGRESS, Snapshot
from placement_audit.sigterm import Sigterm
from placement_audit.store import connect, places, post_place
from placement_audit.verdicts import Report

POLL = 0.25
"""Seconds between two looks of the watchdog."""

_ANSWER = 3.0
"""Seconds that a rank has to answer a roll call; its watchdog needs a fraction of one."""

_GRACE = 1.0
"""Seconds that a rank has to fail by itself, once another has: ranks often fail alike."""

_NO_STORE = "lost the launcher's store: the torchrun that hosts it, or its machine, is gone."


def leave(status: int) -> NoReturn:
    """End this process at once, whatever its threads wait for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class Ranks:
    """This rank's word to the others, and its watchdog."""

    def __init__(
        self,
        env: RankEnv,
        store: Any,
        *,
        say: Callable[[str, str], None],
        timeout: float,
        leave: Callable[[int], Any] = leave,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            env: this process's place.
            store: see `placement_audit.store.connect`.
            say: tells the user a message and its details.
            timeout: seconds without progress that count as hanging.
            leave: ends the process (replaced in tests).
        """
        self.env = env
        self.timeout = timeout
        self._store = store
        self._say = say
        self._leave = leave
        self._main = threading.get_ident()
        self._failing = threading.Event()
        self._sigterm: Sigterm | None = None
        self._posted: Snapshot | None = None
        self._closing = threading.Lock()
        self._stop = threading.Event()

    # ---- the watchdog

    def start(self) -> None:
        """Start the watchdog; from the main thread."""
        self._sigterm = Sigterm()
        threading.Thread(target=self._watch, name="placement-audit watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop the watchdog: this rank is about to leave in good order."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(POLL):
            try:
                self._post_place()
                if self._sigterm and self._sigterm.came() and not self._failing.is_set():
                    self.fail(IncompleteError("was told to end (SIGTERM) before the audit was done."))
                if self._store.check(["failed"]):
                    # Ranks that fail alike, each from its own main thread, are told once, without a rank.
                    if not self._failing.wait(_GRACE):
                        self._close_after_failure()
                    return
                quiet_for = time.monotonic() - PROGRESS.snapshot().since
                if self._store.check(["stalled"]) or quiet_for > self.timeout:
                    self._close_after_stall()
                    return
            except Exception:
                # The store is gone, and with it its launcher: none may linger, and no rank can speak for all.
                if not self._stop.is_set():
                    self._say_here(_NO_STORE)
                    self._leave(IncompleteError.exit_status)
                return

    def _post_place(self) -> None:
        """Let the others know how far this rank is, should it be killed."""
        last = PROGRESS.snapshot()
        if last is not self._posted:
            self._posted = last
            post_place(self._store, self.env.rank, roll.Trail(phase=last.phase, text=last.text))

    # ---- failing

    def fail(self, error: BaseException) -> None:
        """Post this rank's failure, let one rank tell it, and leave."""
        if isinstance(error, SystemExit):
            failure = Failure(error)
            error = IncompleteError(
                f"the job's code ended the process: {failure.what} ({failure.place}).",
                details=failure.details,
            )
        elif not isinstance(error, AuditError):
            failure = Failure(error)
            error = IncompleteError(
                f"placement-audit itself failed: {failure.what} ({failure.place}). Please report it with the "
                "traceback that --verbose shows.",
                details=failure.details,
            )
        record = {
            "status": error.exit_status,
            "message": error.message,
            "details": getattr(error, "details", ""),
        }
        PARTIAL.add("failed", **record)
        try:
            record["order"] = self._store.add("failures", 1)
            self._store.set(f"failure/{self.env.rank}", json.dumps(record))
            self._store.set("failed", "1")
            self._failing.set()
            self._close_after_failure()
        except Exception:
            self._say_here(f"{_NO_STORE}\n  rank {self.env.rank}: {error.message}", record["details"])
            self._leave(error.exit_status)

    def _close_after_failure(self) -> None:
        if not self._closing.acquire(blocking=False):
            time.sleep(3600)  # the watchdog is closing already and will end this process
        self._store.set(f"closed/{self.env.rank}", "1")
        closed = self._collect("closed")
        silent = places(self._store, set(range(self.env.world_size)).difference(closed))
        failures = {rank: json.loads(text) for rank, text in self._collect("failure", wait=0).items()}
        message, details, status = roll.failure_message(failures, self.env.world_size, silent)
        self._tell_once(message, details, ranks=closed)
        self._leave(status)

    def _close_after_stall(self) -> None:
        if not self._closing.acquire(blocking=False):
            return
        self._store.set("stalled", "1")
        last = PROGRESS.snapshot()
        answer = roll.Answer(
            count=last.count,
            phase=last.phase,
            text=last.text,
            seconds=round(time.monotonic() - last.since, 1),
            place=place_of_thread(self._main),
        )
        PARTIAL.add("hung", **asdict(answer))
        self._store.set(f"answer/{self.env.rank}", answer.to_json())
        answers = {r: roll.Answer.from_json(t) for r, t in self._collect("answer").items()}
        message = roll.hang_message(answers, self.env.world_size, self.timeout)
        self._tell_once(message, "", ranks=answers)
        self._leave(IncompleteError.exit_status)

    def _collect(self, key: str, wait: float = _ANSWER) -> dict[int, str]:
        """What the ranks posted under ``key``, after all have or ``wait`` seconds are over."""
        ranks = range(self.env.world_size)
        end = time.monotonic() + wait
        while not self._store.check([f"{key}/{r}" for r in ranks]) and time.monotonic() < end:
            time.sleep(0.05)
        return {r: self._store.get(f"{key}/{r}").decode() for r in ranks if self._store.check([f"{key}/{r}"])}

    def _tell_once(self, message: str, details: str, *, ranks: dict[int, Any]) -> None:
        """The lowest rank that answered tells; the others wait until it has."""
        # Answers that come late can make two ranks think that they are the lowest: the counter decides.
        if self.env.rank == min(ranks, default=self.env.rank) and self._store.add("tellers", 1) == 1:
            self._say(message, details)
            sys.stderr.flush()
            self._store.set("told", "1")
        else:
            end = time.monotonic() + _ANSWER
            while not self._store.check(["told"]) and time.monotonic() < end:
                time.sleep(0.02)
        self._gather_at_the_door(len(ranks))

    def _say_here(self, message: str, details: str = "") -> None:
        """Tell without asking the others, once a machine."""
        if self.env.local_rank == 0:
            self._say(message, details)

    def _gather_at_the_door(self, ranks: int) -> None:
        """Wait until ``ranks`` ranks are about to leave.

        torchrun sends SIGTERM to the rest at the first non-zero exit; leaving within one of its looks (0.1 s)
        lets every rank keep its own status.
        """
        try:
            self._store.add("leaving", 1)
            end = time.monotonic() + _ANSWER
            while self._store.add("leaving", 0) < ranks and time.monotonic() < end:
                time.sleep(0.01)
            if self.env.rank == 0:
                time.sleep(0.03)  # without torchrun rank 0 hosts the store: it must be the last to leave
        except Exception:  # the host left first, so all were told
            return

    # ---- ending well

    def agree(self, report: Report) -> None:
        """Compare the judgements of all ranks.

        Raises:
            IncompleteError: they differ.
        """
        PROGRESS.phase("comparing ranks")
        self._store.set(f"digest/{self.env.rank}", roll.digest(report))
        self._await([f"digest/{r}" for r in range(self.env.world_size)])
        roll.check_digests(self._collect("digest", wait=0))

    def share(self, status: int | None) -> int:
        """Rank 0 gives the final status once it has written; every rank returns it.

        Args:
            status: rank 0's; None on the others.
        """
        PROGRESS.phase("writing the report")
        if status is not None:
            self._store.set("done", str(status))
        else:
            self._await(["done"])
            status = int(self._store.get("done"))
        self.stop()
        self._gather_at_the_door(self.env.world_size)
        return status

    def _await(self, keys: list[str]) -> None:
        """Wait for keys; if they never come, the watchdog ends this process."""
        while not self._store.check(keys):
            time.sleep(0.05)


def run_rank(
    env: RankEnv,
    work: Callable[[Ranks], Report],
    finish: Callable[[Report], int],
    *,
    say: Callable[[str, str], None],
    timeout: float,
) -> NoReturn:
    """Run one rank to its end.

    Args:
        env: this process's place.
        work: audits; may raise.
        finish: rank 0 only: writes the report and returns the exit status.
        say: tells the user a message and its details.
        timeout: seconds without progress that count as hanging; ``work`` may set `Ranks.timeout`.
    """
    ranks = Ranks(env, connect(env), say=say, timeout=timeout)
    ranks.start()
    try:
        report = work(ranks)
        ranks.agree(report)
        status = finish(report) if env.rank == 0 else None
        leave(ranks.share(status))
    except KeyboardInterrupt:
        leave(130)
    except (Exception, SystemExit) as error:
        ranks.fail(error)
        leave(IncompleteError.exit_status)
