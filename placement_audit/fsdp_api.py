"""FSDP2's reduction of gradients: private names of torch, as in `placement_audit.dtensor_api`.

Seen in torch 2.13.0.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as _collectives


@contextmanager
def dividing_locally() -> Generator[None]:
    """For the duration, a gradient divide factor of one's own is divided by after a plain sum.

    FSDP2 hands it to NCCL within the reduce op, which gloo refuses, and of which a dispatch mode sees no number. Where
    `FSDPModule.set_force_sum_reduction_for_comms` is set it does this by itself.
    """
    original = _collectives._get_gradient_divide_factors

    @functools.wraps(original)
    def factors(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        wanted = signature.bind(*args, **kwargs)
        group = wanted.arguments["reduce_scatter_group"]
        alone = group is None or group.size() == 1  # nothing is scattered, and it divides by itself
        if alone or not any(op == dist.ReduceOp.PREMUL_SUM for op in found):
            return found
        wanted.arguments["force_sum_reduction_for_comms"] = True
        return original(*wanted.args, **wanted.kwargs)

    signature = inspect.signature(original)
    _collectives._get_gradient_divide_factors = factors
    try:
        yield
    finally:
        _collectives._get_gradient_divide_factors = original
