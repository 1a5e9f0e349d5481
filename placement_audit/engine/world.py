"""The world mesh, and which of its dims a group or a DTensor's mesh spans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from placement_audit.case import Case, dim_names
from placement_audit.dtensor_api import DTensor, placement_of, spec_of
from placement_audit.model import REPLICATE, Layout, MeshSpec, Placement
from placement_audit.tracing import OwnDim


class World:
    """World mesh dims with more than one rank, and how others map onto them.

    A mesh dim may be told apart into parts where code does: key and value weights that four tp ranks share two
    and two are replicated on "tp[0,1]", the ranks at the places 0 and 1 along tp and those that lie to each
    other likewise, and sharded on "tp[0,2]". These two then stand for "tp".

    Attributes:
        dims: their names, in mesh order.
        sizes: ranks along each.
        rank: this process's.
        parents: of each, the name of the mesh dim that it is (a part of).
    """

    def __init__(self, mesh: DeviceMesh, parts: Iterable[str] = ()) -> None:
        """Read the rank layout once, before any dispatch mode is on.

        Args:
            mesh: the world's.
            parts: names of parts of its dims, such as "tp[0,1]".

        Raises:
            ValueError: a part is none.
        """
        names = dim_names(mesh)
        ranks = mesh.mesh.tolist()
        keep = [i for i in range(mesh.ndim) if mesh.size(i) > 1]
        whole = {names[i]: mesh.size(i) for i in keep}
        strides = _strides(whole, parts)
        self.dims: tuple[str, ...] = tuple(part for n in whole for part, _, _ in _parts(n, strides[n]))
        self.sizes: tuple[int, ...] = tuple(k for n in whole for _, _, k in _parts(n, strides[n]))
        self.parents: tuple[str, ...] = tuple(n for n in whole for _ in _parts(n, strides[n]))
        self.rank = dist.get_rank()
        self._device_type = mesh.device_type
        self._coords: dict[int, tuple[int, ...]] = {}
        self._walk(ranks, (), keep, [[(s, k) for _, s, k in _parts(n, strides[n])] for n in whole])
        self._of_ranks: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        self._of_mesh: dict[int, tuple[DeviceMesh, tuple[tuple[int, ...] | None, ...]]] = {}
        self._layouts: dict[tuple[int, tuple[Any, ...]], Layout] = {}

    @classmethod
    def of(cls, case: Case) -> World:
        """A case's world, its mesh dims told apart where its plain parameters are declared so."""
        named = dict.fromkeys(d for of in case.declared.values() for d in of)
        return cls(case.mesh, [d for d in named if "[" in d])

    def _walk(
        self, ranks: Any, at: tuple[int, ...], keep: list[int], strides: list[list[tuple[int, int]]]
    ) -> None:
        if isinstance(ranks, list):
            for i, inner in enumerate(ranks):
                self._walk(inner, (*at, i), keep, strides)
        else:
            self._coords[ranks] = tuple(
                at[i] // s % k for i, of in zip(keep, strides, strict=True) for s, k in of
            )

    def within(self, mesh_dims: Iterable[str]) -> tuple[str, ...]:
        """The names in `dims` of these mesh dims, those of one rank left out."""
        return tuple(
            d for m in mesh_dims for d, parent in zip(self.dims, self.parents, strict=True) if parent == m
        )

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

    def dims_to(self, rank: int) -> tuple[int, ...] | None:
        """Indices of the world mesh dims along which another rank lies elsewhere; None for an unknown one."""
        here, there = self._coords.get(self.rank), self._coords.get(rank)
        if here is None or there is None:
            return None
        return tuple(d for d, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)

    @property
    def here(self) -> tuple[int, ...]:
        """This rank's coordinates."""
        return self._coords[self.rank]

    @property
    def axes(self) -> range:
        """Indices of the world mesh dims."""
        return range(len(self.dims))

    def neighbour(self, dim: int) -> int:
        """The next rank along a world mesh dim."""
        here = self.here
        there = (*here[:dim], (here[dim] + 1) % self.sizes[dim], *here[dim + 1 :])
        return next(r for r, c in self._coords.items() if c == there)

    def parts_of_ranks(self, ranks: tuple[int, ...]) -> dict[int, int]:
        """World mesh dim -> how many of its coordinates a group of ranks has, where more than one."""
        coords = [self._coords[r] for r in ranks if r in self._coords]
        found = {d: len({c[d] for c in coords}) for d in range(len(self.dims))} if coords else {}
        return {d: n for d, n in found.items() if n > 1}

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

    def dims_apart(self, mesh: DeviceMesh, placements: tuple[Any, ...]) -> dict[int, Any]:
        """World mesh dim -> placement, where ranks along it hold other parts of a DTensor: all of them, or some."""
        apart: dict[int, Any] = {}
        for i, (span, p) in enumerate(zip(self.dims_of_mesh(mesh), placements, strict=True)):
            if not p.is_replicate():
                dims = self.parts_of_ranks(_mesh_dim_ranks(mesh, i)) if span is None else span
                apart.update(dict.fromkeys(dims, p))
        return apart

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

    def declared(self, placements: Mapping[str, Placement] | None) -> Layout | None:
        """The layout of a plain tensor as its owner declared it; None where nothing was."""
        if not placements:
            return None
        whole = zip(self.dims, self.parents, strict=True)
        return Layout(self.dims, tuple(placements.get(d, placements.get(m, REPLICATE)) for d, m in whole))

    def own_dims(self, x: Any) -> tuple[OwnDim, ...]:
        """A DTensor's own mesh, dim by dim; () where each is just one dim of the world mesh."""
        if not isinstance(x, DTensor):
            return ()
        spec = spec_of(x)
        spans = self.dims_of_mesh(spec.mesh)
        if all(span is None or len(span) == 1 for span in spans):
            return ()
        return tuple(
            OwnDim(
                spans=(_unknown(spec.mesh, i),) if span is None else tuple(self.dims[d] for d in span),
                placement=placement_of(p),
            )
            for i, (span, p) in enumerate(zip(spans, spec.placements, strict=True))
        )

    def _layout(self, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Layout:
        dims: list[str] = []
        ours: list[Placement] = []
        for i, (span, p) in enumerate(zip(self.dims_of_mesh(mesh), placements, strict=True)):
            names = [_unknown(mesh, i)] if span is None else [self.dims[d] for d in span]
            dims += names
            ours += [placement_of(p)] * len(names)
        return Layout(tuple(dims), tuple(ours))


def _unknown(mesh: DeviceMesh, dim: int) -> str:
    """A name for a mesh dim that spans none of the world's."""
    return f"ranks{list(_mesh_dim_ranks(mesh, dim))}"


def _mesh_dim_ranks(mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group(dim)))


