"""Megatron's four autograd functions and two more, on plain tensors with raw collectives; written for these tests.

f copies forward and sums backward; g sums forward and copies backward. Under sequence parallelism their places are
taken by gather (all-gather forward, reduce-scatter backward) and scatter (reduce-scatter forward, all-gather
backward).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """A new tensor: the sum over the group."""
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All ranks' rows, one below the other."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's rows of the sum."""
    n = dist.get_world_size(group)
    out = x.new_empty(x.shape[0] // n, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class Copy(torch.autograd.Function):
    """f."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return summed(g, ctx.group), None


class CopyHeld(torch.autograd.Function):
    """f, with somebody who holds the sum for a while if given a list, as the thread of a collective may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, held: list[torch.Tensor] | None) -> torch.Tensor:
        ctx.group, ctx.held = group, held
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        g = summed(g, ctx.group)
        if ctx.held is not None:
            ctx.held.append(g)
        return g, None, None


class Reduce(torch.autograd.Function):
    """g."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g, None


class ReduceTwice(torch.autograd.Function):
    """g whose backward sums, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return summed(g, ctx.group), None


class Gather(torch.autograd.Function):
    """Rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return scattered(g, ctx.group), None


class Scatter(torch.autograd.Function):
    """Rows of a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return gathered(g, ctx.group), None
