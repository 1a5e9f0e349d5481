"""Real ranks for tests: gloo on CPU, forked from a process that has torchtitan imported.

A fork server (of the standard library) imports torchtitan once for the whole test session; every launch forks
its ranks from it, so that a rank starts in a fraction of a second with no process group and no threads.
pytest's own process is no good for that: autograd cannot run in a fork of a process in which it ran.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from placement_audit.config import RankEnv

ROOT = Path(__file__).parents[2]
DEADLINE = 240.0
"""Seconds that a launch may take."""


class RanksFailed(AssertionError):
    """A rank raised, died or did not come to its end; the message has each one's traceback."""


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """Run ``work(rank_env, *args)`` on ``ranks`` gloo ranks; the process group is there already.

    Args:
        ranks: how many.
        work: a module-level function; what it returns is pickled.
        args: for it; pickled.
        deadline: seconds; ranks that are not done are killed.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailed: not all of them came to their end.
    """
    with tempfile.TemporaryDirectory() as room:
        return _forked(ranks, f"{room}/store", work, args, deadline)


def apart(work: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> Any:
    """Run ``work(*args)`` in one such process that has no process group: for a trace of code that is not ours.

    What it imports, torchtitan for one, and what it leaves behind would be found by whichever test comes next.

    Args:
        work: a module-level function; what it returns is pickled.
        args: for it; pickled.
        deadline: seconds; a process that is not done is killed.

    Returns:
        What it returned.

    Raises:
        RanksFailed: it did not come to its end.
    """
    return _forked(1, None, work, args, deadline)[0]


def _forked(
    ranks: int, store: str | None, work: Callable[..., Any], args: tuple[Any, ...], deadline: float
) -> list[Any]:
    context = _context()
    end = time.monotonic() + deadline
    answers: dict[int, tuple[bool, Any]] = {}
    processes, pipes = [], {}
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            env = RankEnv(rank=rank, local_rank=rank, world_size=ranks)
            process = context.Process(
                target=_rank, args=(env, store, theirs, deadline, work, args), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        # A failed rank leaves the others waiting in a collective: give them no more time than it takes to
        # fail alike.
        while pipes and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(pipes), timeout=left):
                answers[pipes.pop(pipe)] = _answer(pipe)
            if not all(ok for ok, _ in answers.values()):
                end = min(end, time.monotonic() + 2)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if not (len(answers) == ranks and all(ok for ok, _ in answers.values())):
        raise RanksFailed(_message(ranks, answers))
    return [answers[r][1] for r in range(ranks)]


def _message(ranks: int, answers: dict[int, tuple[bool, Any]]) -> str:
    """The first failure in full, for the others mostly follow from it; ``answers`` are as they arrived."""
    failed = [f"rank {r}: {text}" for r, (ok, text) in answers.items() if not ok]
    silent = [f"rank {r}: no answer" for r in range(ranks) if r not in answers]
    return "\n".join([*failed[:1], *(text.strip().splitlines()[-1] for text in failed[1:]), *silent])


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "died without a word"


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.gloo.imported"])
    # The server takes its environment, and with it the import path, from when it starts.
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before.get("PYTHONPATH")])])
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        from multiprocessing.forkserver import ensure_running

        ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return context


def _rank(
    env: RankEnv,
    store: str | None,
    pipe: Connection,
    deadline: float,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        import torch.distributed as dist

        from placement_audit.pipeline import quiet

        if store is None:
            with quiet():
                result = work(*args)
        else:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=env.rank,
                world_size=env.world_size,
                timeout=timedelta(seconds=deadline),
            )
            with quiet():
                result = work(env, *args)
            dist.barrier()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # gloo's threads sometimes abort at interpreter exit
