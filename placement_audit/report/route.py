"""The way of a gradient as data: the stops it makes, and what it is labelled and really is between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement_audit.model import CallSite, Layout, MeshSpec, State
from placement_audit.report.way import (
    backward_way,
    collective_text,
    forward_boundaries,
    state_text,
)
from placement_audit.states import belies
from placement_audit.tracing import Boundary, Collective, GradCrossing, ParamRecord, Phase, Trace
from placement_audit.verdicts import GOOD, Finding, Judgement, Report, Verdict

FAULT, CARRIED = "fault", "carried"
"""Marks of an edge: here the label turns false; it still is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor between two stops.

    Attributes:
        labels: (mesh dim, placement), as it is labelled; () for a plain tensor.
        mark: `FAULT`, `CARRIED` or "".
        really: what it is, where the label is false, on the marked mesh dim; else "".
    """

    labels: tuple[tuple[str, str], ...]
    mark: str = ""
    really: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A call on the way: what goes in and comes out, forward and back.

    Attributes:
        kind: what it is called.
        where: ``path:line``, "" for none.
        function: that the call stands in.
        code: the line of code.
        site: all of that.
        role: what the finding says of it; "" for nothing.
        before: forward, before the call; None where the forward did not pass here.
        after: forward, after it; likewise.
        arrived: the gradient, before the call's backward; None where none came.
        left: the gradient, after it; likewise.
        ran_forward: collectives of its forward.
        ran_backward: collectives of its backward.
        own: whether it is a call on the parameter itself.
    """

    kind: str
    where: str
    function: str
    code: str
    site: CallSite
    role: str
    before: Edge | None
    after: Edge | None
    arrived: Edge | None
    left: Edge | None
    ran_forward: tuple[str, ...]
    ran_backward: tuple[str, ...]
    own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of one parameter's gradient, or the places of a finding that names no parameter.

    Attributes:
        name: of the parameter, or of the module.
        stops: in forward order.
        uses: how many of ``stops`` come before the parameter meets the activations; the rest are activations'.
        met: the op where it does, and where; "" for none.
        grad: the label of ``.grad``; None where there is none.
    """

    name: str
    stops: tuple[Stop, ...]
    uses: int
    met: str
    grad: Edge | None


class Routes:
    """The ways of one report's findings."""

    def __init__(self, report: Report) -> None:
        """Index what every way is looked up in."""
        self._trace = report.trace
        self._ran: dict[int, list[Collective]] = {}
        for c in report.trace.collectives:
            if c.boundary is not None:
                self._ran.setdefault(c.boundary, []).append(c)
        self._params = {p.fqn: p for p in report.trace.params}
        self._judgements: dict[str, dict[str, Judgement]] = {}
        for j in report.judgements:
            self._judgements.setdefault(j.param_fqn, {})[j.mesh_dim] = j

    def of(self, finding: Finding) -> Route | None:
        """The way that a finding is about, with its mesh dim's false labels marked; None where it names no call."""
        trace = self._trace
        roles = {s.boundary: s.role for s in finding.path if 0 <= s.boundary < len(trace.boundaries)}
        param = self._params.get(finding.param_fqn or "")
        if param is None:
            if not roles:
                return None
            stops = self._stops([trace.boundaries[i] for i in sorted(roles)], finding.mesh_dim, roles, set())
            return Route(name=finding.module_fqn, stops=stops, uses=0, met="", grad=None)
        judgements = self._judgements.get(param.fqn, {})
        own = forward_boundaries(trace, param)
        mine = {b.index for b in own}
        way = backward_way(trace, param, judgements)
        named = [trace.boundaries[i] for i in sorted(roles) if i not in mine]
        others = {b.index: b for b in (*reversed([b for b in way if b.index not in mine]), *named)}
        if not own and not others:
            return None
        return Route(
            name=param.fqn,
            stops=self._stops([*own, *others.values()], finding.mesh_dim, roles, mine),
            uses=len(own),
            met=_met(param),
            grad=_grad(trace, param, judgements.get(finding.mesh_dim), finding.mesh_dim),
        )

    def _stops(
        self, found: Sequence[Boundary], mesh_dim: str, roles: dict[int, str], own: set[int]
    ) -> tuple[Stop, ...]:
        mesh = self._trace.mesh
        at_fault = _at_fault(mesh, found, mesh_dim, roles)
        return tuple(
            Stop(
                kind=b.name or b.kind,
                where=f"{b.call_site.path}:{b.call_site.line}" if b.call_site.line else "",
                function=b.call_site.function,
                code=b.call_site.code_line,
                site=b.call_site,
                role=roles.get(b.index, ""),
                before=Edge(labels=_labels(b.src)) if b.phase is not Phase.BACKWARD else None,
                after=_after(b, b.index in at_fault),
                arrived=Edge(labels=_labels(b.grad.arrived)) if b.grad is not None else None,
                left=_left(mesh, b.grad, mesh_dim, b.index in at_fault) if b.grad is not None else None,
                ran_forward=self._collectives(b, Phase.FORWARD),
                ran_backward=self._collectives(b, Phase.BACKWARD),
                own=b.index in own,
            )
            for b in found
        )

    def _collectives(self, b: Boundary, phase: Phase) -> tuple[str, ...]:
        return tuple(collective_text(c) for c in self._ran.get(b.index, ()) if c.phase is phase)


