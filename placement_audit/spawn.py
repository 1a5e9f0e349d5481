"""One rank as a fork of this process: quiet, with a way to answer, and never outliving it. No torch.

A fork has everything imported already: a rank starts in milliseconds where a fresh process pays seconds for
torch and torchtitan. That is safe as long as the parent ran no tensor operation and has no process group.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from placement_audit.errors import IncompleteError

_PR_SET_PDEATHSIG = 1


class Outbox:
    """What a rank has to say to the process that started it, kept in a file without a name."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed by the parent

    def put(self, value: object) -> None:
        """The rank's side; the last value counts."""
        data = memoryview(pickle.dumps(value))
        at = 0
        # By position: a fork shares its parent's file offset.
        while at < len(data):
            at += os.pwrite(self._file.fileno(), data[at:], at)

    def get(self) -> Any:
        """The parent's side: the value; None where there is none, or not a whole one."""
        data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        try:
            return pickle.loads(data)
        except (EOFError, pickle.UnpicklingError):
            return None

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


class Child:
    """A forked rank.

    Attributes:
        rank: 0-based.
        log: where its output goes.
        outbox: what it has to say.
        status: exit status, negative for a signal as in `subprocess`; None while it runs.
    """

    def __init__(self, rank: int, main: Callable[[Outbox], object], *, log: Path, show: bool = False) -> None:
        """Fork.

        Args:
            rank: 0-based.
            main: the rank's work; ends the process by itself.
            log: where its output goes.
            show: let it write to this process's standard error in place of the log.
        """
        self.rank = rank
        self.log = log
        self.outbox = Outbox()
        self.status: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write what is still in the buffer
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _die_with(parent)
                _redirect(log, show=show)
                main(self.outbox)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(IncompleteError.exit_status)

    def poll(self) -> bool:
        """True once it has ended; ``status`` says how."""
        if self.status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def dump(self) -> None:
        """Let it write its stack to its log, even while it is busy outside Python."""
        if not self.poll():
            os.kill(self._pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End it now and wait until it has."""
        if not self.poll():
            os.kill(self._pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _die_with(parent: int) -> None:
    """Ctrl-C is the parent's to handle; its death, even by SIGKILL, is this process's own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup's
            signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Elsewhere the watchdog ends this process when the parent's store is gone (`placement_audit.launch`).
    if os.getppid() != parent:
        os._exit(IncompleteError.exit_status)


def _redirect(log: Path, *, show: bool) -> None:
    """File descriptors, not sys.stdout: C++ writes to them too."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if not show:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        os.dup2(target, 2)
        os.close(target)
    os.dup2(2, 1)
    # Line by line: a killed rank's last words must not stay in a buffer.
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    # A crash shows its stack, and `Child.dump` that of the main thread; the watchdog's says nothing.
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
