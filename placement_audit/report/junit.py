"""The report as JUnit XML: a test case for each kind of parameter on each mesh dim, and for each other finding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from placement_audit.report.fold import Block, Cell, Row, fold_findings, fold_rows
from placement_audit.report.plain import block_lines, on, summary_line, suppressed
from placement_audit.verdicts import GOOD, Outcome, Report, Severity, Verdict

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML 1.0 document may hold, escaped or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One test case.

    Attributes:
        suite: the name of its suite.
        name: its own.
        outcome: "failure", "error", "skipped", or "" for passed.
        message: one line.
        text: all there is to say; of a passed one, its output.
    """

    suite: str
    name: str
    outcome: str = ""
    message: str = ""
    text: str = ""


def junit(report: Report) -> str:
    """All cases, as XML with a newline at its end."""
    cases = list(_cases(report))
    root = ElementTree.Element("testsuites", _counts("placement-audit", cases))
    seconds = sum(s for _, s in report.trace.run.phases)
    for name in dict.fromkeys(c.suite for c in cases):
        found = [c for c in cases if c.suite == name]
        suite = ElementTree.SubElement(root, "testsuite", _counts(name, found))
        suite.set("time", f"{seconds if found[0] is cases[0] else 0:.3f}")
        for c in found:
            _add(suite, c, report.trace.run.model)
    out = ElementTree.SubElement(root[-1], "system-out")
    out.text = _legal(summary_line(report))
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _cases(report: Report) -> Iterator[_Case]:
    blocks = [b for b in fold_findings(report) if b.first.severity is not Severity.NOTE]
    told: set[int] = set()
    for row in fold_rows(report):
        for cell in row.cells:
            about = [i for i, b in enumerate(blocks) if _is_about(b, row, cell)]
            case = _gradient(report, row, cell, [blocks[i] for i in about])
            if cell.verdict not in (*GOOD, Verdict.NOT_JUDGED):
                told.update(about)
            yield case
    for i, b in enumerate(blocks):
        if i not in told:
            yield _finding(report, b)
    if report.outcome is Outcome.INCOMPLETE:
        yield _Case(
            suite="audit",
            name="the audit is complete",
            outcome="error",
            message=summary_line(report),
            text="\n".join(report.trace.run.notes),
        )
    else:
        yield _Case(suite="audit", name="the audit is complete")


def _is_about(block: Block, row: Row, cell: Cell) -> bool:
    if block.first.mesh_dim != cell.mesh_dim or block.first.param_fqn is None:
        return False
    named = {fqn for g in block.groups for fqn in g.fqns}
    return not named.isdisjoint(row.group.fqns)


def _gradient(report: Report, row: Row, cell: Cell, blocks: Sequence[Block]) -> _Case:
    name = f"{row.group} on {cell.mesh_dim}"
    errors = [b for b in blocks if b.first.severity is Severity.ERROR]
    counting = [b for b in errors if b.first.suppressed is None]
    if cell.verdict is Verdict.NOT_JUDGED:
        return _Case(suite="gradients", name=name, outcome="skipped", message=_reason(report, row, cell))
    if cell.verdict in GOOD:
        return _Case(suite="gradients", name=name)
    if errors and not counting:
        why = "; ".join(why for _, why in suppressed(errors))
        message = f"{cell.verdict}, suppressed: {why}"
        return _Case(suite="gradients", name=name, outcome="skipped", message=message)
    text = "\n\n".join("\n".join(block_lines(report, b)) for b in counting) or _reason(report, row, cell)
    return _Case(
        suite="gradients",
        name=name,
        outcome="failure",
        message=f"{cell.verdict}: expected {cell.expected}, observed {cell.observed or 'no placement'}",
        text=text,
    )


def _finding(report: Report, block: Block) -> _Case:
    f = block.first
    why = [why for _, why in suppressed([block])]
    lines = block_lines(report, block)
    # a block without its place in the name would make two cases of one name
    where = f" at {f.path[0].call_site.path}:{f.path[0].call_site.line}" if f.path else ""
    return _Case(
        suite="findings",
        name=f"{f.rule_id} {f.rule_name}{on(f.mesh_dim)}{where}",
        outcome="skipped" if why else "failure" if f.severity is Severity.ERROR else "",
        message=f"suppressed: {why[0]}" if why else f.message if f.severity is Severity.ERROR else "",
        text="\n".join(lines),
    )


def _reason(report: Report, row: Row, cell: Cell) -> str:
    fqn = row.group.fqns[0]
    found = (j.reason for j in report.judgements if j.param_fqn == fqn and j.mesh_dim == cell.mesh_dim)
    return next(found, "")


def _counts(name: str, cases: Sequence[_Case]) -> dict[str, str]:
    number = {what: sum(c.outcome == what for c in cases) for what in ("failure", "error", "skipped")}
    return {
        "name": name,
        "tests": str(len(cases)),
        "failures": str(number["failure"]),
        "errors": str(number["error"]),
        "skipped": str(number["skipped"]),
    }


def _add(suite: ElementTree.Element, case: _Case, model: str) -> None:
    at = ElementTree.SubElement(suite, "testcase", classname=_legal(model), name=_legal(case.name), time="0")
    if case.outcome:
        said = ElementTree.SubElement(at, case.outcome, message=_legal(case.message))
        if case.text:
            said.text = _legal(case.text)
    elif case.text:
        ElementTree.SubElement(at, "system-out").text = _legal(case.text)


def _legal(text: str) -> str:
    r"""``text`` with what XML cannot hold spelled as Python would: ``\x1b``."""
    return _ILLEGAL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
