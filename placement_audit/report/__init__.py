"""Renders a report: one function, one format each; strings out, nothing printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from io import StringIO
from typing import TYPE_CHECKING, Literal

from placement_audit.errors import UsageError
from placement_audit.formats import FORMATS
from placement_audit.report.places import Inside, recorded
from placement_audit.verdicts import Report

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COLORS", "FORMATS", "NO_TERMINAL", "Color", "drawn", "render"]

Color = Literal["auto", "always", "never"]

COLORS: tuple[Color, ...] = ("auto", "always", "never")

NO_TERMINAL = (200, 50)
"""Width and height where there is no terminal to ask: rich would take 80 columns and cut names."""


def render(
    report: Report, fmt: str, *, width: int | None = None, color: Color = "auto", inside: Inside = recorded
) -> str:
    """The report in one format.

    Args:
        report: what to render.
        fmt: one of `FORMATS`.
        width: columns of the text report; None asks the terminal, then ``COLUMNS``, then takes 200.
        color: "auto" colors on a terminal only, unless ``NO_COLOR`` is set or ``TERM`` is dumb;
            ``FORCE_COLOR`` colors anywhere. Of the text report, too.
        inside: what tells the files of the user's repository from others, for the formats that point at them.

    Returns:
        The whole output, with a newline at its end.

    Raises:
        UsageError: no such format.
    """
    # each format is imported when it is asked for: the others may bring more
    match fmt:
        case "text":
            return _text(report, width, color)
        case "json":
            from placement_audit.report.json_io import dumps

            return dumps(report)
        case "sarif":
            from placement_audit.report.sarif import sarif

            return sarif(report, inside)
        case "junit":
            from placement_audit.report.junit import junit

            return junit(report)
        case "markdown":
            from placement_audit.report.markdown import markdown

            return markdown(report)
        case "github":
            from placement_audit.report.github import github

            return github(report, inside)
        case "html":
            from placement_audit.report.html import html

            return html(report)
    raise UsageError(f"Unknown report format {fmt!r}; expected one of {', '.join(FORMATS)}.")


def _text(report: Report, width: int | None, color: Color) -> str:
    from placement_audit.report.text import print_report

    return drawn(lambda console: print_report(report, console), width=width, color=color)


def drawn(draw: Callable[[Console], None], *, width: int | None = None, color: Color = "auto") -> str:
    """What ``draw`` prints on a console of our kind; ``width`` and ``color`` as for `render`."""
    # rich is imported here so that reading and writing JSON does not pay for it
    from rich.console import Console

    out = StringIO()
    columns, rows = _size(width)
    colored = _colored(color)
    console = Console(
        file=out,
        width=columns,
        height=rows,
        force_terminal=colored,
        color_system="standard" if colored else None,
        no_color=not colored,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    draw(console)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().removesuffix("\n").split("\n"))


def _size(width: int | None) -> tuple[int, int]:
    if width is not None:
        return width, NO_TERMINAL[1]
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns), NO_TERMINAL[1]
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or NO_TERMINAL[0], NO_TERMINAL[1]
    except (AttributeError, ValueError, OSError):
        return NO_TERMINAL


def _colored(color: Color) -> bool:
    if color != "auto":
        return color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    isatty = getattr(sys.stdout, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM") not in ("dumb", "unknown")
