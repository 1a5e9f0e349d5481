"""A comparison of two reports, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from placement_audit.report.compare import Change, Comparison, Fault, Traffic
from placement_audit.report.words import LABEL_WIDTH, column, plural

SCHEMA_VERSION = "1"
"""Of the JSON form; a change that breaks readers raises it."""


def as_json(found: Comparison) -> str:
    """The comparison as one line of JSON."""
    raw = {"schema_version": SCHEMA_VERSION, "same": found.same, **asdict(found)}
    return json.dumps(raw, ensure_ascii=True, separators=(",", ":")) + "\n"


def draw(found: Comparison, console: Console) -> None:
    """Print the comparison; names are never cut."""
    for line in _lines(found):
        console.print(line, soft_wrap=True)


def _lines(found: Comparison) -> Iterator[Text]:
    yield from _section("versions", _changes(found.versions))
    yield from _section("run", _changes(found.run))
    yield from _section("parameters", _params(found))
    yield from _section("collectives", map(_traffic, found.collectives))
    yield from _section("boundaries", _changes(found.boundaries))
    yield from _section("new findings", _faults(found.appeared))
    yield from _section("findings that are gone", _faults(found.gone))
    yield Text("the same" if found.same else _summary(found), "bold green" if found.same else "bold yellow")


def _section(title: str, lines: Iterable[Text]) -> Iterator[Text]:
    """A title, the lines and a blank one; nothing where there are none."""
    held = list(lines)
    if held:
        yield from (Text(title, "bold"), *held, Text())


def _changes(changes: Iterable[Change], indent: int = 2) -> Iterator[Text]:
    """One line each, their values under each other."""
    held = list(changes)
    width = max((LABEL_WIDTH, *(len(c.what) + 2 for c in held)))
    for change in held:
        head = f"{'':{indent}}{change.what:{width}}"
        if change.differs:
            yield Text.assemble(head, (change.before, "red"), " -> ", (change.after, "green"))
        else:
            yield Text(f"{head}{change.before}")


def _params(found: Comparison) -> Iterator[Text]:
    for changed in found.params:
        yield Text(f"  {changed.group}")
        yield from _changes(changed.changes, indent=4)


def _traffic(t: Traffic) -> Text:
    (n, m), (sent, sent_now) = t.count, t.sent
    out = Text(f"  {t.phase}  {t.what}: ")
    out.append_text(_numbers(f"{n:,}", f"{m:,}"))
    out.append(", bytes sent: ")
    return out.append_text(_numbers(_bytes(sent), _bytes(sent_now)))


def _numbers(before: str, after: str) -> Text:
    if before == after:
        return Text(before)
    return Text.assemble((before, "red"), " -> ", (after, "green"))


def _bytes(sent: int | None) -> str:
    return "unknown" if sent is None else f"{sent:,}"


def _faults(faults: Iterable[Fault]) -> Iterator[Text]:
    for fault in faults:
        on = f" on {fault.mesh_dim}" if fault.mesh_dim else ""
        yield Text(f"  {fault.rule_id} {fault.rule_name}{on}: {plural(fault.count, 'finding')}")
        yield from map(Text, column("", map(str, fault.groups)))


def _summary(found: Comparison) -> str:
    counts = [
        (sum(len(c.group.fqns) for c in found.params), "parameter"),
        (len(found.collectives), "kind of collective"),
        (len(found.boundaries), "kind of boundary"),
        (sum(f.count for f in found.appeared), "new finding"),
        (sum(f.count for f in found.gone), "finding gone"),
        (sum(c.differs for c in found.run), "setting or outcome"),
    ]
    special = {
        "kind of collective": "kinds of collective",
        "kind of boundary": "kinds of boundary",
        "finding gone": "findings gone",
        "setting or outcome": "settings or outcomes",
    }
    said = [
        f"{n:,} {special[noun]}" if n > 1 and noun in special else plural(n, noun) for n, noun in counts if n
    ]
    return "different: " + ", ".join(said)
