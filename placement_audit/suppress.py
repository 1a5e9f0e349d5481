"""Marks the findings of a report that the user has said are not to count. Pure; knows no torch.

Two things say so: tables in the job file (`placement_audit.policy`), and comments on the lines of a call:
``# placement-audit: ignore[PA202] reason until 2027-01-31``. What is wrong with them is a finding, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase

from placement_audit.errors import ConfigError
from placement_audit.model import CallSite
from placement_audit.policy import Suppress
from placement_audit.rules.catalogue import UnknownRuleError, get_rule
from placement_audit.rules.hygiene import hygiene_finding
from placement_audit.rules.rule import Rule
from placement_audit.rules.texts_hygiene import HYGIENE_RULES
from placement_audit.rules.texts_readers import SELF_RULES
from placement_audit.settle import settled
from placement_audit.tracing import Trace
from placement_audit.verdicts import HYGIENE, Finding, Means, Report, Suppressed

FORM = "placement-audit: ignore[RULE] reason until YYYY-MM-DD"
"""How a comment is written; ``until`` and its date may be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """One suppression.

    Attributes:
        by: what says so.
        rules: that it is for.
        reason: in the user's words.
        until: the last day that it holds.
        site: its own line.
        declared: the table; None for a comment.
    """

    by: Means
    rules: tuple[Rule, ...]
    reason: str
    until: date | None
    site: CallSite
    declared: Suppress | None = None

    @property
    def where(self) -> str:
        return f"{self.site.path}:{self.site.line}"

    def __str__(self) -> str:
        of = ", ".join(rule.id for rule in self.rules)
        return f"the {self.by} suppression of {of} at {self.where}"

    def fits(self, f: Finding, trace: Trace) -> bool:
        """Whether it is about a finding, expired or not."""
        if all(rule.id != f.rule_id for rule in self.rules):
            return False
        if self.declared is None:
            return any(
                site.path == self.site.path and any(c.line == self.site.line for c in site.comments)
                for site in _sites_of(f, trace)
            )
        place = f.path[0].call_site.path if f.path else None
        wanted = self.declared
        return (
            (wanted.mesh_dim is None or wanted.mesh_dim == f.mesh_dim)
            and _matches(wanted.parameter, f.param_fqn)
            and _matches(wanted.place, place)
        )

    def expired(self, today: date) -> bool:
        return self.until is not None and today > self.until


def check(declared: Iterable[Suppress]) -> None:
    """Refuse tables for rules that there are none of, before an audit is spent on them.

    Raises:
        ConfigError: a rule is unknown, or can't be suppressed.
    """
    wrong = []
    for entry in declared:
        try:
            _rule(entry.rule)
        except _Unclear as why:
            wrong.append(f"{entry.path}:{entry.line}: placement_audit.suppress: rule: {why}")
    if wrong:
        raise ConfigError("\n".join(wrong))


def apply(report: Report, declared: Sequence[Suppress], *, today: date) -> Report:
    """Mark what is suppressed, and say what is wrong with suppressions; the same again where it was done before.

    Args:
        report: of one run.
        declared: from the job file.
        today: to set last days against.

    Returns:
        The report with marks, findings of PA0xx, and the outcome and exit status that follow.

    Raises:
        ConfigError: see `check`.
    """
    check(declared)
    trace = report.trace
    broken, comments = _comments(report)
    given = [*map(_from_table, declared), *comments]
    used: set[_Given] = set()
    findings: list[Finding] = []
    for f in report.findings:
        if f.rule_id.startswith(HYGIENE):
            continue
        fitting = [g for g in given if g.fits(f, trace)]
        used.update(fitting)
        live = next((g for g in fitting if not g.expired(today)), None)
        mark = None
        if live is not None:
            mark = Suppressed(by=live.by, reason=live.reason, where=live.where, until=live.until)
        findings.append(replace(f, suppressed=mark))
    findings += broken
    findings += (_unused(g) for g in given if g not in used and _could_be_found(g, report))
    findings += (_expired(g, today) for g in given if g in used and g.expired(today))
    return settled(replace(report, findings=tuple(findings)))


# --------------------------------------------------------------------------- reading


class _Unclear(Exception):
    """A suppression that can't be read; the message says why."""


def _rule(name: str) -> Rule:
    try:
        rule = get_rule(name)
    except UnknownRuleError as error:
        raise _Unclear(str(error)) from None
    if rule in SELF_RULES:
        raise _Unclear(f"{rule.id} is a fault of placement-audit itself and cannot be suppressed.")
    if rule in HYGIENE_RULES:
        raise _Unclear(f"{rule.id} is about suppressions and cannot be suppressed.")
    return rule


