"""The report as Markdown for a pull-request comment or a job summary: short, and never over GitHub's limit. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from placement_audit.report.fold import Block, Cell, Row, fold_findings, fold_remarks, fold_rows
from placement_audit.report.names import PARAM
from placement_audit.report.numbers import measured_items
from placement_audit.report.plain import (
    baseline_lines,
    block_lines,
    edit_of,
    live,
    notes,
    on,
    summary_line,
    suppressed,
)
from placement_audit.report.text import who_must_reduce
from placement_audit.report.words import evidence_text, listed, mesh_text, plural, times
from placement_audit.verdicts import Outcome, Report, Verdict

LIMIT = 65_536
"""Characters that GitHub takes in one comment."""

_SIGNS = {
    Verdict.OK: ":white_check_mark:",
    Verdict.DEFERRED: ":white_check_mark:",
    Verdict.NOT_JUDGED: ":grey_question:",
}
_OUTCOMES = {Outcome.CLEAN: ":white_check_mark:", Outcome.FINDINGS: ":x:", Outcome.INCOMPLETE: ":warning:"}

_ROOM_FOR_COUNT = 200


def markdown(report: Report, limit: int = LIMIT) -> str:
    """The whole report in at most ``limit`` characters; what did not fit is counted at its end."""
    out, left = "", {"finding": 0, "section": 0}
    for kind, text in _sections(report):
        if len(out) + len(text) + _ROOM_FOR_COUNT <= limit:
            out += text
        else:
            left[kind] += 1
    missing = [plural(n, f"more {kind}") for kind, n in left.items() if n]
    if missing:
        out += f"\n**Cut here:** {listed(missing)} did not fit; the text and JSON reports have everything.\n"
    return out


def _sections(report: Report) -> Iterator[tuple[str, str]]:
    """(what it is, its text), the first to be kept first."""
    yield "section", _head(report)
    rows = fold_rows(report)
    right = [r for r in rows if r.worst in (Verdict.OK, Verdict.DEFERRED)]
    for part in _parts([r for r in rows if r not in right]):
        yield "section", _table(report, part)
    told = set()
    blocks = fold_findings(report)
    for b in live(blocks):
        edit = edit_of(report, b)
        head, *body = block_lines(report, b, diff=edit not in told)
        told.add(edit)
        yield "finding", f"\n#### {code(' '.join(head.split()))}\n\n{fenced(body)}"
    measured = [f"- **{label}**: {prose(text)}" for label, text in measured_items(report)]
    yield from _section("Measured", measured)
    yield from _section(
        "Not judged",
        [
            f"- {listed([code(str(g)) for g in r.groups[:8]])}: {prose(r.text.replace(PARAM, 'each'))}"
            for r in fold_remarks(report, Verdict.NOT_JUDGED)
        ],
    )
    yield from _section(
        "Deferred",
        [
            f"- {listed([code(str(g)) for g in r.groups[:8]])}: {prose(who_must_reduce(report, r))}"
            for r in fold_remarks(report, Verdict.DEFERRED)
        ],
    )
    yield from _section(
        "Notes",
        [
            f"- {_rule(b)}, {plural(b.count, 'time')}: "
            f"{prose((b.message or b.first.message).replace(PARAM, 'each'))}"
            for b in notes(blocks)
        ],
    )
    yield from _section(
        "Suppressed",
        [
            f"- {_rule(b)}, {listed([code(str(g)) for g in b.groups[:8] if g.name])}: {prose(why)}"
            for b, why in suppressed(blocks)
        ],
    )
    yield from _section("Baseline", [f"- {prose(text)}" for text in baseline_lines(report)])
    yield from _section("What this evidence cannot see", [f"- {prose(text)}" for text in report.blind_spots])
    for part in _parts(right):
        title = plural(len(part), "kind") + " of parameter with a right gradient"
        yield "section", _folded(title, _table(report, part))


def _rule(block: Block) -> str:
    return prose(f"{block.first.rule_id} {block.first.rule_name}{on(block.first.mesh_dim)}")


def _section(title: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    if lines:
        yield "section", _folded(title, "\n" + "\n".join(lines) + "\n")


def _folded(title: str, text: str) -> str:
    return f"\n<details><summary>{title}</summary>\n{text}\n</details>\n"


def _head(report: Report) -> str:
    run = report.trace.run
    facts = [
        f"model {code(run.model)}",
        f"mesh {code(mesh_text(report.trace.mesh, run.world_size))}",
        f"config {code(' '.join((run.config_path, *run.overrides)))}" if run.config_path else "",
        f"evidence {prose(evidence_text(run))}",
        prose(", ".join(f"{name} {version}" for name, version in run.versions)),
    ]
    lines = [f"### {_OUTCOMES[report.outcome]} placement-audit: {prose(summary_line(report))}", ""]
    lines += [f"- {fact}" for fact in facts if fact]
    lines += [f"- {prose(note)}" for note in run.notes]
    return "\n".join(lines) + "\n"


def _parts(rows: Sequence[Row], size: int = 100) -> Iterator[Sequence[Row]]:
    """Tables of a size that one of them can be left out."""
    for at in range(0, len(rows), size):
        yield rows[at : at + size]


def _table(report: Report, rows: Sequence[Row]) -> str:
    dims = report.trace.mesh.dim_names
    lines = [
        "",
        f"| parameter | n |{''.join(f' {code(d)} |' for d in dims)}",
        "|---|--:|" + "---|" * len(dims),
    ]
    for row in rows:
        cells = {c.mesh_dim: c for c in row.cells}
        lines.append(
            f"| {code(row.group.name)} | {len(row.group.fqns)} |"
            + "".join(f" {_cell(cells[d]) if d in cells else ''} |" for d in dims)
        )
    return "\n".join(lines) + "\n"


def _cell(cell: Cell) -> str:
    placement = cell.placement.short() if cell.placement is not None else "-"
    sign = _SIGNS.get(cell.verdict, ":x:")
    if cell.verdict is Verdict.OK and cell.observed in (cell.placement, None):
        return f"{sign} {code(placement)}"
    observed = f", grad {code(cell.observed.short())}" if cell.observed is not None else ""
    factor = f" {times(cell.factor)}" if cell.factor not in (None, 1) else ""
    return f"{sign} {code(placement)}{observed}: **{cell.verdict}{factor}**"


_RUNS = re.compile("`+")
_SPACE = re.compile(r"[\r\n\t\x0b\x0c]")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$-])")


def code(text: str) -> str:
    """A code span that no text can leave, in a table or out of one."""
    text = _SPACE.sub(" ", text).strip()
    if not text:
        return ""
    fence = "`" * (max((len(r) for r in _RUNS.findall(text)), default=0) + 1)
    pad = " " if text[0] == "`" or text[-1] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", "\\|")


def fenced(lines: Sequence[str]) -> str:
    """Lines as they are, in a code block that no line can end."""
    fence = "`" * max(3, max((len(r) + 1 for line in lines for r in _RUNS.findall(line)), default=0))
    return "\n".join((f"{fence}text", *lines, fence)) + "\n"


def prose(text: str) -> str:
    """Running text in which nothing is markup, and nobody is called."""
    return _MARKUP.sub(r"\\\1", _SPACE.sub(" ", text)).replace("@", "@<!-- -->")
