"""Two reports set side by side: what differs between two runs of a job. Pure.

Versions are told and do not count as a difference: to look at two of them is what a comparison is for. Paths, places
and times are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from placement_audit.model import Placement
from placement_audit.report.names import Group, group_names
from placement_audit.report.volume import itemsize
from placement_audit.tracing import Collective, ParamRecord, Trace
from placement_audit.verdicts import Judgement, Report

ABSENT = "-"
"""Stands for what one of the two has not."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing in both reports.

    Attributes:
        what: it is, such as "tp verdict".
        before: in the first; `ABSENT` for nothing.
        after: in the second.
    """

    what: str
    before: str
    after: str

    @property
    def differs(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class Changed:
    """Parameters of which the same has changed.

    Attributes:
        group: the parameters.
        changes: what has.
    """

    group: Group
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind.

    Attributes:
        phase: forward, backward or recompute.
        what: "all_reduce(sum) over tp in float32".
        count: before and after.
        sent: bytes that one rank sends into them, before and after; None where a dtype's size is not known.
    """

    phase: str
    what: str
    count: tuple[int, int]
    sent: tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Findings that are in one of two reports only.

    Attributes:
        rule_id: "PA201".
        rule_name: "lost-reduction".
        mesh_dim: the world mesh dim.
        groups: the parameters, or the modules.
        count: findings.
    """

    rule_id: str
    rule_name: str
    mesh_dim: str
    groups: tuple[Group, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two reports side by side.

    Attributes:
        versions: of placement-audit and what it ran on, changed or not.
        run: model, mesh, evidence and outcome; changed or not.
        params: what has changed of parameters, folded.
        collectives: kinds whose count or bytes have changed.
        boundaries: kinds of calls whose count has changed.
        appeared: findings of the second report only.
        gone: of the first only.
    """

    versions: tuple[Change, ...]
    run: tuple[Change, ...]
    params: tuple[Changed, ...]
    collectives: tuple[Traffic, ...]
    boundaries: tuple[Change, ...]
    appeared: tuple[Fault, ...]
    gone: tuple[Fault, ...]

    @property
    def same(self) -> bool:
        """Whether the two differ in nothing but versions."""
        found = (self.params, self.collectives, self.boundaries, self.appeared, self.gone)
        return not any(found) and not any(c.differs for c in self.run)


def compare(before: Report, after: Report) -> Comparison:
    """What has changed from one report to another."""
    return Comparison(
        versions=_versions(before, after),
        run=_run(before, after),
        params=_params(before, after),
        collectives=_collectives(before.trace, after.trace),
        boundaries=_boundaries(before.trace, after.trace),
        appeared=_faults(after, before),
        gone=_faults(before, after),
    )


