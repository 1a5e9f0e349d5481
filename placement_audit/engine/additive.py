"""Whether an op of sums is the sum of the op of their terms, found out by trying it on random numbers.

Torch's sharding rules want terms summed before many an op that could take them as they are: to copy, to gather,
to fill. Only an op that is not additive makes something else of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from placement_audit.dtensor_api import unwatched
from placement_audit.engine.opargs import flat

_LARGEST = 1 << 12
"""Elements of a tensor with which an op is tried, at most; a pointwise op is tried with one."""
_TRIALS = 16
"""Of a function like relu half the trials show nothing."""


def additive(func: Any, args: Any, kwargs: Any, terms: Collection[int]) -> bool | None:
    """Whether an op is additive; None where it can't be tried.

    Args:
        func: the op.
        args: its arguments.
        kwargs: likewise, without tensors.
        terms: positions of the terms among the tensors of ``args``.
    """
    generator = torch.Generator().manual_seed(0)
    given = flat(list(args))
    pointwise = torch.Tag.pointwise in func.tags
    if any(x.is_complex() or (x.numel() > _LARGEST and not pointwise) for x in given):
        return None

    def drawn(x: torch.Tensor) -> torch.Tensor:
        shape = x.shape if x.numel() <= _LARGEST else (1,) * x.dim()
        if not x.is_floating_point():
            return torch.zeros(shape, dtype=x.dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def ran(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x for x in flat(func(*_with(args, iter(tensors)), **kwargs)) if x.is_floating_point()]

    with unwatched():
        try:
            for _ in range(_TRIALS):
                one = [drawn(x) for x in given]
                other = [drawn(x) if i in terms else one[i] for i, x in enumerate(given)]
                both = [x + y if i in terms else x for i, (x, y) in enumerate(zip(one, other, strict=True))]
                results = zip(ran(one), ran(other), ran(both), strict=True)
                if not all(torch.allclose(x + y, z, equal_nan=True) for x, y, z in results):
                    return False
        except Exception:  # whatever it does not take, it was not tried
            return None
    return True


def _with(args: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The arguments with other tensors; copies, for the op may write them."""
    if isinstance(args, torch.Tensor):
        return next(tensors).clone()
    return type(args)(_with(a, tensors) for a in args) if isinstance(args, list | tuple) else args
