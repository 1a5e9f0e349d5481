"""The world mesh, and which of its dims a group or a DTensor's mesh spans."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from placement_audit.dtensor_api import DTensor, placement_of, spec_of
from placement_audit.model import Layout, MeshSpec, Placement


class World:
    """World mesh dims with more than one rank, and how others map onto them.

    Attributes:
        dims: their names, in mesh order.
        sizes: ranks along each.
        rank: this process's.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Read the rank layout once, before any dispatch mode is on."""
        names = mesh.mesh_dim_names
        if names is None:
            raise ValueError("the world mesh needs mesh_dim_names")
        ranks = mesh.mesh.tolist()
        keep = [i for i in range(mesh.ndim) if mesh.size(i) > 1]
        self.dims: tuple[str, ...] = tuple(names[i] for i in keep)
        self.sizes: tuple[int, ...] = tuple(mesh.size(i) for i in keep)
        self.rank = dist.get_rank()
        self._device_type = mesh.device_type
        self._coords: dict[int, tuple[int, ...]] = {}
        self._walk(ranks, (), keep)
        self._of_ranks: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        self._of_mesh: dict[int, tuple[DeviceMesh, tuple[tuple[int, ...] | None, ...]]] = {}
        self._layouts: dict[tuple[int, tuple[Any, ...]], Layout] = {}

    def _walk(self, ranks: Any, at: tuple[int, ...], keep: list[int]) -> None:
        if isinstance(ranks, list):
            for i, inner in enumerate(ranks):
                self._walk(inner, (*at, i), keep)
        else:
            self._coords[ranks] = tuple(at[i] for i in keep)

    def spec(self, device_type: str) -> MeshSpec:
        """As plain data."""
        return MeshSpec(device_type=device_type, dim_names=self.dims, shape=self.sizes)

    def dims_of_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
        """Indices of the world mesh dims that a group of ranks spans; None where it spans none whole."""
        found = self._of_ranks.get(ranks, ())
        if found != () or ranks in self._of_ranks:
            return found
        coords = [self._coords.get(r) for r in ranks]
        dims: tuple[int, ...] | None = None
        if None not in coords:
            spanned = tuple(i for i in range(len(self.dims)) if len({c[i] for c in coords}) > 1)  # type: ignore[index]
            if math.prod(self.sizes[i] for i in spanned) == len(set(ranks)):
                dims = spanned
        self._of_ranks[ranks] = dims
        return dims

    def dims_of_mesh(self, mesh: DeviceMesh) -> tuple[tuple[int, ...] | None, ...]:
        """For each dim of a DTensor's mesh, the world mesh dims it spans (() for a dim of size 1)."""
        found = self._of_mesh.get(id(mesh))
        if found is None:
            spans = tuple(
                () if mesh.size(i) == 1 else self.dims_of_ranks(_mesh_dim_ranks(mesh, i))
                for i in range(mesh.ndim)
            )
            found = self._of_mesh[id(mesh)] = (mesh, spans)
        return found[1]

    def layout(self, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Layout:
        """A DTensor's placements, spelled by world mesh dim; the same object each time they are met."""
        found = self._layouts.get((id(mesh), placements))
        if found is None:
            found = self._layouts[id(mesh), placements] = self._layout(mesh, placements)
        return found

    def layout_of(self, x: Any) -> Layout | None:
        """A tensor's layout; None for a plain one."""
        if not isinstance(x, DTensor):
            return None
        spec = spec_of(x)
        return self.layout(spec.mesh, spec.placements)

    def _layout(self, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Layout:
        dims: list[str] = []
        ours: list[Placement] = []
        for i, (span, p) in enumerate(zip(self.dims_of_mesh(mesh), placements, strict=True)):
            names = (
                [f"ranks{list(_mesh_dim_ranks(mesh, i))}"] if span is None else [self.dims[d] for d in span]
            )
            dims += names
            ours += [placement_of(p)] * len(names)
        return Layout(tuple(dims), tuple(ours))


def _mesh_dim_ranks(mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group(dim)))
