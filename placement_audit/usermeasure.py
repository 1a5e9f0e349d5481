"""Before a user's program is measured: what its loss amounts to; after it: everything as it was."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from placement_audit import stepfailed
from placement_audit.case import Case, Reference
from placement_audit.dtensor_api import EagerMode, local_of
from placement_audit.engine.world import World
from placement_audit.errors import NotMeasurable
from placement_audit.measure.compare import tolerance, whole
from placement_audit.measure.declared import as_dtensors
from placement_audit.measure.exchange import gather
from placement_audit.measure.labels import coordinates
from placement_audit.measure.readers import tensors
from placement_audit.measure.run import prepare
from placement_audit.measure.weights import parameters, survey
from placement_audit.userranks import met_by_all
from placement_audit.userstep import Step

SEED = 2217
"""Of a measurement's weights."""

_UNLIKE = 1e-3
"""Relative; two runs of one step differ by less, in whatever order a device adds."""


def looked_at(case: Case) -> Case:
    """The case with what can be known of the ranks without a reference; collective, runs the step twice."""
    params = as_dtensors(parameters(case.model), case)
    spread = survey(params, World.of(case), SEED).init_spread
    return replace(met_by_all(case)[0], replicas_apart=spread)


def settled(case: Case) -> Case:
    """The case that is measured: what differs between ranks known, a reference with the same loss; collective.

    Changes weights, and runs the step three times.

    A user's reference has the loss that is meant. Each rank may have its part of it, or, where all ranks' batches
    count alike, a mean of its own: their sum is then n times what is meant, and the average of the ranks'
    gradients, not their sum, is right. One step tells which.

    Args:
        case: of a user's program, on real ranks.
    """
    coarse = _coarser(case)
    if coarse:
        note = (
            f"not measured: the step computes or reduces in {coarse}, whose rounding hides faults and looks like "
            "them; measure it in float32."
        )
        return replace(looked_at(case), reference=None, no_reference=note)
    try:
        prepared = prepare(case, seed=SEED)
    except NotMeasurable:
        return looked_at(case)  # said again, and told, where it is measured
    case, loss, unlike = met_by_all(case)
    if unlike > _UNLIKE:
        note = (
            f"not measured: taken twice with the same weights, the step leaves other gradients (off by {unlike:.1g}): "
            "it takes another batch, adds to tensors of its own, or draws random numbers. Give one that can be "
            "taken again."
        )
        return replace(case, reference=None, no_reference=note)
    if not case.batch_dims:
        return replace(case, grad_scale=Fraction(1))
    assert isinstance(loss, torch.Tensor)
    of_ranks = gather((whole(loss).sum().item(), prepared.reference_loss))
    factor = _multiple(case, prepared.world, [mine for mine, _ in of_ranks], of_ranks[0][1])
    build = case.reference
    assert build is not None

    def reference() -> Reference:
        made = build()
        assert isinstance(made.step, Step)
        return Reference(model=made.model, step=made.step.scaled(factor))

    return replace(case, grad_scale=1 / Fraction(factor), reference=reference)


class _Dtypes(EagerMode):
    """Notes the floating dtypes of what ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made |= {x.dtype for x in tensors((out,), {}) if x.is_floating_point()}
        return out


def _coarser(case: Case) -> str:
    """A dtype coarser than float32 that the step computes or reduces in; collective, "" for none."""
    dtypes = _Dtypes()
    try:
        with stepfailed.told(case), dtypes:
            case.step()
    finally:
        for p in case.model.parameters():
            p.grad = None
    finest = torch.finfo(torch.float32).eps
    coarse = [str(d).removeprefix("torch.") for d in dtypes.made if torch.finfo(d).eps > finest]
    return next((c for of_rank in gather(sorted(coarse)) for c in of_rank), "")


def _multiple(case: Case, world: World, losses: list[float], meant: float | None) -> int:
    """The product of batch dims' sizes that the sum of the losses is of the loss that is meant; 1 where it is none."""
    at_rank = coordinates(world)
    varies = [d in case.batch_dims for d in world.dims]
    sums: dict[tuple[int, ...], float] = {}
    for rank, loss in enumerate(losses):
        at = tuple(c for c, v in zip(at_rank[rank], varies, strict=True) if not v)
        sums[at] = sums.get(at, 0.0) + loss
    sizes = [s for s, v in zip(world.sizes, varies, strict=True) if v]
    within = tolerance(torch.float32, 1)
    for n in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(sizes, n):
            factor = math.prod(chosen)
            if meant and all(abs(s / (factor * meant) - 1) <= within for s in sums.values()):
                return factor
    return 1


@contextmanager
def kept(model: nn.Module) -> Generator[None]:
    """Begin without gradients; put weights, buffers and gradients back at the end."""
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        values = [(x, local_of(x.detach()).clone()) for x in tensors if not x.is_meta]
    grads = [(p, p.grad) for p in model.parameters()]
    for p, _ in grads:
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for x, value in values:
                local_of(x.detach()).copy_(value)
        for p, grad in grads:
            p.grad = grad
