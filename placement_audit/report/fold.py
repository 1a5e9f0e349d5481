"""Folds a report to what a person can read: like parameters into rows, like findings into blocks.

Pure functions over `placement_audit.model`. A model of 126 layers has 1,137 parameters and some
12 rows; 13 findings with one cause are one block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from placement_audit.model import Layout, Placement
from placement_audit.report.names import Group, general, group_names, pattern
from placement_audit.tracing import ParamRecord, Phase, Trace
from placement_audit.verdicts import Evidence, Finding, Judgement, PathStep, Report, Severity, Verdict

WORST_FIRST = (
    Verdict.LOST_REDUCTION,
    Verdict.DOUBLE_REDUCTION,
    Verdict.WRONG_SCALE,
    Verdict.WRONG_PLACEMENT,
    Verdict.RANKS_DISAGREE,
    Verdict.WRONG_GRADIENT,
    Verdict.NO_GRADIENT,
    Verdict.NOT_JUDGED,
    Verdict.DEFERRED,
    Verdict.OK,
)
"""Verdicts, the one to look at first in front."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What a row says of one mesh dim.

    Attributes:
        mesh_dim: the world mesh dim.
        verdict: of every parameter of the row.
        placement: the parameter's; None where its mesh has no such dim.
        expected: of its gradient.
        observed: of its gradient; None for no gradient or a plain one.
        factor: see `Judgement.factor`.
    """

    mesh_dim: str
    verdict: Verdict
    placement: Placement | None
    expected: Placement
    observed: Placement | None
    factor: Fraction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Parameters of one name pattern with the same placements, gradient and verdicts.

    Attributes:
        group: the parameters.
        cells: one per judged mesh dim.
        layout: of the parameter, of its own mesh's dims only; None for a plain tensor.
        trained: False where requires_grad is.
        has_grad: False where backward left none.
        plain_grad: True where the gradient is a plain tensor.
    """

    group: Group
    cells: tuple[Cell, ...]
    layout: Layout | None
    trained: bool
    has_grad: bool
    plain_grad: bool

    @property
    def worst(self) -> Verdict:
        """The verdict to look at first; not judged where there is none at all."""
        found = {c.verdict for c in self.cells} or {Verdict.NOT_JUDGED}
        return min(found, key=WORST_FIRST.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Findings of one rule, on one mesh dim, with one cause.

    Attributes:
        first: the first of them, for what they share.
        groups: the parameters, or the modules where the findings name no parameter.
        count: findings.
        factor: gradient over true gradient, where all agree on one.
        message: shared sentence, with `PARAM` for the name; None where the sentences differ.
        evidence: distinct, with `PARAM` for the name.
    """

    first: Finding
    groups: tuple[Group, ...]
    count: int
    factor: Fraction | None
    message: str | None
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Parameters of which the same is to be said (why not judged, what is deferred).

    Attributes:
        text: the reason, with `PARAM` for the name.
        mesh_dims: where it holds.
        groups: the parameters.
        label: the gradient's placement there, where all agree on one.
    """

    text: str
    mesh_dims: tuple[str, ...]
    groups: tuple[Group, ...]
    label: Placement | None = None

    @property
    def count(self) -> int:
        """Parameters."""
        return sum(len(g.fqns) for g in self.groups)


# --------------------------------------------------------------------------- rows


def fold_rows(report: Report) -> tuple[Row, ...]:
    """Every parameter, folded; in the model's order of the first of each row."""
    cells: dict[str, list[Cell]] = defaultdict(list)
    for j in report.judgements:
        cells[j.param_fqn].append(Cell(j.mesh_dim, j.verdict, j.placement, j.expected, j.observed, j.factor))
    groups: dict[tuple[object, ...], list[ParamRecord]] = defaultdict(list)
    for p in report.trace.params:
        plain = p.grad is not None and p.grad.layout is None
        alike = (tuple(cells[p.fqn]), p.layout, p.requires_grad, p.grad is not None, plain)
        groups[pattern(p.fqn), *alike].append(p)
    universe = [p.fqn for p in report.trace.params]
    rows = []
    for params in groups.values():
        (group,) = group_names((p.fqn for p in params), universe)
        first = params[0]
        rows.append(
            Row(
                group=group,
                cells=tuple(cells[first.fqn]),
                layout=first.layout,
                trained=first.requires_grad,
                has_grad=first.grad is not None,
                plain_grad=first.grad is not None and first.grad.layout is None,
            )
        )
    return tuple(rows)


# --------------------------------------------------------------------------- findings


def fold_findings(report: Report) -> tuple[Block, ...]:
    """Findings (notes too) with the same rule, mesh dim, places and words, as blocks."""
    factors = {(j.param_fqn, j.mesh_dim): j.factor for j in report.judgements}
    blocks: dict[tuple[object, ...], list[Finding]] = defaultdict(list)
    for f in report.findings:
        blocks[_key(f, factors)].append(f)
    universe = {
        True: [p.fqn for p in report.trace.params],
        False: [b.module_fqn for b in report.trace.boundaries],
    }
    return tuple(_block(found, factors, universe) for found in blocks.values())


def places(findings: Iterable[Finding]) -> int:
    """Distinct lines of code that caused ``findings``."""
    return len({(f.path[0].call_site.path, f.path[0].call_site.line) for f in findings if f.path})


def finding_count(report: Report) -> dict[Severity, int]:
    """Findings that count, by severity."""
    found = Counter(f.severity for f in report.findings if f.suppressed is None)
    return {s: found[s] for s in Severity}


def _place(step: PathStep) -> tuple[object, ...]:
    # the role may carry a parameter's own numbers; the place does not
    return step.kind, step.call_site


def _key(f: Finding, factors: dict[tuple[str, str], Fraction | None]) -> tuple[object, ...]:
    on_param = f.param_fqn is not None
    words = tuple(general(t, f.param_fqn) for t in (f.expected, f.observed, f.next_step))
    factor = factors.get((f.param_fqn or "", f.mesh_dim))
    steps = tuple(_place(s) for s in f.path)
    return f.rule_id, f.severity, f.mesh_dim, on_param, steps, words, factor, f.suppressed


def _block(
    found: Sequence[Finding],
    factors: dict[tuple[str, str], Fraction | None],
    universe: dict[bool, list[str]],
) -> Block:
    first = found[0]
    on_param = first.param_fqn is not None
    names = [f.param_fqn if f.param_fqn is not None else f.module_fqn for f in found]
    messages = {general(f.message, f.param_fqn) for f in found}
    evidence = dict.fromkeys(
        Evidence(strength=e.strength, statement=general(e.statement, f.param_fqn))
        for f in found
        for e in f.evidence
    )
    return Block(
        first=first,
        groups=group_names(names, universe[on_param]),
        count=len(found),
        factor=factors.get((first.param_fqn or "", first.mesh_dim)),
        message=messages.pop() if len(messages) == 1 else None,
        evidence=tuple(evidence),
    )


# --------------------------------------------------------------------------- remarks and counts


def fold_remarks(report: Report, verdict: Verdict) -> tuple[Remark, ...]:
    """Parameters with ``verdict``, grouped by reason, mesh dims and label."""
    return _remarks(report, [j for j in report.judgements if j.verdict is verdict])


def fold_relabelled(report: Report) -> tuple[Remark, ...]:
    """Gradients that are ok although their label is not the expected one, likewise."""
    ok = [j for j in report.judgements if j.verdict is Verdict.OK and j.observed is not None]
    return _remarks(report, [j for j in ok if j.observed != j.expected])


def _remarks(report: Report, judgements: Iterable[Judgement]) -> tuple[Remark, ...]:
    # per parameter first: the same reason on two mesh dims is one remark
    dims: dict[tuple[str, str, Placement | None], list[str]] = defaultdict(list)
    for j in judgements:
        dims[j.param_fqn, general(j.reason, j.param_fqn), j.observed].append(j.mesh_dim)
    params: dict[tuple[str, tuple[str, ...], Placement | None], list[str]] = defaultdict(list)
    for (fqn, reason, label), mesh_dims in dims.items():
        params[reason, tuple(mesh_dims), label].append(fqn)
    universe = [p.fqn for p in report.trace.params]
    return tuple(
        Remark(text=reason, mesh_dims=mesh_dims, groups=group_names(fqns, universe), label=label)
        for (reason, mesh_dims, label), fqns in params.items()
    )


def verdict_count(report: Report) -> dict[Verdict, int]:
    """Judgements by verdict, worst first; only those that occur."""
    found = Counter(j.verdict for j in report.judgements)
    return {v: found[v] for v in WORST_FIRST if found[v]}


def boundary_count(trace: Trace) -> dict[str, int]:
    """Boundary calls of the forward by kind, the most frequent first."""
    found = Counter(b.kind for b in trace.boundaries if b.phase is Phase.FORWARD)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def collective_count(trace: Trace, phase: Phase) -> dict[str, int]:
    """Collectives of ``phase``, spelled ``all_reduce(sum) over tp in float32``, by count."""
    found: Counter[str] = Counter()
    for c in trace.collectives:
        if c.phase is phase:
            over = ", ".join(c.mesh_dims) or f"a group of {len(c.group_ranks)} ranks"
            op = f"({c.reduce_op})" if c.reduce_op else ""
            found[f"{c.name}{op} over {over} in {c.dtype}"] += 1
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
