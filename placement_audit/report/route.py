"""The way of a gradient as data: the stops it makes, and what it is labelled and really is between them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from placement_audit.model import CallSite, Layout
from placement_audit.verdicts import PathStep

FAULT, CARRIED = "fault", "carried"
"""Marks of an edge: here it goes wrong; it still is."""

REST = "the rest of the model, the loss"
"""What lies between the last stop of a way and the gradient's way back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor between two stops.

    Attributes:
        labels: (mesh dim, placement), as it is labelled; () for a plain tensor; None where nothing tells.
        mark: `FAULT`, `CARRIED` or "".
        really: what it is, where its label does not say so; else "".
        numbers: what measured numbers say of it; "" for nothing.
        far: whether ops that are not shown lie on it.
        missing: whether there should be a tensor and is none.
    """

    labels: tuple[tuple[str, str], ...] | None
    mark: str = ""
    really: str = ""
    numbers: str = ""
    far: bool = False
    missing: bool = False

    @property
    def told(self) -> str:
        """What it really is, in words that stand beside or in place of a label."""
        really = f"really {self.really}" if self.really and self.labels is not None else self.really
        return ", ".join(filter(None, (really, self.numbers)))

    @property
    def suspect(self) -> bool:
        """Whether numbers say only that it has gone wrong by here."""
        return self.mark == FAULT and bool(self.numbers) and self.far

    @property
    def faulty(self) -> bool:
        """Whether it goes wrong here."""
        return self.mark == FAULT and not self.suspect

    @property
    def verdict(self) -> str:
        """What its mark says, in words; "" for no mark."""
        if self.suspect:
            return "gone wrong by here"
        return {FAULT: "here it goes wrong", CARRIED: "still wrong"}.get(self.mark, "")


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
        before: forward, before the call; None where the forward did not pass here, or nothing tells.
        after: forward, after it; likewise.
        arrived: the gradient, before the call's backward (or before a reader); None where none came, or nothing tells.
        left: the gradient, after it; likewise.
        ran_forward: collectives of its forward.
        ran_backward: collectives of its backward.
        own: whether it is a call on the parameter itself.
        notes: what it does, where no boundary's labels say so; a line each.
    """

    kind: str
    where: str
    function: str
    code: str
    site: CallSite
    role: str
    before: Edge | None = None
    after: Edge | None = None
    arrived: Edge | None = None
    left: Edge | None = None
    ran_forward: tuple[str, ...] = ()
    ran_backward: tuple[str, ...] = ()
    own: bool = False
    notes: tuple[str, ...] = ()

    @property
    def faulty_forward(self) -> bool:
        """Whether the forward goes wrong here."""
        return any(e is not None and e.faulty for e in (self.before, self.after))

    @property
    def faulty_back(self) -> bool:
        """Whether a gradient does."""
        return any(e is not None and e.faulty for e in (self.arrived, self.left))

    @property
    def faulty(self) -> bool:
        """Whether anything does."""
        return self.faulty_forward or self.faulty_back

    @property
    def suspect(self) -> bool:
        """Whether something has gone wrong here or at another stop that is named."""
        return any(e is not None and e.suspect for e in (self.after, self.left))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of one parameter's gradient, or the places of a finding that names no parameter.

    Attributes:
        name: of the parameter, or of the module; "" for none.
        about: what the way is of, where it is no parameter's.
        stops: in forward order.
        uses: how many of ``stops`` come before the parameter meets the activations; the rest are activations'.
        met: the op where it does, and where; "" for none, or where that is a stop.
        start: the parameter as it stands; None for no parameter.
        grad: the label of ``.grad``; None where there is none.
        loose: how many of ``stops`` stand in a known order; None for all.
        says: what is said above the others, a line or two.
        back: it is the backward of the others that is named.
        turn: what lies between the last stop and the gradient's way back; mostly `REST`.
        readers: what reads the gradient after backward, the first one first.
        read_end: what comes of that; "" where nobody is shown.
    """

    name: str
    about: str = ""
    stops: tuple[Stop, ...]
    uses: int = 0
    met: str = ""
    start: Edge | None = None
    grad: Edge | None = None
    loose: int | None = None
    says: tuple[str, str] = ("", "")
    back: bool = False
    turn: str = REST
    readers: tuple[Stop, ...] = ()
    read_end: str = ""

    @property
    def wrong(self) -> str:
        """Where it goes wrong, in words; "" where nothing says so."""
        found = [s.kind for s in (*self.stops, *self.readers) if s.faulty]
        found += [".grad"] * (self.grad is not None and self.grad.faulty)
        if not found and any(s.suspect for s in self.stops):
            return "in one of the calls that are named"
        return f"at {' and '.join(found)}" if found else ""


def labels_of(layout: Layout | None) -> tuple[tuple[str, str], ...]:
    """(mesh dim, placement) of a layout; () for a plain tensor."""
    if layout is None:
        return ()
    return tuple((d, p.short()) for d, p in zip(layout.dims, layout.placements, strict=True))


def labels_text(edge: Edge | None) -> str:
    """``fsdp S(0)  tp R``; ``plain``; ``?`` where nothing tells."""
    if edge is None or edge.labels is None:
        return "?"
    return "  ".join(f"{d} {p}" for d, p in edge.labels) or "plain"


def where(site: CallSite) -> str:
    """``path:line``; "" for no line."""
    return f"{site.path}:{site.line}" if site.line else ""


def forward_stops(route: Route) -> tuple[Stop, ...]:
    """The stops that a value went through, in the order of forward."""
    return tuple(s for s in route.stops if s.before is not None or s.after is not None)


def backward_stops(route: Route) -> tuple[Stop, ...]:
    """The stops that a gradient came back through, in the order of backward."""
    return tuple(s for s in reversed(route.stops) if s.left is not None or s.arrived is not None)


def stop_at(
    step: PathStep,
    *,
    notes: tuple[str, ...] = (),
    before: Edge | None = None,
    after: Edge | None = None,
    arrived: Edge | None = None,
    left: Edge | None = None,
    kind: str = "",
    own: bool = False,
) -> Stop:
    """A stop at a place; without ``notes`` its role is shown."""
    role = step.role.removeprefix("cause").removeprefix(": ")
    return Stop(
        kind=kind or step.kind,
        where=where(step.call_site),
        function=step.call_site.function,
        code=step.call_site.code_line,
        site=step.call_site,
        role=step.role,
        before=before,
        after=after,
        arrived=arrived,
        left=left,
        own=own,
        notes=notes or (role or "named here",),
    )
