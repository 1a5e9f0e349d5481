"""Findings that are known: a file of them, one line each, and the marks that it gives to a report. Pure.

A finding is known by its fingerprint, which has neither line numbers nor wording, world sizes nor numbers in it
(`placement_audit.rules.finding`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import msgspec

from placement_audit.errors import ReportError
from placement_audit.rules.catalogue import UnknownRuleError, get_rule
from placement_audit.rules.texts_readers import SELF_RULES
from placement_audit.settle import settled
from placement_audit.verdicts import HYGIENE, BaselineUse, Finding, Means, Report, Severity, Suppressed

VERSION = 1
"""Of the file, and of how fingerprints are made."""

KEY = "placement_audit_baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One line of the file.

    Attributes:
        rule: id.
        parameter: FQN; the module's, with a dot at its end, for a finding that is on no parameter.
        mesh_dim: the world mesh dim.
        place: file and function of the cause; "" for none.
        fingerprint: what it is known by. The rest is for people.
    """

    rule: str
    parameter: str
    mesh_dim: str
    place: str
    fingerprint: str

    def __str__(self) -> str:
        on = f" on {self.mesh_dim}" if self.mesh_dim else ""
        of = f" of {self.parameter}" if self.parameter else ""
        at = f" at {self.place}" if self.place else ""
        return f"{self.rule}{of}{on}{at}"


def known_in(report: Report) -> tuple[Known, ...]:
    """What a baseline of a report holds: errors and warnings that count, in order."""
    return tuple(
        sorted((_known(f) for f in report.findings if _belongs(f) and _open(f)), key=_natural),
    )


def dumps(known: Iterable[Known]) -> str:
    """The file: JSON, one line a finding."""
    lines = [json.dumps({f.name: getattr(k, f.name) for f in fields(k)}) for k in known]
    body = "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"
    return f'{{"{KEY}": {VERSION}, "findings": {body}}}\n'


def loads(data: bytes, path: str) -> tuple[Known, ...]:
    """Read what `dumps` wrote.

    Args:
        data: the file's bytes.
        path: to name in messages.

    Raises:
        ReportError: it is none, or one of another version or another set of rules.
    """
    again = "Write it anew: placement-audit baseline --config FILE --write " + path
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{path}: is no baseline: not JSON ({error}). {again}") from None
    if not isinstance(raw, dict) or KEY not in raw:
        what = (
            "a saved report" if isinstance(raw, dict) and "schema_version" in raw else "JSON of another kind"
        )
        raise ReportError(
            f"{path}: is no baseline but {what}. placement-audit baseline --report SAVED.json --write FILE makes "
            "one of a saved report."
        )
    if raw[KEY] != VERSION:
        raise ReportError(
            f"{path}: is a baseline of version {raw[KEY]!r}; this placement-audit reads version {VERSION}. {again}"
        )
    try:
        known = msgspec.convert(raw.get("findings"), tuple[Known, ...])
    except msgspec.ValidationError as error:
        raise ReportError(f"{path}: is a damaged baseline: {error}. {again}") from None
    for k in known:
        try:
            get_rule(k.rule)
        except UnknownRuleError:
            raise ReportError(
                f"{path}: is a baseline of another set of rules: this placement-audit has no rule {k.rule!r}. {again}"
            ) from None
    return known


def apply(report: Report, known: Sequence[Known], path: str) -> Report:
    """Mark what is known; the rest is new, and counts.

    A fingerprint that a report has more often than the baseline is new as often as that.

    Args:
        report: with its other suppressions marked.
        known: the baseline.
        path: of its file, to name.
    """
    left = Counter(k.fingerprint for k in known)
    findings: list[Finding] = []
    count = 0
    for f in report.findings:
        if f.suppressed is not None and f.suppressed.by is Means.BASELINE:
            f = replace(f, suppressed=None)
        if _belongs(f) and left[f.fingerprint] > 0:
            left[f.fingerprint] -= 1
            count += 1
            if _open(f):
                mark = Suppressed(by=Means.BASELINE, reason="known", where=path)
                f = replace(f, suppressed=mark)
        findings.append(f)
    gone = []
    for k in known:
        if left[k.fingerprint] > 0 and _could_be_found(k, report):
            left[k.fingerprint] -= 1
            gone.append(str(k))
    use = BaselineUse(path=path, known=count, gone=tuple(gone))
    return settled(replace(report, findings=tuple(findings), baseline=use))


# --------------------------------------------------------------------------- one finding


def _belongs(f: Finding) -> bool:
    """Notes do not count anyway; suppressions, and what is wrong with them, are kept where they are written."""
    kinds = {rule.id for rule in SELF_RULES}
    return f.severity is not Severity.NOTE and not f.rule_id.startswith(HYGIENE) and f.rule_id not in kinds


def _open(f: Finding) -> bool:
    return f.suppressed is None or f.suppressed.by is Means.BASELINE


def _known(f: Finding) -> Known:
    site = f.path[0].call_site if f.path else None
    return Known(
        rule=f.rule_id,
        parameter=f.param_fqn if f.param_fqn is not None else f"{f.module_fqn}." if f.module_fqn else "",
        mesh_dim=f.mesh_dim,
        place=f"{site.path} in {site.function}" if site is not None else "",
        fingerprint=f.fingerprint,
    )


def _natural(k: Known) -> tuple[object, ...]:
    # layer 2 before layer 10: re.split with a group alternates text and number
    name = tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", k.parameter))
    return k.rule, name, k.mesh_dim, k.place, k.fingerprint


def _could_be_found(k: Known, report: Report) -> bool:
    """Whether this run's evidence finds what the rule is about."""
    return get_rule(k.rule).needs in ("", "traced" if report.measurement is None else "measured")
