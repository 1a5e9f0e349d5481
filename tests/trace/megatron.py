"""Tensor parallelism on plain tensors, in the style of Megatron: four autograd functions and small layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from placement_audit.case import Case
from placement_audit.engine.trace import trace_step
from placement_audit.judge import judge
from placement_audit.model import Placement, PlacementKind
from placement_audit.verdicts import Report
from tests.faults.functions import Gather, Reduce, ReduceTwice, Scatter, gathered, summed
from tests.trace.worlds import fake_mesh, run_record

__all__ = ["Copy", "Gather", "GatherOnly", "Nothing", "Reduce", "ReduceTwice", "Scatter"]

ROWS = Placement(PlacementKind.SHARD, 0)
COLUMNS = Placement(PlacementKind.SHARD, 1)


class Copy(torch.autograd.Function):
    """f that returns its very input, where `tests.faults.functions` has a view of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return summed(g, ctx.group), None


class GatherOnly(Gather):
    """Gather, whose backward takes this rank's rows without summing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.rows, ctx.rank = x.shape[0], group.rank()
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g[ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows].clone(), None


class Nothing(torch.autograd.Function):
    """The identity, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g, None


class Block(nn.Module):
    """LayerNorm and a column-then-row FFN, with or without sequence parallelism.

    Attributes:
        enter: the function before the column-parallel weight.
        leave: the function after the row-parallel one.
    """

    def __init__(self, group: Any, enter: Any, leave: Any, width: int = 4) -> None:
        super().__init__()
        n = group.size()
        self.group, self.enter, self.leave = group, enter, leave
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.randn(2 * width // n, width))
        self.down = nn.Parameter(torch.randn(width, 2 * width // n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter.apply(self.norm(x), self.group)
        h = torch.relu(h @ self.up.t()) @ self.down.t()
        return self.leave.apply(h, self.group)


DECLARED = {"up": {"tp": ROWS}, "down": {"tp": COLUMNS}}


def plain_case(
    model: nn.Module,
    mesh: DeviceMesh,
    step: Any,
    *,
    inputs: tuple[torch.Tensor, ...] = (),
    batch_dims: tuple[str, ...] = (),
    declared: Any = DECLARED,
    backend: str = "fake",
) -> Case:
    """Plain-tensor code as a case."""
    return Case(
        name="plain",
        model=model,
        mesh=mesh,
        batch_dims=batch_dims,
        inputs=inputs,
        step=step,
        device_type="cpu",
        backend=backend,
        declared=declared,
    )


def audit(model: nn.Module, mesh: DeviceMesh, step: Any, **more: Any) -> Report:
    """The report on one step of plain-tensor code."""
    case = plain_case(model, mesh, step, **more)
    return judge(trace_step(case, run_record(case)))


def ffn(enter: Any, leave: Any, tp: int = 2) -> Report:
    """The block without sequence parallelism: the batch is equal on all tp ranks."""
    mesh = fake_mesh(tp=tp)
    group = mesh.get_group("tp")
    model = Block(group, enter, leave)
    x = torch.randn(8, 4)
    return audit(model, mesh, lambda: (x + model(x)).square().mean().backward(), inputs=(x,))
