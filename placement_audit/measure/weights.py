"""Weights for a measurement: random where the job's own initial values would hide a fault.

Ones and zeros hide faults, and so do shards that are equal (on CPU every rank draws the same numbers). So
each parameter gets new values, drawn from a seed and its name, with the mean and the deviation that the job's
init gave it. Every rank draws the whole tensor and keeps its part; the model on one device keeps all of it.

A fault is kept: where ranks that should hold the same did not after the job's init, they differ by as much
afterwards. The model on one device has the values without that difference.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from placement_audit.dtensor_api import clean_fqn, local_of, storage_key
from placement_audit.engine.world import World
from placement_audit.errors import UsageError
from placement_audit.measure.exchange import gather
from placement_audit.measure.fingerprint import Fingerprint, fingerprint, spreads
from placement_audit.measure.labels import held_alike, part_of, where_alike

_OF_CONSTANT = 0.2
"""Deviation given to a constant parameter, over its constant."""

_OF_ZERO = 0.1
"""Deviation given to a parameter of zeros: biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What to draw.

    Attributes:
        seed: of all of it.
        moments: by FQN: mean and standard deviation.
        drawn_as: by FQN: the name to draw by; tied parameters share one.
        init_spread: by FQN, per world mesh dim: how far the ranks were apart after the job's own init; None
            where they may be.
    """

    seed: int
    moments: dict[str, tuple[float, float]]
    drawn_as: dict[str, str]
    init_spread: dict[str, tuple[float | None, ...]]

    def full(self, fqn: str, like: torch.Tensor) -> torch.Tensor:
        """One parameter's values, of the global shape; the same on every rank.

        Args:
            fqn: the parameter.
            like: for shape, dtype and device.
        """
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(self.drawn_as[fqn].encode()))
        mean, deviation = self.moments[fqn]
        values = torch.randn(like.shape, generator=generator, dtype=torch.float32)
        return values.mul_(deviation).add_(mean).to(device=like.device, dtype=like.dtype)


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By FQN as the user's model has it; a tied parameter comes under each of its names."""
    return {clean_fqn(n): p for n, p in model.named_parameters(remove_duplicate=False)}


def unique(params: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Each parameter once, tied ones too."""
    return list({id(p): p for p in params.values()}.values())


def survey(params: dict[str, nn.Parameter], world: World, seed: int) -> Weights:
    """Look at what the job's init left; collective."""
    mine: dict[str, tuple[int, float, float, Fingerprint]] = {}
    for fqn, p in params.items():
        local = local_of(p.detach())
        values = local.double() if local.numel() else torch.zeros(1, dtype=torch.float64)
        mine[fqn] = (local.numel(), values.mean().item(), values.std(correction=0).item(), fingerprint(local))
    ranks = gather(mine)
    first: dict[int, str] = {}
    moments, drawn_as, init_spread = {}, {}, {}
    for fqn, p in params.items():
        rows = [r[fqn] for r in ranks]
        there = [r for r in rows if r[0]] or rows
        # The median: one rank that is off must not spoil what all of them draw.
        moments[fqn] = _moments(
            statistics.median_low(r[1] for r in there), statistics.median_low(r[2] for r in there)
        )
        drawn_as[fqn] = first.setdefault(id(p), fqn)
        init_spread[fqn] = where_alike(spreads([r[3] for r in rows], world), held_alike(p, world))
    return Weights(seed=seed, moments=moments, drawn_as=drawn_as, init_spread=init_spread)


def _moments(mean: float, deviation: float) -> tuple[float, float]:
    if not (math.isfinite(mean) and math.isfinite(deviation)):  # never initialised: any usual size will do
        return 0.0, 0.02
    return mean, deviation or abs(mean) * _OF_CONSTANT or _OF_ZERO


@torch.no_grad()
def fill_parallel(params: dict[str, nn.Parameter], weights: Weights, mesh: DeviceMesh) -> None:
    """Give the parallel model its values; collective where replicas differ.

    Args:
        params: the parallel model's.
        weights: from `survey`.
        mesh: the world mesh, for groups.
    """
    for fqn, p in params.items():
        if weights.drawn_as[fqn] != fqn or not p.is_floating_point():
            continue
        local = local_of(p.detach())
        apart = any(weights.init_spread[fqn][d] for d in range(len(weights.init_spread[fqn])))
        difference = _difference(local, weights.init_spread[fqn], mesh) if apart else None
        local.copy_(part_of(weights.full(fqn, p), p))
        if difference is not None:
            local.add_(difference)


def _difference(local: torch.Tensor, spread: tuple[float | None, ...], mesh: DeviceMesh) -> torch.Tensor:
    """How far this rank is from the first of those that should hold the same."""
    agreed = local.clone()
    dims = [i for i, size in enumerate(mesh.shape) if size > 1]
    for dim, s in zip(dims, spread, strict=True):
        if s is not None:
            dist.broadcast(agreed, group_src=0, group=mesh.get_group(dim))
    return local - agreed


def part(reference: nn.Module, model: nn.Module) -> None:
    """Give the model on one device memory of its own where it was made from the job's own tensors.

    Raises:
        UsageError: it has parameters of the job itself, not others of the same memory.
    """
    own = {id(p): fqn for fqn, p in model.named_parameters()}
    same = [fqn for fqn, p in reference.named_parameters() if id(p) in own]
    if same:
        raise UsageError(
            f"the reference's model has the job's own parameters ({', '.join(same[:4])}); expected a model of its "
            "own: its gradients would be added to the job's. Build it anew, or copy.deepcopy it."
        )
    memory = {storage_key(local_of(x)) for x in (*model.parameters(), *model.buffers())}
    for x in (*reference.parameters(), *reference.buffers()):
        if storage_key(local_of(x)) in memory:
            x.data = x.data.clone()


@torch.no_grad()
def fill_reference(params: dict[str, nn.Parameter], weights: Weights) -> None:
    """Give the model on one device the same values, whole."""
    for fqn, p in params.items():
        if p.is_floating_point():
            p.copy_(weights.full(fqn, p))
