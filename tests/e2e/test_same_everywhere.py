"""The same verdicts alone and on real ranks, in text and saved; and the large job."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_ranks import statuses, torchrun  # type: ignore[import-not-found]
from titan_copy import PR_2532, copy_of_torchtitan  # type: ignore[import-not-found]

from placement_audit.report.json_io import loads

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e


def alone(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "placement_audit", *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


def verdicts(report: str) -> tuple[tuple[Any, ...], ...]:
    """All that must not depend on how it was run: judgements, findings, boundaries, the exit status."""
    r = loads(report)
    judgements = tuple(
        (j.param_fqn, j.mesh_dim, j.verdict, j.observed, j.factor, j.reason) for j in r.judgements
    )
    findings = tuple((f.fingerprint, f.message, f.observed, f.path) for f in r.findings)
    boundaries = tuple(
        (b.kind, b.call_site, b.param_fqn, b.src, b.dst, b.value_state) for b in r.trace.boundaries
    )
    return judgements, findings, boundaries, (r.exit_status,)


def first_difference(one: str, other: str) -> Any:
    """None where two reports say the same; a comparison as a whole would print megabytes."""
    for a, b in zip(verdicts(one), verdicts(other), strict=True):
        if len(a) != len(b):
            return len(a), len(b)
        for x, y in zip(a, b, strict=True):
            if x != y:
                return x, y
    return None


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torchtitan as the proposed fix has it."""
    folder = tmp_path_factory.mktemp("titan")
    copy_of_torchtitan(folder, PR_2532)
    return folder


@pytest.mark.gloo
def test_four_ranks_say_what_one_process_says(doubled: Path, tmp_path: Path) -> None:
    env = {"PYTHONPATH": f"{doubled}:{ROOT}"}
    config = ("--config", "configs/fsdp_tp.toml", "--format", "json")
    one = alone(*config, env={**os.environ, **env})
    four = torchrun(
        tmp_path, 4, "fsdp_tp.toml", "--no-measure", "--format", "json", PYTHONPATH=env["PYTHONPATH"]
    )
    assert one.returncode == 1
    assert first_difference(four.stdout, one.stdout) is None
    assert [f.rule_id for f in loads(one.stdout).findings if f.severity != "note"] == ["PA202"] * 13
    assert statuses(four.stderr) == [1, 1, 1, 1], "every rank leaves with the same status"


@pytest.mark.gloo
def test_two_ranks_say_what_one_process_says(tmp_path: Path) -> None:
    one = alone("--config", "configs/tp.toml", "--format", "json")
    two = torchrun(tmp_path, 2, "tp.toml", "--no-measure", "--format", "json")
    assert first_difference(two.stdout, one.stdout) is None, "and stdout holds one report, nothing else"
    assert (one.returncode, two.returncode) == (0, 0)


def test_a_saved_report_renders_again_without_torch(doubled: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{doubled}:{ROOT}", "COLUMNS": "120"}
    text = alone("--config", "configs/fsdp_tp.toml", env=env).stdout
    saved = tmp_path / "saved.json"
    done = alone("--config", "configs/fsdp_tp.toml", "--format", "json", "--output-file", str(saved), env=env)
    assert (done.returncode, done.stdout) == (1, "")
    code = (
        "import sys; from placement_audit.cli import main\n"
        f"status = main(['report', {str(saved)!r}])\n"
        "assert not {'torch', 'torchtitan'} & set(sys.modules), 'torch was imported'\n"
        "sys.exit(status)"
    )
    again = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert again.stderr == ""
    assert again.returncode == 1
    assert again.stdout.splitlines()[:-1] == text.splitlines()[:-1], "all but the seconds"
    assert json.loads(saved.read_text())["schema_version"] == "1"


def test_explain_answers_where_the_all_reduce_is() -> None:
    done = alone("explain", "layers.3.ffn_norm.weight", "--config", "configs/fsdp_tp.toml")
    assert done.returncode == 0
    tail = " ".join(done.stdout.split())
    assert (
        "The all-reduce over tp runs in the backward of DTensor.from_local at "
        "torchtitan/experiments/simple_fsdp/simple_fsdp.py:214: 256 elements, bfloat16." in tail
    )


def test_explain_says_where_there_is_none() -> None:
    done = alone("explain", "norm.weight", "--config", "configs/tp.toml")
    tail = " ".join(done.stdout.split())
    assert "No reduction over tp runs in backward: .grad is Partial(sum) on tp" in tail


def test_405b_on_1024_ranks_in_one_process_under_2_gib(tmp_path: Path) -> None:
    saved = tmp_path / "405b.json"
    done = alone("--config", "configs/llama3_405b.toml", "--format", "json", "--output-file", str(saved))
    assert done.returncode == 0, done.stderr
    report = loads(saved.read_text())
    assert (report.trace.run.world_size, report.trace.mesh.shape) == (1024, (128, 8))
    assert len(report.trace.params) == 1137
    assert {j.verdict.value for j in report.judgements} == {"ok"}
    assert len(report.judgements) == 2 * 1137
    assert not [f for f in report.findings if f.severity != "note"]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak < 2 * 1024 * 1024, f"{peak} KiB"
