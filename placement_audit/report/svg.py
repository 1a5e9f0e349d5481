"""Drawings for the HTML report, in the colours of its page: marks of verdicts, ways of gradients. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from placement_audit.report.route import CARRIED, FAULT, Edge, Route, Stop
from placement_audit.verdicts import Verdict

WIDTH = 360
"""Of a way, in units that are CSS pixels on a narrow screen: two lanes of text fit."""

_LEFT, _RIGHT = 26, WIDTH - 26
_INSET = 14
_LINE = 15
_CHARS = 21
"""Characters of a lane's label, in the page's monospaced 11 px."""

LETTERS = {
    Verdict.OK: "O",
    Verdict.DEFERRED: "P",
    Verdict.LOST_REDUCTION: "L",
    Verdict.DOUBLE_REDUCTION: "D",
    Verdict.WRONG_SCALE: "S",
    Verdict.WRONG_PLACEMENT: "W",
    Verdict.RANKS_DISAGREE: "R",
    Verdict.WRONG_GRADIENT: "G",
    Verdict.NO_GRADIENT: "N",
    Verdict.NOT_JUDGED: "?",
}
"""What stands in a verdict's mark."""

_CIRCLE = '<circle cx="12" cy="12" r="9.5"{}/>'
_SQUARE = '<rect x="3" y="3" width="18" height="18" rx="2"{}/>'
_DIAMOND = '<path d="M12 .8 23.2 12 12 23.2 .8 12Z"{}/>'


CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Characters that a page can't show."""


