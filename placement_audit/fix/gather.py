"""The gather of a weight that the other mesh dims replicate, and the way its gradient takes back.

A gathered weight leaves the data-parallel mesh dims: it meets activations that know only the others. As released,
the last step of that, `DTensor.from_local`, makes its gradient Replicate on the spot. Here the gradient keeps the
placements that it arrives with, and the parameter's own `redistribute` makes of them the parameter's: first the
data-parallel reduction, then what is left, on the shard. What arrives complete is not reduced again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

Compute = Callable[[Any, DTensor], torch.Tensor]
"""A `ReplicateComputation.replicate_compute`."""


def reduced(released: Compute) -> Compute:
    """`replicate_compute` that leaves ``.grad`` complete; ``released`` gathers what is not ours."""

    def replicate_compute(self: Any, x: DTensor) -> torch.Tensor:
        if not _is_ours(self, x):
            return released(self, x)
        # Backward, this is both reductions, data-parallel mesh dims first.
        whole = x.redistribute(
            placements=[*self.compute_placements, *x.placements[self.device_mesh.ndim :]],
            forward_dtype=self.param_dtype,
            backward_dtype=self.reduce_dtype,
        )
        return _off_data_parallel(whole, _other_mesh(self, x), tuple(self.grad_placements))

    return replicate_compute


def deferred(released: Compute) -> Compute:
    """`replicate_compute` that leaves ``.grad`` Partial where it arrives so, for its readers to reduce."""

    def replicate_compute(self: Any, x: DTensor) -> torch.Tensor:
        if not _is_ours(self, x):
            return released(self, x)
        whole = x.detach().redistribute(  # pyrefly: ignore [missing-attribute]
            placements=[*self.compute_placements, *x.placements[self.device_mesh.ndim :]],
            forward_dtype=self.param_dtype,
        )
        return _in_place_of(x, whole, _other_mesh(self, x), tuple(self.grad_placements), self.reduce_dtype)

    return replicate_compute


def _is_ours(wrapper: Any, x: DTensor) -> bool:
    """Whether a weight is replicated on every mesh dim that is not data-parallel."""
    others = x.placements[wrapper.device_mesh.ndim :]
    if getattr(wrapper, "full_dtensor", False) or not others:
        return False
    return all(p.is_replicate() for p in others)


def _other_mesh(wrapper: Any, x: DTensor) -> DeviceMesh:
    names = x.device_mesh.mesh_dim_names
    if names is None:
        raise ValueError("the mesh of a SimpleFSDP parameter has no mesh_dim_names")
    return x.device_mesh[names[wrapper.device_mesh.ndim :]]


def _off(whole: DTensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that the data-parallel mesh dims replicate, without them."""
    placements = whole.placements[-mesh.ndim :]
    return DTensor.from_local(whole.to_local(), mesh, placements, shape=whole.shape, stride=whole.stride())


def _back_on(grad: DTensor, mesh: DeviceMesh, dp_grads: tuple[Placement, ...]) -> DTensor:
    """Its gradient, with them: a sum still to be made stays one, anything else is made whole."""
    kept = [p if p == Partial() else Replicate() for p in grad.placements]
    grad = grad.redistribute(placements=kept)
    return DTensor.from_local(
        grad.to_local(), mesh, (*dp_grads, *kept), shape=grad.shape, stride=grad.stride()
    )


class _OffDataParallel(torch.autograd.Function):
    """`_off` forward, `_back_on` backward."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(ctx: Any, whole: DTensor, mesh: DeviceMesh, dp_grads: tuple[Placement, ...]) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.dp_grads = whole.device_mesh, dp_grads
        return _off(whole, mesh)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: DTensor | None) -> tuple[DTensor | None, None, None]:
        return None if grad is None else _back_on(grad, ctx.mesh, ctx.dp_grads), None, None


class _InPlaceOf(torch.autograd.Function):
    """The same, of the parameter itself; backward is the data-parallel reduction and no other."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(
        ctx: Any,
        x: DTensor,
        whole: DTensor,
        mesh: DeviceMesh,
        dp_grads: tuple[Placement, ...],
        dtype: torch.dtype | None,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.dp_grads = x.device_mesh, dp_grads
        ctx.shards, ctx.dtype = x.placements[: len(dp_grads)], dtype or x.dtype
        return _off(whole, mesh)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: DTensor | None) -> tuple[DTensor | None, None, None, None, None]:
        if grad is not None:
            grad = _back_on(grad, ctx.mesh, ctx.dp_grads)
            placements = (*ctx.shards, *grad.placements[len(ctx.shards) :])
            grad = grad.redistribute(placements=placements, forward_dtype=ctx.dtype)
        return grad, None, None, None, None


def _off_data_parallel(whole: DTensor, mesh: DeviceMesh, dp_grads: tuple[Placement, ...]) -> DTensor:
    return _OffDataParallel.apply(whole, mesh, dp_grads)


def _in_place_of(
    x: DTensor,
    whole: DTensor,
    mesh: DeviceMesh,
    dp_grads: tuple[Placement, ...],
    dtype: torch.dtype | None,
) -> DTensor:
    return _InPlaceOf.apply(x, whole, mesh, dp_grads, dtype)


# Dynamo would run these backwards on a gradient that it takes to be placed as the output is. Left in the graph as they
# are, they meet the real one when the backward is traced.
torch.compiler.allow_in_graph([_off_data_parallel, _in_place_of])
