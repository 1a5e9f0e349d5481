"""Parts of the text report as plain lines, for formats that quote it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from placement_audit.report.blocks import finding_block
from placement_audit.report.fold import Block
from placement_audit.report.text import summary
from placement_audit.report.words import plural
from placement_audit.verdicts import Edit, Report, Severity

WIDTH = 110


def block_lines(report: Report, block: Block, *, diff: bool = True) -> list[str]:
    """A finding as the text report has it, its head line first."""
    edit = edit_of(report, block)
    return [line.plain.rstrip() for line in finding_block(block, report.trace, WIDTH, edit, diff=diff)]


def edit_of(report: Report, block: Block) -> Edit | None:
    """What would mend a finding, or did."""
    return next((e for e in report.edits if block.first.fingerprint in e.fingerprints), None)


def live(blocks: Iterable[Block]) -> list[Block]:
    """The findings that count, and are no notes."""
    return [b for b in blocks if b.first.suppressed is None and b.first.severity is not Severity.NOTE]


def notes(blocks: Iterable[Block]) -> list[Block]:
    """The notes, without those that are said of deferred gradients anyway."""
    found = [b for b in blocks if b.first.suppressed is None and b.first.severity is Severity.NOTE]
    return [b for b in found if b.first.rule_id != "PA401"]


def suppressed(blocks: Iterable[Block]) -> list[tuple[Block, str]]:
    """The findings that do not count, each with why."""
    out = []
    for b in blocks:
        mark = b.first.suppressed
        if mark is not None:
            until = f", until {mark.until}" if mark.until is not None else ""
            out.append((b, f"{mark.reason} ({mark.by} {mark.where}{until})"))
    return out


def on(mesh_dim: str) -> str:
    """`` on tp``; nothing for a finding that is about no mesh dim."""
    return f" on {mesh_dim}" if mesh_dim else ""


def baseline_lines(report: Report) -> Iterator[str]:
    """What a baseline did, a sentence each."""
    use = report.baseline
    if use is not None:
        yield f"{plural(use.known, 'finding')} of {use.path} {'is' if use.known == 1 else 'are'} known."
        yield from (f"Gone: {text}" for text in use.gone)


def summary_line(report: Report) -> str:
    """The last line of the text report."""
    return summary(report).plain


def summary_parts(report: Report) -> tuple[str, str]:
    """The same in two: what came out, and the rest."""
    line = summary(report)
    end = line.spans[0].end if line.spans else len(line.plain)
    return line.plain[:end], line.plain[end:].lstrip(":, ")
