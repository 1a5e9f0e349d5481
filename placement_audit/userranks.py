"""Numbers that differ between ranks, for a user's program: found where other ranks can be had, real or played."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from placement_audit import stepfailed
from placement_audit.case import Case
from placement_audit.dtensor_api import forget_meshes
from placement_audit.engine.apart import Met, Numbers, Stream, Varying, difference, varying
from placement_audit.engine.second_rank import told
from placement_audit.engine.trace import Tracer
from placement_audit.engine.world import World
from placement_audit.measure.compare import local_part, ratio
from placement_audit.measure.exchange import gather
from placement_audit.measure.fingerprint import LARGEST, Fingerprint, fingerprint
from placement_audit.measure.labels import coordinates

Prints = dict[str, Fingerprint]


def played(build: Callable[[int], Case], rank: int = 0) -> Case:
    """The case of ``rank``, with what the ranks beside it do otherwise; alone, on the fake process group.

    Args:
        build: makes the job as a rank sees it, on a process group of its own.
        rank: whose case is wanted.
    """

    def made(as_rank: int) -> Case:
        forget_meshes()
        return build(as_rank)

    numbers: Numbers = {}
    world, mine, *_ = _met(made(rank), numbers)
    differ: dict[int, frozenset[tuple[int, int]]] = {}
    noise: frozenset[tuple[int, int]] | None = None
    notes: list[str] = []
    for d in world.axes:
        found = difference(mine, _met(made(world.neighbour(d)), numbers)[1])
        if found.parted:
            notes.append(told(world.dims[d], found))
        if found.at and noise is None:
            # What differs between two runs of one rank (memory that was never written) is no rank's doing.
            noise = difference(mine, _met(made(rank), numbers)[1]).at
        differ[d] = found.at - (noise or frozenset())
    return _knowing(made(rank), varying(mine, differ), notes, world)


def met_by_all(case: Case) -> tuple[Case, Any, float]:
    """The case with what differs between the real ranks; collective, runs the step twice.

    Args:
        case: on real ranks.

    Returns:
        (the case, what its step returned, how far the gradients of its two runs are apart: relative, on the rank
        where that is most).
    """
    world, mine, loss, prints = _met(case)
    unlike = max(gather(_unlike(prints, _prints(case.model))))
    streams = gather([replace(m, site=_place(m.site)) for m in mine])
    at = coordinates(world)
    tokens = [m.token for m in streams[world.rank]]
    alike = [r for r, s in enumerate(streams) if [m.token for m in s] == tokens]
    differ: dict[int, frozenset[tuple[int, int]]] = {}
    notes: list[str] = []
    for d in world.axes:
        found: set[tuple[int, int]] = set()
        for r in alike:
            for other in _line(at, r, d):
                seen = difference(streams[r], streams[other])
                found |= seen.at
                if seen.parted and r == world.rank:
                    notes.append(told(world.dims[d], seen))
        differ[d] = frozenset(found)
    return _knowing(case, varying(mine, differ), notes[:1], world), loss, unlike


def _line(at: dict[int, tuple[int, ...]], rank: int, d: int) -> list[int]:
    """The other ranks that differ from ``rank`` in one coordinate alone."""
    here = at[rank]
    return [r for r, c in at.items() if r != rank and (*c[:d], *c[d + 1 :]) == (*here[:d], *here[d + 1 :])]


def _met(case: Case, numbers: Numbers | None = None) -> tuple[World, Sequence[Met], Any, Prints]:
    """(world, the ops of one step, what the step returned, the gradients of the one before, with real ranks)."""
    with stepfailed.told(case):
        # Once before: what DTensor works out about an op the first time it meets it, it then remembers.
        case.step()
        prints = {} if case.backend == "fake" else _prints(case.model)
        tracer = Tracer(case)
        stream = tracer.stream = Stream(numbers=numbers)
        loss = tracer.run()
    return tracer.world, stream.met, loss, prints


def _prints(model: nn.Module) -> Prints:
    """Of this rank's gradients, by parameter."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: fingerprint(local_part(g)) for n, g in grads.items() if not g.is_meta}


def _unlike(before: Prints, after: Prints) -> float:
    """How far all gradients are apart, relative to their common norm."""
    if before.keys() != after.keys():
        return LARGEST
    # What is no number both times is the same, and wrong for another reason.
    pairs = [
        [xy for xy in zip(before[n], after[n], strict=True) if any(map(math.isfinite, xy))] for n in before
    ]
    gap = math.hypot(*(max((abs(x - y) for x, y in of), default=0.0) for of in pairs))
    norm = math.hypot(*(p[0] for p in before.values() if math.isfinite(p[0])))
    return ratio(gap, norm) if gap else 0.0


def _place(site: Any) -> Any:
    """A site as another process knows it."""
    return None if site is None else (site[0].co_filename, *site[1:])


def _knowing(case: Case, differing: Varying, notes: list[str], world: World) -> Case:
    return replace(
        case,
        varying=differing,
        other_ranks=tuple(world.neighbour(d) for d in world.axes),
        notes=(*case.notes, *notes),
    )
