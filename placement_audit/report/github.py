"""The report as GitHub workflow commands: annotations, the most severe first. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from placement_audit.report.fold import Block, fold_findings
from placement_audit.report.names import PARAM
from placement_audit.report.places import Inside, primary, recorded
from placement_audit.report.plain import live, notes, on, summary_line, suppressed
from placement_audit.report.words import listed, plural
from placement_audit.verdicts import HYGIENE, Finding, Report, Severity

LIMIT = 10
"""Annotations of one type that GitHub shows of one step; it drops the rest without a word."""

TITLE_LIMIT = 200

NAMES_SHOWN = 12

SUPPRESSED_SHOWN = 12

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def github(report: Report, inside: Inside = recorded) -> str:
    """One line an annotation, one annotation a folded finding; what is left out is counted in a last notice.

    Args:
        report: what to write.
        inside: what tells the files of the user's repository from others: GitHub shows no line of others.
    """
    found = fold_findings(report)
    blocks = [*live(found), *notes(found)]
    by_severity = {s: [b for b in blocks if b.first.severity is s] for s in Severity}
    # one notice is kept for the summary, which counts what is left out
    room = {s: LIMIT - (s is Severity.NOTE) for s in Severity}
    lines = [_annotation(b, inside) for s in Severity for b in by_severity[s][: room[s]]]
    left = {s: len(by_severity[s]) - room[s] for s in Severity}
    more = [plural(n, f"more {s}") for s, n in left.items() if n > 0]
    text = summary_line(report)
    if more:
        text += (
            f"\nNot shown here, for GitHub shows {LIMIT} of a type: {listed(more)}. The report has them all."
        )
    hidden = [
        f"{b.first.rule_id} {b.first.rule_name}{on(b.first.mesh_dim)}: {why}" for b, why in suppressed(found)
    ]
    text += "".join(f"\nsuppressed: {line}" for line in hidden[:SUPPRESSED_SHOWN])
    if len(hidden) > SUPPRESSED_SHOWN:
        text += f"\nand {len(hidden) - SUPPRESSED_SHOWN:,} more suppressed; the report has them all."
    lines.append(command("notice", text, title="placement-audit"))
    return "\n".join(lines) + "\n"


def command(name: str, message: str, **properties: str | int) -> str:
    """``::error file=a.py,line=3::message``, escaped as GitHub's runner unescapes it."""
    said = ",".join(f"{key}={_property(str(value))}" for key, value in properties.items())
    return f"::{name}{' ' if said else ''}{said}::{_data(message)}"


def _annotation(block: Block, inside: Inside) -> str:
    f = block.first
    properties: dict[str, str | int] = {}
    at = primary(f.path, inside)
    own = inside(at.call_site) if at is not None else None
    if at is not None and own is not None:
        # the first line alone: GitHub puts a longer span under its last line
        properties = {"file": own, "line": at.call_site.line}
    about = f"{_about(block)}{on(f.mesh_dim)}"
    title = f"{f.rule_id} {f.rule_name}{': ' if about else ''}{about}"
    properties["title"] = title if len(title) <= TITLE_LIMIT else f"{title[: TITLE_LIMIT - 3]}..."
    return command(_COMMANDS[f.severity], "\n".join(_message(block)), **properties)


def _message(block: Block) -> Iterable[str]:
    f = block.first
    yield _named(block, block.message or f.message)
    names = [str(g) for g in block.groups if g.name]
    if len(names) > 1:
        more = [f"{len(names) - NAMES_SHOWN} more kinds"] if len(names) > NAMES_SHOWN else []
        yield f"of {listed([*names[:NAMES_SHOWN], *more])}"
    yield f"expected: {_named(block, f.expected)}"
    yield f"observed: {_named(block, f.observed)}"
    for e in block.evidence[:3]:
        yield f"{e.strength}: {_named(block, e.statement)}"
    for s in f.path:
        yield f"at {s.call_site}" if _is_hygiene(f) else f"{s.kind} ({s.role}): {s.call_site}"
    yield f"next: {f.next_step}"


def _about(block: Block) -> str:
    if block.first.param_fqn is None:
        return "" if _is_hygiene(block.first) else block.first.module_fqn or "the step"
    return str(block.groups[0]) if len(block.groups) == 1 else plural(block.count, "parameter")


def _is_hygiene(f: Finding) -> bool:
    """Whether it is about a suppression, which is no call and is on no parameter."""
    return f.rule_id.startswith(HYGIENE)


def _named(block: Block, text: str) -> str:
    name = block.first.param_fqn or ""
    return text.replace(PARAM, name if block.count == 1 else f"each of {block.count} parameters")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
