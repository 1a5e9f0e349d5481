"""Ops on lists of DTensors (`torch._foreach_*`, fused optimizers), run one tensor after another.

DTensor asks its rules once for each place of a list, and goes through the whole list each time: for the thousand
parameters of a large model that takes longer than its forward. One by one they are like each other, and remembered.
"""

from __future__ import annotations

from typing import Any

import torch

from placement_audit.dtensor_api import DTensor, EagerMode
from placement_audit.engine.optraits import known, traits_of


class Singly(EagerMode):
    """The mode; entered after those that are to see the single ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One op."""
        kwargs = kwargs or {}
        if DTensor not in types or not (known.get(func) or traits_of(func)).foreach:
            return func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        n = max(len(a) for a in given if _is_list(a))
        if n < 2 or any(_spans_places(a, n) for a in given):
            return func(*args, **kwargs)
        outs = [
            func(*(_at(a, i) for a in args), **{k: _at(a, i) for k, a in kwargs.items()}) for i in range(n)
        ]
        return None if outs[0] is None else [x for out in outs for x in out]


def _is_list(a: object) -> bool:
    return isinstance(a, list | tuple)


def _spans_places(a: Any, n: int) -> bool:
    """Whether an argument is neither one for all places nor a list with something for each (or for none)."""
    if _is_list(a):
        return len(a) not in (0, n)
    return isinstance(a, torch.Tensor) and a.dim() > 0


def _at(a: Any, i: int) -> Any:
    """An argument of the op at one place."""
    return [a[i]] if _is_list(a) and a else a
