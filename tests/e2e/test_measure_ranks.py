"""--measure alone: ranks of our own, and from outside one program. Each test is one launch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.gloo]

REPO = Path(__file__).parents[2]

FAULT = """\
import ctypes, os, signal, time
from torchtitan.models.llama3.model import model

original = model.FeedForward.forward
calls = 0


def forward(self, x):
    global calls
    calls += hasattr(self.w1.weight, "placements")  # not those of the model on one device
    if calls == 3 and os.environ["RANK"] in os.environ["FAULTY_RANKS"].split(","):
        print("the fault begins")
        match os.environ["FAULT"]:
            case "hang":
                time.sleep(1000)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise RuntimeError("this layer is broken")
    return original(self, x)


model.FeedForward.forward = forward
"""
FAULTY = ("--", "--experimental.custom_import", "faulty")


class Program:
    """One run of placement-audit in a folder of its own, which is its temporary folder too."""

    def __init__(self, folder: Path, config: str, *args: str, **env: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        (folder / "faulty.py").write_text(FAULT)
        command = [sys.executable, "-m", "placement_audit", *args]
        at = command.index("--") if "--" in command else len(command)
        command[at:at] = ["--config", str(REPO / "configs" / config), "--measure"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **env, "PYTHONPATH": str(REPO), "TMPDIR": str(self.temporary)},
        )
        self.out = self.err = ""

    def end(self) -> int:
        """Wait for the program's own end; no rank may be left then."""
        ranks = self.ranks()
        try:
            self.out, self.err = self.process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, err = self.process.communicate()
            pytest.fail(f"it did not end:\n{err}")
        assert_gone(ranks)
        return self.process.returncode

    def ranks(self) -> list[int]:
        """Process ids of its children."""
        return [pid for pid, parent in processes() if parent == self.process.pid]

    @property
    def kept(self) -> list[str]:
        """What it left in its temporary folder (torch leaves a cache there)."""
        return sorted(p.name for p in self.temporary.glob("*placement*"))


