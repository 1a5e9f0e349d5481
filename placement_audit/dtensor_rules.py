"""Torch's sharding rules, asked without a DTensor: private names of torch, as in `placement_audit.dtensor_api`.

Seen in torch 2.13.0. A rule that cannot be asked is no rule: what it is about is then not followed.
"""

from __future__ import annotations

import functools
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
from torch.distributed.tensor.experimental import register_sharding
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
    with unwatched(), with_cpu_attention(), _quiet("torch._subclasses.fake_tensor"):
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
def with_cpu_attention() -> Generator[None]:
    """For the duration, the CPU's fused attention has the sharding rule that torch gives the GPU's.

    Torch 2.13 has none: where attention is on DTensors (pytorch/examples' tensor parallel LLaMA), a causal one does not
    run on the CPU that it is audited on, and another one gathers its heads, which it does not do on GPUs. Heads may
    be sharded, and the batch where no mask goes with it.
    Afterwards DTensor has no rule again, and may remember what came of this one for the shapes that it met.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_strategy_funcs, propagator.op_to_schema_info)
    aten = torch.ops.aten
    rules = {
        aten._scaled_dot_product_flash_attention_for_cpu.default: (3, 2),
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (6, 3),
    }
    lacking = {op: n for op, n in rules.items() if op not in propagator.op_strategy_funcs}
    for op, (ins, outs) in lacking.items():
        register_sharding(op)(functools.partial(_attention_shardings, ins, outs))
    try:
        yield
    finally:
        for op in lacking:
            for table in tables:
                table.pop(op, None)


def _attention_shardings(
    ins: int, outs: int, *args: Any, attn_mask: Any = None, **_kwargs: Any
) -> list[tuple[list[TorchPlacement], list[TorchPlacement | None]]]:
    """What `register_sharding` wants of an op whose tensors, ``ins`` and ``outs`` many, are [batch, heads, ...]."""
    kinds = [Replicate(), Shard(1)] + ([Shard(0)] if attn_mask is None else [])
    rest = [None] * (len(args) - ins)
    return [([kind] * outs, [*[kind] * ins, *rest]) for kind in kinds]


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
