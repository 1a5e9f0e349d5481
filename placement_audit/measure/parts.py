"""Which part of the whole a rank holds of an activation or of its gradient, told by labels and shapes.

Values never choose. A DTensor is read as its placements say. A plain tensor is set against the shape that it
has on one device: a mesh dim that makes up the difference in one way only shards it there; along mesh dims that
do not, the traced state says whether the ranks hold the same. What stays open is not compared.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from placement_audit.dtensor_api import offset_of, placement_of, spec_of
from placement_audit.engine.world import World
from placement_audit.measure.labels import coordinates
from placement_audit.measure.sketch import Sketch, sketch
from placement_audit.model import StateKind

_EQUAL = (StateKind.INVARIANT, StateKind.ZERO)


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of an activation.

    Attributes:
        shape: of the whole, global batch included.
        adds: per world mesh dim, whether the parts along it add up to the whole (shards, terms of a sum); else
            each of them is the whole, as far as that mesh dim goes.
        sketch: of the part.
    """

    shape: tuple[int, ...]
    adds: tuple[bool, ...]
    sketch: Sketch


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why a part can't be told.

    Attributes:
        why: a few words.
    """

    why: str


class Reader:
    """Reads parts on this rank."""

    def __init__(self, world: World, batch_dims: tuple[str, ...]) -> None:
        """See the class.

        Args:
            world: the world mesh.
            batch_dims: mesh dims over which the batch varies: they cut tensor dim 0, in mesh order.
        """
        self._world = world
        self._at = coordinates(world)[world.rank]
        self._batch = [d for d, name in enumerate(world.dims) if name in batch_dims]

    def read(
        self,
        x: torch.Tensor,
        kinds: tuple[StateKind, ...],
        shape: tuple[int, ...] | None,
        value: Part | None = None,
    ) -> Part | Unknown:
        """This rank's part of an activation, or of the gradient of one.

        Args:
            x: of at least one tensor dim.
            kinds: its traced state along each world mesh dim.
            shape: on one device, over the global batch; None where there is no such tensor, and the label
                alone must tell.
            value: of the activation, where ``x`` is its gradient.
        """
        sizes = self._world.sizes
        adds: dict[int, bool] = {}
        share = 1.0
        whole, offset = list(x.shape), [0] * x.dim()
        if isinstance(x, DTensor):
            spec = spec_of(x)
            for span, placement in zip(self._world.dims_of_mesh(spec.mesh), spec.placements, strict=True):
                p = placement_of(placement)
                if span is None:
                    return Unknown("its mesh is no part of the world mesh")
                if p.split_factor is not None or (p.is_partial and p.reduce_op not in ("sum", "avg")):
                    return Unknown(f"placement {p}")
                for d in span:
                    adds[d] = not p.is_replicate
                    share /= sizes[d] if p.reduce_op == "avg" else 1
            found = offset_of(x)
            if found is None:
                return Unknown("its local part has not the shape that its placements call for")
            offset = list(found)
        batch = [d for d in self._batch if d not in adds]
        if batch and len(batch) < len(self._batch):
            return Unknown("its mesh spans some of the batch's mesh dims")
        index = 0
        for d in batch:
            index, adds[d] = index * sizes[d] + self._at[d], True
        offset[0] += index * whole[0]
        whole[0] *= math.prod(sizes[d] for d in batch)
        others = [d for d in range(len(sizes)) if d not in adds]
        if shape is not None and tuple(whole) != shape:
            why = self._cut(whole, offset, shape, others, adds)
            if why is not None:
                return Unknown(why)
        for d in (d for d in others if d not in adds):
            if kinds[d] in _EQUAL:
                adds[d] = False
            elif value is not None and not value.adds[d] and kinds[d] is StateKind.VARYING:
                adds[d] = True  # each rank's term of the gradient of what all of them hold
            else:
                return Unknown(f"traced {kinds[d]} along {self._world.dims[d]}, in its full shape")
        projected = sketch(x._local_tensor if isinstance(x, DTensor) else x, offset)
        return Part(
            shape=tuple(whole),
            adds=tuple(adds[d] for d in range(len(sizes))),
            sketch=projected if share == 1 else tuple(share * s for s in projected),
        )

    def _cut(
        self,
        whole: list[int],
        offset: list[int],
        shape: tuple[int, ...],
        among: list[int],
        adds: dict[int, bool],
    ) -> str | None:
        """Find the mesh dims that shard a plain tensor, and tell where the part lies; else say why not."""
        sizes = self._world.sizes
        odd = [t for t, (n, m) in enumerate(zip(whole, shape, strict=False)) if n != m]
        if len(whole) != len(shape) or len(odd) != 1:
            return f"{tuple(whole)} where one device has {shape}"
        (t,) = odd
        ways = [
            chosen
            for n in range(1, len(among) + 1)
            for chosen in itertools.combinations(among, n)
            if whole[t] * math.prod(sizes[d] for d in chosen) == shape[t]
        ]
        # Tensor dim 0 holds the batch: flattened with another it is no contiguous part.
        if len(ways) != 1 or t == 0:
            return f"{tuple(whole)} where one device has {shape}, in no way or in several"
        index = 0
        for d in ways[0]:
            index, adds[d] = index * sizes[d] + self._at[d], True
        offset[t] += index * whole[t]
        whole[t] = shape[t]
        return None


def assembled(parts: list[Part], world: World) -> list[Sketch]:
    """The sketches of all that should be the whole: one for each set of ranks whose parts make it up."""
    groups: dict[tuple[int, ...], list[Sketch]] = {}
    for rank, at in sorted(coordinates(world).items()):
        same = tuple(c for c, adds in zip(at, parts[rank].adds, strict=True) if not adds)
        groups.setdefault(same, []).append(parts[rank].sketch)
    return [tuple(map(sum, zip(*g, strict=True))) for g in groups.values()]