def _visible(text: str) -> str:
    return escape(CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


def mark(verdict: Verdict | None) -> str:
    """The sign of a verdict: a ring is right, a filled diamond is wrong, a dashed square is not judged."""
    match verdict:
        case Verdict.OK:
            shape, kind = _CIRCLE.format(""), "good"
        case Verdict.DEFERRED:
            shape, kind = _CIRCLE.format(' stroke-dasharray="3.6 2.4"'), "good"
        case None | Verdict.NOT_JUDGED:
            shape, kind = _SQUARE.format(' stroke-dasharray="3 3"'), "open"
        case _:
            shape, kind = _DIAMOND.format(""), "bad"
    letter = LETTERS[verdict or Verdict.NOT_JUDGED]
    return (
        f'<svg class="mark {kind}" viewBox="0 0 24 24" aria-hidden="true" focusable="false">{shape}'
        f'<text x="12" y="16.2" text-anchor="middle">{letter}</text></svg>'
    )


def lanes(route: Route, ident: str, mesh_dim: str) -> str:
    """The way of a gradient: forward down the left lane, back up the right one, a box for each call.

    Args:
        route: what to draw.
        ident: unique in the page.
        mesh_dim: that the finding is about.
    """
    drawing = _Drawing(mesh_dim)
    drawing.way(route)
    title = f"The way of {route.name or 'a tensor'}, forward and back"
    faults = [s.kind for s in route.stops if FAULT in _marks(s)]
    where = f"the label is false on {mesh_dim} from {' and '.join(faults)} on" if faults else "no faulty call"
    told = f"{len(route.stops)} calls; {where}. The same way follows in words."
    return (
        f'<svg class="way" viewBox="0 0 {WIDTH} {drawing.y}" role="img" aria-labelledby="{ident}-t {ident}-d">'
        f'<title id="{ident}-t">{_visible(title)}</title><desc id="{ident}-d">{_visible(told)}</desc>'
        f"{''.join(drawing.parts)}</svg>"
    )


def _marks(stop: Stop) -> tuple[str, ...]:
    return tuple(e.mark for e in (stop.after, stop.left) if e is not None)


class _Drawing:
    """Grows downwards; ``mesh_dim`` is the one whose labels are marked.

    Attributes:
        parts: SVG so far.
        y: where the next part begins.
    """

    def __init__(self, mesh_dim: str) -> None:
        self._mesh_dim = mesh_dim
        self.parts: list[str] = []
        self.y = 0

    def way(self, route: Route) -> None:
        stops = route.stops
        on_param = route.grad is not None or route.uses > 0
        self._ends("parameter" if on_param else "before", ".grad" if on_param else "gradient")
        for i, stop in enumerate(stops):
            above = stops[i - 1] if i else None
            if i == route.uses and route.met and i:
                self._gap(above, None, None)
                self._pill("meets the activations", route.met)
                above = None
            top = route.grad if i == 0 else None
            self._gap(above, stop, top)
            self._box(stop)
        self._gap(stops[-1] if stops else None, None, None)
        if route.uses == len(stops) and route.met:
            self._pill("meets the activations", route.met)
            self._gap(None, None, None)
        self._turn()

    # ---- parts

    def _ends(self, left: str, right: str) -> None:
        self._text(_INSET, 12, "forward", "lane")
        self._text(WIDTH - _INSET, 12, "backward", "lane", end=True)
        for x, text, end in ((_INSET, left, False), (WIDTH - _INSET, right, True)):
            self._text(x, 29, text, "name", end=end)
        self.y = 36

    def _gap(self, above: Stop | None, below: Stop | None, grad: Edge | None) -> None:
        """The tensors between two boxes; ``grad`` is what the parameter ends with."""
        forward = _joined(above.after if above else None, below.before if below else None)
        back = _joined(grad, above.arrived if above else None, below.left if below else None)
        left, right = [list(_words(e)) for e in forward], [list(_words(e)) for e in back]
        size = max([sum(map(len, side)) + len(side) - 1 for side in (left, right)] + [0])
        top, height = self.y, 26 + _LINE * max(size, 0)
        bare = above is None and below is None
        self._edge(_LEFT, top, height, forward, left, down=True, bare=bare)
        self._edge(_RIGHT, top, height, back, right, down=False, bare=bare)
        self.y += height

    def _edge(
        self,
        x: int,
        top: int,
        height: int,
        edges: Sequence[Edge],
        words: Sequence[Sequence[str]],
        *,
        down: bool,
        bare: bool,
    ) -> None:
        mark = next((m for m in (FAULT, CARRIED) if any(e.mark == m for e in edges)), "")
        # what lies between two labels that differ is no call of this way: a gap in the line says so
        dotted = " dotted" if len(edges) > 1 else ""
        bottom = top + height
        if not edges and not bare:
            # nothing of this way is here: it passes by
            self.parts.append(f'<path class="edge dotted" d="M{x} {top + 2}V{bottom - 2}"/>')
            return
        self.parts.append(f'<path class="edge {mark}{dotted}" d="M{x} {top + 2}V{bottom - 2}"/>')
        tip, base = (bottom - 1, bottom - 9) if down else (top + 1, top + 9)
        self.parts.append(f'<path class="tip {mark}" d="M{x - 4.5} {base}H{x + 4.5}L{x} {tip}Z"/>')
        y = top + 17 + (height - 26 - _LINE * (sum(map(len, words)) + len(words) - 1)) / 2
        for edge, lines in zip(edges, words, strict=True):
            for i, line in enumerate(lines):
                kind = self._label(edge, i)
                self._text(x + _INSET if down else x - _INSET, y, line, f"label {kind}", end=not down)
                y += _LINE
            y += _LINE
        if mark == FAULT:
            at = top + height / 2
            self.parts.append(
                f'<g class="cross"><circle cx="{x}" cy="{at}" r="9"/>'
                f'<path d="M{x - 3.5} {at - 3.5}l7 7m0-7l-7 7"/></g>'
            )

    def _label(self, edge: Edge, line: int) -> str:
        """The class of a line of an edge's words: only the mesh dim that is wrong is marked."""
        if line >= max(len(edge.labels), 1):
            return f"{edge.mark} really"
        if not edge.labels:
            return f"{edge.mark} plain"
        return edge.mark if edge.labels[line][0] == self._mesh_dim else ""

    def _box(self, stop: Stop) -> None:
        left, right = list(_ran(stop.ran_forward)), list(_ran(stop.ran_backward))
        name = stop.where.rpartition("/")[2]
        inner = 2 * _INSET
        beside = len(stop.kind) * 7.4 + len(name) * 6.4 + inner + 12 <= WIDTH
        head = 25 if beside else 40
        lines = max(len(left), len(right))
        height = head + (lines * 14 + 8 if lines else 3)
        kind = "fault" if FAULT in _marks(stop) else ""
        tip = " ".join(filter(None, (stop.where, stop.function and f"in {stop.function}", stop.code)))
        self.parts.append(
            f'<g class="box {kind}"><title>{_visible(tip)}</title>'
            f'<rect x="1" y="{self.y + 0.5}" width="{WIDTH - 2}" height="{height}" rx="6"/></g>'
        )
        self._text(_INSET, self.y + 17, stop.kind, "kind")
        if beside:
            self._text(WIDTH - _INSET, self.y + 17, name, "site", end=True)
        else:
            self._text(_INSET, self.y + 32, textwrap.shorten(name, 50, placeholder="..."), "site")
        for x, column, end in ((_INSET, left, False), (WIDTH - _INSET, right, True)):
            for i, line in enumerate(column):
                self._text(x, self.y + head + 11 + 14 * i, line, "ran", end=end)
        self.y += height

    def _pill(self, text: str, about: str) -> None:
        lines = textwrap.wrap(about, 48) or [""]
        height = 25 + 14 * len(lines)
        self.parts.append(
            f'<rect class="pill" x="1" y="{self.y}" width="{WIDTH - 2}" height="{height}" rx="16"/>'
        )
        self._text(WIDTH / 2, self.y + 16, text, "small", middle=True)
        for i, line in enumerate(lines):
            self._text(WIDTH / 2, self.y + 31 + 14 * i, line, "ran", middle=True)
        self.y += height

    def _turn(self) -> None:
        y = self.y
        self.parts.append(
            f'<path class="edge dotted" d="M{_LEFT} {y}V{y + 8}Q{_LEFT} {y + 26} {_LEFT + 18} {y + 26}'
            f'H{_RIGHT - 18}Q{_RIGHT} {y + 26} {_RIGHT} {y + 8}V{y}"/>'
        )
        self._text(WIDTH / 2, y + 18, "the rest of the model, the loss", "small", middle=True)
        self.y += 34

    def _text(
        self, x: float, y: float, text: str, kind: str, *, end: bool = False, middle: bool = False
    ) -> None:
        anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}"{anchor}>{_visible(text)}</text>')


def _joined(*edges: Edge | None) -> tuple[Edge, ...]:
    """The tensor between two calls: once where both say the same of it."""
    found: list[Edge] = []
    for edge in edges:
        if edge is None:
            continue
        if found and found[-1].labels == edge.labels:
            # the mark that says more is kept
            found[-1] = edge if edge.mark == FAULT or not found[-1].mark else found[-1]
        else:
            found.append(edge)
    return tuple(found)


def _words(edge: Edge) -> Iterator[str]:
    """A line a mesh dim, then what it really is."""
    if not edge.labels:
        yield "plain"
    for mesh_dim, placement in edge.labels:
        yield f"{mesh_dim} {placement}"
    if edge.really:
        yield from textwrap.wrap(f"really {edge.really}", _CHARS)


def _ran(collectives: Sequence[str]) -> Iterator[str]:
    for text in collectives:
        what, _, size = text.partition(": ")
        name, over, dims = what.partition(" over ")
        parts = [what] if len(what) <= _CHARS + 3 else [name, f"{over.strip()} {dims}"]
        for part in (*parts, size):
            yield from textwrap.wrap(part, _CHARS + 3)
