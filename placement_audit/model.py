"""The values that travel through the house: config -> build -> trace -> judge -> report.

Everything here is frozen plain data: tuples, strings, numbers. No torch object ever gets in; the
tracer converts at its edge. So a saved trace can be judged and rendered again without torch.

Words are torch's: a *mesh dim* belongs to a device mesh, a *tensor dim* to a tensor. All mesh dims
named here are dims of the world mesh (``Trace.mesh``); a DTensor that lives on a part of it (tp alone,
fsdp alone) has a `Layout` that names only those dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction


class PlacementKind(StrEnum):
    """The four DTensor placements."""

    SHARD = "shard"
    STRIDED_SHARD = "strided_shard"
    REPLICATE = "replicate"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Placement:
    """A DTensor placement on one mesh dim.

    Attributes:
        kind: which of the four.
        tensor_dim: the sharded tensor dim, for the two shards, else None.
        split_factor: of a strided shard, else None.
        reduce_op: of a partial ("sum", "avg", "max", ...), else None.
    """

    kind: PlacementKind
    tensor_dim: int | None = None
    split_factor: int | None = None
    reduce_op: str | None = None

    @property
    def is_shard(self) -> bool:
        """True for both the plain and the strided shard."""
        return self.kind in (PlacementKind.SHARD, PlacementKind.STRIDED_SHARD)

    @property
    def is_replicate(self) -> bool:
        return self.kind is PlacementKind.REPLICATE

    @property
    def is_partial(self) -> bool:
        return self.kind is PlacementKind.PARTIAL

    def __str__(self) -> str:
        """Torch's spelling: ``Shard(0)``, ``Replicate()``, ``Partial(sum)``."""
        match self.kind:
            case PlacementKind.SHARD:
                return f"Shard({self.tensor_dim})"
            case PlacementKind.STRIDED_SHARD:
                return f"_StridedShard({self.tensor_dim}, sf={self.split_factor})"
            case PlacementKind.REPLICATE:
                return "Replicate()"
            case _:
                return f"Partial({self.reduce_op})"

    def short(self) -> str:
        """The spelling for tables: ``S(0)``, ``R``, ``P(sum)``; torch's own short form."""
        match self.kind:
            case PlacementKind.SHARD:
                return f"S({self.tensor_dim})"
            case PlacementKind.STRIDED_SHARD:
                return f"_S({self.tensor_dim}, {self.split_factor})"
            case PlacementKind.REPLICATE:
                return "R"
            case _:
                return f"P({self.reduce_op})"


REPLICATE = Placement(PlacementKind.REPLICATE)


@dataclass(frozen=True, slots=True)
class Layout:
    """Placements of a DTensor, one per mesh dim.

    Attributes:
        dims: world mesh dim names, in the DTensor's mesh order (mesh dims of size 1 are left out).
        placements: as many as ``dims``.
    """

    dims: tuple[str, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.placements):
            raise ValueError(f"{len(self.dims)} mesh dims but {len(self.placements)} placements")

    def on(self, mesh_dim: str) -> Placement | None:
        """The placement on ``mesh_dim``, or None where the DTensor's mesh has no such dim."""
        return dict(zip(self.dims, self.placements, strict=True)).get(mesh_dim)

    def short(self) -> str:
        """``(S(0), R)``."""
        return "(" + ", ".join(p.short() for p in self.placements) + ")"

    def __str__(self) -> str:
        """``fsdp=Shard(0) tp=Replicate()``."""
        return " ".join(f"{d}={p}" for d, p in zip(self.dims, self.placements, strict=True))


class StateKind(StrEnum):
    """What a value, or a gradient, really is along one mesh dim (see `placement_audit.states`)."""

    ZERO = "zero"
    INVARIANT = "invariant"
    VARYING = "varying"
    AMBIGUOUS = "ambiguous"
    MIXED = "mixed"
    LOST = "lost"
    TERM = "term"


@dataclass(frozen=True, slots=True)
class State:
    """The actual state along one mesh dim, as computed from the dataflow and never from a label.

    Attributes:
        kind: see `StateKind`.
        scale: the gradient over the true gradient; 1 where nothing rescaled it, None where parts of
            different scale were added up.
        blame: indices into ``Trace.boundaries`` of the calls whose label departed from the state, in
            backward order.
    """

    kind: StateKind
    scale: Fraction | None = Fraction(1)
    blame: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """The world mesh: only dims with more than one rank.

    Attributes:
        device_type: "cpu", "cuda" or "meta".
        dim_names: torch's ``mesh_dim_names``.
        shape: ranks along each mesh dim.
    """

    device_type: str
    dim_names: tuple[str, ...]
    shape: tuple[int, ...]

    def size(self, mesh_dim: str) -> int:
        """Ranks along ``mesh_dim``."""
        return self.shape[self.dim_names.index(mesh_dim)]

    def __str__(self) -> str:
        return " x ".join(f"{n} {s}" for n, s in zip(self.dim_names, self.shape, strict=True)) or "1 rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Shape and dtype of a tensor.

    Attributes:
        global_shape: elements along each tensor dim of the full tensor (a plain tensor: ``local_shape``).
        local_shape: elements along each tensor dim of this rank's part.
        dtype: torch's name without the ``torch.``, e.g. "float32".
    """

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Comment:
    """What a comment in the source says to placement-audit.

    Attributes:
        line: 1-based.
        text: what follows ``placement-audit:``.
    """

    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """A line of code.

    Attributes:
        path: shortened: relative to site-packages or to the working directory.
        line: 1-based.
        function: the function's name.
        code_line: the stripped source line, "" where it could not be read.
        package: top-level package the file belongs to ("torchtitan", "torch"), or None for a user's own file.
        span: (line, column, end line, end column) of the call, lines 1-based, columns 0-based characters; None
            where it is not known.
        comments: to placement-audit, on the lines of the call.
    """

    path: str
    line: int
    function: str
    code_line: str = ""
    package: str | None = None
    span: tuple[int, int, int, int] | None = None
    comments: tuple[Comment, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}"
