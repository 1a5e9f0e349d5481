"""The ways of a report's findings: the calls that a gradient crossed, and what the finding names beside them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from placement_audit.model import REPLICATE, Placement, State, StateKind
from placement_audit.report.route import CARRIED, FAULT, REST, Edge, Route, Stop, labels_of, where
from placement_audit.report.spots import Finder
from placement_audit.report.way import (
    backward_way,
    collective_text,
    forward_boundaries,
    state_text,
)
from placement_audit.states import belies
from placement_audit.tracing import Boundary, Collective, ParamRecord, Phase
from placement_audit.verdicts import GOOD, HYGIENE, Finding, Judgement, Report, Verdict


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
        self._finder = Finder(report, lambda b: self._stops([b], "", {}, frozenset())[0])

    def of(self, finding: Finding) -> Route | None:
        """The way that a finding is about, marked where it goes wrong; None where it names no call."""
        if finding.rule_id.startswith(HYGIENE):
            return None  # the place of a suppression is no call
        trace = self._trace
        roles = {s.boundary: s.role for s in finding.path if 0 <= s.boundary < len(trace.boundaries)}
        param = self._params.get(finding.param_fqn or "")
        own = forward_boundaries(trace, param) if param is not None else []
        mine = frozenset(b.index for b in own)
        spots = self._finder.of(finding, mine)
        judgements = self._judgements.get(param.fqn, {}) if param is not None else {}
        way = backward_way(trace, param, judgements) if param is not None else []
        named = [trace.boundaries[i] for i in sorted(roles) if i not in mine]
        others = {b.index: b for b in (*reversed([b for b in way if b.index not in mine]), *named)}
        found = [*own, *(b for b in others.values() if b.index not in spots.drawn)]
        if not found and not spots.stops and not spots.readers:
            return None
        # where candidates are drawn, none of them is the cause
        cause = (
            finding.path[0].boundary
            if finding.path and not any(s.faulty or s.suspect for s in spots.stops)
            else -1
        )
        stops = self._stops(found, finding.mesh_dim, roles, mine, cause, param is not None, spots.drawn)
        told = any(s.faulty or s.suspect for s in (*stops, *spots.stops, *spots.readers))
        # others than the parameter's own calls have no order that is known, but among themselves
        loose = spots.candidates or (bool(found and spots.stops) and (spots.loose or len(found) > len(own)))
        return Route(
            name=finding.module_fqn if param is None else param.fqn,
            about=spots.about or "a tensor",
            stops=(*stops, *spots.stops),
            uses=len(own),
            met="" if spots.met or param is None else _met(param),
            start=Edge(labels=labels_of(param.layout)) if param is not None else None,
            grad=self._grad(param, judgements.get(finding.mesh_dim), finding.mesh_dim, told=told)
            if param is not None
            else None,
            loose=len(stops) if loose else None,
            says=spots.says,
            back=spots.back,
            turn=spots.turn or REST,
            readers=spots.readers,
            read_end=spots.read_end,
        )

    def _stops(
        self,
        found: Sequence[Boundary],
        mesh_dim: str,
        roles: dict[int, str],
        own: frozenset[int],
        cause: int = -1,
        of_param: bool = False,
        noted: frozenset[int] = frozenset(),
    ) -> tuple[Stop, ...]:
        forward, back = self._at_fault(found, mesh_dim, roles, cause, of_param)
        stops = []
        for b in found:
            passed = b.phase is not Phase.BACKWARD
            after = Edge(
                labels=labels_of(b.dst),
                mark=FAULT if b.index in forward else "",
                really=forward.get(b.index, ""),
            )
            stops.append(
                Stop(
                    kind=b.name or b.kind,
                    where=where(b.call_site),
                    function=b.call_site.function,
                    code=b.call_site.code_line,
                    site=b.call_site,
                    role=roles.get(b.index, ""),
                    before=Edge(labels=labels_of(b.src)) if passed else None,
                    after=after if passed else None,
                    arrived=Edge(labels=labels_of(b.grad.arrived)) if b.grad is not None else None,
                    left=self._left(b, mesh_dim, b.index in back),
                    ran_forward=self._collectives(b, Phase.FORWARD),
                    ran_backward=self._collectives(b, Phase.BACKWARD),
                    own=b.index in own,
                    notes=(roles[b.index],) if b.index in noted else (),
                )
            )
        return tuple(stops)

    def _collectives(self, b: Boundary, phase: Phase) -> tuple[str, ...]:
        return tuple(collective_text(c) for c in self._ran.get(b.index, ()) if c.phase is phase)

    # ---- what goes wrong

    def _false_gradients(self, found: Sequence[Boundary], mesh_dim: str, roles: dict[int, str]) -> set[int]:
        """The calls that a gradient's false label begins at."""
        out = set()
        for b in found:
            if b.grad is None or b.grad.left is None or b.index not in roles:
                continue
            label, state = b.grad.left.on(mesh_dim), self._on(b.grad.left_state, mesh_dim)
            told_before = state is not None and state.blame and b.index not in state.blame
            if label is not None and state is not None and belies(label, state) and not told_before:
                out.add(b.index)
        return out

    def _at_fault(
        self, found: Sequence[Boundary], mesh_dim: str, roles: dict[int, str], cause: int, of_param: bool
    ) -> tuple[dict[int, str], set[int]]:
        """The calls whose result is not what it should be, with what it is, and those whose gradient is not."""
        back = self._false_gradients(found, mesh_dim, roles)
        if back or not roles:
            return {}, back
        named = [b for b in found if b.index in roles]
        blamed = of_param and any(
            _blamed(b, self._on(b.grad.left_state, mesh_dim)) for b in named if b.grad is not None
        )
        forward = {} if blamed else {b.index: t for b in named if (t := self._false_value(b, mesh_dim))}
        if forward:
            return forward, set()
        # where no label is false, the one that the finding calls the cause
        causes = [b for b in named if b.index == cause]
        return {b.index: "" for b in causes if b.grad is None}, {
            b.index for b in causes if b.grad is not None
        }

    def _false_value(self, b: Boundary, mesh_dim: str) -> str:
        """What the result of a call is, where its forward says of it or makes of it something else."""
        size = self._trace.mesh.size(mesh_dim) if mesh_dim in self._trace.mesh.dim_names else 0
        if any(mesh_dim in c.already_equal for c in self._ran.get(b.index, ()) if c.phase is Phase.FORWARD):
            return f"{size} times what went in"
        label, state = b.dst.on(mesh_dim) if b.dst is not None else None, self._on(b.value_state, mesh_dim)
        if b.src is not None or label is None or state is None:
            return ""
        if label.is_replicate and state.kind is StateKind.VARYING:
            return state_text(state, None)
        if label.is_partial and state.kind is StateKind.INVARIANT and mesh_dim not in b.divided:
            return f"equal on all {size} ranks"
        return ""

    def _left(self, b: Boundary, mesh_dim: str, at_fault: bool) -> Edge | None:
        if b.grad is None:
            return None
        layout, state = b.grad.left, self._on(b.grad.left_state, mesh_dim)
        label = layout.on(mesh_dim) if layout is not None else None
        false = label is not None and state is not None and belies(label, state)
        mark = FAULT if at_fault else CARRIED if false else ""
        if not mark or state is None:
            really = ""
        elif label is None:
            really = state_text(state, None) if _blamed(b, state) else ""
        else:
            really = _really(label, state)
        return Edge(labels=labels_of(layout), mark=mark, really=really)

    def _grad(
        self, param: ParamRecord, judgement: Judgement | None, mesh_dim: str, *, told: bool
    ) -> Edge | None:
        """The gradient at its end; at fault where nothing before it is."""
        verdict = judgement.verdict if judgement is not None else Verdict.NOT_JUDGED
        wrong = verdict not in (*GOOD, Verdict.NOT_JUDGED)
        mark = "" if not wrong else CARRIED if told else FAULT
        if param.grad is None:
            missing = verdict is Verdict.NO_GRADIENT
            return Edge(labels=None, mark=mark, really="no gradient", missing=True) if missing else None
        layout, state = param.grad.layout, self._on(param.grad.state, mesh_dim)
        # a plain gradient counts as Replicate
        label = layout.on(mesh_dim) if layout is not None else REPLICATE
        factor = judgement.factor if judgement is not None else None
        really = _really(label, state) if wrong and label is not None and state is not None else ""
        if wrong and not really and factor not in (None, 1):
            really = f"{factor} times the true gradient"
        return Edge(labels=labels_of(layout), mark=mark, really=really)

    def _on(self, states: Sequence[State], mesh_dim: str) -> State | None:
        return dict(zip(self._trace.mesh.dim_names, states, strict=False)).get(mesh_dim)


def _met(param: ParamRecord) -> str:
    if not param.uses:
        return ""
    use = param.uses[0]
    return f"{use.op} in {use.module_fqn}" if use.module_fqn else use.op


def _really(label: Placement, state: State) -> str:
    """What a gradient is, where that is not what its label says; "" where it is."""
    return state_text(state, None) if belies(label, state) or state.scale != 1 else ""


def _blamed(b: Boundary, state: State | None) -> bool:
    """Whether a call made of a gradient what it is not meant to be, by what the trace says."""
    return state is not None and (b.index in state.blame or state.scale != 1)
