"""A unified diff as whole lines to replace. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


@dataclass(frozen=True, slots=True)
class Replacement:
    """Some lines of the old file, and what stands in their stead.

    Attributes:
        line: the first of them, 1-based; where none goes, the one that the text comes before.
        lines: how many go.
        text: what comes, whole lines.
    """

    line: int
    lines: int
    text: str


def replacements(diff: str) -> tuple[Replacement, ...]:
    """The changes of a unified diff of one file, top to bottom; () for what is no such diff."""
    # not splitlines: only a newline ends a line of a diff, no form feed does
    lines = [f"{line}\n" for line in diff.split("\n")[:-1]]
    # what a last line without a newline becomes can't be told in whole lines
    if sum(line.startswith("--- ") for line in lines) != 1 or any(line.startswith("\\") for line in lines):
        return ()
    return tuple(_changes(lines))


def _changes(lines: list[str]) -> Iterator[Replacement]:
    at, gone, come = 0, 0, []
    for line in (*lines, " "):
        hunk = _HUNK.match(line)
        if at and line.startswith("-"):
            at, gone = at + 1, gone + 1
        elif at and line.startswith("+"):
            come.append(line[1:])
        else:
            if gone or come:
                yield Replacement(at - gone, gone, "".join(come))
            gone, come = 0, []
            if hunk:
                at = int(hunk[1]) + (hunk[2] == "0")  # nothing of the old file: it names the line before
            elif at:
                at += 1