def _from_table(entry: Suppress) -> _Given:
    patterns = (("rule", entry.rule), ("parameter", entry.parameter), ("mesh_dim", entry.mesh_dim))
    text = ", ".join(f'{k} = "{v}"' for k, v in (*patterns, ("place", entry.place)) if v is not None)
    return _Given(
        by=Means.CONFIG,
        rules=(_rule(entry.rule),),
        reason=entry.reason.strip(),
        until=entry.until,
        site=CallSite(path=entry.path, line=entry.line, function="placement_audit.suppress", code_line=text),
        declared=entry,
    )


_IGNORE = re.compile(r"ignore\s*\[([^\]]*)\](.*)", re.DOTALL)
_LAST_DAY = re.compile(r"(?:^|\s)until\s+(\d\S*)$")


def _comments(report: Report) -> tuple[list[Finding], list[_Given]]:
    """(What is wrong with comments, what the others say), each comment once."""
    broken: list[Finding] = []
    given: list[_Given] = []
    seen: set[tuple[str, int]] = set()
    for site in _all_sites(report):
        for comment in site.comments:
            if (site.path, comment.line) in seen:
                continue
            seen.add((site.path, comment.line))
            own = replace(site, line=comment.line, span=None, code_line=comment.text)
            try:
                given.append(_from_comment(comment.text, own))
            except _Unclear as why:
                broken.append(_broken(comment.text, own, str(why)))
    return broken, given


def _from_comment(text: str, site: CallSite) -> _Given:
    found = _IGNORE.fullmatch(text)
    if found is None:
        raise _Unclear("it does not say ignore[RULE]")
    names = [name.strip() for name in found[1].split(",") if name.strip()]
    if not names:
        raise _Unclear("it names no rule between its brackets")
    rules = tuple(_rule(name) for name in names)
    reason, until = found[2].strip(), None
    day = _LAST_DAY.search(reason)
    if day is not None:
        reason = reason[: day.start()].strip()
        try:
            until = date.fromisoformat(day[1])
        except ValueError:
            raise _Unclear(f"{day[1]!r} is no date; expected one such as 2027-01-31") from None
    if not reason:
        raise _Unclear("it gives no reason")
    return _Given(by=Means.COMMENT, rules=rules, reason=reason, until=until, site=site)


def _all_sites(report: Report) -> Iterator[CallSite]:
    """Every call site that a report knows of; most of them often."""
    trace = report.trace
    for b in trace.boundaries:
        yield b.call_site
        yield b.user_site
    for c in trace.collectives:
        if c.call_site is not None:
            yield c.call_site
    for loss in trace.losses:
        yield loss.call_site
    for p in trace.params:
        for use in p.uses:
            yield use.call_site
    for f in report.findings:
        for step in f.path:
            if not f.rule_id.startswith(HYGIENE):
                yield step.call_site


def _sites_of(f: Finding, trace: Trace) -> Iterator[CallSite]:
    """The call that is the cause; where that is in torch, the user's own call of it as well."""
    if f.path:
        cause = f.path[0]
        yield cause.call_site
        if cause.boundary >= 0:
            yield trace.boundaries[cause.boundary].user_site


def _matches(pattern: str | None, name: str | None) -> bool:
    return pattern is None or (name is not None and fnmatchcase(name, pattern))


def _could_be_found(g: _Given, report: Report) -> bool:
    """Whether this run's evidence finds what one of its rules is about."""
    strength = "traced" if report.measurement is None else "measured"
    return any(rule.needs in ("", strength) for rule in g.rules)


# --------------------------------------------------------------------------- findings


def _broken(text: str, site: CallSite, why: str) -> Finding:
    return hygiene_finding(
        "PA001",
        kind=Means.COMMENT,
        site=site,
        message=f"a suppression comment suppresses nothing: {why}",
        expected=f"# {FORM}",
        observed=f"# placement-audit: {text}",
        next_step="say which rule and why; a last day is optional",
    )


def _unused(g: _Given) -> Finding:
    return hygiene_finding(
        "PA002",
        kind=g.by,
        site=g.site,
        message=f"{g} fits no finding of this run",
        expected="a finding that it fits",
        observed="none",
        next_step="take it out, or mend its rule or patterns",
    )


def _expired(g: _Given, today: date) -> Finding:
    return hygiene_finding(
        "PA003",
        kind=g.by,
        site=g.site,
        message=f"{g} held until {g.until}, and today is {today}: what it fits counts again",
        expected=f"a last day from {today} on",
        observed=f"until {g.until}: {g.reason}",
        next_step="mend the fault, or give a new day with a new reason",
    )
