"""Rules as text: one in full, or all in a table."""

from __future__ import annotations

import re
import textwrap

from placement_audit.rules.catalogue import RULES
from placement_audit.rules.rule import Rule

WIDTH = 100
"""Columns of the running text; code stands as it is."""


def rule_text(rule: Rule) -> str:
    """Everything there is to say of one rule."""
    lines = [f"{rule.id} {rule.name}   {rule.severity}", "", *_paragraphs(rule.summary, "")]
    for title, text in (("why", rule.why), ("how it is judged", rule.how_judged)):
        lines += ["", title, *_paragraphs(text)]
    for title, code in (("bad", rule.bad), ("good", rule.good)):
        lines += ["", title, *textwrap.indent(code, "    ").splitlines()]
    lines += ["", "fix", *_paragraphs(rule.fix)]
    if rule.links:
        widest = max(len(link.ref) for link in rule.links)
        lines += ["", "threads", *(f"  {link.ref:{widest}}  {link.about}" for link in rule.links)]
    return "\n".join(lines) + "\n"


def rules_table() -> str:
    """One line a rule: id, severity, name, summary."""
    widest = max(len(rule.name) for rule in RULES)
    lines = [f"{r.id}  {r.severity:7}  {r.name:{widest}}  {r.summary}" for r in RULES]
    return "\n".join([*lines, "", "placement-audit explain PA201 says all there is to say of one."]) + "\n"


_CODE = re.compile(r"`[^`]*`")
_JOINED = "\N{NO-BREAK SPACE}"


def _paragraphs(text: str, indent: str = "  ") -> list[str]:
    out: list[str] = []
    for paragraph in text.split("\n\n"):
        if out:
            out.append("")
        # code between backticks stays on one line, so that it can be copied
        joined = _CODE.sub(lambda code: code[0].replace(" ", _JOINED), " ".join(paragraph.split()))
        lines = textwrap.wrap(
            joined,
            width=WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        out += [line.replace(_JOINED, " ") for line in lines]
    return out
