"""The report formats by name, and where each is to go. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = ("text", "json", "sarif", "junit", "markdown", "github", "html")
"""What a report can be written as."""


@dataclass(frozen=True, slots=True)
class Target:
    """One format of a run.

    Attributes:
        format: one of `FORMATS`.
        path: of its file; None for standard output, or the file that --output-file names.
    """

    format: str
    path: str | None = None


def parse_target(text: str) -> Target:
    """``FORMAT`` or ``FORMAT:FILE``.

    Raises:
        ValueError: no such format, or no file after the colon; the message says it.
    """
    name, colon, path = text.partition(":")
    if name not in FORMATS:
        raise ValueError(f"invalid choice: {name!r} (choose from {', '.join(FORMATS)})")
    if colon and not path:
        raise ValueError(f"expected a file after the colon of {text!r}, or {name} alone")
    return Target(name, path or None)
