"""A tensor's sketch: eight random projections that its parts can be projected on separately.

The weight of an element is a product of one random number for each of its coordinates in the whole tensor. So
a shard is projected from where it lies, and the sketches of shards, or of the terms of a sum, add up to the
sketch of the whole: nothing but eight numbers travels. Where two tensors differ by d, the root mean square of
the differences of their sketches is about the norm of d.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from placement_audit.measure.compare import ratio
from placement_audit.measure.fingerprint import LARGEST

Sketch = tuple[float, ...]

COUNT = 8
"""Projections of each tensor: the size of a difference comes out right within a factor of about 2."""

_BLOCK = 4096
_SEED = 170902


def sketch(local: torch.Tensor, offset: Sequence[int]) -> Sketch:
    """Project one rank's part; runs no collective. Call it where no dispatch mode watches.

    Args:
        local: this rank's values, floating point or complex, at least one tensor dim; not a DTensor.
        offset: where the part begins in the whole, one for each tensor dim.
    """
    x = local.detach()
    if x.is_complex():
        x, offset = torch.view_as_real(x), (*offset, 0)
    if not x.numel():
        return (0.0,) * COUNT
    # The longest reduction in single precision: its rounding is that of the values themselves.
    x = x if x.dtype == torch.float64 else x.float()
    last = x.dim() - 1
    sums = (x @ _weights(last, offset[last], x.shape[last], x.device).to(x.dtype)).double()
    for d in reversed(range(last)):
        sums = (sums * _weights(d, offset[d], x.shape[d], x.device)).sum(-2)
    return tuple(sums.tolist())


def added(sketches: Sequence[Sketch]) -> Sketch:
    """The sketch of the whole, or of the sum."""
    return tuple(map(sum, zip(*sketches, strict=True)))


def error(ours: Sketch, reference: Sketch, norm: float) -> float:
    """About the relative error; `LARGEST` for what is not finite.

    Args:
        ours: sketch.
        reference: sketch.
        norm: of the reference itself.
    """
    square = sum((a - b) ** 2 for a, b in zip(ours, reference, strict=True)) / COUNT
    if not math.isfinite(square):
        return LARGEST
    return ratio(math.sqrt(square), norm) if square else 0.0


def _weights(tensor_dim: int, start: int, size: int, device: torch.device) -> torch.Tensor:
    """Random numbers of the coordinates start to start + size along a tensor dim: [size, COUNT]."""
    first, last = start // _BLOCK, (start + size - 1) // _BLOCK
    blocks = [_block(tensor_dim, b, device) for b in range(first, last + 1)]
    whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return whole[start - first * _BLOCK :][:size]


@functools.lru_cache(maxsize=64)
def _block(tensor_dim: int, block: int, device: torch.device) -> torch.Tensor:
    """Drawn block by block, so that a long tensor dim begins as a short one does."""
    generator = torch.Generator().manual_seed(_SEED + 1009 * block + tensor_dim)
    return torch.randn(_BLOCK, COUNT, generator=generator, dtype=torch.float64).to(device)
