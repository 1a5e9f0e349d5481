"""What a finding names on a way, in words: the same as is drawn. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from placement_audit.report.route import (
    FAULT,
    Edge,
    Route,
    Stop,
    backward_stops,
    forward_stops,
    labels_text,
)
from placement_audit.report.words import wrapped

WIDTH = 110
"""Columns of the running text; code lines and paths stand as they are."""

_MARGIN = " " * 5


def named_in_words(route: Route) -> str:
    """The stops that a finding names, forward, back and after backward, and where it goes wrong.

    Calls on a parameter whose labels say what happens are left to `placement_audit.report.way.explain_param`.

    Returns:
        Lines of text; "" where nothing is left to say.
    """
    of_param = route.start is not None
    told = [s for s in route.stops if s.notes or s.faulty_forward or not of_param]
    bare = [s for s in told if s not in (*forward_stops(route), *backward_stops(route))]
    forward = [s for s in told if s in forward_stops(route) or (s in bare and not route.back)]
    back = [s for s in reversed(told) if s in backward_stops(route) or (s in bare and route.back)]
    noted = back if route.back else forward
    lines: list[str] = []
    number = 0
    for title, stops in (
        ("in forward", forward),
        ("in backward", back),
        ("after backward", list(route.readers)),
    ):
        lines += ["", title] if stops else []
        for s in stops:
            number += 1
            again = stops is not noted and s in noted
            lines += _step(number, replace(s, notes=()) if again else s, ahead=stops is forward)
    if route.grad is not None and route.grad.mark == FAULT:
        lines += ["", *wrapped(_wrong(".grad:", route.grad), head="", width=WIDTH)]
    if not lines:
        return ""
    says = f": {', '.join(filter(None, route.says))}" if route.loose is not None else ""
    return "\n".join([f"what the finding names{says}", *lines]) + "\n"


def _step(number: int, s: Stop, *, ahead: bool) -> Iterator[str]:
    into, out = (s.before, s.after) if ahead else (s.arrived, s.left)
    known = any(e is not None and e.labels is not None for e in (into, out))
    yield f"{number:3}. {s.kind}" + (f": {labels_text(into)} -> {labels_text(out)}" if known else "")
    if s.where:
        yield f"{_MARGIN}{s.site}"
    if s.code:
        yield f"{_MARGIN}{s.code}"
    for text in (*s.notes, *(s.ran_forward if ahead else s.ran_backward)):
        yield from wrapped(text, head=_MARGIN, width=WIDTH)
    for does, edge in (("goes in", into), ("comes out", out)):
        if edge is not None and (edge.mark or edge.told):
            yield from wrapped(_wrong(does, edge), head=_MARGIN, width=WIDTH)


def _wrong(does: str, edge: Edge) -> str:
    head = f"{edge.verdict.upper() if edge.faulty else edge.verdict}: " if edge.mark else ""
    label = labels_text(edge) if edge.labels is not None else ""
    return f"{head}{does} {', '.join(filter(None, (label, edge.told))) or 'wrong'}"
