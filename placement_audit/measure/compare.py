"""Gradients against those of one device: errors, ratios, and the factor that all of them share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch.distributed.tensor import DTensor

from placement_audit.dtensor_api import spec_of
from placement_audit.measure.fingerprint import LARGEST

_ULPS = 1e-5 / torch.finfo(torch.float32).eps
"""Roundings allowed for, at least: 84, which is 1e-5 in float32."""

_OF_STEP = 10
"""One optimizer step mostly changes a parameter by less than a tenth of its norm."""


def tolerance(dtype: torch.dtype, summands: int) -> float:
    """Relative error below which gradients count as equal.

    A weight's gradient is a sum over all tokens; added in another order it is off by about the square root of
    their number, in units of the dtype's precision. Below 7,000 tokens the depth of the model counts for
    more, and 84 units are allowed: 1e-5 in float32.

    Args:
        dtype: that everything is computed in. One finer than float32 counts as that: a model in float64 has calls in
            it that compute in float32 (a norm's, a softmax's), and no fault is so small.
        summands: tokens of the global batch.
    """
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return _up(eps * max(_ULPS, math.sqrt(summands)))


def step_tolerance(gradient_tolerance: float) -> float:
    """The same for a parameter's value after a step, relative to the value or, if that is more, ten times the step.

    A gradient within the tolerance changes a step by as much, and a step is mostly less than a tenth of the value.
    """
    return gradient_tolerance / _OF_STEP


def of_step(error: float, value: torch.Tensor, change: float) -> float:
    """An error relative to a parameter's value after a step, as `step_tolerance` takes it.

    Args:
        error: relative to ``value``.
        value: after the step.
        change: Frobenius norm of the step.
    """
    norm = _norm(value)
    return error * norm / max(norm, _OF_STEP * change) if norm else error


def _up(x: float) -> float:
    """Rounded up to two digits: a tolerance is no measurement."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return float(f"{math.ceil(x / unit - 1e-9) * unit:.2g}")


def whole(x: torch.Tensor) -> torch.Tensor:
    """The tensor as its placements say, global shape; collective for a DTensor."""
    with torch.no_grad():
        return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def read_as(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The stored local part of a gradient, read as if it had the parameter's placements; collective.

    Args:
        grad: its local part has the shape of the parameter's.
        param: for the placements.

    Returns:
        Global shape.
    """
    if not isinstance(param, DTensor):
        return local_part(grad)
    spec = spec_of(param)
    if (
        isinstance(grad, DTensor)
        and spec_of(grad).mesh == spec.mesh
        and spec_of(grad).placements == spec.placements
    ):
        return whole(grad)
    with torch.no_grad():
        return DTensor.from_local(
            local_part(grad),
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        ).full_tensor()


def local_part(x: torch.Tensor) -> torch.Tensor:
    """This rank's part, waited for where a collective still writes it."""
    with torch.no_grad():
        return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def relative_error(x: torch.Tensor, reference: torch.Tensor, scale: Fraction | float = 1.0) -> float:
    """Frobenius norm of ``x - scale * reference`` over that of ``scale * reference``.

    Returns:
        Dimensionless; `LARGEST` for another shape, for what is not finite, and for anything but 0 where the
        reference is 0.
    """
    if x.shape != reference.shape:
        return LARGEST
    off = _norm(torch.sub(x, reference, alpha=float(scale)))
    return ratio(off, float(scale) * _norm(reference)) if off else 0.0


def norm_ratio(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm over the reference's; 1 where both are 0."""
    ours, theirs = _norm(x), _norm(reference)
    return 1.0 if ours == theirs else ratio(ours, theirs)


def ratio(x: float, y: float) -> float:
    """``x / y`` as a finite number, for JSON."""
    quotient = x / y if y else math.inf
    return quotient if math.isfinite(quotient) else LARGEST


def change(x: torch.Tensor, before: torch.Tensor) -> float:
    """Frobenius norm of the difference."""
    return _norm(x - before)


def _norm(x: torch.Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item()


def scales(batch_sizes: Sequence[int]) -> tuple[Fraction, ...]:
    """Factors that data-parallel averaging can give all gradients, 1 first.

    Args:
        batch_sizes: ranks along each mesh dim over which the batch varies.
    """
    products = {
        math.prod(chosen)
        for n in range(len(batch_sizes) + 1)
        for chosen in itertools.combinations(batch_sizes, n)
    }
    return tuple(Fraction(1, p) for p in sorted(products))


def best_scale(
    errors: Sequence[Sequence[float]], candidates: Sequence[Fraction], within: float, due: Fraction | None
) -> int:
    """Index of the factor that all gradients have that are not wrong by themselves.

    The one that the job's loss calls for, where it makes any gradient right, or none does: a factor that not all
    have is no common one. Else the one that makes the most of them right; of equally good ones the nearest to 1.

    Args:
        errors: per parameter, the error under each candidate.
        candidates: from `scales`.
        within: tolerance.
        due: the factor that the job's loss calls for; None for unknown.
    """
    fits = [[e <= within for e in row] for row in errors]
    telling = [row for row in fits if not all(row)]  # zero is right times any factor
    at_due = candidates.index(due) if due in candidates else 0
    if not any(map(any, telling)) or (due in candidates and any(row[at_due] for row in telling)):
        return at_due
    right = [sum(row[i] for row in fits) for i in range(len(candidates))]
    return right.index(max(right))