def processes() -> Iterator[tuple[int, int]]:
    """Every process that runs, and its parent."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            yield int(stat.parent.name), int(fields[1])


def assert_gone(pids: list[int], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while left := {pid for pid, _ in processes()}.intersection(pids):
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.02)


# --------------------------------------------------------------------------- good runs


def test_it_is_one_program_with_one_report_and_nothing_left_behind(tmp_path):
    program = Program(tmp_path, "tp.toml")
    assert program.end() == 0, program.err
    assert program.err == ""
    assert program.out.count("clean: 57 parameters judged") == 1
    assert program.out.count("placement-audit 0") == 1
    assert program.kept == []


def test_a_json_file_says_that_it_was_measured_and_the_logs_are_kept_where_asked(tmp_path):
    output = ("--format", "json", "--output-file", "out.json", "--log-dir", "logs/new")
    program = Program(tmp_path, "fsdp_tp.toml", *output)
    assert program.end() == 0, program.err
    assert (program.out, program.err, program.kept) == ("", "", [])
    run = json.loads((tmp_path / "out.json").read_text())["trace"]["run"]
    assert run["evidence"] == ["traced", "measured"]
    assert (run["world_size"], run["backend"], run["device_type"]) == (4, "gloo", "cpu")
    logs = tmp_path / "logs" / "new"
    assert sorted(p.name for p in logs.iterdir()) == [
        f"rank-{r}.{kind}" for r in range(4) for kind in ("jsonl", "log")
    ]
    for rank in range(4):
        records = [json.loads(line) for line in (logs / f"rank-{rank}.jsonl").read_text().splitlines()]
        ended = [r["name"] for r in records if r["kind"] == "phase" and r["seconds"] is not None]
        assert ended[0] == "build"
        assert ended[-1] == "judge"
        assert any(re.fullmatch(r"all_gather #\d+ over tp in forward", r.get("text", "")) for r in records)
        assert (logs / f"rank-{rank}.log").read_text() == ""


# --------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--", "--model.name", "simple_fsdp.lama3"), "Did you mean 'simple_fsdp.llama3'?"),
        (("--device", "cuda"), "--measure starts CPU ranks. To measure on GPUs start them with torchrun"),
        (("--log-dir", "faulty.py"), "--log-dir faulty.py: cannot be made: File exists."),
    ],
)
def test_what_is_wrong_is_found_before_any_rank_starts(tmp_path, args, message):
    program = Program(tmp_path, "tp.toml", *args)
    assert program.end() == 2
    assert program.err.startswith("placement-audit: error: ")
    assert message in program.err
    assert program.err.count("\n") == 1
    assert program.kept == []


def test_what_only_the_ranks_can_find_is_told_once(tmp_path):
    program = Program(tmp_path, "tp.toml", "--", "--experimental.custom_import", "absent")
    assert program.end() == 2
    assert program.err.startswith("placement-audit: error: experimental.custom_import = 'absent': cannot be")
    assert program.err.count("placement-audit: error") == 1
    assert program.kept == []


# --------------------------------------------------------------------------- ranks that fail


def evidence(program: Program) -> Path:
    """The folder that the message names."""
    last = program.err.splitlines()[-1]
    folder = Path(last.removeprefix("logs and partial evidence of all ranks: "))
    assert program.kept == [folder.name]
    return folder


def test_a_rank_that_raises_is_named_with_its_place(tmp_path):
    program = Program(tmp_path, "tp.toml", *FAULTY, FAULT="raise", FAULTY_RANKS="1")
    assert program.end() == 3
    lines = program.err.splitlines()
    assert lines[0].startswith(
        "placement-audit: error: rank 1: simple_fsdp.llama3 debugmodel failed in forward, module "
        '"layers.2.feed_forward": RuntimeError: this layer is broken (faulty.py:'
    )
    assert lines[1:3] == ["from the end of rank 1's log:", "  | the fault begins"]
    assert program.out == ""
    records = [json.loads(line) for line in (evidence(program) / "rank-1.jsonl").read_text().splitlines()]
    (failed,) = [r for r in records if r["kind"] == "failed"]
    assert "this layer is broken" in failed["message"]
    assert "Traceback" in failed["details"]


def test_a_rank_that_hangs_is_named_with_its_place_within_the_deadline(tmp_path):
    start = time.monotonic()
    program = Program(tmp_path, "tp.toml", "--timeout", "5", *FAULTY, FAULT="hang", FAULTY_RANKS="1")
    assert program.end() == 3
    assert time.monotonic() - start < 60
    lines = program.err.splitlines()
    assert lines[0] == "placement-audit: error: rank 1 hung: no progress for 5 s (--timeout)."
    assert re.fullmatch(
        r"  rank 1: got as far as all_gather #\d+ over tp in forward, \d+ s ago; at faulty.py:\d+ in forward",
        lines[1],
    )
    assert re.match(r"  rank 0: waiting in reduce_scatter #\d+ over tp in forward, \d+ s ago; at ", lines[2])
    evidence(program)


def test_a_killed_rank_is_named_with_its_place_and_the_others_evidence_is_kept(tmp_path):
    program = Program(tmp_path, "tp.toml", *FAULTY, FAULT="kill", FAULTY_RANKS="1")
    assert program.end() == 3
    lines = program.err.splitlines()
    assert re.fullmatch(
        r"placement-audit: error: rank 1 was killed by signal 9 \(SIGKILL\) during trace, at or after "
        r"all_gather #\d+ over tp in forward\.",
        lines[0],
    )
    assert re.match(r"  rank 0: during trace, at or after \w+ #\d+ over tp in forward", lines[2])
    assert lines[3:5] == ["from the end of rank 1's log:", "  | the fault begins"]
    records = [json.loads(line) for line in (evidence(program) / "rank-0.jsonl").read_text().splitlines()]
    assert next(r["name"] for r in records if r["kind"] == "phase" and r["seconds"]) == "build"


# --------------------------------------------------------------------------- signals


def test_no_rank_outlives_the_program(tmp_path):
    # To the parent alone: a terminal's Ctrl-C would reach the ranks too.
    statuses = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}
    programs = {}
    for number in statuses:
        (tmp_path / number.name).mkdir()
        programs[number] = Program(
            tmp_path / number.name, "tp.toml", *FAULTY, FAULT="hang", FAULTY_RANKS="0,1"
        )
    end = time.monotonic() + 100
    for number, program in programs.items():
        while sum("begins" in log.read_text() for log in program.temporary.glob("*/rank-*.log")) < 2:
            assert time.monotonic() < end
            assert program.process.poll() is None, program.process.communicate()[1]
            time.sleep(0.05)
        assert len(program.ranks()) == 2
        program.process.send_signal(number)
        assert program.end() == statuses[number]
        assert (program.out, program.err) == ("", "")
        if number != signal.SIGKILL:
            assert program.kept == []
