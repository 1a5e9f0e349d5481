"""What the tracer needs of a job, whoever built it: a model on its mesh and one training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from placement_audit.model import Placement


def dim_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of its dims; "dim0", "dim1" and so on where it was made without any, as torch allows."""
    return tuple(mesh.mesh_dim_names or (f"dim{i}" for i in range(mesh.ndim)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The same job on one device: what the parallel one is measured against.

    Attributes:
        model: not parallelised, real tensors, float32, the same FQNs; whoever measures sets the weights.
        step: one forward and backward on the global batch; leaves the gradients in ``.grad`` and returns
            the loss, scaled as the sum of the ranks' losses is.
    """

    model: nn.Module
    step: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A parallelised model, ready for one forward and backward.

    Attributes:
        name: model and flavor, for people.
        model: already parallelised; its parameters are what is judged.
        mesh: the world mesh, dims of size 1 included, by `dim_names`; holds this process's rank.
        batch_dims: mesh dims over which the batch varies (data and context parallel).
        inputs: tensors that differ between the ranks of ``batch_dims`` (tokens, labels).
        step: runs one forward and backward; leaves the gradients in ``.grad`` and returns this rank's loss.
        device_type: "meta", "cpu" or "cuda".
        backend: "fake", "gloo" or "nccl".
        reduce_dtype: the dtype that the job wants gradients reduced in, torch's name; None where it wants none.
        grad_scale: what the job's loss calls for, over the gradient of the sum of the ranks' losses: 1 where
            each rank's loss is its part of the whole, 1/n where it is a mean of its own; None for unknown.
        notes: what the reader of the report must know, whole sentences.
        twin: what was built, where it had to be smaller than the job's own model, in words; "" for that one.
        reference: makes the same job on one device; None where there is no such thing.
        no_reference: why there is none, a whole sentence; "" where nobody expects one.
        update: clips and steps an optimizer on a model (parallel or the reference) that has its gradients:
            ``update(model, "job")`` with the job's own optimizer, ``update(model, "sgd")`` with plain SGD;
            returns the total norm that clipping reported, None without clipping and on the meta device.
        declared: what plain-tensor parameters are along the mesh dims: FQN -> mesh dim -> placement. One that
            is not named, and every mesh dim that is left out, counts as Replicate; DTensor parameters say it
            themselves.
        catching: finds the tensors of the batch while the step runs, where they are not known before:
            ``with catching(take): step()`` calls ``take`` with each of them; None where `inputs` has them all.
        varying: what of the step's plain ops differs between ranks without being a tensor's values
            (`placement_audit.engine.apart.Varying`); None where no other rank was looked at.
        other_ranks: the ranks that were looked at for it, one a mesh dim.
        replicas_apart: parameter -> how far its replicas are apart, by world mesh dim; None where nobody looked.
        own_readers: whether `update` has clipping or an optimizer of the job's own, that a trace can follow.
        in_own_dtypes: builds the same case in the dtypes that the job asks for, where this one is in float32
            to be measured; None where there is no difference.
    """

    name: str
    model: nn.Module
    mesh: DeviceMesh
    batch_dims: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    step: Callable[[], object]
    device_type: str
    backend: str
    reduce_dtype: str | None = None
    grad_scale: Fraction | None = None
    notes: tuple[str, ...] = ()
    twin: str = ""
    reference: Callable[[], Reference] | None = None
    no_reference: str = ""
    update: Callable[[nn.Module, str], float | None] | None = None
    own_readers: bool = False
    in_own_dtypes: Callable[[], Case] | None = None
    declared: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)
    catching: Callable[[Callable[[torch.Tensor], None]], AbstractContextManager[None]] | None = None
    varying: Mapping[Any, tuple[tuple[int, int], ...]] | None = None
    other_ranks: tuple[int, ...] = ()
    replicas_apart: Mapping[str, tuple[float | None, ...]] | None = None
