"""Looks for departures among watched tensors: wrong, though all that they were computed from is right.

Boundaries do not change the tensor that their labels stand for, so that one whose label gives the right tensor
shows that all before it is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from placement_audit.dtensor_api import TORCH_DIR
from placement_audit.engine import callsite
from placement_audit.engine.intercept import RawBoundary
from placement_audit.engine.world import World
from placement_audit.measure.activations import Watch, WholeOutput, same_as
from placement_audit.measure.exchange import gather
from placement_audit.measure.graph import Passed, Way
from placement_audit.measure.outputs import Output
from placement_audit.measurement import Checkpoint, Departure, DepartureStep
from placement_audit.model import Layout

_STEPS = 8
"""Places that a departure names at most."""

LOSS = -1
"""Its index among the watched tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A watched tensor.

    Attributes:
        what: for people.
        module_fqn: the module that put it out, or that has the parameter.
        param_fqn: the parameter; None for an activation.
        value_error: None for unknown.
        grad_error: likewise.
        came: when its gradient did.
        output: the activation.
        reference: on one device.
    """

    what: str
    module_fqn: str
    param_fqn: str | None = None
    value_error: float | None = None
    grad_error: float | None = None
    came: tuple[int, int] = (-1, -1)
    output: Output | None = None
    reference: WholeOutput | None = None


class Crossings:
    """Boundaries' values of all ranks, set against watched tensors; collective where it is made."""

    def __init__(self, watch: Watch, world: World, within: float) -> None:
        self._world, self._within = world, within
        mine = {
            b.index: (
                b.value_sketch,
                b.grad.arrived_sketch if b.grad else None,
                b.grad.left_sketch if b.grad else None,
            )
            for b in watch.boundaries()
        }
        self._ranks = gather(mine)

    def value(self, b: RawBoundary, points: Sequence[Point]) -> bool:
        """Whether what goes into a boundary is one of these outputs, and right."""
        return self._is(b, 0, [p.reference.value for p in points if p.reference])

    def arrived(self, b: RawBoundary, points: Sequence[Point]) -> bool:
        """Whether the gradient that arrived at it is that of one of these outputs."""
        return self._is(b, 1, [p.reference.grad for p in points if p.reference])

    def left(self, b: RawBoundary, points: Sequence[Point]) -> bool:
        """Whether the gradient that left it is."""
        return self._is(b, 2, [p.reference.grad for p in points if p.reference])

    def known(self, b: RawBoundary, n: int) -> bool:
        """Whether there is a label to read it by."""
        return all(r.get(b.index, (None,) * 3)[n] is not None for r in self._ranks)

    def _is(self, b: RawBoundary, n: int, wholes: Sequence[object]) -> bool:
        parts = [r.get(b.index, (None,) * 3)[n] for r in self._ranks]
        return any(w is not None and same_as(parts, w, self._world, self._within) for w in wholes)  # type: ignore[arg-type]


