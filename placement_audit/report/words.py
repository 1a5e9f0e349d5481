"""The words and layout that the text report and the gradient's way share. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from fractions import Fraction

from placement_audit.model import Layout, MeshSpec
from placement_audit.tracing import RunRecord

LABEL_WIDTH = 12
"""Columns that a label such as ``evidence`` takes, its gap included."""

_CALLS = {
    "to_local": "DTensor.to_local",
    "from_local": "DTensor.from_local",
    "redistribute": "DTensor.redistribute",
    "full_tensor": "DTensor.full_tensor",
}


def call_name(kind: str) -> str:
    """``from_local`` -> ``DTensor.from_local``; functions keep their name."""
    return _CALLS.get(kind, kind)


def plural(count: int, noun: str) -> str:
    """``1 finding``, ``2 findings``, ``1,137 parameters``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(part for part in (", ".join(items[:-1]), *items[-1:]) if part)


def times(factor: Fraction) -> str:
    """``x2``, ``x1/2``."""
    return f"x{factor}"


def layout_text(layout: Layout | None) -> str:
    """``fsdp S(0)  tp R``; a plain tensor is ``plain``."""
    if layout is None:
        return "plain"
    return "  ".join(f"{d} {p.short()}" for d, p in zip(layout.dims, layout.placements, strict=True))


def mesh_text(mesh: MeshSpec, world_size: int) -> str:
    """``fsdp 2 x tp 2 (4 ranks)``."""
    return f"{mesh} ({plural(world_size, 'rank')})" if mesh.dim_names else str(mesh)


def evidence_text(run: RunRecord) -> str:
    """How the run came by what it says."""
    strengths = listed(run.evidence) or "none"
    if run.backend == "fake":
        how = f"one process on torch's fake process group, {run.device_type} tensors; no value was computed"
    else:
        how = f"{plural(run.world_size, 'rank')} on {run.backend}, {run.device_type} tensors"
    return f"{strengths}: {how}"


def version_of(run: RunRecord, name: str) -> str | None:
    """The version of ``name`` in the run, or None."""
    return dict(run.versions).get(name)


def labelled(label: str, text: str, *, width: int, indent: int = 2) -> list[str]:
    """A label and its text, wrapped between words under itself. No word is ever cut."""
    head = " " * indent + label.ljust(LABEL_WIDTH)
    return wrapped(text, head=head, width=width)


_COMMAND = re.compile(r"placement-audit [a-z]+ (?:'[^']*'|[\w.*-]+)")
_JOINED = "\N{NO-BREAK SPACE}"


def unbroken(text: str) -> str:
    """``text`` that `wrapped` keeps on one line."""
    return text.replace(" ", _JOINED)


def wrapped(text: str, *, head: str, width: int) -> list[str]:
    """``text`` after ``head``, further lines hanging under the first; a command stays on one line."""
    joined = _COMMAND.sub(lambda found: unbroken(found[0]), text)
    lines = textwrap.wrap(
        joined,
        width=max(width, len(head) + 20),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_JOINED, " ").rstrip() for line in lines] or [head.rstrip()]


def column(label: str, items: Iterable[str], *, indent: int = 2) -> list[str]:
    """A label and one item a line, each as it is: for names, paths and code lines."""
    heads = [label]
    return [" " * indent + (heads.pop() if heads else "").ljust(LABEL_WIDTH) + item for item in items if item]
