"""A patched torchtitan really runs, right, with the reduction where the patch says: a process for each release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from placement_audit import cli
from tests.releases import Unreachable, release
from tests.trace.titan03 import needs

pytestmark = pytest.mark.trace

REPO = Path(__file__).parents[2]
NORMS = 13  # of the debug model: two a layer and the last


def patched(version: str, folder: Path, *options: str) -> Path:
    try:
        release(version, folder)
    except Unreachable as why:
        pytest.skip(str(why))
    if options:
        assert cli.main(["patch", "--torchtitan", str(folder), *options]) == 0
    return folder


def audit(titan: Path, *options: str | Path) -> dict[str, Any]:
    """Audit a job on that torchtitan; the JSON report."""
    return json.loads(python(titan, "-m", "placement_audit", "--format", "json", *options))


def python(*words: str | Path) -> str:
    """What Python prints, with folders of packages first; ``words`` are those folders, then arguments."""
    folders = [str(word) for word in words if isinstance(word, Path)]
    done = subprocess.run(
        [sys.executable, *(word for word in words if isinstance(word, str))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*folders, str(REPO)])},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def backward(report: dict[str, Any], name: str, *, tp: bool) -> Counter[tuple[str, int]]:
    """Backward collectives of a kind, over tp or over data parallel: how many of each dtype and size."""
    return Counter(
        (one["dtype"], one["numel"])
        for one in report["trace"]["collectives"]
        if one["phase"] == "backward" and one["name"] == name and (one["mesh_dims"] == ["tp"]) is tp
    )


def verdicts(report: dict[str, Any], *, tp: bool) -> Counter[str]:
    """Verdicts on tp, or on the data-parallel mesh dims, which each release names in its own way."""
    return Counter(one["verdict"] for one in report["judgements"] if (one["mesh_dim"] == "tp") is tp)


def test_as_released_the_sum_comes_first(tmp_path):
    report = audit(patched("0.2.2", tmp_path), "--config", str(REPO / "configs" / "fsdp_tp.toml"))
    assert backward(report, "all_reduce", tp=True) == {("bfloat16", 256): NORMS}


@pytest.mark.parametrize("version", ["0.2.0", "0.2.1", "0.2.2"])
def test_the_sum_comes_after_data_parallel_in_its_dtype(version, tmp_path):
    report = audit(patched(version, tmp_path, "--apply"), "--config", str(REPO / "configs" / "fsdp_tp.toml"))
    # one rank's half of a norm of 256, where the release has the whole of it, in bfloat16
    assert backward(report, "all_reduce", tp=True) == {("float32", 128): NORMS}
    assert report["findings"] == []
    assert verdicts(report, tp=True) == verdicts(report, tp=False) == {"ok": 57}
    scatters = backward(report, "reduce_scatter", tp=False)
    assert sum(scatters.values()) == 57
    assert scatters["float32", 256] >= NORMS


@pytest.mark.parametrize("version", ["0.2.0", "0.2.2"])
def test_the_sum_is_left_to_readers_in_the_deferred_form(version, tmp_path):
    report = audit(
        patched(version, tmp_path, "--deferred", "--apply"), "--config", str(REPO / "configs/fsdp_tp.toml")
    )
    assert backward(report, "all_reduce", tp=True) == {}
    assert verdicts(report, tp=True) == {"deferred": NORMS, "ok": 57 - NORMS}
    assert verdicts(report, tp=False) == {"ok": 57}


def test_both_reductions_of_ddp_are_one(tmp_path):
    config = (
        "--config",
        str(REPO / "configs" / "hsdp_tp.toml"),
        "--",
        "--parallelism.data_parallel_shard_degree",
        "1",
    )
    report = audit(patched("0.2.2", tmp_path, "--apply"), *config)
    joint = [
        one
        for one in report["trace"]["collectives"]
        if one["phase"] == "backward" and len(one["mesh_dims"]) == 2
    ]
    assert Counter((one["name"], one["dtype"]) for one in joint) == {("all_reduce", "float32"): NORMS}
    assert {one["verdict"] for one in report["judgements"]} == {"ok"}


def patched03(folder: Path, *options: str) -> tuple[Path, Path]:
    """torchtitan 0.3.0, and what it needs."""
    titan = patched("0.3.0", folder, *options)
    try:
        return titan, needs()
    except Unreachable as why:
        pytest.skip(str(why))


def test_in_03_too(tmp_path):
    titan, more = patched03(tmp_path, "--apply")
    report = audit(titan, more, "--config", str(REPO / "configs" / "titan03_fsdp_tp.toml"))
    assert report["findings"] == []
    assert verdicts(report, tp=True) == verdicts(report, tp=False) == {"ok": 45}
    assert backward(report, "all_reduce", tp=True) == {("float32", 128): NORMS}


_TWO_MODELS = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
def model(dtype):
    return data_parallel(torch.nn.Linear(4, 4), mesh, "fully_shard", MixedPrecisionPolicy(dtype, torch.float32))
first, second, third = model(torch.bfloat16), model(torch.float32), model(torch.bfloat16)
print(first.weight.dtype, second.weight.dtype, type(first) is type(third))
"""


def test_a_second_model_in_the_process_has_its_own_dtype(tmp_path):
    said = [
        python(*patched03(tmp_path / name, *how), "-c", _TWO_MODELS)
        for name, how in (("s", ()), ("m", ("--apply",)))
    ]
    assert said == ["torch.bfloat16 torch.bfloat16 True\n", "torch.bfloat16 torch.float32 True\n"]


@pytest.mark.parametrize("form", [(), ("--deferred",)], ids=["reduced", "deferred"])
def test_measured_on_four_ranks_it_is_right(form, tmp_path):
    titan = patched("0.2.2", tmp_path, *form, "--apply")
    report = audit(titan, "--config", str(REPO / "configs" / "fsdp_tp.toml"), "--measure")
    rows = report["measurement"]["params"]
    assert max(row["grad_error"] for row in rows) < 1e-5
    assert max(row["step_error"] for row in rows) < 1e-6
    assert {len(one["evidence"]) for one in report["judgements"]} == {2}
    assert report["findings"] == []


COMPILED = """
import sys
from placement_audit.config import RankEnv, load
from placement_audit.build import build
import torch
# torch 2.13 cannot compile the released model whole with selective checkpointing
overrides = ["--training.seq_len", "128", "--activation_checkpoint.mode", "none"]
case = build(load(sys.argv[1], overrides=overrides, device="cpu"), rank_env=RankEnv.from_environ({}))
case.model.compile(backend="aot_eager", fullgraph=True)
case.step()
grads = {n: p.grad for n, p in case.model.named_parameters()}
norms = {n: g for n, g in grads.items() if "norm" in n}
print(len(norms), len({str(g.placements) for g in norms.values()}), next(iter(norms.values())).placements)
"""


def test_it_compiles_into_one_graph(tmp_path):
    titan = patched("0.2.2", tmp_path, "--apply")
    printed = python(titan, "-c", COMPILED, str(REPO / "configs" / "fsdp_tp.toml"))
    assert printed.split(maxsplit=2) == ["13", "1", "(Shard(dim=0), Replicate())\n"]
