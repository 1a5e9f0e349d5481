"""Places of a finding that are no boundaries, as stops of a way, with what is known between them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from placement_audit.measurement import Departure
from placement_audit.model import CallSite
from placement_audit.report.departed import departed_steps, departed_stops
from placement_audit.report.doubted import KINDS, Step, doubt_steps
from placement_audit.report.reads import UPDATED, reading, updating
from placement_audit.report.route import FAULT, Edge, Stop, labels_of, stop_at
from placement_audit.report.way import collective_text, state_text
from placement_audit.rules.departures import departure_of
from placement_audit.rules.texts_measured import WRONG_GRADIENT
from placement_audit.rules.texts_readers import WRONG_UPDATE
from placement_audit.tracing import Boundary, Collective, LossRecord, ParamRecord, ParamUse, Phase, ValueDoubt
from placement_audit.verdicts import Finding, PathStep, Report

ALSO = ("named, too", "where among the calls above is not known")
"""What is said above stops that are told from the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spots:
    """What a finding's places are on the way.

    Attributes:
        about: what the way is of, where it is no parameter's.
        stops: forward or back, in the order of forward.
        drawn: indices of the boundaries among them.
        loose: whether their order among the way's other stops is not known.
        says: what is said above them then.
        candidates: it goes wrong in one of them.
        back: it is their backward that is named.
        met: whether the first of them is where the parameter meets the activations.
        turn: what lies behind the last; "" for what lies behind any.
        readers: those after backward, in the order of reading.
        read_end: what comes of those; "" for none.
    """

    about: str = ""
    stops: tuple[Stop, ...] = ()
    drawn: frozenset[int] = frozenset()
    loose: bool = False
    says: tuple[str, str] = ALSO
    candidates: bool = False
    back: bool = False
    met: bool = False
    turn: str = ""
    readers: tuple[Stop, ...] = ()
    read_end: str = ""


