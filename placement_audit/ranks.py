"""Real ranks without torchrun: forked from this process, watched, and told about as one program.

This process imports torch and torchtitan, finds what is wrong with the job as far as that is known without
building it (`placement_audit.preflight`), forks the ranks, and from then on only watches
(`placement_audit.ranks_watch`) and hosts their key-value store. Each rank runs the very path of a rank under
torchrun (`placement_audit.launch`); what it prints goes to a log, what it has to say to its `Outbox`, and how
far it is to its file of partial evidence.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from placement_audit import launch, preflight, store
from placement_audit.config import AuditConfig, RankEnv
from placement_audit.errors import AuditError, IncompleteError, UsageError
from placement_audit.partial import PARTIAL, Reader
from placement_audit.ranks_watch import Watch
from placement_audit.spawn import Child, Outbox
from placement_audit.verdicts import Report

Tell = Callable[[str, float | None], None]
Work = Callable[[AuditConfig, RankEnv, Tell], Report]


class _Stopped(BaseException):
    """A signal that ends this process; the ranks and the temporary folder go first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How to run the ranks.

    Attributes:
        log_dir: folder for logs and partial evidence, which then stay; None for a temporary one.
        verbose: rank 0 writes to this process's standard error, not to a log.
        tell: called with each phase's name, and None when it begins or its seconds when it ends.
    """

    log_dir: str | None
    verbose: bool
    tell: Tell


def run_ranks(config: AuditConfig, work: Work, manner: Manner) -> Report:
    """Run a job on CPU ranks of its own, as many as its mesh has.

    Args:
        config: the job; `AuditConfig.device` must not ask for a GPU.
        work: what each rank runs.
        manner: see `Manner`.

    Returns:
        Rank 0's report.

    Raises:
        AuditError: the job cannot be run, or a rank failed, hung, or was killed; no rank is left then.
    """
    if config.device == "cuda":
        raise UsageError(
            "--device cuda: --measure starts CPU ranks. To measure on GPUs start them with torchrun: "
            "torchrun --nproc-per-node N -m placement_audit --config FILE."
        )
    # Forks share no GPU context with their parent, and these need none.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # As torchrun has it: one thread a rank, unless the user says otherwise.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        # All ranks are on this machine, whose name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    children: list[Child] = []
    with stoppable(), _folder(manner.log_dir) as folder:
        try:
            manner.tell("import", None)
            start = time.monotonic()
            hosted = _start(replace(config, device="cpu"), work, manner, folder, children)
            manner.tell("import", time.monotonic() - start)
            readers = [Reader(_evidence_path(folder, c.rank)) for c in children]
            report = Watch(children, readers, timeout=config.timeout, tell=manner.tell).run()
            del hosted
            return report
        finally:
            for child in children:
                child.kill()
                child.outbox.close()


def _make_folder(folder: Path) -> None:
    """Make the folder of --log-dir.

    Raises:
        UsageError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: cannot be made: {error.strerror or error}.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--log-dir {folder}: no permission to write there.")


def open_evidence(folder: str, rank: int) -> None:
    """Let a rank that torchrun started keep what it has so far.

    Raises:
        UsageError: it cannot be kept there.
    """
    _make_folder(Path(folder))
    try:
        PARTIAL.open(_evidence_path(Path(folder), rank))
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: cannot be written to: {error.strerror or error}.") from error
    PARTIAL.follow()


def _evidence_path(folder: Path, rank: int) -> Path:
    """Where a rank keeps what it has so far."""
    return folder / f"rank-{rank}.jsonl"


def _log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


@contextmanager
def _folder(log_dir: str | None) -> Generator[Path]:
    """The folder of a run: the user's own, or one that stays only where it is evidence."""
    if log_dir is not None:
        _make_folder(Path(log_dir))
        yield Path(log_dir)
        return
    folder = Path(tempfile.mkdtemp(prefix="placement-audit-"))
    keep = False
    try:
        yield folder
    except AuditError as error:
        keep = error.exit_status == IncompleteError.exit_status
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def stoppable() -> Generator[None]:
    """Clean up before a signal ends this process as it would have."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise _Stopped(number)

    changed: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                changed[number] = signal.signal(number, stop)
    try:
        yield
    except _Stopped as stopped:
        signal.signal(stopped.number, signal.SIG_DFL)
        os.kill(os.getpid(), stopped.number)
        raise
    finally:
        for number, before in changed.items():
            signal.signal(number, before)


def _start(config: AuditConfig, work: Work, manner: Manner, folder: Path, children: list[Child]) -> Any:
    """Fork the ranks into ``children``, and return the store that they talk through."""
    ranks = preflight.check(config)
    for rank in range(ranks):
        for path in (_evidence_path(folder, rank), _log_path(folder, rank)):
            path.unlink(missing_ok=True)  # of an earlier run, which would be read as this one's
    listener = store.listen()
    for rank in range(ranks):
        env = RankEnv(rank=rank, local_rank=rank, world_size=ranks)

        def main(outbox: Outbox, env: RankEnv = env) -> NoReturn:
            environ = store.environ_of(env, listener)
            listener.close()  # or the port would outlive its host
            os.environ.update(environ)
            _be_rank(config, work, env, folder, outbox)

        show = manner.verbose and rank == 0
        children.append(Child(rank, main, log=_log_path(folder, rank), show=show))
    # After the forks, for it starts threads; until then the ranks wait at the open port.
    return store.serve(listener)


def _be_rank(config: AuditConfig, work: Work, env: RankEnv, folder: Path, outbox: Outbox) -> NoReturn:
    """The life of a rank, after the fork."""
    PARTIAL.open(_evidence_path(folder, env.rank))
    PARTIAL.follow()

    def finish(report: Report) -> int:
        outbox.put(report)
        return 0

    launch.run_rank(
        env,
        lambda _ranks: work(config, env, PARTIAL.phase),
        finish,
        say=lambda message, details: outbox.put((message, details)),
        timeout=config.timeout,
    )
