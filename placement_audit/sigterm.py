"""SIGTERM as a question that a watchdog thread can ask. No torch."""

from __future__ import annotations

import contextlib
import signal
import socket


class Sigterm:
    """From its creation on, in the main thread, SIGTERM ends nothing by itself."""

    def __init__(self) -> None:
        # A Python handler runs only between two steps of the main thread, which may wait in C++ for ever; the
        # number of the signal is written to the wakeup descriptor at once.
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        self._came = False

    def came(self) -> bool:
        """True once SIGTERM has come; from any thread."""
        with contextlib.suppress(BlockingIOError):
            self._came = self._came or signal.SIGTERM in self._reader.recv(4096)
        return self._came
