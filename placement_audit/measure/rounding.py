"""How far rounding alone moves each gradient of the model on one device.

A gradient that is the small rest of large terms, or zero but for rounding (a router whose weights are normalised
over the experts that it chose), is another one on every machine. Its numbers must not be held against a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from placement_audit.measure import compare

_TIMES = 2
"""Runs; the smaller change counts, for a choice (of experts, say) may flip in one of them."""

_SAME_LOSS = 1e-3
"""Relative; a step that has another loss than before read other data."""


def rounding(
    model: nn.Module, params: Mapping[str, nn.Parameter], step: Callable[[], float], loss: float
) -> dict[str, float]:
    """The relative change of each gradient when every weight is off by one unit in its last place.

    Args:
        model: on one device; it is left as it was.
        params: its parameters, with the gradients of its step.
        step: runs the step once more; gives its loss.
        loss: that it had.

    Returns:
        By FQN, dimensionless; empty where the step cannot be taken again alike.
    """
    unique = list({id(p): p for p in params.values()}.values())
    before = {fqn: p.grad for fqn, p in params.items()}
    found: dict[str, float] = {}
    with torch.no_grad():
        kept = [(x, x.detach().clone()) for x in (*unique, *model.buffers())]
    try:
        for i in range(_TIMES):
            generator = torch.Generator().manual_seed(i)
            for p, (_, value) in zip(unique, kept, strict=False):
                p.grad = None
                _round(p, value, generator)
            again = step()
            if abs(again - loss) > _SAME_LOSS * abs(loss):
                return {}
            for fqn, p in params.items():
                grad = before[fqn]
                if grad is not None and p.grad is not None:
                    change = compare.relative_error(p.grad, grad)
                    found[fqn] = min(change, found.get(fqn, change))
    except Exception:  # whatever its step does that cannot be done twice, it says nothing of rounding
        return {}
    finally:
        with torch.no_grad():
            for x, value in kept:
                x.copy_(value)
        for fqn, p in params.items():
            p.grad = before[fqn]
    return found


@torch.no_grad()
def _round(p: nn.Parameter, value: torch.Tensor, generator: torch.Generator) -> None:
    if value.is_floating_point():
        up = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
        p.copy_(value * (1 + torch.finfo(value.dtype).eps * up))
