"""Where numbers part from one device's, as stops of a way. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from placement_audit.measurement import Departure
from placement_audit.report.route import FAULT, Edge, Stop, stop_at
from placement_audit.tracing import Boundary
from placement_audit.verdicts import Finding, PathStep


def departed_steps(f: Finding, d: Departure) -> list[PathStep]:
    """Those of a finding's steps that are where numbers depart."""
    ran = [(x.kind, x.call_site, x.role) for x in d.steps]
    return [s for s in f.path if (s.kind, s.call_site, s.role.partition(": ")[2]) in ran]


def departed_stops(
    steps: Sequence[PathStep],
    d: Departure,
    boundaries: Sequence[Boundary],
    own: Collection[int],
    stop_of: Callable[[Boundary], Stop],
) -> tuple[Stop, ...]:
    """What ran between the last right numbers and the first wrong ones, in the order of forward.

    Args:
        steps: it, in the order in which it ran; one of them it is.
        d: the departure.
        boundaries: all of the trace.
        own: indices of those that are drawn elsewhere.
        stop_of: makes a stop of a boundary, with nothing marked.
    """
    stops: list[Stop] = []
    for s in steps:
        said, _, what = s.role.partition(": ")
        place = stop_at(
            s, kind=what if s.kind == "op" else "", notes=(said if s.kind in ("op", what) else s.role,)
        )
        if 0 <= s.boundary < len(boundaries):
            at = {"where": place.where, "function": place.function, "code": place.code, "site": place.site}
            place = replace(stop_of(boundaries[s.boundary]), role=s.role, notes=place.notes, **at)
        if s.boundary not in own:
            stops.append(place)
    if not stops:
        return ()
    off = f"off by {d.error:.2g}"
    if d.direction == "backward":
        stops[0] = replace(
            stops[0], arrived=_edge(stops[0].arrived, "right", d) if d.right else stops[0].arrived
        )
        stops[-1] = replace(stops[-1], left=_edge(stops[-1].left, off, d, FAULT))
        return tuple(reversed(stops))
    stops[0] = replace(stops[0], before=_edge(stops[0].before, "right", d) if d.right else stops[0].before)
    stops[-1] = replace(stops[-1], after=_edge(stops[-1].after, off, d, FAULT))
    return tuple(stops)


def _edge(known: Edge | None, numbers: str, d: Departure, mark: str = "") -> Edge:
    return replace(known or Edge(labels=None), numbers=numbers, mark=mark, far=not d.exact)
