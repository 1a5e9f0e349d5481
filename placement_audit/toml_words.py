"""Words about TOML that a user has written: for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_miss(name: str, known: Iterable[str]) -> str:
    """A hint " Did you mean 'x'?" for a near miss, else "".

    Args:
        name: what the user wrote.
        known: what could have been meant.
    """
    folded = {k.lower().replace("-", "_"): k for k in known}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return f" Did you mean {folded[close[0]]!r}?" if close else ""


def toml_text(value: object) -> str:
    """A TOML value as a user would write it, cut to a readable length."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def toml_type(value: object) -> str:
    """TOML's name for the type of a value."""
    match value:
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "float"
        case list():
            return "array"
        case dict():
            return "table"
        case _:
            return type(value).__name__
