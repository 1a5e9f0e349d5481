"""Forked ranks, watched: real processes, with no torch in them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from placement_audit import preflight, ranks, store
from placement_audit import ranks_watch as watch
from placement_audit.config import AuditConfig
from placement_audit.errors import AuditError, IncompleteError
from placement_audit.partial import Partial, Reader
from placement_audit.progress import Progress
from placement_audit.spawn import Child, Outbox

pytestmark = pytest.mark.unit


class Run:
    """Ranks that each run one function, and what the watch made of them."""

    def __init__(self, folder: Path, *mains, timeout: float = 60.0) -> None:
        self.folder = folder
        self.phases: list[tuple[str, float | None]] = []
        children = []
        for rank, main in enumerate(mains):
            evidence = folder / f"rank-{rank}.jsonl"

            def work(outbox: Outbox, main=main, evidence=evidence) -> None:
                partial = Partial()
                partial.open(evidence)
                progress = Progress()
                partial.follow(progress)
                progress.phase("trace")
                progress.note("all_gather #1 over tp in forward")
                main(outbox, partial)

            children.append(Child(rank, work, log=folder / f"rank-{rank}.log"))
        readers = [Reader(folder / f"rank-{r}.jsonl") for r in range(len(mains))]
        start = time.monotonic()
        self.error: AuditError | None = None
        try:
            watch.Watch(
                children, readers, timeout=timeout, tell=lambda name, s: self.phases.append((name, s))
            ).run()
        except AuditError as error:
            self.error = error
        self.seconds = time.monotonic() - start
        self.alive = [c.rank for c in children if not c.poll()]
        for child in children:
            child.kill()
            child.outbox.close()

    @property
    def lines(self) -> list[str]:
        assert self.error is not None
        return self.error.message.splitlines()


def wait(_outbox: Outbox, _partial: Partial) -> None:
    time.sleep(60)


def die(_outbox: Outbox, _partial: Partial) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_where_it_was_and_the_others_are_ended(tmp_path):
    run = Run(tmp_path, wait, die)
    assert run.lines == [
        "rank 1 was killed by signal 9 (SIGKILL) during trace, at or after all_gather #1 over tp in forward.",
        "  If nobody sent it, memory ran out: take fewer ranks, or a smaller model.",
        "  rank 0: during trace, at or after all_gather #1 over tp in forward",
        f"logs and partial evidence of all ranks: {tmp_path}",
    ]
    assert isinstance(run.error, IncompleteError)
    assert run.alive == []
    assert run.seconds < 5


def test_a_crash_shows_what_was_printed_before_and_the_innermost_calls(tmp_path):
    def crash(_outbox: Outbox, _partial: Partial) -> None:
        print("a word before", file=sys.stderr)
        ctypes.string_at(0)

    run = Run(tmp_path, wait, crash)
    assert run.lines[0].startswith("rank 1 was killed by signal 11 (SIGSEGV) during trace")
    at = run.lines.index("from the end of rank 1's log:")
    assert run.lines[at + 1] == "  | a word before"
    assert "  | Fatal Python error: Segmentation fault" in run.lines
    assert any(line.endswith(" in crash") for line in run.lines)


def test_leaving_with_status_0_before_there_is_a_report_is_no_success(tmp_path):
    run = Run(tmp_path, wait, lambda _outbox, _partial: os._exit(0))
    assert run.lines[0] == (
        "rank 1 ended with exit status 0 before the audit was done, during trace, at or after all_gather #1 "
        "over tp in forward."
    )


def test_what_a_rank_told_stands_although_another_then_crashes(tmp_path):
    def tell(outbox: Outbox, partial: Partial) -> None:
        partial.add("failed", message="broken")
        outbox.put(("rank 0: broken", "its traceback"))
        time.sleep(0.2)
        os._exit(3)

    def abort_later(_outbox: Outbox, _partial: Partial) -> None:
        time.sleep(0.1)
        os.abort()

    run = Run(tmp_path, tell, abort_later)
    assert run.lines[0] == "rank 0: broken"
    assert run.error is not None
    assert (run.error.exit_status, getattr(run.error, "details", "")) == (3, "its traceback")


def test_the_log_shown_is_that_of_the_first_to_fail(tmp_path):
    def fail(after: float, word: str):
        def main(outbox: Outbox, partial: Partial) -> None:
            time.sleep(after)
            print(word)
            partial.add("failed", message=word)
            if word == "second":
                outbox.put(("rank 1: first", ""))
            time.sleep(0.5)
            os._exit(3)

        return main

    run = Run(tmp_path, fail(0.2, "second"), fail(0, "first"))
    assert run.lines[:3] == ["rank 1: first", "from the end of rank 1's log:", "  | first"]


def test_a_users_mistake_is_told_as_it_is(tmp_path):
    def tell(outbox: Outbox, _partial: Partial) -> None:
        outbox.put(("no such model", ""))
        os._exit(2)

    run = Run(tmp_path, tell, lambda _outbox, _partial: os._exit(2))
    assert run.lines == ["no such model"]
    assert run.error is not None
    assert run.error.exit_status == 2


def test_a_rank_that_does_not_leave_with_the_others_is_ended_and_shows_its_stack(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_GRACE", 0.3)

    def stuck_outside_python(_outbox: Outbox, _partial: Partial) -> None:
        ctypes.PyDLL(None).sleep(60)

    def tell(outbox: Outbox, _partial: Partial) -> None:
        outbox.put(("rank 1 hung", ""))
        os._exit(3)

    run = Run(tmp_path, tell, stuck_outside_python)
    assert run.lines[0] == "rank 1 hung"
    assert "from the end of rank 1's log:" in run.lines
    assert any(line.endswith(" in stuck_outside_python") for line in run.lines)
    assert run.alive == []


def test_ranks_that_all_stand_still_are_ended_from_outside(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_BACKSTOP", 0.2)

    def stop(_outbox: Outbox, _partial: Partial) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    run = Run(tmp_path, stop, stop, timeout=0.3)
    assert run.lines == [
        "all 2 ranks hang: no progress for 0.3 s (--timeout), and no watchdog answers.",
        "  ranks 0-1: during trace, at or after all_gather #1 over tp in forward",
        f"logs and partial evidence of all ranks: {tmp_path}",
    ]
    assert run.alive == []
    assert run.seconds < 5


def test_the_phases_of_rank_0_are_shown_and_no_others(tmp_path):
    def phases(name: str):
        def main(_outbox: Outbox, partial: Partial) -> None:
            partial.phase(name, None)
            partial.phase(name, 1.5)
            time.sleep(0.2)
            os._exit(3)

        return main

    assert Run(tmp_path, phases("build"), phases("other")).phases == [("build", None), ("build", 1.5)]


def test_an_interrupt_leaves_no_rank_and_nothing_of_an_earlier_run(tmp_path, monkeypatch):
    def interrupted(_listener: object) -> None:
        end = time.monotonic() + 10
        while len(list(pids.iterdir())) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        raise KeyboardInterrupt

    old = tmp_path / "rank-1.jsonl"
    old.write_text('{"kind": "phase", "name": "of an earlier run", "seconds": null}\n')
    pids = tmp_path / "pids"
    pids.mkdir()

    def be_rank(*_args: object) -> None:
        (pids / str(os.getpid())).touch()
        time.sleep(60)

    monkeypatch.setattr(preflight, "check", lambda _config: 2)
    monkeypatch.setattr(ranks, "_be_rank", be_rank)
    monkeypatch.setattr(store, "serve", interrupted)
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # set by the run, and put back after the test
    config = AuditConfig(path="", sha256="", job={}, job_path="")
    manner = ranks.Manner(log_dir=str(tmp_path), verbose=False, tell=lambda _name, _seconds: None)
    with pytest.raises(KeyboardInterrupt):
        ranks.run_ranks(config, lambda *_args: pytest.fail("no rank works"), manner)
    assert not [p.name for p in pids.iterdir() if running(int(p.name))]
    assert not old.exists()


def test_a_rank_ends_with_the_process_that_forked_it(tmp_path):
    def rank(_outbox: Outbox) -> None:
        (tmp_path / "rank").write_text(str(os.getpid()))
        time.sleep(60)

    parent = os.fork()
    if parent == 0:
        try:
            Child(0, rank, log=tmp_path / "rank-0.log")
            time.sleep(60)
        finally:
            os._exit(0)
    end = time.monotonic() + 10
    while not (tmp_path / "rank").exists() or not (tmp_path / "rank").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    pid = int((tmp_path / "rank").read_text())
    while running(pid):
        assert time.monotonic() < end, "the rank outlived its parent"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """False for a zombie too: nobody may be there to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_record_that_is_not_whole_yet_is_read_when_it_is(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    reader = Reader(path)
    assert reader.new() == []
    path.write_bytes(b'{"kind": "a"}\n{"ki')
    assert reader.new() == [{"kind": "a"}]
    with path.open("ab") as file:
        file.write(b'nd": "b"}\n')
    assert reader.new() == [{"kind": "b"}]
    assert reader.new() == []


def test_nothing_is_kept_before_a_file_is_open(tmp_path):
    partial = Partial()
    partial.add("note")
    partial.open(tmp_path / "a")
    partial.add("note", text="x")
    (record,) = Reader(tmp_path / "a").new()
    assert record["text"] == "x"