class Finder:
    """Finds what one report knows of the places of its findings."""

    def __init__(self, report: Report, stop_of: Callable[[Boundary], Stop]) -> None:
        """See the class.

        Args:
            report: it.
            stop_of: makes a stop of a boundary, with nothing marked.
        """
        self._trace = report.trace
        self._measured = report.measurement
        self._stop_of = stop_of
        self._params = {p.fqn: p for p in report.trace.params}
        self._calls: dict[tuple[str, int], list[Boundary]] = {}
        for b in report.trace.boundaries:
            if b.phase is Phase.FORWARD:
                self._calls.setdefault(_line(b.call_site), []).append(b)
        self._ran: dict[tuple[str, int], list[Collective]] = {}
        for c in report.trace.collectives:
            if c.call_site is not None and c.phase is Phase.FORWARD:
                self._ran.setdefault(_line(c.call_site), []).append(c)

    def of(self, f: Finding, own: frozenset[int]) -> Spots:
        """The stops of a finding's places; none where all of its places are boundaries.

        Args:
            f: the finding.
            own: indices of the calls on its parameter, which are drawn anyway.
        """
        named = range(len(self._trace.boundaries))
        d = departure_of(f.param_fqn, self._measured.departures) if self._measured is not None else None
        departed = departed_steps(f, d) if d is not None else []
        rest = [s for s in f.path if s.boundary not in named and s not in departed]
        found = self._known(f, rest, own) if rest or f.rule_id == WRONG_UPDATE.id else Spots()
        if d is None or not departed:
            return found
        if f.path[0] not in departed:  # a trace knows better, and is not contradicted
            places = [s for s in departed if s.boundary not in named]
            also = tuple(
                stop_at(s, kind=s.role.partition(": ")[2], notes=("first departure of the numbers",))
                for s in places
            )
            return replace(found, stops=(*found.stops, *also), loose=True)
        stops = () if d.exact and f.path[0].boundary in named else departed_stops(
            departed, d, self._trace.boundaries, own, self._stop_of
        )  # fmt: skip
        return replace(
            found,
            about=d.what,
            stops=(*found.stops, *stops),
            drawn=frozenset(s.boundary for s in departed) if stops else frozenset(),
            loose=True,
            candidates=bool(stops),
            says=_says(d, len(departed)) if stops else found.says,
            back=d.direction == "backward",
        )

    def _known(self, f: Finding, steps: list[PathStep], own: frozenset[int]) -> Spots:
        param = self._params.get(f.param_fqn or "")
        doubt = self._doubt(f, steps)
        if doubt is not None:
            return self._doubted(f, doubt, steps, own)
        if param is not None and steps and param.update is not None and steps[0].kind == "reader":
            dim = self._trace.mesh.dim_names.index(f.mesh_dim)
            end = UPDATED if param.update.state is not None else "changed .grad"
            return Spots(readers=updating(param, param.update, dim, steps), read_end=end)
        if f.rule_id == WRONG_UPDATE.id and param is not None:
            known = self._measured.readers if self._measured is not None else ()
            return Spots(readers=(reading(f, param, steps, known),), read_end=UPDATED)
        for step in steps:
            loss = next((x for x in self._trace.losses if x.call_site == step.call_site), None)
            if loss is not None and step.kind == "backward":
                return self._began(f, loss, step)
            use = self._use(step, param)
            if use is not None:
                return _used(f, step, use, own=param is not None and use in param.uses)
            ran = [c for c in self._ran.get(_line(step.call_site), ()) if c.name == step.kind]
            if ran:
                return self._again(f, step, ran)
        return Spots(stops=tuple(stop_at(s) for s in steps), loose=True)

    # ---- values that were followed

    def _doubt(self, f: Finding, steps: list[PathStep]) -> ValueDoubt | None:
        if not steps:
            return None
        told = (KINDS.get(f.rule_id), f.mesh_dim, steps[0].kind, steps[0].call_site)
        later = steps[1].call_site if len(steps) > 1 else None
        for x in self._trace.value_doubts:
            if (x.kind, x.mesh_dim, x.op, x.call_site) == told and x.summed_at == later:
                of = x.counted[0][0] if x.kind == "updated" and x.counted else f.param_fqn
                module = f.module_fqn if x.kind == "updated" else x.module_fqn
                if (of, module) == (f.param_fqn, f.module_fqn):
                    return x
        return None

    def _doubted(self, f: Finding, x: ValueDoubt, steps: list[PathStep], own: frozenset[int]) -> Spots:
        param = self._params.get(f.param_fqn or "")
        told = doubt_steps(x, self._trace.mesh.size(x.mesh_dim), param)
        stops = [
            _stop_of(step, what, after=x.after_backward) for step, what in zip(steps, told, strict=False)
        ]
        if x.after_backward:
            end = UPDATED if x.kind == "updated" else "whoever uses it"
            return Spots(about="the gradients", readers=tuple(stops), read_end=end)
        drawn = set()
        for i, (step, what) in enumerate(zip(steps, told, strict=False)):
            call = self._call(step, x, own) if what.labels else None
            if call is not None:
                drawn.add(call.index)
                plain = self._stop_of(call)
                after = replace(plain.after or Edge(labels=None), mark=what.mark, really=what.labelled)
                notes = (
                    what.notes
                    if x.kind == "declared"
                    else (f"labels each rank's term {x.carried}: to be summed",)
                )
                stops[i] = replace(plain, role=step.role, notes=notes, before=stops[i].before, after=after)
            elif what.sums:
                ran = self._ran.get(_line(step.call_site), ())
                ran = [c for c in ran if x.mesh_dim in c.mesh_dims and c.module_fqn == x.module_fqn]
                stops[i] = replace(stops[i], ran_forward=_texts(ran))
        return Spots(about="a value", stops=tuple(stops), drawn=frozenset(drawn), met=stops[0].own)

    def _call(self, step: PathStep, x: ValueDoubt, own: frozenset[int]) -> Boundary | None:
        """The boundary that gives the value its label at a place, where only one can be it."""
        label = x.declared if x.kind == "declared" else x.carried
        calls = [
            b
            for b in self._calls.get(_line(step.call_site), ())
            if b.src is None and b.dst is not None and b.dst.on(x.mesh_dim) == label
            and b.module_fqn == x.module_fqn and b.index not in own
        ]  # fmt: skip
        return calls[0] if len(calls) == 1 else None

    # ---- losses, uses, collectives

    def _began(self, f: Finding, loss: LossRecord, step: PathStep) -> Spots:
        state = loss.state[self._trace.mesh.dim_names.index(f.mesh_dim)]
        edge = Edge(labels=(), mark=FAULT, really=f"{state_text(state, None)} on {f.mesh_dim}", far=True)
        stop = stop_at(step, notes=("backward begins at this loss",), before=edge)
        return Spots(about="the loss", stops=(stop,), turn="the gradients of each rank's own loss")

    def _use(self, step: PathStep, param: ParamRecord | None) -> ParamUse | None:
        """The first use of a parameter that a step is: of this one, or of another that it names."""
        if step.kind != "op":
            return None
        params = [param] if param is not None else []
        params += [p for p in self._trace.params if step.role.startswith(f"{p.fqn},")]
        return next((u for p in params for u in p.uses if u.call_site == step.call_site), None)

    def _again(self, f: Finding, step: PathStep, ran: Sequence[Collective]) -> Spots:
        labels = () if all(c.op is None for c in ran) else None
        stop = stop_at(
            step,
            before=Edge(labels=labels, really=f"equal on all ranks of {f.mesh_dim}", far=True),
            after=Edge(labels=labels, mark=FAULT, really=f"{self._trace.mesh.size(f.mesh_dim)} times it"),
        )
        return Spots(about="a value", stops=(replace(stop, ran_forward=_texts(ran)),))


def _stop_of(step: PathStep, what: Step, *, after: bool) -> Stop:
    if after:
        return stop_at(step, notes=what.notes, arrived=what.into, left=what.out)
    if what.back:
        return stop_at(step, notes=what.notes, before=what.into, after=what.into, left=what.out)
    return stop_at(step, notes=what.notes, before=what.into, after=what.out, own=what.own)


def _used(f: Finding, step: PathStep, use: ParamUse, *, own: bool) -> Spots:
    """The op that a parameter meets the activations in: what goes in is the parameter's own only in its own way."""
    stop = stop_at(
        step,
        kind=use.op,
        own=own,
        before=Edge(labels=labels_of(use.layout)) if own else None,
        after=Edge(labels=labels_of(use.result)),
        left=Edge(labels=None, mark=FAULT, really="wrong from here on")
        if f.rule_id == WRONG_GRADIENT.id
        else None,
    )
    return Spots(stops=(stop,), met=own, loose=not own)


def _says(d: Departure, steps: int) -> tuple[str, str]:
    if steps == 1:
        return ("it goes wrong here" if d.exact else "it goes wrong here, as far as numbers tell"), ""
    return "it goes wrong in one of these", "right before them, wrong after them" if d.right else ""


def _line(site: CallSite) -> tuple[str, int]:
    return site.path, site.line


def _texts(ran: Iterable[Collective]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(collective_text(c) for c in ran))
