"""Whether ranks hold the same tensor, without sending it: three numbers of each.

The norm, and two projections on random vectors that are the same on every rank. Equal tensors have equal
fingerprints, to the last bit. Where two tensors differ by d, each projection differs by about the norm of d
(it is normally distributed, with that standard deviation), so that the larger of the two says how far they
are apart within a factor of about 3; both are too small by a factor of 100 once in 16,000 times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from placement_audit.engine.world import World
from placement_audit.measure.labels import coordinates
from placement_audit.measurement import LARGEST

Fingerprint = tuple[float, float, float]
"""Frobenius norm and two projections; dimensionless."""

_BLOCK = 1 << 18
_WEIGHTS = 4096
_SEED = 190626


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryPrints:
    """One rank's fingerprints at one boundary.

    Attributes:
        index: into ``Trace.boundaries``.
        value: of the input's local part.
        arrived: of the arriving gradient's; None where none came.
        left: of the gradient's that left; None where none did.
    """

    index: int
    value: Fingerprint
    arrived: Fingerprint | None = None
    left: Fingerprint | None = None


def fingerprint(local: torch.Tensor) -> Fingerprint:
    """Three numbers of a local tensor of any dtype; runs no collective.

    The ops are ordinary ones: call it where no dispatch mode watches. A tensor that a collective is still
    writing (an AsyncCollectiveTensor) is waited for, if it is given as it is and not unwrapped.

    Args:
        local: this rank's values; not a DTensor, not on the meta device.
    """
    flat = (torch.view_as_real(local) if local.is_complex() else local).detach().reshape(-1)
    probes, weights = _probes(flat.device)
    sums = torch.zeros(3, dtype=torch.float64, device=flat.device)
    for k, part in enumerate(flat.split(_BLOCK)):
        x = part.double()
        sums[0] += x.dot(x)
        # A vector as long as the tensor would cost eight bytes an element for good: one block is used
        # again and again, each time with a weight of its own, which still tells the blocks apart.
        sums[1:] += weights[:, k % _WEIGHTS] * (probes[:, : x.numel()] @ x)
    square, first, second = sums.tolist()
    return math.sqrt(square) if square >= 0 else square, first, second


@functools.cache
def _probes(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random vectors [2, block] and block weights [2, blocks], drawn once; the same on every rank."""
    generator = torch.Generator().manual_seed(_SEED)
    shapes = ((2, _BLOCK), (2, _WEIGHTS))
    probes, weights = (torch.randn(s, generator=generator, dtype=torch.float64).to(device) for s in shapes)
    return probes, weights


def spreads(of_ranks: Sequence[Fingerprint], world: World) -> tuple[float, ...]:
    """Per world mesh dim, the largest relative difference between ranks that differ in that coordinate alone.

    Args:
        of_ranks: by world rank.
        world: the world mesh.

    Returns:
        As many as ``world.dims``: difference over norm, dimensionless; `LARGEST` where a value is not finite.
    """
    return tuple(max(_spread([of_ranks[r] for r in line]) for line in lines) for lines in _lines(world))


def _spread(prints: list[Fingerprint]) -> float:
    if not all(math.isfinite(x) for p in prints for x in p):
        return LARGEST
    gap = max(max(column) - min(column) for column in zip(*prints, strict=True))
    return gap / max(p[0] for p in prints) if gap else 0.0


@functools.lru_cache(maxsize=8)
def _lines(world: World) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per world mesh dim, the groups of ranks that differ in that coordinate alone."""
    lines = []
    for d in range(len(world.dims)):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, at in sorted(coordinates(world).items()):
            groups.setdefault((*at[:d], *at[d + 1 :]), []).append(rank)
        lines.append(tuple(tuple(g) for g in groups.values()))
    return tuple(lines)
