"""Small things between ranks, over the default process group. Every function here is collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from placement_audit.errors import AuditError, NotMeasurable
from placement_audit.failure import Failure

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """What each rank holds, by rank; for numbers and names, never for tensors."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank0(what: str, work: Callable[[], T]) -> T | None:
    """Run ``work`` on rank 0 alone; where it raises, every rank raises, so that none waits for the others.

    Args:
        what: for the message, such as "the model on one device".
        work: what to run.

    Returns:
        Its result on rank 0, None on the others.

    Raises:
        NotMeasurable: it failed.
        AuditError: as it raised.
    """
    result: T | None = None
    failed: list[AuditError | None] = [None]
    if dist.get_rank() == 0:
        try:
            result = work()
        except AuditError as error:
            failed = [error]
        except Exception as error:
            failure = Failure(error)
            failed = [NotMeasurable(f"not measured: {what} failed: {failure.what} ({failure.place}).")]
    dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise failed[0]
    return result


def from_rank0(x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor, on every rank; no coarser than float32.

    Args:
        x: rank 0's, of the global shape; not read on the others.
        like: a parameter or its gradient, alike on all ranks, for shape, dtype and device.
    """
    # What one device computes in, the other ranks do not know: another dtype than the job's, perhaps.
    dtype = torch.promote_types(like.dtype, torch.float32)
    if dist.get_rank() == 0:
        assert x is not None
        sent = x.detach().to(dtype).contiguous()
    else:
        sent = torch.empty(like.shape, dtype=dtype, device=like.device)
    dist.broadcast(sent, src=0)
    return sent
