"""Suppressions, baselines and comparisons as a user types them, on a copy of torchtitan with the proposed fix in it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from titan_copy import PR_2532, WRAPPER, copy_of_torchtitan  # type: ignore[import-not-found]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
JOB = ROOT / "configs" / "fsdp_tp.toml"
CALL = "            sharded_local_tensor = x.to_local(grad_placements=grads)\n"
COMMENTED = """\
            sharded_local_tensor = x.to_local(
                grad_placements=grads  # placement-audit: ignore[PA202] PR 2532 is tried here until 2999-12-31
            )
"""


def ran(folder: Path, env: dict[str, str], *args: str, status: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "placement_audit", *args]
    env = {**env, "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], str(ROOT)])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


def findings(path: Path, rule: str) -> list[dict[str, Any]]:
    return [f for f in json.loads(path.read_text())["findings"] if f["rule_id"] == rule]


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / WRAPPER
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A copy of torchtitan with PR 2532 in it, its environment, and ``saved.json``, an audit of it."""
    folder = tmp_path_factory.mktemp("copy")
    env = copy_of_torchtitan(folder, PR_2532)
    done = ran(folder, env, "--config", str(JOB), "--format", "json", "--output-file", "saved.json", status=1)
    assert done.stderr == "", "progress is for terminals"
    return folder, env


def test_a_baseline_outlives_shifted_lines_and_another_world_size(copy):
    folder, env = copy
    out = ran(folder, env, "baseline", "--report", "saved.json", "--write", "known.json", status=0).stdout
    assert out == "known.json: 13 findings: 13 of PA202\n"
    edit(folder, "class ReplicateComputation(", "# one more line\n\n\nclass ReplicateComputation(")
    try:
        args = ("--config", str(JOB), "--world-size", "16", "--baseline", "known.json")
        over = ("--", "--parallelism.data_parallel_shard_degree", "8")
        text = ran(folder, env, *args, *over, status=0).stdout
    finally:
        edit(folder, "# one more line\n\n\n", "")
    assert "mesh        fsdp 8 x tp 2 (16 ranks)" in text
    assert "\n  known       13 findings of known.json\n\n" in text, "none is gone"
    assert text.splitlines()[-1].startswith("clean but for 13 suppressed: ")


def test_suppressed_by_a_comment_and_by_the_job_file(copy):
    """The comment is on another line of the call than the one that Python names; progress goes to a terminal."""
    folder, env = copy
    job = folder / "audit.toml"
    job.write_text(
        f'[placement_audit]\njob = "{JOB}"\n'
        '[[placement_audit.suppress]]\nrule = "PA501"\nparameter = "layers.*"\nreason = "as released"\n'
        '[[placement_audit.suppress]]\nrule = "PA201"\nreason = "not there"\n'
    )
    edit(folder, CALL, COMMENTED)
    terminal, ours = pty.openpty()
    try:
        command = [sys.executable, "-m", "placement_audit", "--config", "audit.toml", "--format", "json"]
        full = {**env, "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], str(ROOT)])}
        with (folder / "marked.json").open("wb") as out:
            done = subprocess.run(command, cwd=folder, env=full, stdout=out, stderr=ours, check=False)
        os.close(ours)
        said = os.read(terminal, 100_000).decode()
    finally:
        os.close(terminal)
        edit(folder, COMMENTED, CALL)
    assert done.returncode == 0, said
    assert "tracing one step ... " in said
    doubled = findings(folder / "marked.json", "PA202")
    line = next(
        n for n, text in enumerate((folder / WRAPPER).read_text().splitlines(), 1) if text + "\n" == CALL
    )
    assert [f["suppressed"] for f in doubled] == [
        {
            "by": "comment",
            "reason": "PR 2532 is tried here",
            "where": f"{WRAPPER}:{line + 1}",
            "until": "2999-12-31",
        }
    ] * 13
    dtypes = findings(folder / "marked.json", "PA501")
    assert {f["param_fqn"].startswith("layers.") for f in dtypes if f["suppressed"]} == {True}
    assert [f["param_fqn"] for f in dtypes if not f["suppressed"]] == ["norm.weight"]
    assert [f["message"] for f in findings(folder / "marked.json", "PA002")] == [
        "the config suppression of PA201 at audit.toml:7 fits no finding of this run"
    ]
    assert findings(folder / "marked.json", "PA001") == []


def test_diff_of_two_audits(copy):
    folder, env = copy
    stock = ran(ROOT, env | {"PYTHONPATH": ""}, "--config", str(JOB), "--format", "json", status=0).stdout
    (folder / "stock.json").write_text(stock)
    text = ran(folder, env, "diff", "stock.json", "saved.json", status=1).stdout
    lines = text.splitlines()
    at = lines.index("  layers.*.attention_norm.weight (6)")
    assert lines[at + 1 : at + 3] == [
        "    tp verdict        ok -> double reduction, x2",
        "    tp observed grad  R -> P(sum)",
    ]
    assert "  PA202 double-reduction on tp: 13 findings" in lines
    assert (
        ran(folder, env, "diff", "stock.json", "stock.json", status=0).stdout.splitlines()[-1] == "the same"
    )
