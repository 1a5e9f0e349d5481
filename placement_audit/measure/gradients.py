"""Every gradient against the one of one device, and against the other ranks'; all of it collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from placement_audit.dtensor_api import fits_its_label, local_of, spec_of
from placement_audit.engine.world import World
from placement_audit.measure import compare
from placement_audit.measure.exchange import from_rank0, gather
from placement_audit.measure.fingerprint import LARGEST, Fingerprint, fingerprint, spreads
from placement_audit.measure.labels import held_alike, where_alike
from placement_audit.measurement import allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class GradNumbers:
    """One gradient; see the fields of the same names in `placement_audit.measurement.ParamMeasure`."""

    grad_error: float | None = None
    grad_ratio: float | None = None
    grad_present: bool
    reference_present: bool
    local_error: float | None = None
    grad_spread: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradTable:
    """All gradients.

    Attributes:
        scale: factor that all share over the reference.
        rows: by FQN.
    """

    scale: Fraction
    rows: dict[str, GradNumbers]


@dataclass(frozen=True, slots=True)
class _Held:
    """What one rank holds of a gradient: enough to know which collectives all ranks can run."""

    label: str
    as_param: bool
    fits: bool


@dataclass(frozen=True, slots=True)
class _Row:
    """One rank's numbers of one gradient, an error per candidate scale."""

    errors: tuple[float, ...]
    local_errors: tuple[float, ...] | None
    ratio: float
    print: Fingerprint


def grad_table(
    params: Mapping[str, nn.Parameter],
    reference: Mapping[str, nn.Parameter] | None,
    world: World,
    batch_sizes: tuple[int, ...],
    within: float,
    due: Fraction | None = None,
) -> GradTable:
    """Compare all gradients.

    Args:
        params: the parallel model's, gradients in ``.grad``.
        reference: the one-device model's, likewise; None on every rank but 0.
        world: the world mesh.
        batch_sizes: ranks along each mesh dim over which the batch varies.
        within: tolerance.
        due: the common factor that the job's loss calls for; None for unknown.
    """
    candidates = compare.scales(batch_sizes)
    held = gather({fqn: _held(p) for fqn, p in params.items()})
    has_reference = gather(
        {fqn: p.grad is not None for fqn, p in reference.items()} if reference is not None else {}
    )[0]
    mine: dict[str, _Row | None] = {}
    for fqn, p in params.items():
        ranks = [h[fqn] for h in held]
        ref = from_rank0(reference[fqn].grad if reference else None, p) if has_reference[fqn] else None
        mine[fqn] = _row(p, ref, ranks, candidates)
    rows = gather(mine)
    worst = {
        fqn: tuple(max(r.errors[i] for r in of_ranks) for i in range(len(candidates)))
        for fqn in params
        if (of_ranks := [r for ranks in rows if (r := ranks[fqn]) is not None]) and has_reference[fqn]
    }
    best = compare.best_scale(list(worst.values()), candidates, within, due)
    return GradTable(
        scale=candidates[best],
        rows={
            fqn: _numbers(p, [r[fqn] for r in rows], has_reference[fqn], best, float(candidates[best]), world)
            for fqn, p in params.items()
        },
    )


def errors(table: GradTable, within: float, noise: Mapping[str, float]) -> dict[str, float | None]:
    """By parameter, how far its gradient is off on any rank: replicas that differ can't all be right.

    Args:
        table: of all gradients.
        within: tolerance; what is off by more, but by no more than rounding moves it, is given as that.
        noise: of `placement_audit.measure.again`.
    """
    found: dict[str, float | None] = {}
    for fqn, row in table.rows.items():
        if row.grad_error is None:
            found[fqn] = None
            continue
        error = max(row.grad_error, *(s or 0.0 for s in row.grad_spread))
        found[fqn] = error if error > allowed(within, noise.get(fqn)) else min(error, within)
    return found


def _held(p: nn.Parameter) -> _Held | None:
    g = p.grad
    if g is None:
        return None
    label = str(spec_of(g).placements) if isinstance(g, DTensor) else "plain"
    return _Held(label, local_of(g).shape == local_of(p).shape, fits_its_label(g))


def _row(
    p: nn.Parameter, ref: torch.Tensor | None, ranks: list[_Held | None], candidates: tuple[Fraction, ...]
) -> _Row | None:
    """This rank's numbers; None where it has no gradient. Same collectives on every rank."""
    g = p.grad
    present = [h for h in ranks if h is not None]
    if g is None:
        return None
    local = compare.local_part(g)
    if ref is None:
        return _Row((), None, 1.0, fingerprint(local))
    if len(present) < len(ranks) or len({h.label for h in present}) > 1 or not all(h.fits for h in present):
        # Ranks without a gradient, or with another label, would not take part in putting it together; a part
        # that is not what its label says can't be put together at all.
        return _Row((LARGEST,) * len(candidates), None, LARGEST, fingerprint(local))
    full = compare.whole(g)
    errors = tuple(compare.relative_error(full, ref, c) for c in candidates)
    local_errors: tuple[float, ...] | None = None
    if all(h.as_param for h in present):
        read = compare.read_as(g, p)
        local_errors = tuple(compare.relative_error(read, ref, c) for c in candidates)
    return _Row(errors, local_errors, compare.norm_ratio(full, ref), fingerprint(local))


def _numbers(
    p: nn.Parameter, ranks: list[_Row | None], has_reference: bool, best: int, scale: float, world: World
) -> GradNumbers:
    nothing = (None,) * len(world.dims)
    rows = [r for r in ranks if r is not None]
    if len(rows) < len(ranks) or p.grad is None:
        return GradNumbers(grad_present=False, reference_present=has_reference, grad_spread=nothing)
    spread = where_alike(spreads([r.print for r in rows], world), held_alike(p.grad, world))
    if not has_reference:
        return GradNumbers(grad_present=True, reference_present=False, grad_spread=spread)
    local = [r.local_errors[best] for r in rows if r.local_errors is not None]
    return GradNumbers(
        grad_error=max(r.errors[best] for r in rows),
        grad_ratio=max((r.ratio for r in rows), key=lambda ratio: abs(ratio - scale)),
        grad_present=True,
        reference_present=True,
        local_error=max(local) if len(local) == len(rows) else None,
        grad_spread=spread,
    )