def backward_stops(route: Route) -> tuple[Stop, ...]:
    """The stops that a gradient came back through, in the order of backward."""
    return tuple(s for s in reversed(route.stops) if s.left is not None)


def _met(param: ParamRecord) -> str:
    if not param.uses:
        return ""
    use = param.uses[0]
    return f"{use.op} in {use.module_fqn}" if use.module_fqn else use.op


def _grad(trace: Trace, param: ParamRecord, judgement: Judgement | None, mesh_dim: str) -> Edge | None:
    if param.grad is None:
        return None
    wrong = judgement is not None and judgement.verdict not in (*GOOD, Verdict.NOT_JUDGED)
    state = _on(trace.mesh, param.grad.state, mesh_dim)
    return Edge(
        labels=_labels(param.grad.layout),
        mark=CARRIED if wrong else "",
        really=_really(param.grad.layout, state, mesh_dim) if wrong else "",
    )


def _really(layout: Layout | None, state: State | None, mesh_dim: str) -> str:
    """What a gradient is, where that is not what its label says; "" where it is."""
    label = layout.on(mesh_dim) if layout is not None else None
    if state is None or label is None or not (belies(label, state) or state.scale != 1):
        return ""
    return state_text(state, None)


def _after(b: Boundary, at_fault: bool) -> Edge | None:
    """The forward's result; at fault only where no gradient came back to be at fault."""
    if b.phase is Phase.BACKWARD:
        return None
    return Edge(labels=_labels(b.dst), mark=FAULT if at_fault and b.grad is None else "")


def _left(mesh: MeshSpec, grad: GradCrossing, mesh_dim: str, at_fault: bool) -> Edge:
    state = _on(mesh, grad.left_state, mesh_dim)
    label = grad.left.on(mesh_dim) if grad.left is not None else None
    false = label is not None and state is not None and belies(label, state)
    mark = FAULT if at_fault else CARRIED if false else ""
    really = _really(grad.left, state, mesh_dim) if mark else ""
    return Edge(labels=_labels(grad.left), mark=mark, really=really)


def _at_fault(mesh: MeshSpec, found: Sequence[Boundary], mesh_dim: str, roles: dict[int, str]) -> set[int]:
    """The calls that a false label begins at; where no label is false, the one that the finding calls the cause."""
    out = set()
    for b in found:
        if b.grad is None or b.grad.left is None or b.index not in roles:
            continue
        label, state = b.grad.left.on(mesh_dim), _on(mesh, b.grad.left_state, mesh_dim)
        told_before = state is not None and state.blame and b.index not in state.blame
        if label is not None and state is not None and belies(label, state) and not told_before:
            out.add(b.index)
    return out or set(list(roles)[:1])


def _on(mesh: MeshSpec, states: Sequence[State], mesh_dim: str) -> State | None:
    return dict(zip(mesh.dim_names, states, strict=False)).get(mesh_dim)


def _labels(layout: Layout | None) -> tuple[tuple[str, str], ...]:
    if layout is None:
        return ()
    return tuple((d, p.short()) for d, p in zip(layout.dims, layout.placements, strict=True))