class Search:
    """Looks for departures in the graph."""

    def __init__(
        self,
        watch: Watch,
        points: dict[int, Point],
        found: list[Way],
        crossings: Crossings,
        within: float,
    ) -> None:
        self._watch, self._points, self._crossings, self._within = watch, points, crossings, within
        self._before: dict[int, list[Way]] = {}
        self._after: dict[int, list[Way]] = {}
        for way in found:
            self._after.setdefault(way.to, []).append(way)
            self._before.setdefault(way.frm, []).append(way)
        self._sites = callsite.SiteTable()

    def forward(self) -> tuple[Departure, ...]:
        """Wrong values, all of whose sources are right, in forward order."""
        departures = []
        for i in sorted(self._points, key=lambda i: (i == LOSS, i)):
            p = self._points[i]
            if p.param_fqn is not None or p.value_error is None or p.value_error <= self._within:
                continue
            sources, passed = self._frontier(i, self._before, lambda way: way.to, lambda q: q.value_error)
            if any(self._points[s].value_error > self._within for s in sources):  # type: ignore[operator]
                continue
            known = [self._points[s] for s in sources]
            passed.reverse()
            exact, start = self._first_wrong_value(p, known, passed)
            departures.append(self._departure("forward", p, p.value_error, known, passed[start:], exact))
        return tuple(departures)

    def backward(self) -> tuple[Departure, ...]:
        """Wrong gradients, all of whose sources are right, in backward order."""
        departures = []
        for i in sorted(self._points, key=lambda i: self._points[i].came):
            p = self._points[i]
            if i == LOSS or p.grad_error is None or p.grad_error <= self._within:
                continue
            sources, passed = self._frontier(i, self._after, lambda way: way.frm, lambda q: q.grad_error)
            if not sources or any(self._points[s].grad_error > self._within for s in sources):  # type: ignore[operator]
                continue
            known = [self._points[s] for s in sources]
            exact, start = self._first_wrong_gradient(p, known, passed)
            steps = [*self._hooks(p, known), *passed[start:]]
            departures.append(self._departure("backward", p, p.grad_error, known, steps, exact))
        return tuple(departures)

    def _frontier(
        self,
        start: int,
        neighbours: Mapping[int, list[Way]],
        other: Callable[[Way], int],
        error: Callable[[Point], float | None],
    ) -> tuple[list[int], list[Passed]]:
        """The nearest tensors whose numbers are known, and what lies between, in backward order."""
        sources: dict[int, None] = {}
        passed: dict[int, Passed] = {}
        stack, seen = [start], {start}
        while stack:
            for way in neighbours.get(stack.pop(), []):
                o = other(way)
                q = self._points[o]
                if neighbours is self._before and q.param_fqn is not None:
                    passed |= {p.order: p for p in way.passed}
                    continue  # a parameter's value is given
                passed |= {p.order: p for p in way.passed}
                if error(q) is not None:
                    sources[o] = None
                elif o not in seen:
                    seen.add(o)
                    stack.append(o)
        return list(sources), sorted(passed.values(), key=lambda p: -p.order)

    def _first_wrong_value(self, p: Point, known: list[Point], passed: list[Passed]) -> tuple[bool, int]:
        """(whether it is sure, index): the first step after the last boundary at which all is right still."""
        start = 0
        for n, step in enumerate(passed):
            if step.boundary is not None and self._crossings.value(step.boundary, [p, *known]):
                # What a label says, torch's own calls keep; but a term of a sum is no value any more.
                leaves_terms = step.kind == "to_local" and _is_partial(step.boundary.src)
                start = n if leaves_terms else n + 1
        return False, start if start < len(passed) else 0

    def _first_wrong_gradient(self, p: Point, known: list[Point], passed: list[Passed]) -> tuple[bool, int]:
        start, exact = 0, False
        for n, step in enumerate(passed):
            if step.boundary is None:
                continue
            if self._crossings.left(step.boundary, [p, *known]):
                start, exact = n + 1, False
            elif self._crossings.arrived(step.boundary, [p, *known]):
                start, exact = n, self._crossings.known(step.boundary, 2)
        return exact, start if start < len(passed) else 0

    def _hooks(self, p: Point, known: list[Point]) -> list[Passed]:
        """Collectives that ran meanwhile in backward, called from outside torch: by hooks and own backwards."""
        since = max((q.came[1] for q in known), default=-1)
        begun = self._watch.begun_at
        return [
            Passed(-1, name, None, site, True)
            for name, site in self._watch.collectives[max(since, 0) : max(p.came[1], 0)]
            # Torch's own are called from where backward was, or from torch.
            if site is not None
            and not site[0].co_filename.startswith(TORCH_DIR)
            and not (begun and site[:2] == begun[:2])
        ]

    def _departure(
        self,
        direction: str,
        p: Point,
        error: float,
        known: list[Point],
        passed: Sequence[Passed],
        exact: bool,
    ) -> Departure:
        backward = direction == "backward"
        ordered = _pairs_last(list(passed), backward=backward)
        if backward and not exact:
            # What runs in backward alone: nothing in forward would have shown it.
            ordered.sort(key=lambda s: not s.own_backward)
        steps: dict[tuple[str, int], DepartureStep] = {}
        for s in ordered:
            step = self._step(s, backward)
            if step is not None:
                steps.setdefault((step.call_site.path, step.call_site.line), step)
        if not steps:
            site = p.output.site if p.output is not None else self._watch.begun_at
            if site is not None:
                step = DepartureStep(
                    role="called here", kind="module", call_site=self._sites.get(site), boundary=-1
                )
                steps[step.call_site.path, step.call_site.line] = step
        return Departure(
            direction=direction,
            what=p.what,
            module_fqn=p.module_fqn,
            param_fqn=p.param_fqn,
            error=error,
            right=tuple(
                Checkpoint(what=q.what, error=(q.grad_error if backward else q.value_error) or 0.0)
                for q in known
            ),
            steps=tuple(steps.values())[:_STEPS],
            exact=exact,
        )

    def _step(self, s: Passed, backward: bool) -> DepartureStep | None:
        b = s.boundary
        if b is not None and not s.own_backward:
            return DepartureStep(
                role=f"{s.kind}'s backward" if backward else s.kind,
                kind=s.kind,
                call_site=self._sites.get(b.site),
                boundary=b.index,
            )
        if s.site is None:
            return None
        if s.own_backward:
            role = f"own backward of {s.kind}"
            if s.kind == "hook":
                role = "a hook on the gradient"
            elif s.order < 0:
                role = f"{s.kind} that runs in backward"
        else:
            role = f"{s.kind.removesuffix('0').removesuffix('Backward')}" + (
                "'s backward" if backward else ""
            )
        return DepartureStep(
            role=role,
            kind="op" if b is None else b.kind,
            call_site=self._sites.get(s.site),
            boundary=-1 if b is None else b.index,
        )


def _is_partial(layout: Layout | None) -> bool:
    return layout is not None and any(p.is_partial for p in layout.placements)


def _pairs_last(steps: list[Passed], *, backward: bool) -> list[Passed]:
    """Put what runs inside a pair of calls before the pair, where the two say the same.

    Values leave DTensor by `to_local` and come back by `from_local`; with one layout on both, and no other for
    the gradient, the two cancel, and it is what runs in between that changes the tensor.
    """
    opens, closes = ("from_local", "to_local") if backward else ("to_local", "from_local")
    first = next((n for n, s in enumerate(steps) if s.boundary is not None), None)
    if first is None or first > 0 or steps[0].kind != opens:
        return steps
    inner = next((n for n, s in enumerate(steps) if n and s.kind == closes), None)
    if inner is None or inner == 1:
        return steps
    a, b = steps[0].boundary, steps[inner].boundary
    outside, back = (a.dst, b.src) if backward else (a.src, b.dst)
    if outside != back or a.declared is not None or b.declared is not None:
        return steps
    return [*steps[1:inner], steps[0], *steps[inner:]]
