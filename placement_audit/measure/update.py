"""One optimizer step on the parallel model and on the one of one device; parameters compared afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from placement_audit.dtensor_api import fits_its_label, local_of
from placement_audit.measure import compare
from placement_audit.measure.exchange import from_rank0, gather, on_rank0
from placement_audit.measure.readers import watched
from placement_audit.measure.weights import unique
from placement_audit.measurement import Reader

Update = Callable[[nn.Module, str], float | None]


_CLIPPED_FROM = 1000.0
"""Gradient norm of the probes; above any max_norm that jobs have, so that clipping does clip."""

_NORM_ULPS = 4
"""Rounding of a norm, in units of the dtype's precision times the square root of the number of elements."""

_CLEAR = 0.01
"""Gradients below this part of their root mean square are near zero: see `compare_update`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Outcome of one update.

    Attributes:
        errors: by FQN, the worst over the ranks; of what has a gradient in both models.
        norm: total gradient norm that clipping reported, rank 0's; None without clipping.
        reference_norm: likewise on one device.
        readers: who read the gradients that were left Partial, on this rank.
    """

    errors: dict[str, float]
    norm: float | None
    reference_norm: float | None
    readers: tuple[Reader, ...] = ()


def compare_update(
    update: Update,
    which: str,
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    reference: tuple[nn.Module, Mapping[str, nn.Parameter]] | None,
    *,
    scale: Fraction,
) -> Step:
    """Apply an update to both models, compare, and put parameters and gradients back; collective.

    Gradients are first brought to a norm of about 1000, by the same power of two in both models: below the
    job's max_norm clipping does nothing, and a fault of it would go unseen.

    "sgd" starts from parameters of zero, so that the change alone is compared, free of the rounding of a
    large value plus a small change. "job" starts from the weights, and compares the values after the step,
    but for the elements whose gradient is less than a hundredth of its root mean square: the first step of
    Adam is the gradient's sign, which rounding decides where the gradient is near zero.

    Total norms are sums of millions of squares in float32, and good to four digits only. Where both models
    report the same norm within that, the rest of its difference is taken out of the changes of "sgd".

    Nothing is updated, and nothing compared, where ranks have gradients of different parameters: their
    clipping and optimizers would wait for each other; nor where a gradient is not what its label says.

    Args:
        update: `placement_audit.case.Case.update`.
        which: "job" or "sgd".
        model: the parallel one, with gradients.
        params: its parameters.
        reference: the model on one device and its parameters; None on every rank but 0.
        scale: factor of the parallel gradients over the reference's; the reference's are multiplied by it,
            for clipping and Adam are not linear.
    """
    linear = which == "sgd"
    theirs = reference[1] if reference else {}
    ranks_have = gather(_with_gradient(params))
    if any(have != ranks_have[0] for have in ranks_have) or not all(gather(_all_fit(params))):
        return Step(errors={}, norm=None, reference_norm=None)
    reference_has, boost = gather((_with_gradient(theirs), _boost(theirs, float(scale))))[0]
    compared = [fqn for fqn in ranks_have[0] if fqn in reference_has]

    def reference_step() -> float | None:
        assert reference is not None
        _multiply(theirs, float(scale) * boost)
        if linear:
            _zero(theirs)
        return update(reference[0], which)

    with _kept(theirs) as before, _kept(params):
        reference_norm = on_rank0("the optimizer step on one device", reference_step)
        _multiply(params, boost)
        if linear:
            _zero(params)
        with watched(params) as readings:
            norm = update(model, which)
        norms = gather((norm, reference_norm))[0]
        noise = _noise(*norms, max((p.numel() for p in params.values()), default=1)) if linear else 1.0
        changes = gather({fqn: compare.change(p.detach(), before[id(p)]) for fqn, p in theirs.items()})[0]
        errors = {
            fqn: _error(params[fqn], theirs.get(fqn), noise=noise, change=None if linear else changes[fqn])
            for fqn in compared
        }
    ranks = gather(errors)
    return Step(
        errors={fqn: max(r[fqn] for r in ranks) for fqn in errors},
        norm=None if norms[0] is None else norms[0] / boost,
        reference_norm=None if norms[1] is None else norms[1] / boost,
        readers=readings.frozen(),
    )


def _with_gradient(params: Mapping[str, nn.Parameter]) -> list[str]:
    return [fqn for fqn, p in params.items() if p.grad is not None]


def _all_fit(params: Mapping[str, nn.Parameter]) -> bool:
    return all(p.grad is None or fits_its_label(p.grad) for p in params.values())


def _noise(norm: float | None, reference_norm: float | None, numel: int) -> float:
    """The reference's norm over the ranks', where they differ by no more than rounding; else 1."""
    if not norm or not reference_norm:
        return 1.0
    factor = reference_norm / norm
    return (
        factor if abs(factor - 1) <= _NORM_ULPS * torch.finfo(torch.float32).eps * math.sqrt(numel) else 1.0
    )


def _error(p: nn.Parameter, reference: nn.Parameter | None, *, noise: float, change: float | None) -> float:
    """The error of one parameter; ``change`` is the norm of its step on one device, None where that alone counts."""
    value = from_rank0(reference, p)
    ours = compare.whole(p)
    if change is not None and ours.shape == value.shape:
        grad = from_rank0(None if reference is None else reference.grad, p).abs()
        ours = torch.where(grad >= _CLEAR * grad.square().mean().sqrt(), ours, value)
    # The second is for jobs whose max_norm is so large that nothing was clipped by it.
    error = min(compare.relative_error(ours, value, noise), compare.relative_error(ours, value))
    return error if change is None else compare.of_step(error, value, change)


def _boost(reference: Mapping[str, nn.Parameter], scale: float) -> float:
    """The power of two that brings the gradients' norm to about 1000."""
    squares = [torch.linalg.vector_norm(p.grad).item() ** 2 for p in unique(reference) if p.grad is not None]
    norm = scale * math.sqrt(sum(squares))
    return 2.0 ** round(math.log2(_CLIPPED_FROM / norm)) if 0 < norm < _CLIPPED_FROM else 1.0


@torch.no_grad()
def _multiply(params: Mapping[str, nn.Parameter], factor: float) -> None:
    for p in unique(params):
        if p.grad is not None:
            local_of(p.grad).mul_(factor)


@torch.no_grad()
def _zero(params: Mapping[str, nn.Parameter]) -> None:
    for p in unique(params):
        local_of(p.detach()).zero_()


@contextmanager
def _kept(params: Mapping[str, nn.Parameter]) -> Generator[dict[int, torch.Tensor]]:
    """Put back the local values of parameters and gradients: clipping changes gradients in place.

    Yields:
        By id of the parameter, its local value.
    """
    with torch.no_grad():
        before = [
            (
                p,
                local_of(p.detach()).clone(),
                p.grad,
                None if p.grad is None else compare.local_part(p.grad).clone(),
            )
            for p in unique(params)
        ]
    try:
        yield {id(p): value for p, value, _, _ in before}
    finally:
        with torch.no_grad():
            for p, value, grad, grad_value in before:
                local_of(p.detach()).copy_(value)
                p.grad = grad
                if grad is not None and grad_value is not None:
                    local_of(grad).copy_(grad_value)
