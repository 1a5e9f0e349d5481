"""Which findings a job file says are not to count: ``[[placement_audit.suppress]]``, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime

from placement_audit.toml_words import near_miss, toml_text, toml_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppress:
    """Findings that are not to count; each pattern that is given must fit.

    Attributes:
        rule: id or name.
        reason: in the user's words.
        parameter: pattern (``*``, ``?``, ``[..]``) of FQNs.
        mesh_dim: the world mesh dim.
        place: pattern of the path of the call that is the cause.
        until: the last day that it holds.
        path: the file that says so.
        line: there, 1-based.
    """

    rule: str
    reason: str
    parameter: str | None = None
    mesh_dim: str | None = None
    place: str | None = None
    until: date | None = None
    path: str = ""
    line: int = 1


_TEXTS = {
    "rule": "a rule's id or name, as a string",
    "reason": "why the finding is not to count, as a string",
    "parameter": 'a pattern of parameter names, such as "layers.*.ffn_norm.weight"',
    "mesh_dim": "the name of a mesh dim, as a string",
    "place": 'a pattern of paths, such as "my_model/*.py"',
}
_UNTIL = "a date without quotes, such as 2027-01-31"
_HEADER = re.compile(r"\s*\[\[\s*placement_audit\s*\.\s*suppress\s*\]\]")


def check_suppress(path: str, raw: object, text: str) -> tuple[tuple[Suppress, ...], list[str]]:
    """Check the ``suppress`` key of our table.

    Args:
        path: of the job file.
        raw: the key's value.
        text: the whole file.

    Returns:
        (what is to be suppressed, what is wrong with it, all at once).
    """
    if not isinstance(raw, list) or not all(isinstance(entry, dict) for entry in raw):
        problem = f"suppress: expected tables ([[placement_audit.suppress]]); got {toml_text(raw)} ({toml_type(raw)})."
        return (), [problem]
    headers = [number for number, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    lines = headers if len(headers) == len(raw) else [1] * len(raw)
    made: list[Suppress] = []
    problems: list[str] = []
    for number, (entry, line) in enumerate(zip(raw, lines, strict=True), 1):
        wrong = _problems(entry)
        problems += [f"suppress, entry {number} (line {line}): {problem}" for problem in wrong]
        if not wrong:
            made.append(Suppress(**entry, path=path, line=line))
    return tuple(made), problems


def _problems(entry: Mapping[str, object]) -> list[str]:
    known = (*_TEXTS, "until")
    problems = [f"{key} is missing: {_TEXTS[key]}." for key in ("rule", "reason") if key not in entry]
    for key, value in entry.items():
        if key not in known:
            hint = near_miss(key, known) or f" Known keys: {', '.join(sorted(known))}."
            problems.append(f"{key}: unknown key.{hint}")
        elif key == "until":
            if not isinstance(value, date) or isinstance(value, datetime):
                problems.append(f"until: expected {_UNTIL}; got {toml_text(value)} ({toml_type(value)}).")
        elif not isinstance(value, str) or not value.strip():
            problems.append(f"{key}: expected {_TEXTS[key]}; got {toml_text(value)} ({toml_type(value)}).")
    return problems
