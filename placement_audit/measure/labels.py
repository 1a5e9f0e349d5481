"""What a tensor's placements say about its ranks, and this rank's part of a full tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from placement_audit.dtensor_api import local_of, placement_of, spec_of
from placement_audit.engine.world import World
from placement_audit.errors import NotMeasurable


def coordinates(world: World) -> dict[int, tuple[int, ...]]:
    """Every rank's coordinates in the world mesh, as many as ``world.dims``."""
    return world._coords


def held_alike(x: torch.Tensor, world: World) -> tuple[bool, ...]:
    """Per world mesh dim, whether by its placements all ranks along it hold the same values.

    A plain tensor, and a world mesh dim that the DTensor's mesh does not span, count as replicated.
    """
    alike = [True] * len(world.dims)
    if isinstance(x, DTensor):
        spec = spec_of(x)
        for span, placement in zip(world.dims_of_mesh(spec.mesh), spec.placements, strict=True):
            if placement_of(placement).is_replicate:
                continue
            # A mesh dim that cuts across the world's dims (experts) may vary along any of them.
            for d in range(len(alike)) if span is None else span:
                alike[d] = False
    return tuple(alike)


def where_alike(spreads: tuple[float, ...], alike: tuple[bool, ...]) -> tuple[float | None, ...]:
    """The spreads of those world mesh dims along which the ranks should agree; None for the others."""
    return tuple(s if a else None for s, a in zip(spreads, alike, strict=True))


def part_of(full: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``full``, as the placements of ``param`` cut it.

    Mesh dims cut from left to right, with one exception: a strided shard is cut after the mesh dims to its
    right that cut the same tensor dim into ``split_factor`` parts (FSDP cuts what TP has left). Where none does,
    the tensor holds that many weights one after another, and each of them is cut (fused projections).

    Args:
        full: the global tensor, the same on every rank.
        param: a parameter; a plain one has all of it.

    Raises:
        NotMeasurable: a placement that is no way to cut, or a cut of another size than the parameter's.
    """
    if not isinstance(param, DTensor):
        return full
    spec = spec_of(param)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        raise NotMeasurable("not measured: a parameter lives on a mesh that this rank is no part of.")
    part = full
    for mesh_dim, fused in _cutting_order(spec):
        dim, size, at = spec.placements[mesh_dim].dim, spec.mesh.size(mesh_dim), coordinate[mesh_dim]
        parts = [_piece(one, size, dim, at) for one in part.chunk(fused, dim)]
        part = torch.cat(parts, dim) if fused > 1 else parts[0]
    if part.shape != local_of(param).shape:
        raise NotMeasurable(
            f"not measured: a parameter of {tuple(full.shape)} with placements {spec.placements} holds "
            f"{tuple(local_of(param).shape)} on this rank, where {tuple(part.shape)} were expected."
        )
    return part


def _piece(x: torch.Tensor, pieces: int, dim: int, at: int) -> torch.Tensor:
    """One of so many pieces; torch.chunk gives fewer where they do not go round: the last ranks get nothing."""
    found = x.chunk(pieces, dim)
    return found[at] if at < len(found) else x.narrow(dim, 0, 0)


def _cutting_order(spec: object) -> list[tuple[int, int]]:
    """Mesh dims that cut the tensor, in the order in which they do: (mesh dim, how many weights it cuts each)."""
    mesh, placements = spec.mesh, spec.placements  # type: ignore[attr-defined]
    order: list[tuple[int, int]] = []
    for i in reversed(range(len(placements))):
        p = placement_of(placements[i])
        if p.is_partial:
            raise NotMeasurable(
                f"not measured: a parameter with placements {placements} has no value of its own."
            )
        if not p.is_shard:
            continue
        at, parts = 0, 1
        while p.split_factor is not None and parts < p.split_factor and at < len(order):
            parts *= mesh.size(order[at][0]) if placements[order[at][0]].dim == p.tensor_dim else 1
            at += 1
        fused = p.split_factor or 1
        if parts not in (1, fused):
            raise NotMeasurable(f"not measured: placements {placements} cut a parameter in no known order.")
        order.insert(*((at, (i, 1)) if parts == fused else (0, (i, fused))))
    return order
