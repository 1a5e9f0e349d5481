"""What is said of a rule: the one source of `explain`, of `rules` and of every report's rule text."""

from __future__ import annotations

from dataclasses import dataclass

from placement_audit.verdicts import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A public thread.

    Attributes:
        ref: ``owner/name#number``.
        about: what it has to do with the rule.
    """

    ref: str
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. Texts are paragraphs, parted by empty lines.

    Attributes:
        id: "PA201"; never used for anything else.
        name: kebab-case; accepted wherever the id is.
        severity: of its findings.
        summary: one sentence.
        why: what goes wrong, with numbers where they were measured.
        how_judged: what is compared with what, and what the comparison cannot see.
        bad: code that has the fault.
        good: the same code without it.
        fix: what to do.
        links: public threads; empty where none is known.
        needs: the only strength of evidence that finds it ("traced" or "measured"); "" where either does.
        measured_only: whether only values can show it; a trace says nothing of it.
    """

    id: str
    name: str
    severity: Severity
    summary: str
    why: str
    how_judged: str
    bad: str
    good: str
    fix: str
    links: tuple[Link, ...] = ()
    needs: str = ""
    measured_only: bool = False
