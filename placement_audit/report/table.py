"""The table of parameters: one row a group of like parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.box import Box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from placement_audit.model import Placement
from placement_audit.report.fold import WORST_FIRST, Cell, Row
from placement_audit.report.words import layout_text, times
from placement_audit.verdicts import Verdict

STYLES = {
    Verdict.OK: "green",
    # calm: a gradient that waits for its reader's reduction is as right as one that does not
    Verdict.DEFERRED: "cyan",
    Verdict.NOT_JUDGED: "yellow",
    Verdict.NO_GRADIENT: "yellow",
}
"""Colour of a verdict; every other is bold red. The word stands beside it, always."""

BAD = "bold red"

# rich's own boxes draw lines that are not ASCII, or none at all; this one rules off the head only
_RULE_UNDER_HEAD = Box("    \n    \n----\n    \n    \n    \n    \n    \n", ascii=True)


def style_of(verdict: Verdict) -> str:
    """The rich style of a verdict."""
    return STYLES.get(verdict, BAD)


def parameter_table(console: Console, rows: Sequence[Row]) -> Table:
    """The widest form that fits: all columns, the expectation merged, or all below the name."""
    widest = _wide(rows, merged=False)
    if _fits(console, widest):
        return widest
    if all(c.expected == (c.placement or c.expected) for r in rows for c in r.cells):
        merged = _wide(rows, merged=True)
        if _fits(console, merged):
            return merged
    return _narrow(rows)


def verdict_text(row: Row) -> Text:
    """``double reduction (tp, x2)``: worst first, one entry a verdict; ``ok`` only where all are."""
    by_verdict: dict[tuple[Verdict, str], list[str]] = defaultdict(list)
    for c in row.cells:
        factor = times(c.factor) if c.factor not in (None, 1) else ""
        by_verdict[c.verdict, factor].append(c.mesh_dim)
    if not by_verdict:
        return Text("not judged" if row.trained else "not trained", style_of(Verdict.NOT_JUDGED))
    out = Text()
    for (verdict, factor), dims in sorted(by_verdict.items(), key=lambda i: WORST_FIRST.index(i[0][0])):
        # every parameter is ok on most mesh dims: saying so beside a fault would only hide it
        if verdict is Verdict.OK and out and not factor:
            continue
        everywhere = len(dims) == len(row.cells) and verdict in (
            Verdict.OK,
            Verdict.NOT_JUDGED,
            Verdict.NO_GRADIENT,
        )
        about = ", ".join(filter(None, ["" if everywhere else ", ".join(dims), factor]))
        out.append("; " if out else "")
        out.append(f"{verdict} ({about})" if about else str(verdict), style_of(verdict))
    return out


def _fits(console: Console, table: Table) -> bool:
    return Measurement.get(console, console.options.update(width=10_000), table).maximum <= console.width


def _wide(rows: Sequence[Row], *, merged: bool) -> Table:
    table = _new_table()
    table.add_column("parameter", overflow="fold")
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("placements = expected" if merged else "placements", overflow="fold")
    if not merged:
        table.add_column("expected grad", overflow="fold")
    table.add_column("observed grad", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for row in rows:
        cells = [_name(row), str(len(row.group.fqns)), _placements(row)]
        if not merged:
            cells.append(_expected(row))
        table.add_row(*cells, _observed(row), verdict_text(row))
    return table


def _narrow(rows: Sequence[Row]) -> Table:
    table = _new_table()
    table.add_column("parameter and its placements", overflow="fold")
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for row in rows:
        name = _name(row)
        name.append("\n    ").append_text(_placements(row))
        if any(c.expected != c.placement for c in row.cells if c.placement is not None):
            name.append("\n    expected grad ").append_text(_expected(row))
        if not row.has_grad or row.plain_grad or any(c.observed != c.placement for c in row.cells):
            name.append("\n    observed grad ").append_text(_observed(row))
        table.add_row(name, str(len(row.group.fqns)), verdict_text(row))
    return table


def _new_table() -> Table:
    return Table(
        box=_RULE_UNDER_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )


def _name(row: Row) -> Text:
    return Text(row.group.name, style="" if row.worst in STYLES else "bold")


def _placements(row: Row) -> Text:
    if row.layout is None:
        return Text("plain tensor")
    if not row.cells:
        return Text(layout_text(row.layout))
    return _per_mesh_dim((c.mesh_dim, _short(c.placement), "") for c in row.cells)


def _expected(row: Row) -> Text:
    return _per_mesh_dim((c.mesh_dim, _short(c.expected), "") for c in row.cells)


def _observed(row: Row) -> Text:
    if not row.has_grad:
        return Text("none")
    if row.plain_grad:
        return Text("plain tensor")
    return _per_mesh_dim((c.mesh_dim, _short(c.observed), _mark(c)) for c in row.cells)


def _mark(cell: Cell) -> str:
    return "" if cell.verdict is Verdict.OK else style_of(cell.verdict)


def _short(placement: Placement | None) -> str:
    return placement.short() if placement is not None else "-"


def _per_mesh_dim(parts: Iterable[tuple[str, str, str]]) -> Text:
    out = Text()
    for mesh_dim, placement, style in parts:
        out.append("  " if out else "")
        out.append(f"{mesh_dim} ", "dim").append(placement, style)
    return out
