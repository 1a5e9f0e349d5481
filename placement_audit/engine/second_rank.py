"""Traces a second rank per mesh dim, in the same process, and gives the first rank's trace what that shows.

The job is built once per rank: on torch's fake process group a process can be any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from placement_audit.case import Case
from placement_audit.dtensor_api import forget_meshes
from placement_audit.engine.apart import Difference, Met, Numbers, Stream, Varying, difference, varying
from placement_audit.engine.trace import Tracer
from placement_audit.failure import short_path
from placement_audit.tracing import RunRecord, Trace


def trace_ranks(build: Callable[[int], Case], run: Callable[[Case], RunRecord], *, rank: int = 0) -> Trace:
    """The trace of ``rank``, in which numbers that differ between ranks are known.

    Args:
        build: makes the job as a rank sees it; called for several ranks in turn, the last time for ``rank``.
            Each call may end the process group of the one before.
        run: what ran, for the trace.
        rank: whose trace it is.
    """
    numbers: Numbers = {}
    case, tracer, mine = _run(build, rank, None, numbers)
    world = tracer.world
    differences = {d: difference(mine, _run(build, world.neighbour(d), None, numbers)[2]) for d in world.axes}
    if any(x.at for x in differences.values()):
        # What differs between two runs of the same rank (uninitialised memory that was read) is no rank's doing.
        noise = difference(mine, _run(build, rank, None, numbers)[2]).at
        differ = varying(mine, {d: x.at - noise for d, x in differences.items()})
        case, tracer, _ = _run(build, rank, differ, numbers)
    elif len(differences):
        case, tracer, _ = _run(build, rank, None, numbers)  # the process group that it ran on is gone
    record = run(case)
    notes = tuple(told(world.dims[d], x) for d, x in differences.items() if x.parted)
    trace = tracer.freeze(replace(record, notes=(*record.notes, *notes)))
    return replace(trace, other_ranks=tuple(world.neighbour(d) for d in world.axes))


def _run(
    build: Callable[[int], Case], rank: int, differ: Varying | None, numbers: Numbers
) -> tuple[Case, Tracer, Sequence[Met]]:
    forget_meshes()
    case = build(rank)
    tracer, stream = Tracer(case), Stream(differ, numbers)
    tracer.stream = stream
    tracer.run()
    return case, tracer, stream.met


def told(mesh_dim: str, x: Difference) -> str:
    """A sentence on ranks that do not run the same ops."""
    mine, other = x.parted[0]
    more = "" if len(x.parted) == 1 else f", and at {len(x.parted) - 1} more places"
    return (
        f'Ranks that differ along "{mesh_dim}" do not run the same ops: {_op(mine)} where the other runs '
        f"{_op(other)}{more}. Results of ops that only one of them runs are taken as different; "
        "what only the other runs is not seen."
    )


def _op(met: Met | None) -> str:
    if met is None:
        return "nothing"
    if met.site is None:
        return met.op
    where = met.site[0]  # a code object, or in another process the name of its file
    path = short_path(where if isinstance(where, str) else where.co_filename)
    return f"{met.op} at {path}:{met.site[1]}"
