"""Where numbers part from one device's: between which tensors, and at which line.

A value is wrong and all that it was computed from is right: there it departs; likewise a gradient, in backward
order. What ran in between is read off the autograd graph.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from placement_audit.engine.world import World
from placement_audit.measure.activations import Compared, Watch
from placement_audit.measure.exchange import gather
from placement_audit.measure.graph import Way, ways
from placement_audit.measure.search import LOSS, Crossings, Point, Search
from placement_audit.measurement import Departure


def localise(
    watch: Watch,
    compared: Compared,
    params: Mapping[str, nn.Parameter],
    grad_errors: Mapping[str, float | None],
    loss_error: float,
    world: World,
    within: float,
) -> tuple[Departure, ...]:
    """All departures; collective. The same on every rank.

    Args:
        watch: this rank's notes.
        compared: from `compare_activations`.
        params: the model's.
        grad_errors: by parameter, its replicas' differences counted.
        loss_error: relative.
        world: the world mesh.
        within: tolerance.
    """
    if all(e is None or e <= within for e in (*grad_errors.values(), loss_error)):
        return ()  # what else differs is another way to the same: rows of a batch in another order, say
    points, found = _graph(watch, compared, params, grad_errors, loss_error)
    search = Search(watch, points, found, Crossings(watch, world, within), within)
    departures = search.forward() or search.backward()
    return gather(departures)[0]


def _graph(
    watch: Watch,
    compared: Compared,
    params: Mapping[str, nn.Parameter],
    grad_errors: Mapping[str, float | None],
    loss_error: float,
) -> tuple[dict[int, Point], list[Way]]:
    points = {LOSS: Point(what="the loss", module_fqn="", value_error=loss_error, grad_error=0.0)}
    cuts: dict[tuple[int, int], int] = {}
    for i, o in enumerate(watch.notes.found):
        row = compared.rows.get(o.key)
        # A module that puts out what an inner one put out names the same tensor; the inner one names it better.
        if o.node is None or row is None or (at := (id(o.node[0]), o.node[1])) in cuts:
            continue
        cuts[at] = i
        fqn, call, n = o.key
        points[i] = Point(
            what=f"the output of {fqn or 'the model'}"
            + (f", call {call + 1}" if call else "")
            + (f", tensor {n + 1}" if n else ""),
            module_fqn=fqn,
            value_error=row.value_error,
            grad_error=row.grad_error,
            came=o.came,
            output=o,
            reference=compared.reference[o.key],
        )
    leaves: dict[int, int] = {}
    for i, (fqn, p) in enumerate(params.items(), start=len(watch.notes.found)):
        if id(p) in leaves:
            continue
        leaves[id(p)] = i
        points[i] = Point(
            what=fqn,
            module_fqn=fqn.rpartition(".")[0],
            param_fqn=fqn,
            grad_error=grad_errors.get(fqn),
            came=watch.came.get(fqn, (-1, -1)),
        )
    return points, ways(watch.roots, cuts, leaves, watch.sites, watch.hooks)
