"""Experts that data-parallel ranks share out among them, within FSDP2: their gradients are summed on the way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from placement_audit import Job
from tests.faults.family import RIGHT, Expect, Family, draw, laid_out, mine, unevenly
from tests.faults.functions import Gather, Scatter

N, D, E = 8, 6, 2
"""Rows of the batch, features, experts."""


class _Experts(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        w = draw("experts", E, D, D)
        self.w = nn.Parameter(w) if mesh is None else laid_out(w, mesh, Shard(0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Row i goes to expert i; [rows, D]."""
        if self.mesh is None:
            return torch.stack([F.linear(row, self.w[i % E]) for i, row in enumerate(rows)])
        group = self.mesh.get_group()
        every = Gather.apply(rows, group)
        own = torch.arange(len(every)) % E == self.mesh.get_local_rank()
        out = F.linear(every * own[:, None], self.w.to_local(grad_placements=[Shard(0)])[0])
        return Scatter.apply(out, group)


class Moe(nn.Module):
    """A linear layer, the experts, another linear layer.

    Args:
        ep: the mesh whose ranks have an expert each; None on one device.
    """

    def __init__(self, ep: DeviceMesh | None) -> None:
        super().__init__()
        self.up = nn.Parameter(draw("up", D, D))
        self.down = nn.Parameter(draw("down", D, D))
        self.experts = _Experts(ep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.experts(F.linear(x, self.up)), self.down)


def job(dp: DeviceMesh, ep: DeviceMesh, efsdp: DeviceMesh, mesh: DeviceMesh, factor: float | None) -> Job:
    """Each rank's loss is a mean of its own.

    Args:
        dp: that the rest of the model is sharded over.
        ep: that the experts are shared out over.
        efsdp: that each expert is sharded over.
        mesh: that is audited, with ``dp``'s dims in it.
        factor: that the experts' gradients are divided by; None for what FSDP2 takes.
    """
    x, y = draw("x", N, D, scale=1), draw("y", N, D)
    model: Any = Moe(ep)
    fully_shard(model.experts, mesh=efsdp)
    if factor is not None:
        model.experts.set_gradient_divide_factor(factor)
    fully_shard(model, mesh=dp)
    rank, n = dp.get_local_rank(), dp.size()
    rows, wanted = x.chunk(n)[rank], y.chunk(n)[rank]
    whole = Moe(None)
    return Job(
        model=model,
        step=lambda: (model(rows) - wanted).square().mean(),
        mesh=mesh,
        inputs=(rows, wanted),
        batch_placements={dp.mesh_dim_names[0]: Shard(0)},
        reference=lambda: (whole, lambda: (whole(x) - y).square().mean()),
    )


def _shared_out(mesh: DeviceMesh, variant: str) -> Job:
    return job(mesh["dp"], mesh["dp"], mesh["one"], mesh, 2.0 if variant == "divided by all ranks" else None)


SHARED_OUT = Family(
    name="experts within FSDP2",
    about="all ranks' rows have met in an expert's gradient, which is to be the average that the others are",
    mesh={"one": 1, "dp": 2},
    variants={
        "divided by all ranks": RIGHT,
        "not divided": Expect(gradients=unevenly("experts.w")),
    },
    job=_shared_out,
)


# --------------------------------------------------------------------------- the same factor for two mesh dims


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, bias=False)
        self.second = nn.Linear(D, D, bias=False)
        self.last = nn.Linear(D, D, bias=False)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(draw(name, D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


def divided(mesh: DeviceMesh, *, first: float, last: float, global_mean: bool = False) -> Job:
    """What the gradients of the first module, and of the other two, are divided by after their sum over 4 ranks."""
    x, y = draw("x", N, D, scale=1), draw("y", N, D)
    model: Any = _Two()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module, factor in ((model.first, first), (model, last)):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo divides in no other way
    rows, wanted = mine(mine(x, mesh, "rep"), mesh, "dp"), mine(mine(y, mesh, "rep"), mesh, "dp")
    n = y.numel() if global_mean else wanted.numel()
    whole = _Two()
    return Job(
        model=model,
        step=lambda: (model(rows) - wanted).square().sum() / n,
        mesh=mesh,
        inputs=(rows, wanted),
        batch_placements={"rep": Shard(0), "dp": Shard(0)},
        reference=lambda: (whole, lambda: (whole(x) - y).square().mean()),
    )


def _divided(mesh: DeviceMesh, variant: str) -> Job:
    everywhere = 1.0 if "not" in variant else 4.0
    first = 1.0 if "but the first" in variant else everywhere
    return divided(mesh, first=first, last=everywhere, global_mean="global mean" in variant)


DIVIDED = Family(
    name="FSDP2's divide factor",
    about="what was summed over two mesh dims is divided by all their ranks at once, or one module's gradients are not",
    mesh={"rep": 2, "dp": 2},
    variants={
        "own mean: by all": RIGHT,
        "global mean: not": RIGHT,
        "own mean: all but the first by all": Expect(gradients=unevenly("first.weight")),
    },
    job=_divided,
)

FAMILIES = (SHARED_OUT, DIVIDED)
