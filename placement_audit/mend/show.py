"""What ``placement-audit patch`` prints: text, or JSON with the same in it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from placement_audit.mend.checkout import INSTALLED
from placement_audit.mend.command import Action, Done
from placement_audit.mend.look import Look
from placement_audit.mend.manifest import Known
from placement_audit.mend.result import Form, Part, State

_STYLES = {
    State.ABSENT: "dim",
    State.APPLIED: "green",
    State.NOT_APPLIED: "yellow",
    State.OTHER_FORM: "yellow",
}
_BAD = "bold red"
_NAMES = 19
_STATES = 13


def as_json(done: Done) -> str:
    """All of it, for programs."""
    data: dict[str, Any] = {
        "action": done.asked.action.value,
        "torchtitan": str(done.checkout.root),
        "form": done.asked.form.value,
        "exit_status": done.exit_status,
        "files": [_file(done, one) for one in done.looks],
        "changed": [str(path) for path in done.changed],
        "kept": [str(path) for path in done.kept],
    }
    if done.asked.action is Action.DIFF:
        data["diff"] = done.diff.decode("utf-8", "backslashreplace")
    return json.dumps(data, indent=2) + "\n"


def _file(done: Done, one: Look) -> dict[str, Any]:
    return {
        "path": str(one.shown),
        "sha256": one.source.sha256,
        "releases": list(one.known.releases) if one.known else [],
        "state": one.state.value,
        "refusal": done.refusals.get(one.source.path),
        "parts": [
            {"name": part.name, "state": part.state.value, "line": part.line, "reason": part.reason}
            for part in one.parts
        ],
    }


def draw(done: Done, console: Console) -> None:
    """All of it, for people; a diff is no business of a console."""
    match done.asked.action:
        case Action.CHECK:
            _draw_check(done, console)
        case Action.APPLY:
            _draw_apply(done, console)
        case Action.REVERT | Action.DIFF:
            _draw_revert(done, console)


def _draw_check(done: Done, console: Console) -> None:
    _line(console, f"torchtitan in {done.checkout.root}")
    for one in done.looks:
        console.print()
        console.print(Text(f"{one.shown}   {_whose(one.known)}"))
        for part in one.parts:
            _draw_part(part, console)
        if refusal := done.refusals.get(one.source.path):
            _row(console, "to be edited", Text("not as it is", _BAD), refusal)
    console.print()
    states = {one.state for one in done.looks}
    if State.REFUSED in states:
        console.print(Text("refused: not understood as it is, and nothing is edited.", _BAD))
    elif states == {State.APPLIED}:
        console.print(Text(f"applied, in the {done.asked.form} form", "green"))
    else:
        _line(
            console, f"next   {_command(done, 'diff')} shows the edit, --apply makes it, --revert undoes it"
        )


def _line(console: Console, text: str | Text) -> None:
    """A line with a path or a command in it, which people copy: never broken."""
    console.print(Text(text) if isinstance(text, str) else text, soft_wrap=True)


def _draw_part(part: Part, console: Console) -> None:
    where = f"line {part.line}: " if part.line else ""
    _row(console, part.name, Text(part.state.value, _STYLES.get(part.state, _BAD)), where + part.reason)


def _row(console: Console, name: str, state: Text, about: str) -> None:
    head = Text(f"  {name:{_NAMES}}").append(state)
    if len(state) > _STATES:
        console.print(head)
        console.print(Padding(Text(about), (0, 0, 0, _NAMES + 2)))
        return
    body = Text(about)
    wide = _NAMES + 2 + _STATES + 1
    lines = body.wrap(console, max(console.width - wide, 30))
    for number, line in enumerate(lines):
        start = head.append(" " * (_STATES + 1 - len(state))) if number == 0 else Text(" " * wide)
        console.print(start.append(line))


def _whose(known: Known | None) -> str:
    if known is None:
        return "the file of no release that is known (drifted)"
    releases = ", ".join(known.releases)
    if known.form is None:
        return f"torchtitan {releases}, as released"
    return f"torchtitan {releases}, with the {known.form} form"


def _draw_apply(done: Done, console: Console) -> None:
    for path in done.changed:
        head = Text("applied", "green")
        _line(console, head.append(f"   {path}, the {done.asked.form} form", "default"))
    if not done.changed:
        console.print(Text("applied", "green").append(" before: nothing to do.", "default"))
    _line(console, f"next      audit again: {_audit(done)}")
    _line(console, f"          {_command(done, 'revert')} undoes it")


def _draw_revert(done: Done, console: Console) -> None:
    for path in done.changed:
        _line(console, f"reverted  {path}")
    for path in done.kept:
        _line(console, f"kept      what was edited after --apply: {path}")


def _command(done: Done, action: str) -> str:
    named = done.asked.torchtitan
    where = "" if named == INSTALLED else f" --torchtitan {shlex.quote(named)}"
    form = " --deferred" if done.asked.form is Form.DEFERRED and action != "revert" else ""
    return f"placement-audit patch{where}{form} --{action}"


def _audit(done: Done) -> str:
    """The command that proves it, on the very files."""
    command = "placement-audit --config JOB.toml"
    if done.asked.torchtitan == INSTALLED:
        return command
    return f"PYTHONPATH={shlex.quote(str(done.checkout.root.resolve()))} {command}"
