"""What reads a gradient after backward, as stops of its way: clipping, optimizers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from placement_audit.measurement import Reader
from placement_audit.model import CallSite, StateKind
from placement_audit.report.route import CARRIED, FAULT, Edge, Stop, labels_of, stop_at, where
from placement_audit.report.way import state_text
from placement_audit.tracing import ParamRecord, UpdateRecord
from placement_audit.verdicts import Finding, PathStep

UPDATED = "updated parameter"
"""What comes of a gradient that an optimizer read."""


def updating(
    param: ParamRecord, update: UpdateRecord, dim: int, steps: Sequence[PathStep]
) -> tuple[Stop, ...]:
    """Readers that drive the replicas of a parameter apart, each at what the one before it left.

    Args:
        param: the parameter.
        update: what became of it.
        dim: index of the mesh dim.
        steps: the readers; not empty.
    """
    grad = labels_of(param.grad.layout) if param.grad is not None else None
    spoilt = update.grad_state[dim] if update.grad_state is not None else None
    if spoilt is not None and spoilt.kind is StateKind.INVARIANT:
        spoilt = None  # another mesh dim's
    stops: list[Stop] = []
    for step in steps:
        last = stops[-1].left if stops else None
        arrived = Edge(labels=grad, far=True) if last is None else replace(last, mark=CARRIED)
        mark = FAULT if last is None else CARRIED
        if spoilt is not None and step.call_site == update.grad_site and last is None:
            left = Edge(labels=grad, mark=mark, really=state_text(spoilt, None))
            stops.append(stop_at(step, arrived=arrived, left=left))
            continue
        state = update.state[dim] if update.state is not None else None
        whose = "one rank's" if state is not None and state.kind is StateKind.LOST else "each rank its own"
        left = Edge(labels=labels_of(param.layout), mark=mark, really=whose)
        stops.append(stop_at(step, kind="update", arrived=arrived, left=left))
    return tuple(stops)


def reading(f: Finding, param: ParamRecord, steps: Sequence[PathStep], known: Iterable[Reader]) -> Stop:
    """All readers of a gradient in one box: each reads it, none hands it to another.

    Args:
        f: a finding about a parameter that is wrong after a step.
        param: the parameter.
        steps: the readers; may be empty.
        known: what was measured of readers.
    """
    part = {(r.through, site) for r in known if not r.whole for site in (r.user_site, r.call_site)}
    term = any((s.kind, s.call_site) in part for s in steps)
    arrived = Edge(
        labels=labels_of(param.grad.layout) if param.grad is not None else None,
        mark=FAULT if term else "",
        really="one rank's term of it is read" if term else "",
        far=not steps,
    )
    left = Edge(labels=labels_of(param.layout), mark=CARRIED if term else FAULT, numbers=f.observed)
    site = steps[0].call_site if steps else CallSite(path="", line=0, function="")
    said = [s.role if s.kind in s.role else f"{s.kind} {s.role}" for s in steps]
    notes = tuple(f"{t}, {where(s.call_site).rpartition('/')[2]}" for t, s in zip(said, steps, strict=True))
    return Stop(
        kind="clipping, optimizer step",
        where=where(site),
        function=site.function,
        code=site.code_line,
        site=site,
        role=steps[0].role if steps else "",
        arrived=arrived,
        left=left,
        notes=notes or ("which call of it is not known",),
    )
