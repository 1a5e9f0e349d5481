"""Under torchrun: one message, one status on every rank, nobody hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.gloo]

REPO = Path(__file__).parents[2]

FAULT = """\
import os, signal, time
from torchtitan.models.llama3.model import model

original = model.FeedForward.forward
calls = 0


def forward(self, x):
    global calls
    calls += hasattr(self.w1.weight, "placements")  # not those of the model on one device
    if calls == 3 and os.environ["RANK"] in os.environ["FAULTY_RANKS"].split(","):
        if os.environ["FAULT"] == "hang":
            time.sleep(1000)
        if os.environ["FAULT"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("this layer is broken")
    return original(self, x)


model.FeedForward.forward = forward
"""


def torchrun(
    folder: Path, ranks: int, config: str, *args: str, **env: str
) -> subprocess.CompletedProcess[str]:
    return ended(started(folder, [f"--nproc-per-node={ranks}", "--standalone"], config, *args, **env))


def started(folder: Path, launcher: list[str], config: str, *args: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "placement_audit"]
    return subprocess.Popen(
        [*command, "--config", str(REPO / "configs" / config), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **env},
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        # SIGTERM, not run()'s SIGKILL: torchrun hands it on, so that no rank outlives a failing test.
        process.terminate()
        out, err = process.communicate(timeout=60)
        pytest.fail(f"torchrun did not end:\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def ours(stderr: str) -> str:
    """What we said, without torchrun's own 40 lines."""
    text = stderr[stderr.index("placement-audit: error: ") :]
    return re.split(r"\n[EW]\d{4} |\nTraceback", text)[0]


def statuses(stderr: str) -> list[int]:
    """Exit status of every rank, as torchrun lists them."""
    return [int(n) for n in re.findall(r"^  exitcode  : (-?\d+)", stderr, flags=re.M)]


@pytest.fixture
def faulty(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULT)
    return tmp_path


def test_a_hung_rank_is_named_with_its_place_and_what_the_others_wait_in(faulty):
    override = ("--", "--experimental.custom_import", "faulty")
    done = torchrun(faulty, 2, "tp.toml", "--timeout", "12", *override, FAULT="hang", FAULTY_RANKS="1")
    lines = ours(done.stderr).splitlines()
    assert lines[0] == "placement-audit: error: rank 1 hung: no progress for 12 s (--timeout)."
    assert re.fullmatch(
        r"  rank 1: got as far as all_gather #\d+ over tp in forward, \d+ s ago; "
        r"at faulty.py:\d+ in forward",
        lines[1],
    )
    assert re.match(r"  rank 0: waiting in reduce_scatter #\d+ over tp in forward, \d+ s ago; at ", lines[2])
    assert statuses(done.stderr) == [3, 3]
    assert done.stderr.count("placement-audit: error") == 1


def test_a_rank_that_raises_ends_all_with_its_own_error(faulty):
    override = ("--", "--experimental.custom_import", "faulty")
    done = torchrun(faulty, 2, "tp.toml", *override, FAULT="raise", FAULTY_RANKS="1")
    assert ours(done.stderr).startswith(
        "placement-audit: error: rank 1: simple_fsdp.llama3 debugmodel failed in forward, module "
        '"layers.2.feed_forward": RuntimeError: this layer is broken (faulty.py:16 in forward).'
    )
    assert statuses(done.stderr) == [3, 3]
    assert done.stderr.count("placement-audit: error") == 1


def test_a_killed_rank_is_named_although_torchrun_ends_the_others_at_once(faulty):
    override = ("--", "--experimental.custom_import", "faulty")
    done = torchrun(faulty, 2, "tp.toml", *override, FAULT="kill", FAULTY_RANKS="1")
    lines = ours(done.stderr).splitlines()
    assert lines[0] == (
        "placement-audit: error: rank 1 gave no answer: killed (out of memory?), or busy outside Python."
    )
    assert re.match(r"  rank 1 was last seen during \w+", lines[1])
    assert lines[2].startswith("  rank 0: ")
    assert sorted(statuses(done.stderr)) == [-signal.SIGKILL, 3]
    assert done.stderr.count("placement-audit: error") == 1


def test_two_nodes_measure_by_default_and_give_one_report(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for node in (0, 1):
        launcher = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--rdzv-backend=static"]
        launcher += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        agents.append(started(tmp_path, launcher, "tp.toml", "--format", "json", "--log-dir", "logs"))
    first, second = [ended(agent) for agent in agents]
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    run = json.loads(first.stdout)["trace"]["run"]
    assert (run["world_size"], run["evidence"]) == (2, ["traced", "measured"])
    assert second.stdout == ""
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank-0.jsonl", "rank-1.jsonl"]


def test_ranks_that_fail_alike_say_it_once(faulty):
    override = ("--", "--experimental.custom_import", "faulty")
    done = torchrun(faulty, 2, "tp.toml", *override, FAULT="raise", FAULTY_RANKS="0,1")
    assert ours(done.stderr).startswith(
        "placement-audit: error: simple_fsdp.llama3 debugmodel failed in forward"
    )
    assert statuses(done.stderr) == [3, 3]
    assert done.stderr.count("placement-audit: error") == 1


def test_a_world_that_torchrun_did_not_start(tmp_path):
    done = torchrun(tmp_path, 2, "fsdp_tp.toml")
    assert "torchrun started 2 processes, but the job's degrees give 4" in ours(done.stderr)
    assert statuses(done.stderr) == [2, 2]
    assert done.stderr.count("placement-audit: error") == 1


def test_a_good_run_prints_one_report_and_ends_clean(tmp_path):
    done = torchrun(tmp_path, 2, "tp.toml")
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert done.stdout.count("clean: 57 parameters judged") == 1


def test_rank_0_that_cannot_write_ends_all(tmp_path):
    done = torchrun(tmp_path, 2, "tp.toml", "--output-file", "/dev/full")
    assert ours(done.stderr) == (
        "placement-audit: error: /dev/full: cannot be written: No space left on device."
    )
    assert statuses(done.stderr) == [2, 2]
