"""A way as its tests look at it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from placement_audit.report.lanes import lanes
from placement_audit.report.route import Edge, Route, labels_text
from placement_audit.report.routes import Routes
from placement_audit.verdicts import Report


def route_of(report: Report, rule: str = "") -> Route:
    found = Routes(report).of(next(f for f in report.findings if f.rule_id.startswith(rule)))
    assert found is not None
    return found


def shown(edge: Edge | None) -> str:
    """``LABELS (what it really is) MARK``: ``!`` it goes wrong here, ``~`` still, ``?!`` by here; ``..`` far."""
    if edge is None:
        return "-"
    mark = "?!" if edge.suspect else {"fault": "!", "carried": "~", "": ""}[edge.mark]
    told = f"({edge.told})" if edge.told else ""
    return " ".join(filter(None, (labels_text(edge), told, mark, ".." if edge.far else "")))


def forward(report: Report, rule: str = "") -> list[tuple[str, ...]]:
    return [(s.kind, s.where, shown(s.before), shown(s.after)) for s in route_of(report, rule).stops]


def backward(report: Report, rule: str = "") -> list[tuple[str, ...]]:
    return [(s.kind, s.where, shown(s.arrived), shown(s.left)) for s in route_of(report, rule).stops]


def readers(report: Report, rule: str = "") -> list[tuple[str, ...]]:
    return [(s.kind, s.where, shown(s.arrived), shown(s.left)) for s in route_of(report, rule).readers]


def drawn(route: Route, *, right: bool) -> list[str]:
    """The lines of a lane from top to bottom, each as its class, with ``>`` where it has a tip."""
    lines: list[str] = []
    for e in ElementTree.fromstring(lanes(route, "way", "tp")).iter("path"):
        kind, d = " ".join((e.get("class") or "").split()), e.get("d") or ""
        x = float(re.findall(r"[0-9.]+", d)[0]) + (4.5 if kind.startswith("tip") else 0)
        if x != (334 if right else 26) or "Q" in d:
            continue
        if kind.startswith("tip"):
            lines[-1] = f"{lines[-1]} >".strip()
        else:
            lines.append(kind.removeprefix("edge").strip())
    return lines
