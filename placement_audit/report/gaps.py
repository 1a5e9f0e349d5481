"""What stands between the boxes of a drawn way, and in them, line by line. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from placement_audit.report.route import FAULT, Edge, Route, Stop

CHARS = 21
"""Characters of a lane's label, in the page's monospaced 11 px."""

Pill = tuple[str, str, str]
"""Words between boxes: the first line, the others, and the class of those."""

Node = Stop | Pill | None
"""A box, words between boxes, or the end of a lane."""


def nodes(route: Route) -> Iterator[Stop | Pill]:
    """The boxes of a way from top to bottom, with what is to be said between them."""
    for i, stop in enumerate((*route.stops, None)):
        if i == route.uses and route.met:
            yield "meets the activations", route.met, "ran"
        if i == route.loose and stop is not None:
            yield (*route.says, "small")
        if stop is not None:
            yield stop


def loose_ends(route: Route) -> tuple[Edge | None, Edge | None]:
    """What a parameter begins with, far from a first box that is not known to be next to it; and its gradient."""
    start, grad = route.start, route.grad
    first = None if route.met and not route.uses else next(iter(route.stops), None)
    if first is None:
        return start, grad
    if start is not None and not first.own:
        start = replace(start, far=True)
    return start, grad


def came(route: Route) -> bool:
    """Whether a gradient came back, as far as is known."""
    return route.start is None or (route.grad is not None and not route.grad.missing)


def between(end: Edge | None, *boxes: Edge | None) -> tuple[Edge, ...]:
    """The tensors of a lane between boxes, at its end one that comes or goes; None for a box that tells nothing."""
    known = _joined(end, *boxes)
    return tuple(replace(e, far=True) for e in known) if None in boxes else known


def _joined(*edges: Edge | None) -> tuple[Edge, ...]:
    """The tensor between two calls: once where both say the same of it."""
    found: list[Edge] = []
    for edge in edges:
        if edge is None:
            continue
        last = found[-1] if found else None
        if last is not None and last.labels == edge.labels:
            # the mark that says more is kept
            kept = edge if edge.mark == FAULT or not last.mark else last
            found[-1] = replace(kept, far=last.far or edge.far)
        else:
            found.append(edge)
    return tuple(found)


def edge_lines(edge: Edge) -> Iterator[str]:
    """A line a mesh dim, then what it really is."""
    if edge.labels == ():
        yield "plain"
    for mesh_dim, placement in edge.labels or ():
        yield f"{mesh_dim} {placement}"
    if edge.told:
        yield from textwrap.wrap(edge.told, CHARS)


def cut(text: str, size: int) -> str:
    """``text``, or as much of it as fits."""
    return text if len(text) <= size else f"{text[: size - 3]}..."


def ran_lines(collectives: Sequence[str]) -> Iterator[str]:
    """Collectives, each in a few short lines."""
    for text in collectives:
        what, _, size = text.partition(": ")
        name, over, dims = what.partition(" over ")
        parts = [what] if len(what) <= CHARS + 3 else [name, f"{over.strip()} {dims}"]
        for part in (*parts, size):
            yield from textwrap.wrap(part, CHARS + 3)