def _pairs(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    names = dict.fromkeys((*before, *after))
    return tuple(Change(n, before.get(n, ABSENT), after.get(n, ABSENT)) for n in names)


def _versions(before: Report, after: Report) -> tuple[Change, ...]:
    def of(report: Report) -> dict[str, str]:
        run = report.trace.run
        return {"placement-audit": run.tool_version, **dict(run.versions)}

    return _pairs(of(before), of(after))


def _run(before: Report, after: Report) -> tuple[Change, ...]:
    def of(report: Report) -> dict[str, str]:
        trace, run = report.trace, report.trace.run
        return {
            "model": run.model,
            "overrides": " ".join(run.overrides) or ABSENT,
            "mesh": str(trace.mesh),
            "batch over": ", ".join(trace.batch_dims) or ABSENT,
            "parameters": str(len(trace.params)),
            "reduce dtype": trace.reduce_dtype or ABSENT,
            "evidence": ", ".join(run.evidence),
            "backend": f"{run.backend}, {run.device_type}",
            "outcome": str(report.outcome),
        }

    return _pairs(of(before), of(after))


# --------------------------------------------------------------------------- parameters


def _params(before: Report, after: Report) -> tuple[Changed, ...]:
    was, now = _described(before), _described(after)
    names = list(dict.fromkeys((*was, *now)))
    alike: dict[tuple[Change, ...], list[str]] = defaultdict(list)
    for name in names:
        if name not in was or name not in now:
            changes: tuple[Change, ...] = (Change("parameter", *_there(name in was, name in now)),)
        else:
            changes = tuple(c for c in _pairs(was[name], now[name]) if c.differs)
        if changes:
            alike[changes].append(name)
    return tuple(
        Changed(group, changes) for changes, found in alike.items() for group in group_names(found, names)
    )


def _there(before: bool, after: bool) -> tuple[str, str]:
    return "there" if before else ABSENT, "there" if after else ABSENT


def _described(report: Report) -> dict[str, dict[str, str]]:
    """FQN -> everything of a parameter that may change, in words."""
    judgements: dict[str, list[Judgement]] = defaultdict(list)
    for j in report.judgements:
        judgements[j.param_fqn].append(j)
    return {p.fqn: _description(p, judgements[p.fqn]) for p in report.trace.params}


def _description(p: ParamRecord, judgements: Iterable[Judgement]) -> dict[str, str]:
    said = {
        "dtype": p.tensor.dtype,
        "shape": " x ".join(map(str, p.tensor.global_shape)) or "scalar",
        "trained": "yes" if p.requires_grad else "no",
        "grad dtype": p.grad.dtype if p.grad is not None else ABSENT,
    }
    for j in judgements:
        factor = f", x{j.factor}" if j.factor not in (None, 1) else ""
        said[f"{j.mesh_dim} verdict"] = f"{j.verdict}{factor}"
        said[f"{j.mesh_dim} placement"] = _short(j.placement)
        said[f"{j.mesh_dim} expected grad"] = _short(j.expected)
        said[f"{j.mesh_dim} observed grad"] = _short(j.observed)
    return said


def _short(placement: Placement | None) -> str:
    return placement.short() if placement is not None else ABSENT


# --------------------------------------------------------------------------- traffic


def _collectives(before: Trace, after: Trace) -> tuple[Traffic, ...]:
    was, now = _totals(before), _totals(after)
    rows = []
    for key in dict.fromkeys((*was, *now)):
        (n, sent), (m, sent_now) = was.get(key, (0, 0)), now.get(key, (0, 0))
        if (n, sent) != (m, sent_now):
            rows.append(Traffic(phase=key[0], what=key[1], count=(n, m), sent=(sent, sent_now)))
    return tuple(sorted(rows, key=lambda t: (t.phase, t.what)))


def _totals(trace: Trace) -> dict[tuple[str, str], tuple[int, int | None]]:
    found: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for c in trace.collectives:
        over = ", ".join(c.mesh_dims) or f"a group of {len(c.group_ranks)} ranks"
        op = f"({c.reduce_op})" if c.reduce_op else ""
        found[str(c.phase), f"{c.name}{op} over {over} in {c.dtype}"].append(c)
    return {key: (len(those), _bytes(those)) for key, those in found.items()}


def _bytes(collectives: Iterable[Collective]) -> int | None:
    total = 0
    for c in collectives:
        size = itemsize(c.dtype)
        if size is None:
            return None
        total += c.numel * size
    return total


def _boundaries(before: Trace, after: Trace) -> tuple[Change, ...]:
    def of(trace: Trace) -> dict[str, str]:
        found = Counter(f"{b.kind}, {b.phase}" for b in trace.boundaries)
        return {kind: f"{n:,}" for kind, n in sorted(found.items())}

    return tuple(c for c in _pairs(of(before), of(after)) if c.differs)


# --------------------------------------------------------------------------- findings


def _faults(report: Report, other: Report) -> tuple[Fault, ...]:
    """Findings of ``report`` beyond those that ``other`` has; not by place, for that a new version moves."""

    def keys(r: Report) -> Counter[tuple[str, str, str, str]]:
        return Counter((f.rule_id, f.rule_name, f.mesh_dim, f.param_fqn or f.module_fqn) for f in r.findings)

    beyond = keys(report) - keys(other)
    names: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    count: Counter[tuple[str, str, str]] = Counter()
    for (rule_id, rule_name, mesh_dim, name), n in beyond.items():
        names[rule_id, rule_name, mesh_dim].append(name)
        count[rule_id, rule_name, mesh_dim] += n
    universe = [p.fqn for p in report.trace.params] + [b.module_fqn for b in report.trace.boundaries]
    return tuple(
        Fault(
            rule_id=key[0],
            rule_name=key[1],
            mesh_dim=key[2],
            groups=tuple(g for g in group_names(found, universe) if g.name),
            count=count[key],
        )
        for key, found in sorted(names.items())
    )
