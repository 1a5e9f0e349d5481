"""What one rank has so far, on disk at once: evidence that outlives the rank.

One JSON line a record, written without a buffer, so that even SIGKILL loses none. `PARTIAL` writes nothing
until it is opened: alone there is nobody to read it. No torch.

Records: ``note`` (how far: phase and what was noted last), ``phase`` (begins where ``seconds`` is null, else
has ended), ``failed`` and ``hung`` (the rank's own last words), and whatever else `Partial.add` is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from placement_audit.progress import PROGRESS, Progress


class Partial:
    """One rank's file of JSON lines."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._start = 0.0

    def open(self, path: Path) -> None:
        """Write to ``path`` from now on; an older file is emptied.

        Raises:
            OSError: it cannot be opened.
        """
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._start = time.monotonic()

    def add(self, kind: str, **fields: Any) -> None:
        """Write one record; nothing where no file is open. A full disk is no reason to stop an audit.

        Args:
            kind: of record.
            fields: plain JSON data.
        """
        if self._fd is None:
            return
        record = {"at": round(time.monotonic() - self._start, 3), "kind": kind, **fields}
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(record).encode() + b"\n")

    def phase(self, name: str, seconds: float | None) -> None:
        """A phase begins (None) or has ended; the form of `placement_audit.pipeline.Options.tell`."""
        self.add("phase", name=name, seconds=seconds)

    def follow(self, progress: Progress = PROGRESS) -> None:
        """Keep each note that ``progress`` takes from now on."""

        def then(take: Callable[[str], None]) -> Callable[[str], None]:
            def both(text: str) -> None:
                take(text)
                last = progress.snapshot()
                self.add("note", phase=last.phase, text=last.text)

            return both

        for name in ("phase", "note"):
            setattr(progress, name, then(getattr(progress, name)))


PARTIAL = Partial()
"""This process's own."""


class Reader:
    """Another process's file, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The records since the last call; a line that is not whole yet stays for the next."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]
