"""Marks of verdicts for the HTML report, in the colours of its page, and text as a page can show it. Pure."""

from __future__ import annotations

import re
from html import escape

from placement_audit.verdicts import Verdict

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


def visible(text: str) -> str:
    """Text within a drawing."""
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
