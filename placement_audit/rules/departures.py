"""Tells findings about wrong numbers where the numbers part from one device's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from placement_audit.measurement import Departure, Measurement
from placement_audit.rules.finding import make_finding
from placement_audit.verdicts import Evidence, Finding, PathStep, Severity

_BY_NUMBERS = ("PA207", "PA208")
"""Rules that have no place but this one."""

_TRACED = ("PA201", "PA202", "PA203", "PA204", "PA205")


def located(findings: Iterable[Finding], m: Measurement) -> Iterator[Finding]:
    """The findings, those about wrong numbers with the place where these depart, and whether a trace agrees."""
    for f in findings:
        known = f.rule_id in (*_BY_NUMBERS, *_TRACED) and f.severity is Severity.ERROR
        d = departure_of(f.param_fqn, m.departures) if known else None
        yield f if d is None else _located(f, d)


def departure_of(param_fqn: str | None, departures: Sequence[Departure]) -> Departure | None:
    """The departure that explains a parameter's gradient: its own, else the first on the activations' way.

    Args:
        param_fqn: None for the loss.
        departures: from a measurement.
    """
    own = [d for d in departures if d.param_fqn is not None and d.param_fqn == param_fqn]
    activations = [d for d in departures if d.param_fqn is None]
    return next(iter(own or activations), None)


def in_words(d: Departure) -> str:
    """One sentence with its numbers."""
    what = "the gradient" if d.direction == "backward" else "the value"
    right = ", ".join(f"{c.what} (to {c.error:.1g})" for c in d.right[:3])
    more = f" and {len(d.right) - 3} more" if len(d.right) > 3 else ""
    where = "of" if d.param_fqn is not None or not d.module_fqn else "at"
    off = f"{where} {d.what} is off by {d.error:.2g}"
    return f"{what} {off}; it is right at {right}{more}" if right else f"{what} {off}, the first of all"


def _located(f: Finding, d: Departure) -> Finding:
    steps = tuple(
        PathStep(
            role=f"{'cause' if d.exact else 'first departure'}: {s.role}" if n == 0 else f"or here: {s.role}",
            kind=s.kind,
            call_site=s.call_site,
            boundary=s.boundary,
        )
        for n, s in enumerate(d.steps[:1] if d.exact else d.steps)
    )
    told = in_words(d)
    if f.rule_id in _BY_NUMBERS:
        path = steps or f.path
    else:
        cause = {(p.call_site.path, p.call_site.line) for p in f.path[:1]}
        if cause & {(s.call_site.path, s.call_site.line) for s in steps}:
            told += "; the trace names a place in between"
            path = f.path
        else:
            told += "; the trace names a place elsewhere: both are shown"
            path = (*f.path, *steps[:1])
    return make_finding(
        f.rule_id,
        param_fqn=f.param_fqn,
        module_fqn=f.module_fqn or d.module_fqn,
        mesh_dim=f.mesh_dim,
        message=f.message,
        expected=f.expected,
        observed=f.observed,
        evidence=(*f.evidence, Evidence(strength="measured", statement=told)),
        path=path,
        next_step=_next_step(f, path, d),
        severity=f.severity,
    )


def _next_step(f: Finding, path: tuple[PathStep, ...], d: Departure) -> str:
    if f.rule_id != "PA207" or not path:
        return f.next_step
    where = path[0].call_site
    what = "forward" if d.direction == "forward" else "backward"
    return f"look at the {what} of {where.path}:{where.line}: a local mean over a shard, a wrong divisor, own backwards"