def _strides(whole: dict[str, int], parts: Iterable[str]) -> dict[str, list[int]]:
    """Mesh dim -> the strides that its parts begin and end at, 1 and its size among them."""
    found = {name: {1, size} for name, size in whole.items()}
    for part in parts:
        name, _, places = part.rstrip("]").partition("[")
        at = [int(p) for p in places.split(",") if p.strip().isdigit()]
        step = at[1] - at[0] if len(at) > 1 else 0
        even = step > 0 and at == list(range(0, step * len(at), step))
        if name not in whole or not even:
            raise ValueError(
                f"{part!r} is no part of a mesh dim: expected a name of {sorted(whole)} and places that begin "
                'at 0 and lie evenly, such as "tp[0,1]"'
            )
        found[name] |= {step, step * len(at)}
    for name, strides in found.items():
        ordered = sorted(strides)
        if any(b % a for a, b in pairwise(ordered)) or ordered[-1] != whole[name]:
            raise ValueError(f"the parts of {name!r} do not divide its {whole[name]} ranks evenly")
    return {name: sorted(strides) for name, strides in found.items()}


def _parts(name: str, strides: list[int]) -> list[tuple[str, int, int]]:
    """(name, stride, ranks) of each part of a mesh dim, the outermost first."""
    if len(strides) == 2:
        return [(name, 1, strides[1])]
    return [
        (f"{name}[{','.join(str(p) for p in range(0, high, low))}]", low, high // low)
        for low, high in reversed(list(pairwise(strides)))
    ]
