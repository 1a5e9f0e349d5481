"""The way of a gradient as a drawing for the HTML report: forward down the left lane, back up the right one. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from placement_audit.report.gaps import Node, between, came, cut, edge_lines, loose_ends, nodes, ran_lines
from placement_audit.report.route import CARRIED, FAULT, Edge, Route, Stop
from placement_audit.report.svg import visible

WIDTH = 360
"""Of a way, in units that are CSS pixels on a narrow screen: two lanes of text fit."""

_LEFT, _RIGHT = 26, WIDTH - 26
_INSET = 14
_LINE = 15

_CROSSED = 54
"""What a cross takes, with the line and the tip of an arrow around it."""

_WHOLE = 54
"""Characters of a line across both lanes."""


def lanes(route: Route, ident: str, mesh_dim: str) -> str:
    """The way of a gradient: forward down the left lane, back up the right one, a box for each call.

    What reads the gradient after backward stands above its end.

    Args:
        route: what to draw.
        ident: unique in the page.
        mesh_dim: that the finding is about.
    """
    drawing = _Drawing(mesh_dim)
    drawing.readers(route)
    drawing.way(route)
    title = f"The way of {route.name or route.about}, forward and back"
    on = f" on {mesh_dim}" if mesh_dim else ""
    wrong = f"it goes wrong{on} {route.wrong}" if route.wrong else "no faulty call"
    calls = len(route.stops) + len(route.readers)
    told = f"{calls} {'call' if calls == 1 else 'calls'}; {wrong}. The same way follows in words."
    return (
        f'<svg class="way" viewBox="0 0 {WIDTH} {drawing.y}" role="img" aria-labelledby="{ident}-t {ident}-d">'
        f'<title id="{ident}-t">{visible(title)}</title><desc id="{ident}-d">{visible(told)}</desc>'
        f"{''.join(drawing.parts)}</svg>"
    )


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

    def readers(self, route: Route) -> None:
        """What reads the gradient once it is there: upwards, the last reader first."""
        if not route.read_end:
            return
        self._text(WIDTH - _INSET, 12, "after backward", "lane", end=True)
        self._text(WIDTH - _INSET, 29, route.read_end, "name", end=True)
        self.y = 36
        above = None
        for stop in reversed(route.readers):
            self._gap(above, stop, forward=False)
            self._box(stop)
            above = stop
        self._gap(above, None, forward=False)
        self.y += 10

    def way(self, route: Route) -> None:
        """Down to the loss and back."""
        self._ends(route)
        above: Node = None
        start, grad = loose_ends(route)
        for node in (*nodes(route), None):
            self._gap(above, node, start=start, grad=grad, came=came(route))
            if isinstance(node, Stop):
                self._box(node)
            elif node is not None:
                self._pill(*node)
            above, start, grad = node, None, None
        self._turn(route.turn)

    # ---- parts

    def _ends(self, route: Route) -> None:
        left, right = "before", "gradient"
        if route.start is not None or route.readers:
            left, right = "parameter" if route.start is not None else "parameters", ".grad"
        self._text(_INSET, self.y + 12, "forward", "lane")
        self._text(WIDTH - _INSET, self.y + 12, "backward", "lane", end=True)
        for x, text, end in ((_INSET, left, False), (WIDTH - _INSET, right, True)):
            self._text(x, self.y + 29, text, "name", end=end)
        self.y += 36

    def _gap(
        self,
        above: Node,
        below: Node,
        *,
        start: Edge | None = None,
        grad: Edge | None = None,
        forward: bool = True,
        came: bool = False,
    ) -> None:
        """The tensors between two boxes.

        Args:
            above: what stands above; None for the end of a lane.
            below: what stands below; likewise.
            start: what the parameter begins with.
            grad: what it ends with.
            forward: whether there is a forward lane.
            came: whether a gradient came at all.
        """
        up = above if isinstance(above, Stop) else None
        low = below if isinstance(below, Stop) else None
        after, arrived = ((up.after,), (up.arrived,)) if up is not None else ((), ())
        before, gone = ((low.before,), (low.left,)) if low is not None else ((), ())
        ahead = between(start, *after, *before) if forward else ()
        back = between(grad, *arrived, *gone)
        left, right = [list(edge_lines(e)) for e in ahead], [list(edge_lines(e)) for e in back]
        size = max(0, *(sum(map(len, side)) + len(side) - 1 for side in (left, right)))
        at_least = _CROSSED if any(e.mark == FAULT for e in (*ahead, *back)) else 0
        top, height = self.y, max(26 + _LINE * size, at_least)
        bare = above is not None and up is None and low is None
        if forward:
            self._edge(_LEFT, top, height, ahead, left, down=True, bare=bare)
        self._edge(_RIGHT, top, height, back, right, down=False, bare=bare and came)
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
        dotted = " dotted" if len(edges) > 1 or any(e.far or e.missing for e in edges) else ""
        bottom = top + height
        if not edges and not bare:
            # nothing of this way is here: it passes by
            self.parts.append(f'<path class="edge dotted" d="M{x} {top + 2}V{bottom - 2}"/>')
            return
        self.parts.append(f'<path class="edge {mark}{dotted}" d="M{x} {top + 2}V{bottom - 2}"/>')
        if not any(e.missing for e in edges):
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
        if edge.labels is None or line >= max(len(edge.labels), 1):
            return f"{edge.mark} really"
        if not edge.labels:
            return f"{edge.mark} plain"
        return edge.mark if edge.labels[line][0] == self._mesh_dim else ""

    def _box(self, stop: Stop) -> None:
        left, right = list(ran_lines(stop.ran_forward)), list(ran_lines(stop.ran_backward))
        name = stop.where.rpartition("/")[2]
        inner = 2 * _INSET
        beside = len(stop.kind) * 7.4 + len(name) * 6.4 + inner + 12 <= WIDTH
        head = 25 if beside else 40
        notes = [line for note in stop.notes for line in textwrap.wrap(note, _WHOLE)]
        lines = len(notes) + max(len(left), len(right))
        height = head + (lines * 14 + 8 if lines else 3)
        kind = "fault" if stop.faulty else ""
        tip = " ".join(filter(None, (stop.where, stop.function and f"in {stop.function}", stop.code)))
        self.parts.append(
            f'<g class="box {kind}"><title>{visible(tip)}</title>'
            f'<rect x="1" y="{self.y + 0.5}" width="{WIDTH - 2}" height="{height}" rx="6"/></g>'
        )
        self._text(_INSET, self.y + 17, cut(stop.kind, 44), "kind")
        if beside:
            self._text(WIDTH - _INSET, self.y + 17, name, "site", end=True)
        else:
            self._text(_INSET, self.y + 32, cut(name, 50), "site")
        for i, line in enumerate(notes):
            self._text(_INSET, self.y + head + 11 + 14 * i, line, "small")
        for x, column, end in ((_INSET, left, False), (WIDTH - _INSET, right, True)):
            for i, line in enumerate(column, len(notes)):
                self._text(x, self.y + head + 11 + 14 * i, line, "ran", end=end)
        self.y += height

    def _pill(self, text: str, about: str, kind: str) -> None:
        lines = textwrap.wrap(about, 48)
        height = 25 + 14 * len(lines)
        self.parts.append(
            f'<rect class="pill" x="1" y="{self.y}" width="{WIDTH - 2}" height="{height}" rx="16"/>'
        )
        self._text(WIDTH / 2, self.y + 16, text, "small", middle=True)
        for i, line in enumerate(lines):
            self._text(WIDTH / 2, self.y + 31 + 14 * i, line, kind, middle=True)
        self.y += height

    def _turn(self, about: str) -> None:
        y = self.y
        self.parts.append(
            f'<path class="edge dotted" d="M{_LEFT} {y}V{y + 8}Q{_LEFT} {y + 26} {_LEFT + 18} {y + 26}'
            f'H{_RIGHT - 18}Q{_RIGHT} {y + 26} {_RIGHT} {y + 8}V{y}"/>'
        )
        self._text(WIDTH / 2, y + 18, about, "small", middle=True)
        self.y += 34

    def _text(
        self, x: float, y: float, text: str, kind: str, *, end: bool = False, middle: bool = False
    ) -> None:
        if not text:
            return
        anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}"{anchor}>{visible(text)}</text>')
