"""What torchtitan's clipping and optimizers make of the parameters, traced alone: its own, and a user's."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from placement_audit import pipeline
from placement_audit.adapters import titan02_device
from placement_audit.config import load
from placement_audit.verdicts import Report, Verdict
from tests.trace.titan import CONFIGS, report_on
from tests.trace.worlds import of_rule

pytestmark = pytest.mark.trace

Audit = Callable[..., Report]

SPEC = """
import dataclasses
import torch
from torch.distributed.tensor import distribute_tensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {{"lr": lr}})

    @torch.no_grad()
    def step(self):
        params = [p for group in self.param_groups for p in group["params"]]
{step}

{build}

spec = get_train_spec("simple_fsdp.llama3")
register_train_spec("{name}", dataclasses.replace(spec, build_optimizers_fn=built))
"""

BUILD = """
def built(parts, options, dims):
    return OptimizersContainer(parts, Own, {"lr": options.lr})
"""


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def audited(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Audit]:
    """Audits a job of configs/ whose train spec has an optimizer of the user's, beside the job file."""
    name = "own_" + "".join(c if c.isalnum() else "_" for c in request.node.name)

    def audit(step: str, config: str = "fsdp_tp.toml", build: str = BUILD) -> Report:
        lines = "\n".join(f"        {line}" for line in step.strip().splitlines())
        (tmp_path / f"{name}.py").write_text(SPEC.format(step=lines, build=build, name=name))
        job = (CONFIGS / config).read_text()
        assert job.count('name = "simple_fsdp.llama3"') == 1
        job = job.replace('name = "simple_fsdp.llama3"', f'name = "{name}"')
        (tmp_path / "job.toml").write_text(f'{job}\n[experimental]\ncustom_import = "{name}"\n')
        return pipeline.run(load(tmp_path / "job.toml"))

    path = list(sys.path)
    yield audit
    sys.path[:] = path


def norms(report: Report) -> set[str]:
    return {p.fqn for p in report.trace.params if "norm" in p.fqn}


def matrices(report: Report) -> set[str]:
    return {p.fqn for p in report.trace.params if len(p.tensor.global_shape) == 2}


def errors(report: Report) -> list[str]:
    return [f.rule_id for f in report.findings if f.severity == "error"]


def followed(report: Report) -> bool:
    said = [b for b in report.blind_spots if "eaders of gradients" in b]
    assert len(said) == 1
    assert report.trace.readers == ("whether they keep replicas equal" in said[0])
    assert report.trace.readers != ("were not judged" in said[0])
    return report.trace.readers


# --------------------------------------------------------------------------- what torchtitan has


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("fsdp_tp.toml", ()),
        ("tp.toml", ()),
        ("hsdp_tp.toml", ()),
        ("fsdp_tp.toml", ("--optimizer.implementation", "foreach")),
        ("tp.toml", ("--optimizer.implementation", "for-loop")),
        ("tp.toml", ("--optimizer.name", "Adam")),
        ("fsdp_tp.toml", ("--optimizer.early_step_in_backward",)),
        ("fsdp_tp.toml", ("--model.name", "llama3")),
        ("tp.toml", ("--model.name", "llama3")),
        ("hsdp_tp.toml", ("--parallelism.data_parallel_shard_degree", "1")),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_its_own_readers_are_followed_and_right(config: str, overrides: tuple[str, ...]) -> None:
    report = report_on(config, *overrides)
    assert followed(report)
    assert [f for f in report.findings if f.severity != "note"] == []
    assert all(p.update is not None and p.update.state is not None for p in report.trace.params)
    if "--model.name" in overrides:
        return  # FSDP2 wants storage: values of one rank, on the CPU
    assert report.trace.run.device_type == "meta"


def test_the_readers_leave_nothing_else_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_on("tp.toml")
    monkeypatch.setattr(titan02_device, "too_large_for_readers", lambda *_: "not now")
    alone = report_on("tp.toml")
    assert not followed(alone)
    assert alone.trace.run.notes == report.trace.run.notes  # of `run_record`
    assert report.trace.ops == alone.trace.ops
    assert report.trace.collectives == alone.trace.collectives
    assert report.trace.boundaries == alone.trace.boundaries
    assert report.judgements == alone.judgements


# --------------------------------------------------------------------------- a user's optimizer

ORTHOGONAL = """
for p in params:
    g, w = p.grad.to_local(), p.to_local()
    if g.dim() == 2:
        g = 1.5 * g - 0.5 * (g @ g.T) @ g
    w.sub_(g, alpha=0.1)
"""

OF_THE_WHOLE = """
for p in params:
    g = p.grad.full_tensor()
    if g.dim() == 2:
        g = 1.5 * g - 0.5 * (g @ g.T) @ g
    p.to_local().sub_(distribute_tensor(g, p.device_mesh, p.placements).to_local(), alpha=0.1)
"""

OWN_TERMS = """
for p in params:
    g = p.grad if p.dim() == 1 else p.grad.redistribute(placements=p.placements)
    p.to_local().sub_(g.to_local(), alpha=0.1)
"""

OWN_NORM = """
total = torch.stack([p.grad.to_local().square().sum() for p in params]).sum().sqrt()
for p in params:
    p.grad.to_local().mul_((0.01 / total).clamp(max=1.0))
    p.to_local().sub_(p.grad.to_local(), alpha=0.1)
"""


