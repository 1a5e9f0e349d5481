"""The lines of one folded finding: which, where, expected, observed, why it is said, what next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from placement_audit.report.fold import Block, Remark
from placement_audit.report.names import PARAM, Group
from placement_audit.report.table import BAD
from placement_audit.report.words import column, labelled, layout_text, listed, plural, wrapped
from placement_audit.tracing import Trace
from placement_audit.verdicts import HYGIENE, Edit, EditStatus, PathStep, Severity, Suppressed

GROUPS_SHOWN = 12
"""Name groups listed in one block; the JSON report has them all."""

EVIDENCE_SHOWN = 3

DIFF_SHOWN = 16
"""Lines of an edit's diff: enough for one call, and for the import that it needs."""


def finding_block(
    block: Block, trace: Trace, width: int, edit: Edit | None = None, *, diff: bool = True
) -> Iterator[Text]:
    """One folded finding; names, paths and code lines stand as they are and are never cut.

    Args:
        block: the finding.
        trace: that it is about.
        width: to wrap at.
        edit: what would mend it.
        diff: whether to show the edit's; a reader who has seen it needs it no second time.
    """
    first = block.first
    style = BAD if first.severity is Severity.ERROR else "bold yellow"
    title = f"{first.rule_id} {first.rule_name}"
    on = f"   mesh dim {first.mesh_dim}" if first.mesh_dim else ""
    yield Text.assemble((title, style), (_about(block), "bold"), f"{on}   {first.severity}")
    yield from map(Text, _body(block, trace, width))
    if edit is not None:
        yield from map(Text, edit_lines(edit, width, diff=diff))


def note_block(block: Block, width: int) -> Iterator[str]:
    """A note in short: the rule, what it says, where."""
    first = block.first
    said = _named(block, block.message or first.message)
    yield from labelled(first.rule_id, f"{first.rule_name} on {first.mesh_dim}: {said}", width=width)
    yield from column("", _names([g for g in block.groups if g.name]))
    yield from column("", [str(first.path[0].call_site)] if first.path else [])


def suppressed_block(block: Block, mark: Suppressed, width: int) -> Iterator[str]:
    """A finding that does not count, in short: the rule, why it does not, whom it is about, where."""
    first = block.first
    on = f" on {first.mesh_dim}" if first.mesh_dim else ""
    until = f", until {mark.until}" if mark.until is not None else ""
    text = f"{first.rule_name}{on}: {mark.reason} ({mark.by} {mark.where}{until})"
    yield from labelled(first.rule_id, text, width=width)
    yield from column("", _names([g for g in block.groups if g.name]))
    yield from column("", [str(first.path[0].call_site)] if first.path else [])


def remark_lines(remark: Remark, text: str, everywhere: bool, width: int) -> Iterator[str]:
    """The parameters of a remark, then what is to be said of them.

    Args:
        remark: of which parameters and mesh dims.
        text: what to say.
        everywhere: whether it holds on every mesh dim, which then goes without saying.
        width: to wrap at.
    """
    yield from (f"  {name}" for name in _names(remark.groups))
    text = text.replace(PARAM, remark.groups[0].name if remark.count == 1 else "each of them")
    where = "" if everywhere else f"on {listed(remark.mesh_dims)}: "
    yield from wrapped(where + text, head="    ", width=width)


def edit_lines(edit: Edit, width: int, *, diff: bool = True) -> Iterator[str]:
    """What is to be said of an edit, and its diff without the lines that stay; the JSON report has it whole."""
    if edit.status is not EditStatus.SHOWN:
        head = f"{edit.status}: {edit.proof}"
    elif not edit.diff:
        head = edit.reason
    else:
        head = (
            f"safe, --fix proves and applies it: {edit.reason}" if edit.safe else f"shown only: {edit.reason}"
        )
    yield from labelled("edit", head, width=width)
    if not edit.diff:
        return
    changed = [line for line in edit.diff.splitlines() if not line.startswith(" ")]
    if len(changed) > DIFF_SHOWN:
        added, gone = (sum(line.startswith(c) for line in changed) - 1 for c in "+-")  # 1: the file's names
        changed = [f"{edit.path}, {added} lines added, {gone} removed: the JSON report has the diff"]
    yield from column("", changed if diff else [f"{edit.path}:{edit.line}, as above"])


def _about(block: Block) -> str:
    """Whom it concerns, in the head line: the one group, or how many parameters or modules."""
    if block.first.param_fqn is not None:
        one = len(block.groups) == 1
        return f"   {block.groups[0] if one else plural(block.count, 'parameter')}"
    names = [str(g) for g in block.groups if g.name]
    return f"   module {names[0]}" if len(names) == 1 else f"   {len(names)} kinds of module" if names else ""


def _body(block: Block, trace: Trace, width: int) -> Iterator[str]:
    first = block.first
    if len(block.groups) > 1:
        label = "parameters" if first.param_fqn is not None else "modules"
        yield from column(label, _names(block.groups))
    if block.message is not None:
        # the head line has said which rule it is
        message = block.message.removeprefix(f"{first.rule_name.replace('-', ' ')}: ")
        yield from labelled("what", _named(block, message), width=width)
    yield from labelled("expected", _named(block, first.expected), width=width)
    yield from labelled("observed", _named(block, first.observed), width=width)
    said = [first.observed, *(e.statement for e in block.evidence)]
    if block.factor not in (None, 1) and not any(f"{block.factor} times" in text for text in said):
        yield from labelled(
            "factor", f"{block.factor}: .grad, read as it is labelled, over the true gradient", width=width
        )
    for i, e in enumerate(block.evidence[:EVIDENCE_SHOWN]):
        text = f"{e.strength}: {_named(block, e.statement)}"
        yield from labelled("evidence" if i == 0 else "", text, width=width)
    if len(block.evidence) > EVIDENCE_SHOWN:
        more = len(block.evidence) - EVIDENCE_SHOWN
        yield from labelled("", f"and {more} more of its kind in the JSON report", width=width)
    if first.rule_id.startswith(HYGIENE):
        places = [s.call_site for s in first.path]
        yield from column("where", [line for at in places for line in (str(at), at.code_line)])
    else:
        yield from _steps(first.path, trace, width)
    yield from labelled("next", first.next_step, width=width)


def _steps(path: Sequence[PathStep], trace: Trace, width: int) -> Iterator[str]:
    for i, step in enumerate(path):
        role = f" ({step.role})" if step.role else ""
        text = f"{step.kind}{_declared(step, trace)}{role}"
        yield from labelled("boundary" if i == 0 else "and", text, width=width)
        yield from column("", [str(step.call_site), step.call_site.code_line])


def _declared(step: PathStep, trace: Trace) -> str:
    """What the caller said of the gradient, for the two calls that can say it."""
    if step.kind not in ("to_local", "from_local") or not 0 <= step.boundary < len(trace.boundaries):
        return ""
    declared = trace.boundaries[step.boundary].grad_declared
    return f" with grad_placements {layout_text(declared)}" if declared else " with no grad_placements"


def _names(groups: Sequence[Group]) -> list[str]:
    shown = [str(g) for g in groups[:GROUPS_SHOWN]]
    rest = groups[GROUPS_SHOWN:]
    if rest:
        shown.append(f"and {sum(len(g.fqns) for g in rest):,} more")
    return shown


def _named(block: Block, text: str) -> str:
    """``text`` with the parameters in place of `PARAM`."""
    if block.count == 1 and block.first.param_fqn:
        return text.replace(PARAM, block.first.param_fqn)
    return text.replace(PARAM, f"each of these {block.count} parameters")
