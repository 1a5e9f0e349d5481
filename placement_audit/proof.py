"""Whether an edit mends: the report after it set against the report before. Pure; knows no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from placement_audit.verdicts import GOOD, HYGIENE, Finding, Outcome, Report, Severity, Verdict

_TOLD = 3


def setbacks(before: Report, after: Report, mended: Collection[str]) -> tuple[str, ...]:
    """What speaks against an edit; nothing where it mends what it should and spoils nothing.

    Args:
        before: of the files as they are.
        after: of the files as edited; the same job, on the same kinds of evidence.
        mended: fingerprints of the findings that should be gone.
    """
    if after.outcome is Outcome.INCOMPLETE:
        return ("the audit after it came to no end",)
    if before.measurement is not None and after.measurement is None:
        return ("after it the job could not be measured",)
    return (*_findings(before, after, mended), *_judgements(before, after))


def how(report: Report) -> str:
    """What kinds of evidence a proof from such reports rests on."""
    m = report.measurement
    if m is None:
        return "traced before and after"
    return f"traced before and after, and measured on {m.ranks} {m.backend} ranks against one device"


def _place(f: Finding) -> tuple[str | None, ...]:
    """What a finding is about. Not its code line: that is what the edit changed."""
    site = f.path[0].call_site if f.path else None
    where = (f.path[0].kind, site.path, site.function) if site is not None else ()
    return f.rule_id, f.param_fqn, f.module_fqn, f.mesh_dim, *where


def _counts(f: Finding) -> bool:
    # a suppression that an edit leaves without its finding is no fault of the edit
    return f.severity is not Severity.NOTE and not f.rule_id.startswith(HYGIENE)


def _findings(before: Report, after: Report, mended: Collection[str]) -> list[str]:
    had = Counter(_place(f) for f in before.findings if _counts(f))
    due = Counter(_place(f) for f in before.findings if f.fingerprint in mended)
    has = Counter(_place(f) for f in after.findings if _counts(f))
    of = {_place(f): f for f in after.findings}
    left = [of[place] for place in due if has[place] > had[place] - due[place]]
    new = [of[place] for place in has if has[place] > had[place]]
    return [
        *_told("still there: ", [_named(f) for f in left]),
        *_told("new: ", [_named(f) for f in new if f not in left]),
    ]


def _named(f: Finding) -> str:
    who = f.param_fqn or f.module_fqn
    about = f" of {who}" if who else ""
    on = f" on {f.mesh_dim}" if f.mesh_dim else ""
    where = f" at {f.path[0].call_site}" if f.path else ""
    return f"{f.rule_id} {f.rule_name}{about}{on}{where}"


def _judgements(before: Report, after: Report) -> list[str]:
    had = {(j.param_fqn, j.mesh_dim): j.verdict for j in before.judgements}
    has = {(j.param_fqn, j.mesh_dim): j.verdict for j in after.judgements}
    if had.keys() != has.keys():
        return ["after it the model has other parameters or mesh dims"]
    worse = []
    readers = []
    for (fqn, mesh_dim), now in has.items():
        was = had[fqn, mesh_dim]
        said = f"{fqn} on {mesh_dim} was {was}, is {now}"
        if (was in GOOD and now not in GOOD) or (now is Verdict.NOT_JUDGED and was is not Verdict.NOT_JUDGED):
            worse.append(said)
        elif now is Verdict.DEFERRED and was is not Verdict.DEFERRED and after.measurement is None:
            readers.append(said)
    return [
        *_told("worse: ", worse),
        *_told("right only if its readers reduce it, whose numbers a trace does not see: ", readers),
    ]


def _told(head: str, items: list[str]) -> list[str]:
    more = f" and {len(items) - _TOLD} more" if len(items) > _TOLD else ""
    return [head + "; ".join(items[:_TOLD]) + more] if items else []
