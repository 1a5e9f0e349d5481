"""A fake world in this process, and the report on a small module in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from placement_audit.case import Case
from placement_audit.engine.trace import trace_step
from placement_audit.judge import judge
from placement_audit.tracing import RunRecord
from placement_audit.verdicts import Finding, Judgement, Report, Verdict


def fake_mesh(rank: int = 0, **dims: int) -> DeviceMesh:
    """A mesh of fake ranks, e.g. ``fake_mesh(fsdp=2, tp=2)``; this process is ``rank``."""
    if dist.is_initialized():
        dist.destroy_process_group()
    size = 1
    for n in dims.values():
        size *= n
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def audit(
    model: nn.Module,
    mesh: DeviceMesh,
    step: Callable[[], Any],
    inputs: tuple[torch.Tensor, ...] = (),
    batch_dims: tuple[str, ...] = ("fsdp",),
) -> Report:
    """The report on one step of ``model``."""
    case = Case(
        name="test",
        model=model,
        mesh=mesh,
        batch_dims=batch_dims,
        inputs=inputs,
        step=step,
        device_type="cpu",
        backend="fake",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(trace_step(case, run_record(case)))


def run_record(case: Case) -> RunRecord:
    """A run record for tests."""
    return RunRecord(
        tool_version="test",
        versions=(),
        model=case.name,
        config_path="",
        config_sha256="",
        overrides=(),
        world_size=dist.get_world_size(),
        backend=case.backend,
        device_type=case.device_type,
        evidence=("traced",),
        notes=(),
        phases=(),
    )


def verdicts(report: Report, fqn: str) -> dict[str, Verdict]:
    """Mesh dim -> verdict of one parameter."""
    return {j.mesh_dim: j.verdict for j in report.judgements if j.param_fqn == fqn}


def judgement(report: Report, fqn: str, mesh_dim: str) -> Judgement:
    """The judgement on one parameter and mesh dim."""
    return next(j for j in report.judgements if j.param_fqn == fqn and j.mesh_dim == mesh_dim)


def of_rule(report: Report, rule_id: str) -> list[Finding]:
    """The findings of one rule."""
    return [f for f in report.findings if f.rule_id == rule_id]
