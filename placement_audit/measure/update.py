"""One optimizer step on the parallel model and on the one of one device; parameters compared afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from placement_audit.dtensor_api import local_of
from placement_audit.measure import compare
from placement_audit.measure.exchange import from_rank0, gather, on_rank0

Update = Callable[[nn.Module, str], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Outcome of one update.

    Attributes:
        errors: by FQN, of the parameter's value after the step, the worst over the ranks; of what has a gradient.
        norm: total gradient norm that clipping reported, rank 0's.
        reference_norm: likewise on one device.
    """

    errors: dict[str, float]
    norm: float | None
    reference_norm: float | None


def compare_update(
    update: Update,
    which: str,
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    reference: tuple[nn.Module, Mapping[str, nn.Parameter]] | None,
    *,
    scale: Fraction,
    from_zero: bool,
) -> Step:
    """Apply an update to both models, compare, and put parameters and gradients back.

    Args:
        update: `placement_audit.case.Case.update`.
        which: "job" or "sgd".
        model: the parallel one, with gradients.
        params: its parameters.
        reference: the model on one device and its parameters; None on every rank but 0.
        scale: factor of the parallel gradients over the reference's; the reference's are multiplied by it, for
            clipping and Adam are not linear.
        from_zero: set the parameters to zero first, so that what is compared is the change alone, free of
            the rounding of a large value plus a small change.
    """
    stepped = {fqn: p for fqn, p in params.items() if p.grad is not None}
    everywhere = set.intersection(*(set(names) for names in gather(list(stepped))))

    def reference_step() -> float | None:
        assert reference is not None
        for p in reference[1].values():
            if p.grad is not None:
                p.grad.mul_(float(scale))
        if from_zero:
            _zero(reference[1])
        return update(reference[0], which)

    with _kept(reference[1] if reference else {}), _kept(params):
        reference_norm = on_rank0("the optimizer step on one device", reference_step)
        if from_zero:
            _zero(params)
        norm = update(model, which)
        errors: dict[str, float] = {}
        for fqn, p in params.items():
            if fqn in everywhere:
                theirs = from_rank0(reference[1][fqn] if reference else None, p)
                errors[fqn] = compare.relative_error(compare.whole(p), theirs)
    ranks = gather(errors)
    norms = gather((norm, reference_norm))[0]
    return Step(
        errors={fqn: max(r[fqn] for r in ranks) for fqn in errors}, norm=norms[0], reference_norm=norms[1]
    )


@torch.no_grad()
def _zero(params: Mapping[str, nn.Parameter]) -> None:
    for p in params.values():
        local_of(p.detach()).zero_()


@contextmanager
def _kept(params: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Put back the local values of parameters and gradients afterwards: clipping changes gradients in place."""
    unique = {id(p): p for p in params.values()}.values()
    with torch.no_grad():
        before = [
            (p, local_of(p.detach()).clone(), p.grad, None if p.grad is None else compare.local_part(p.grad).clone())
            for p in unique
        ]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value, grad, grad_value in before:
                local_of(p.detach()).copy_(value)
                p.grad = grad
                if grad is not None:
                    local_of(grad).copy_(grad_value)
