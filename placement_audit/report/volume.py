"""What goes over the wire, by mesh dim: collectives and the bytes that one rank puts into them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from placement_audit.tracing import Phase, Trace

_BITS = re.compile(r"^(?:bfloat|float|complex|uint|int)(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind.

    Attributes:
        phase: forward, backward or recompute.
        name: ``all_reduce(sum)``.
        dtype: of what was sent.
        count: how many.
        sent: bytes that this rank put in; None where the dtype's size is not known.
    """

    phase: Phase
    name: str
    dtype: str
    count: int
    sent: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Everything over one mesh dim, or over several at once.

    Attributes:
        over: ``tp``; ``fsdp and tp``; ``a group of 4 ranks``.
        rows: the most bytes first.
    """

    over: str
    rows: tuple[Traffic, ...]

    @property
    def count(self) -> int:
        return sum(t.count for t in self.rows)

    @property
    def sent(self) -> int:
        """Bytes, of the dtypes whose size is known."""
        return sum(t.sent or 0 for t in self.rows)


def itemsize(dtype: str) -> int | None:
    """Bytes of one element: ``bfloat16`` -> 2, ``float8_e4m3fn`` -> 1; None for what has no known size."""
    if dtype == "bool":
        return 1
    found = _BITS.match(dtype)
    bits = int(found[1]) if found else 0
    return bits // 8 if bits and bits % 8 == 0 else None


def volumes(trace: Trace) -> tuple[Volume, ...]:
    """Collectives of the whole step; mesh dims in the mesh's order, what spans none or several last."""
    count: Counter[tuple[str, Phase, str, str]] = Counter()
    numel: Counter[tuple[str, Phase, str, str]] = Counter()
    for c in trace.collectives:
        over = " and ".join(c.mesh_dims) or f"a group of {len(c.group_ranks)} ranks"
        name = f"{c.name}({c.reduce_op})" if c.reduce_op else c.name
        key = (over, c.phase, name, c.dtype)
        count[key] += 1
        numel[key] += c.numel
    names = sorted({key[0] for key in count})
    dims = list(trace.mesh.dim_names)
    names.sort(key=lambda name: dims.index(name) if name in dims else len(dims))
    out = []
    for name in names:
        rows = []
        for key, n in count.items():
            if key[0] == name:
                size = itemsize(key[3])
                sent = None if size is None else numel[key] * size
                rows.append(Traffic(phase=key[1], name=key[2], dtype=key[3], count=n, sent=sent))
        rows.sort(key=lambda t: (-(t.sent or 0), t.phase, t.name))
        out.append(Volume(over=name, rows=tuple(rows)))
    return tuple(out)
