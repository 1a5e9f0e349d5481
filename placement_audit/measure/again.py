"""The step on one device, taken again: what of its numbers is chance, and what is rounding.

A gradient that is the small rest of large terms, or zero but for rounding (a router whose weights are normalised
over the experts that it chose), is another one on every machine. Its numbers must not be held against a job; nor
must those of a step that draws random numbers (dropout), which ranks and one device draw each for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from placement_audit.measure import compare
from placement_audit.measure.weights import unique

_TIMES = 2
"""Runs; the smaller change counts, for a choice (of experts, say) may flip in one of them."""

_SAME_LOSS = 1e-3
"""Relative; a step that has another loss than before read other data."""

_ANOTHER_SEED = 20261130


@contextmanager
def own_random_state(device_type: str) -> Generator[None]:
    """Rank 0 alone builds and runs the reference: its random state must not get ahead of the others'."""
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def random_state(device_type: str) -> bytes:
    """The state of the random numbers that a step may draw from; changed once it drew some."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device_type == "cuda" else [])]
    return b"".join(s.numpy().tobytes() for s in states)


def is_random(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    step: Callable[[], float],
    loss: float,
    within: float,
) -> bool:
    """Whether the step has another loss with other random numbers; leaves gradients and buffers as they were.

    Args:
        model: on one device.
        params: its parameters, with the gradients of its step.
        step: runs the step once more; gives its loss. The caller restores the random state.
        loss: that it had.
        within: tolerance.
    """
    with _as_before(model, params):
        torch.manual_seed(_ANOTHER_SEED)
        try:
            again = step()
        except Exception:  # it cannot be taken twice, which says nothing
            return False
    return abs(again - loss) > within * abs(loss)


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
    gradients = {fqn: p.grad for fqn, p in params.items()}
    found: dict[str, float] = {}
    with _as_before(model, params) as values:
        for i in range(_TIMES):
            generator = torch.Generator().manual_seed(i)
            for p, value in values:
                p.grad = None
                _round(p, value, generator)
            try:
                again = step()
            except Exception:  # whatever it does that cannot be done twice, it says nothing of rounding
                return {}
            if abs(again - loss) > _SAME_LOSS * abs(loss):
                return {}
            for fqn, p in params.items():
                before = gradients[fqn]
                if before is not None and p.grad is not None:
                    change = compare.relative_error(p.grad, before)
                    found[fqn] = min(change, found.get(fqn, change))
    return found


@contextmanager
def _as_before(
    model: nn.Module, params: Mapping[str, nn.Parameter]
) -> Generator[list[tuple[nn.Parameter, torch.Tensor]]]:
    """Put gradients aside, and back afterwards, with the values of parameters and buffers.

    Yields:
        Each parameter once, with its value.
    """
    once = unique(params)
    gradients = [(p, p.grad) for p in once]
    with torch.no_grad():
        values = [(p, p.detach().clone()) for p in once]
        buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for p in once:
        p.grad = None
    try:
        yield values
    finally:
        with torch.no_grad():
            for x, value in (*values, *buffers):
                x.copy_(value)
        for p, grad in gradients:
            p.grad = grad


@torch.no_grad()
def _round(p: nn.Parameter, value: torch.Tensor, generator: torch.Generator) -> None:
    if value.is_floating_point():
        up = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
        p.copy_(value * (1 + torch.finfo(value.dtype).eps * up))
