"""What is true of a variant, by numbers alone: no line of placement-audit takes part.

Each rank runs the step and, beside it, the same program on one device, and compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Module

from placement_audit import Job

TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Numbers of one variant.

    Attributes:
        errors: relative error of each gradient, the worst over the ranks; infinite where one side has
            none, or one of another shape.
        multiples: of those that are wrong: how many times the reference they are, where they are a multiple.
        updates: relative error of each parameter's change by the optimizer; empty without one.
    """

    errors: dict[str, float]
    multiples: dict[str, float]
    updates: dict[str, float]

    @property
    def wrong(self) -> set[str]:
        # Not at most the tolerance: a gradient that is no number is wrong, too.
        return {n for n, e in self.errors.items() if not e <= TOLERANCE}


def whole(x: torch.Tensor, job: Job, name: str, mesh: DeviceMesh) -> torch.Tensor:
    """As its placements, or what was declared of it, say."""
    if isinstance(x, DTensor):
        return x.detach().full_tensor()
    declared: Any = (job.declared or {}).get(name, {})
    placements = [declared.get(d, Replicate()) for d in mesh.mesh_dim_names or ()]
    return DTensor.from_local(x.detach(), mesh, placements, run_check=False).full_tensor()


def truth_of(job: Job, mesh: DeviceMesh) -> Truth:
    """Run it once; collective."""
    out = job.step()
    if isinstance(out, torch.Tensor):
        out.backward()
    assert job.reference is not None
    theirs, their_step, *rest = job.reference()
    their_step().backward()
    reference = dict(theirs.named_parameters())
    errors, multiples = {}, {}
    ours = getattr(job.model, "module", job.model)  # in DistributedDataParallel
    for name, p in ours.named_parameters():
        g, r = p.grad, reference[name].grad
        if g is None or r is None:
            errors[name] = 0.0 if g is r else float("inf")
            continue
        full = whole(g, job, name, mesh).double()
        r = r.double()
        if full.shape != r.shape:
            errors[name] = float("inf")
            continue
        errors[name] = _worst(((full - r).norm() / r.norm()).item())
        factor = ((full * r).sum() / r.square().sum()).item()
        if errors[name] > TOLERANCE and _worst(((full - factor * r).norm() / r.norm()).item()) <= TOLERANCE:
            multiples[name] = factor
    updates = {}
    if job.optimizer is not None:
        before = {n: p.detach().clone() for n, p in reference.items()}
        _step(job.optimizer, job.model)
        _step(rest[0] if rest else job.optimizer, theirs)
        for name, p in ours.named_parameters():
            full, r = whole(p, job, name, mesh).double(), reference[name].detach().double()
            updates[name] = _worst(((full - r).norm() / (r - before[name].double()).norm()).item())
    return Truth(errors=errors, multiples=multiples, updates=updates)


def _step(update: Any, model: Module) -> None:
    made = update(model)
    if hasattr(made, "step"):
        made.step()


def _worst(error: float) -> float:
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return max(errors)
