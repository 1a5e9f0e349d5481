"""Torch's sharding rules, asked without a DTensor: private names of torch, as in `placement_audit.dtensor_api`.

Seen in torch 2.13.0. A rule that cannot be asked is no rule: what it is about is then not followed.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from placement_audit.dtensor_api import placement_of, unwatched
from placement_audit.model import Placement, PlacementKind

NORM_OF_A_PART = Placement(PlacementKind.PARTIAL, reduce_op="norm")
"""Ours for torch's `_NormPartial`: each rank has the norm of its part, which no sum makes the whole's."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor as a sharding rule takes it, along one mesh dim.

    Attributes:
        shape: of the whole tensor.
        stride: likewise.
        dtype: of it.
        placement: what each rank holds of it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement


def sharding_rule(
    op: Any, ranks: int, args: Any, kwargs: Any
) -> tuple[tuple[Placement | None, ...], tuple[Placement | None, ...]] | None:
    """What torch's own rule says of an op on DTensors, over one mesh dim; nothing is communicated.

    Args:
        op: the op overload.
        ranks: along the mesh dim.
        args: the op's arguments, with a `Part` for each tensor and shapes those of the whole.
        kwargs: likewise, without tensors.

    Returns:
        (what the rule wants of each tensor that goes in, what comes out); None in it for a placement that is
        none of ours. None where torch has no rule.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    with unwatched(), _quiet("torch._subclasses.fake_tensor"):
        try:
            mesh = DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("ranks",), _init_backend=False)
            info = propagator.op_to_schema_info.get(op)
            if info is None:
                info = getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}).get(op)
            schema = OpSchema(op, _as_specs(args, mesh), dict(kwargs), schema_info=info)
            found = propagator.propagate_op_sharding_non_cached(schema)
        except Exception:  # a rule that does not take this is no rule, however it says so
            return None
    wants = (found.redistribute_schema or schema).args_spec
    outs = found.output_spec if isinstance(found.output_spec, list | tuple) else [found.output_spec]
    return tuple(_plain_placement(s) for s in wants), tuple(_plain_placement(s) for s in outs)


@contextmanager
def _quiet(name: str) -> Generator[None]:
    """Keep a logger still: what is no rule is no error."""
    logger = logging.getLogger(name)
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def takes_a_shape(op: Any) -> int | None:
    """Which argument of an op is the whole result's shape, as torch's rules tell; None for none."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    at = propagator.op_to_shape_and_stride_idx.get(op)
    return at if isinstance(at, int) else None


def _as_specs(args: Any, mesh: DeviceMesh) -> Any:
    if isinstance(args, Part):
        meta = TensorMeta(torch.Size(args.shape), args.stride, args.dtype)
        return DTensorSpec(mesh, (_torch_placement(args.placement),), tensor_meta=meta)
    if isinstance(args, list | tuple):
        return type(args)(_as_specs(a, mesh) for a in args)
    return args


def _torch_placement(p: Placement) -> TorchPlacement:
    if p.is_shard:
        assert p.tensor_dim is not None
        return Shard(p.tensor_dim)
    return Partial(p.reduce_op or "sum") if p.is_partial else Replicate()


def _plain_placement(spec: Any) -> Placement | None:
    """A spec's placement; None for one that is more than its name says (a masked sum, a strided shard)."""
    if spec is None:
        return None
    p = spec.placements[0]
    if type(p).__name__ == "_NormPartial":
        return NORM_OF_A_PART
    return placement_of(p) if type(p) in (Shard, Partial, Replicate) else None
