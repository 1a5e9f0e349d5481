"""The report on a terminal: what ran, a row for every kind of parameter, a block for every cause."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from placement_audit.report import fold
from placement_audit.report.blocks import (
    edit_lines,
    finding_block,
    note_block,
    remark_lines,
    suppressed_block,
)
from placement_audit.report.numbers import measured_lines
from placement_audit.report.table import BAD, parameter_table
from placement_audit.report.words import (
    column,
    evidence_text,
    labelled,
    listed,
    mesh_text,
    plural,
    unbroken,
    version_of,
    wrapped,
)
from placement_audit.tracing import Phase
from placement_audit.verdicts import Edit, EditStatus, Outcome, Report, Severity, Verdict

SEEN_TO_REDUCE = (2, 13)
"""First torch version whose clip_grad_norm_ and optimizers were seen to reduce a Partial gradient."""


def print_report(report: Report, console: Console) -> None:
    """Write the whole report to ``console``. Only the table depends on its width and may fold names."""

    def lines(texts: Iterator[Text]) -> None:
        for text in texts:
            # soft_wrap: a path or a code line longer than the console is wrapped by the terminal, not cut
            console.print(text, soft_wrap=True)

    width = console.width
    lines(_header(report, width))
    rows = fold.fold_rows(report)
    if rows:
        console.print()
        console.print(parameter_table(console, rows))
    lines(_counts(report, width))
    lines(measured_lines(report, width))
    blocks = fold.fold_findings(report)
    edits = {fingerprint: edit for edit in report.edits for fingerprint in edit.fingerprints}
    told: set[Edit | None] = set()
    for block in blocks:
        if block.first.severity is not Severity.NOTE and block.first.suppressed is None:
            console.print()
            edit = edits.get(block.first.fingerprint)
            lines(finding_block(block, report.trace, width, edit, diff=edit not in told))
            told.add(edit)
    lines(_section("not judged", _not_judged(report, width)))
    lines(_section("notes", _notes(report, blocks, width)))
    lines(_section("suppressed", _suppressed(blocks, width)))
    lines(_section("baseline", _baseline(report, width)))
    lines(_section("mended", _mended(report, width)))
    lines(_section("what this evidence cannot see", _blind_spots(report, width)))
    console.print()
    console.print(summary(report), soft_wrap=True)


def summary(report: Report) -> Text:
    """The last line: what was found, in how much, in how long."""
    trace = report.trace
    skipped = {j.param_fqn for j in report.judgements if j.verdict is Verdict.NOT_JUDGED}
    judged = {j.param_fqn for j in report.judgements} - skipped
    left = f" ({len(skipped)} not judged)" if skipped else ""
    took = f"on mesh {trace.mesh}, {sum(s for _, s in trace.run.phases):.1f} s"
    if report.outcome is Outcome.FINDINGS:
        count = fold.finding_count(report)
        live = [f for f in report.findings if f.severity is not Severity.NOTE and f.suppressed is None]
        kinds = [plural(count[s], s) for s in (Severity.ERROR, Severity.WARNING) if count[s]]
        head = plural(len(live), "finding") + (f" ({listed(kinds)})" if len(kinds) > 1 else "")
        if fold.places(live):
            head += f" at {plural(fold.places(live), 'place')}"
        hidden = _suppressed_count(report)
        more = f", {hidden:,} more suppressed," if hidden else ""
        tail = f"{more} in {plural(len(trace.params), 'parameter')}{left} {took}"
        return Text.assemble((head, BAD if count[Severity.ERROR] else "bold yellow"), tail)
    if report.outcome is Outcome.CLEAN:
        verdicts = fold.verdict_count(report)
        kinds = [f"{n:,} {v}" for v, n in reversed(verdicts.items())]
        warnings = fold.finding_count(report)[Severity.WARNING]
        took += f"; {plural(warnings, 'warning')}" if warnings else ""
        tail = f": {plural(len(judged), 'parameter')} judged, {plural(sum(verdicts.values()), 'verdict')}"
        hidden = _suppressed_count(report)
        but = f" but for {hidden:,} suppressed" if hidden else ""
        return Text.assemble(("clean", "bold green"), f"{but}{tail}: {listed(kinds)}; {took}")
    what = f"{plural(len(judged), 'parameter')} judged{left}" if judged else "nothing was audited"
    return Text.assemble(("incomplete", "bold yellow"), f": {what}; {took}")


def _suppressed_count(report: Report) -> int:
    """How many findings are there and do not count, apart from notes."""
    return sum(f.suppressed is not None and f.severity is not Severity.NOTE for f in report.findings)


# --------------------------------------------------------------------------- sections


def _header(report: Report, width: int) -> Iterator[Text]:
    run, mesh = report.trace.run, report.trace.mesh
    versions = ", ".join(f"{name} {version}" for name, version in run.versions)
    tail = f" on {versions}" if versions else ""
    yield Text.assemble((f"placement-audit {run.tool_version}", "bold"), tail)
    varies = f"; the batch varies over {listed(report.trace.batch_dims)}" if report.trace.batch_dims else ""
    config = run.config_path or "none"
    if run.config_sha256 and run.config_path:
        config += f" (sha256 {run.config_sha256[:12]})"
    if run.overrides:
        config += " with " + " ".join(run.overrides)
    rows = [
        ("model", f"{run.model}, {plural(len(report.trace.params), 'parameter')}"),
        ("mesh", mesh_text(mesh, run.world_size) + varies),
        ("config", config),
        ("evidence", evidence_text(run)),
        *(("note", note) for note in run.notes),
    ]
    for label, text in rows:
        yield from map(Text, labelled(label, text, width=width))


def _counts(report: Report, width: int) -> Iterator[Text]:
    """How many boundaries and collectives stand behind the verdicts."""
    trace = report.trace
    kinds = [f"{n:,} {kind}" for kind, n in fold.boundary_count(trace).items()]
    if kinds:
        yield Text()
        yield from map(Text, labelled("boundaries", ", ".join(kinds), width=width, indent=0))
    for phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD):
        found = [unbroken(f"{n:,} {what}") for what, n in fold.collective_count(trace, phase).items()]
        if found:
            yield from map(Text, labelled(phase.value, ", ".join(found), width=width, indent=0))


def _not_judged(report: Report, width: int) -> Iterator[Text]:
    for remark in fold.fold_remarks(report, Verdict.NOT_JUDGED):
        yield from map(Text, remark_lines(remark, remark.text, _everywhere(report, remark), width))


def _notes(report: Report, blocks: tuple[fold.Block, ...], width: int) -> Iterator[Text]:
    for remark in fold.fold_remarks(report, Verdict.DEFERRED):
        yield from map(Text, remark_lines(remark, who_must_reduce(report, remark), True, width))
    for block in blocks:
        # PA401 says of each parameter what the lines above say of all
        if block.first.suppressed is not None or block.first.severity is not Severity.NOTE:
            continue
        if block.first.rule_id != "PA401":
            yield from map(Text, note_block(block, width))
    for remark in fold.fold_relabelled(report):
        label = f"ok, though .grad is {remark.label}: " if remark.label else "ok: "
        yield from map(Text, remark_lines(remark, label + remark.text, _everywhere(report, remark), width))
    trace = report.trace
    taken_as_equal = [
        (trace.assumed_invariant, plural(trace.assumed_invariant, "tensor") + " from outside the trace"),
        (trace.random_ops, plural(trace.random_ops, "random op")),
    ]
    for count, what in taken_as_equal:
        if count:
            text = f"{what} {'was' if count == 1 else 'were'} taken as equal on all ranks."
            yield from map(Text, wrapped(text, head="  ", width=width))


def _suppressed(blocks: tuple[fold.Block, ...], width: int) -> Iterator[Text]:
    for block in blocks:
        if block.first.suppressed is not None:
            yield from map(Text, suppressed_block(block, block.first.suppressed, width))


def _baseline(report: Report, width: int) -> Iterator[Text]:
    use = report.baseline
    if use is None:
        return
    yield from map(Text, labelled("known", f"{plural(use.known, 'finding')} of {use.path}", width=width))
    yield from map(Text, column("gone", use.gone))
    if use.gone:
        command = f"placement-audit baseline --report SAVED.json --write {shlex.quote(use.path)}"
        text = f"{unbroken(command)} takes them out; SAVED.json is this run's --format json"
        yield from map(Text, labelled("", text, width=width))


def _mended(report: Report, width: int) -> Iterator[Text]:
    for edit in report.edits:
        if edit.status is EditStatus.APPLIED:
            yield Text(f"  {edit.path}:{edit.line}")
            yield from map(Text, edit_lines(edit, width))


def _everywhere(report: Report, remark: fold.Remark) -> bool:
    return len(remark.mesh_dims) == len(report.trace.mesh.dim_names)


def who_must_reduce(report: Report, remark: fold.Remark) -> str:
    """What is to be said of gradients that are left Partial, or a shard where the parameter is another or none."""
    dims = listed(remark.mesh_dims)
    label = remark.label or "Partial"
    if remark.label is not None and remark.label.is_shard:
        return (
            f"deferred: .grad is {label} on {dims} and the parameter is not, right once whoever reads it has "
            "redistributed it: DTensor's ops do, and so clip_grad_norm_ and torch's optimizers; a reader of "
            ".grad.to_local() does not. placement-audit explain PA401"
        )
    torch = (version_of(report.trace.run, "torch") or "").partition("+")[0]
    known = tuple(int(n) for n in torch.split(".")[:2] if n.isdecimal())
    if known >= SEEN_TO_REDUCE:
        readers = f"clip_grad_norm_ and the optimizers of torch {torch} do"
    else:
        readers = "torch 2.13's own do, in-place foreach ops of torch 2.10 leave it as it is"
    return (
        f"deferred: .grad is {label} on {dims}, right once whoever reads it has reduced it over {dims}: "
        f"{readers}; a reader of .grad.to_local() does not. placement-audit explain PA401"
    )


def _blind_spots(report: Report, width: int) -> Iterator[Text]:
    for sentence in report.blind_spots:
        yield from map(Text, wrapped(sentence, head="  - ", width=width))


def _section(title: str, lines: Iterator[Text]) -> Iterator[Text]:
    """A blank line and a title before ``lines``; nothing where there are none."""
    for i, line in enumerate(lines):
        if i == 0:
            yield Text()
            yield Text(title, "bold")
        yield line
