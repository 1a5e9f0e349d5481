"""The report as one HTML page: no script, no network, nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import jinja2
from markupsafe import Markup, escape

from placement_audit.report import fold, svg
from placement_audit.report.blocks import EVIDENCE_SHOWN
from placement_audit.report.lanes import lanes
from placement_audit.report.names import PARAM, Group
from placement_audit.report.numbers import measured_items
from placement_audit.report.plain import baseline_lines, edit_of, live, notes, on, summary_parts, suppressed
from placement_audit.report.route import Route
from placement_audit.report.route_words import named_in_words
from placement_audit.report.routes import Routes
from placement_audit.report.text import who_must_reduce
from placement_audit.report.volume import volumes
from placement_audit.report.way import explain_param
from placement_audit.report.words import evidence_text, listed, mesh_text, plural
from placement_audit.verdicts import GOOD, HYGIENE, Edit, Evidence, Finding, Outcome, Report, Verdict

MEANINGS = {
    Verdict.OK: "complete, and what its label says",
    Verdict.DEFERRED: "left Partial or another shard: right for readers that redistribute it",
    Verdict.LOST_REDUCTION: "each rank holds its own term, nothing sums them",
    Verdict.DOUBLE_REDUCTION: "summed once more although complete",
    Verdict.WRONG_SCALE: "a wrong multiple",
    Verdict.WRONG_PLACEMENT: "cannot be read as the parameter's",
    Verdict.RANKS_DISAGREE: "declared Replicate, and the ranks differ",
    Verdict.WRONG_GRADIENT: "the numbers are off, no one reduction explains it",
    Verdict.NO_GRADIENT: "backward left none",
    Verdict.NOT_JUDGED: "the evidence at hand cannot tell",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A folded finding, ready to show.

    Attributes:
        block: it.
        finding: the first of it.
        name: the parameter or module that the way is shown of; "" for none.
        about: what it is shown of, where that has no name.
        what: its sentence; likewise the next two.
        expected: what should be.
        observed: what is.
        evidence: the first few.
        more_evidence: how many more there are.
        hygiene: whether it is about a suppression, whose place is no call.
        edit: what would mend it.
        drawing: the way; "" for none.
        words: the way in words; "" for none.
    """

    block: fold.Block
    finding: Finding
    name: str
    about: str
    what: str
    expected: str
    observed: str
    evidence: tuple[Evidence, ...]
    more_evidence: int
    hygiene: bool
    edit: Edit | None
    drawing: Markup
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Measured numbers of a row of parameters, the worst of each.

    Attributes:
        group: of parameters.
        grad_error: relative; None where it was not compared, and so on.
        ratio: norm over the reference's, of the parameter that is off the most.
        step_error: after the job's own clipping and optimizer.
        sgd_error: of the change in one plain SGD step.
        wrong: whether the gradient is off by more than the tolerance.
    """

    group: Group
    grad_error: float | None
    ratio: float | None
    step_error: float | None
    sgd_error: float | None
    wrong: bool


def html(report: Report) -> str:
    """The page, with a newline at its end."""
    rows = fold.fold_rows(report)
    items = list(_items(report))
    verdicts = fold.verdict_count(report)
    blocks = fold.fold_findings(report)
    headline, rest = summary_parts(report)
    page = _template().render(
        mark=lambda verdict: Markup(svg.mark(verdict)),
        on=on,
        GOOD=GOOD,
        report=report,
        run=report.trace.run,
        dims=report.trace.mesh.dim_names,
        title=f"placement-audit: {report.trace.run.model}",
        good=report.outcome is Outcome.CLEAN,
        headline=headline,
        rest=rest,
        facts=list(_facts(report)),
        rows=rows,
        cells=lambda row: {c.mesh_dim: c for c in row.cells},
        verdicts=verdicts,
        meanings=MEANINGS,
        items=items,
        notes=[(b, _named(b, b.message or b.first.message)) for b in notes(blocks)],
        suppressed=suppressed(blocks),
        baseline=list(baseline_lines(report)),
        remarks=list(_remarks(report)),
        volumes=volumes(report.trace),
        measured=list(measured_items(report)),
        numbers=list(_numbers(report, rows)),
    )
    return page if page.endswith("\n") else f"{page}\n"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    run, trace = report.trace.run, report.trace
    yield "Model", f"{run.model}, {plural(len(trace.params), 'parameter')}"
    varies = f"; the batch varies over {listed(trace.batch_dims)}" if trace.batch_dims else ""
    yield "Mesh", mesh_text(trace.mesh, run.world_size) + varies
    if run.config_path:
        yield "Config", " ".join((run.config_path, *run.overrides))
    yield "Evidence", evidence_text(run)
    versions = ((f"placement-audit {run.tool_version}"), *(f"{n} {v}" for n, v in run.versions))
    yield "Versions", ", ".join(versions)
    for note in run.notes:
        yield "Note", note


def _items(report: Report) -> Iterator[Item]:
    routes = Routes(report)
    for i, b in enumerate(live(fold.fold_findings(report)), 1):
        f = b.first
        route = routes.of(f)
        drawing = Markup(lanes(route, f"way-{i}", f.mesh_dim)) if route is not None else Markup("")
        yield Item(
            block=b,
            finding=f,
            name=f.param_fqn if f.param_fqn is not None else f.module_fqn,
            about=route.about if route is not None else "",
            what=_named(b, b.message or f.message),
            expected=_named(b, f.expected),
            observed=_named(b, f.observed),
            evidence=tuple(
                Evidence(strength=e.strength, statement=_named(b, e.statement))
                for e in b.evidence[:EVIDENCE_SHOWN]
            ),
            more_evidence=max(0, len(b.evidence) - EVIDENCE_SHOWN),
            hygiene=f.rule_id.startswith(HYGIENE),
            edit=edit_of(report, b),
            drawing=drawing,
            words="\n".join(filter(None, _words(report, f, route))),
        )


def _words(report: Report, f: Finding, route: Route | None) -> Iterator[str]:
    """The way of the parameter, then what the finding names on it or without it."""
    if any(p.fqn == f.param_fqn for p in report.trace.params):
        yield explain_param(report, f.param_fqn or "")
    if route is not None:
        yield named_in_words(route)


def _remarks(report: Report) -> Iterator[tuple[str, list[tuple[fold.Remark, str]]]]:
    """Titles, each with its remarks and what they say."""
    not_judged, deferred = (fold.fold_remarks(report, v) for v in (Verdict.NOT_JUDGED, Verdict.DEFERRED))
    if not_judged:
        yield (
            "Not judged",
            [
                (r, r.text.replace(PARAM, r.groups[0].name if r.count == 1 else "each of them"))
                for r in not_judged
            ],
        )
    if deferred:
        yield (
            "Deferred",
            [(r, who_must_reduce(report, r).removeprefix("deferred: ")) for r in deferred],
        )


def _numbers(report: Report, rows: tuple[fold.Row, ...]) -> Iterator[Numbers]:
    m = report.measurement
    by_name = {p.fqn: p for p in m.params} if m is not None else {}
    for row in rows:
        found = [by_name[fqn] for fqn in row.group.fqns if fqn in by_name]
        if m is None or not found:
            continue
        worst = max(found, key=lambda p: -1.0 if p.grad_error is None else p.grad_error)
        yield Numbers(
            group=row.group,
            grad_error=worst.grad_error,
            ratio=worst.grad_ratio,
            step_error=max((p.step_error for p in found if p.step_error is not None), default=None),
            sgd_error=max((p.sgd_error for p in found if p.sgd_error is not None), default=None),
            wrong=worst.grad_error is not None and not worst.grad_error <= m.allowed(worst),
        )


def _named(block: fold.Block, text: str) -> str:
    if block.count == 1 and block.first.param_fqn:
        return text.replace(PARAM, block.first.param_fqn)
    return text.replace(PARAM, f"each of these {block.count} parameters")


# --------------------------------------------------------------------------- the template


@cache
def _template() -> jinja2.Template:
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("placement_audit.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    env.filters.update(
        breaks=_breaks, size=_size, error=_error, plural=plural, group=_group, listed=listed, times=_times
    )
    return env.get_template("page.html")


def _finalize(value: object) -> object:
    """What HTML has no place for, visibly."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _visible(value)


def _breaks(text: str) -> Markup:
    """Names and paths that may be broken after their dots, underscores and slashes, numbers that may not."""
    shown = re.sub(r"([./_])(?=[A-Za-z*{])", r"\1<wbr>", str(escape(_visible(text))))
    return Markup(re.sub(r"\b[\d.]+e-\d+", r'<span class="number">\g<0></span>', shown))


def _visible(text: str) -> str:
    """``text`` with a sign for what a page can't show."""
    return svg.CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _group(group: Group) -> Markup:
    count = (
        Markup(' <span class="n">&times;&nbsp;{}</span>').format(len(group.fqns))
        if len(group.fqns) > 1
        else ""
    )
    return _breaks(group.name) + count


def _size(sent: int | None) -> str:
    """``6,656 B``, ``12.3 MB``: never more than a glance."""
    if sent is None:
        return "unknown"
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if sent >= 10 * scale:
            return f"{sent / scale:,.0f} {unit}" if sent >= 100 * scale else f"{sent / scale:,.1f} {unit}"
    return f"{sent:,} B"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _times(factor: Fraction | None) -> str:
    return f"\N{MULTIPLICATION SIGN}{factor}" if factor not in (None, 1) else ""