def test_an_optimizer_on_shards_is_told(audited: Audit) -> None:
    report = audited(ORTHOGONAL)
    assert followed(report)
    found = of_rule(report, "PA404")
    assert {f.severity for f in found} == {"warning"}
    assert {f.param_fqn for f in found} == matrices(report)
    assert {f.path[0].call_site.code_line for f in found} == {"g = 1.5 * g - 0.5 * (g @ g.T) @ g"}
    assert errors(report) == []
    assert {j.verdict for j in report.judgements} == {Verdict.OK}


def test_one_on_whole_gradients_is_not(audited: Audit) -> None:
    report = audited(OF_THE_WHOLE, "tp.toml")
    assert followed(report)
    assert [f for f in report.findings if f.severity != "note"] == []


def test_one_that_takes_each_ranks_term_is_told(audited: Audit) -> None:
    report = audited(OWN_TERMS, "tp.toml")
    assert followed(report)
    found = of_rule(report, "PA403")
    assert {f.param_fqn for f in found} == norms(report)
    assert {f.mesh_dim for f in found} == {"tp"}
    assert {f.path[0].call_site.function for f in found} == {"step"}
    assert {f.path[0].call_site.code_line for f in found} == {OWN_TERMS.strip().splitlines()[-1].strip()}
    assert set(errors(report)) == {"PA403"}
    assert report.exit_status == 1


def test_one_that_clips_by_a_norm_of_this_ranks_own_is_told(audited: Audit) -> None:
    report = audited(OWN_NORM)
    assert followed(report)
    found = of_rule(report, "PA403")
    assert {(f.param_fqn, f.mesh_dim) for f in found} == {(fqn, "tp") for fqn in norms(report)}
    assert {f.path[0].call_site.code_line for f in found} == {
        "p.grad.to_local().mul_((0.01 / total).clamp(max=1.0))"
    }
    assert all("total norm" in f.next_step for f in found)
    assert report.exit_status == 1


@torch.no_grad()
def clip_by_local_parts(
    parameters: Iterable[torch.Tensor], max_norm: float, foreach: bool | None = None
) -> torch.Tensor:
    assert foreach, "as the Trainer asks for it"
    grads = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
    total = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    torch._foreach_mul_(grads, (max_norm / total).clamp(max=1.0))
    return total


def test_a_torchtitan_that_clips_by_local_parts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchtitan.distributed.utils as utils

    monkeypatch.setattr(utils, "clip_grad_norm_", clip_by_local_parts)
    report = report_on("fsdp_tp.toml")
    assert followed(report)
    found = of_rule(report, "PA403")
    assert {(f.param_fqn, f.mesh_dim) for f in found} == {(fqn, "tp") for fqn in norms(report)}
    assert {f.path[0].call_site.code_line for f in found} == {
        "torch._foreach_mul_(grads, (max_norm / total).clamp(max=1.0))"
    }
    assert {f.path[1].call_site.path for f in found} == {"torchtitan/components/optimizer.py"}


# --------------------------------------------------------------------------- what is not followed


@pytest.mark.parametrize(
    ("step", "build", "why"),
    [
        ("params[0].grad.to_local().norm().item()", BUILD, "cannot be called on meta tensors"),
        ("{}['momentum']", BUILD, "KeyError: 'momentum'"),
        ("torch._fused_sgd_()", BUILD, "_fused_sgd_"),
        (
            "pass",
            "def built(parts):\n    raise AssertionError",
            "build_optimizers_fn(parts) is called with 3",
        ),
        ("pass", BUILD.replace("Own, {", "Own, {'momentum': 1, "), "unexpected keyword argument 'momentum'"),
    ],
    ids=["values", "a plain bug", "torch refuses", "other arguments", "wrong options"],
)
def test_what_fails_is_told_in_a_note(audited: Audit, step: str, build: str, why: str) -> None:
    report = audited(step, build=build)
    assert not followed(report)
    (note,) = [n for n in report.trace.run.notes if "was not followed" in n]
    assert note.startswith("The optimizer of own_")
    assert why in note
    assert note.count("\n") == 0
    assert [f for f in report.findings if f.severity != "note"] == []
    assert {j.verdict for j in report.judgements} == {Verdict.OK}
    assert report.exit_status == 0


def test_where_memory_is_short_they_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("cpu"):
        model = torch.nn.Linear(1024, 1024, bias=False)
    cpu = torch.device("cpu")
    monkeypatch.setattr(titan02_device, "_available_memory", lambda: 5 * 2**22)
    assert titan02_device.too_large_for_readers(model, cpu) == ""
    monkeypatch.setattr(titan02_device, "_available_memory", lambda: 5 * 2**22 - 1)
    assert titan02_device.too_large_for_readers(model, cpu) == (
        "clipping and the optimizer were not followed: beside the weights they take 0.0 GiB, and 0.0 GiB are free."
    )
    assert titan02_device.too_large_for_readers(model.to("meta"), torch.device("meta")) == ""
    assert math.isinf(titan02_device._free(torch.device("meta")))


def test_a_model_with_storage_says_when_they_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def too_large(_model: torch.nn.Module, device: torch.device) -> str:
        calls.append(device)
        return "too large"

    monkeypatch.setattr(titan02_device, "too_large_for_readers", too_large)
    config = load(CONFIGS / "tp.toml", overrides=["--model.name", "llama3"])
    report = pipeline.run(config)
    assert not followed(report)
    assert "too large" in report.trace.run.notes
    assert len(calls) == 1
