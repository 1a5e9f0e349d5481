"""Proves edits before they are kept: audits again with them, in a process that sees edited copies of the files.

Nothing is written to a file before its edit is proven, and what is written is audited once more as it lies there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from placement_audit import overlay
from placement_audit.errors import AuditError, IncompleteError, UsageError
from placement_audit.mend import backups, files
from placement_audit.mend.attach import Planned, combined
from placement_audit.mend.imports import Refused
from placement_audit.proof import how, setbacks
from placement_audit.report.json_io import loads
from placement_audit.verdicts import Edit, EditStatus, Report

Audit = Callable[[Path | None], Report]
"""Audits the same job again, with the overlay of a folder, or the files as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How edits are to be proven.

    Attributes:
        audit: see `Audit`.
        write: keep what is proven; False only says what would be kept.
        force: edit even files that have edits of the user's own.
        traced_only: the user asked for a trace alone, and takes its word.
        tell: called with each phase's name and None when it begins, or its seconds when it ends.
    """

    audit: Audit
    write: bool
    force: bool
    traced_only: bool
    tell: Callable[[str, float | None], None]


def mend(report: Report, planned: Sequence[Planned], terms: Terms) -> Report:
    """Prove the safe edits, keep those that are proven, and audit what was kept.

    Args:
        report: of the files as they are.
        planned: its edits.
        terms: see `Terms`.

    Returns:
        The report on the files as they are now; its edits say what became of each.
    """
    told: dict[Planned, tuple[EditStatus, str]] = {}
    safe = [p for p in planned if p.edit.safe]
    if safe and report.measurement is None and not terms.traced_only:
        why = "not tried: this job could not be measured, and a trace alone proves too little (--no-measure takes it)"
        return _with(report, planned, dict.fromkeys(safe, (EditStatus.REJECTED, why)))
    open_to_us = []
    for p in safe:
        why = None if terms.force else _refusal(p)
        if why is None:
            open_to_us.append(p)
        else:
            told[p] = (EditStatus.REJECTED, why)
    kept = _proven(report, open_to_us, terms, told)
    if not kept:
        return _with(report, planned, told)
    proof = how(report)
    if not terms.write:
        told |= dict.fromkeys(kept, (EditStatus.PROVEN, proof))
        return _with(report, planned, told)
    changes = combined(kept)
    ours = {c.path for c in changes if backups.backup_for(c.path, c.before)}
    try:
        files.apply(changes, force=terms.force)
    except UsageError as error:
        return _with(report, planned, told | dict.fromkeys(kept, (EditStatus.REJECTED, error.message)))
    against: tuple[str, ...] = ()
    try:
        with _phase(terms, "auditing the edited files"):
            final = terms.audit(None)
        against = setbacks(report, final, _fingerprints(kept))
    except AuditError as error:
        against = (error.message,)
        final = report
    except BaseException:
        _take_back(changes, ours)
        raise
    if against:
        _take_back(changes, ours)
        why = "taken back: the audit of the edited files did not bear out the proof: " + "; ".join(against)
        return _with(report, planned, told | dict.fromkeys(kept, (EditStatus.REJECTED, why)))
    return _after(final, planned, told | {p: (EditStatus.APPLIED, f"{proof}; {_way_back(p)}") for p in kept})


# --------------------------------------------------------------------------- proving


def _proven(
    report: Report,
    candidates: Sequence[Planned],
    terms: Terms,
    told: dict[Planned, tuple[EditStatus, str]],
) -> list[Planned]:
    """The edits that are proven together; why the others are not goes to ``told``."""
    if not candidates:
        return []
    against = _against(report, candidates, terms)
    if not against:
        return list(candidates)
    if len(candidates) == 1:
        told[candidates[0]] = (EditStatus.REJECTED, "; ".join(against))
        return []
    kept: list[Planned] = []
    for p in candidates:
        against = _against(report, [*kept, p], terms)
        if against:
            told[p] = (EditStatus.REJECTED, "; ".join(against))
        else:
            kept.append(p)
    return kept


def _against(report: Report, together: Sequence[Planned], terms: Terms) -> tuple[str, ...]:
    """What speaks against some edits; nothing where they are proven."""
    what = (
        f"proving {len(together)} edits"
        if len(together) > 1
        else f"proving the edit of {together[0].edit.path}"
    )
    try:
        changes = combined(together)
        with _phase(terms, what), tempfile.TemporaryDirectory(prefix="placement-audit-") as folder:
            overlay.write(Path(folder), {c.path: (c.before, c.after) for c in changes})
            after = terms.audit(Path(folder))
    except Refused as refused:
        return (refused.reason,)
    except AuditError as error:
        return (f"the audit with it failed: {error.message.splitlines()[0]}",)
    return setbacks(report, after, _fingerprints(together))


@contextlib.contextmanager
def _phase(terms: Terms, name: str) -> Generator[None]:
    terms.tell(name, None)
    start = time.monotonic()
    yield
    terms.tell(name, time.monotonic() - start)


def _fingerprints(planned: Sequence[Planned]) -> set[str]:
    return {fingerprint for p in planned for fingerprint in p.edit.fingerprints}


def _refusal(p: Planned) -> str | None:
    try:
        (change,) = combined([p])
    except Refused as refused:
        return refused.reason
    return files.refusal(change, known=None)


def _way_back(p: Planned) -> str:
    """What to type to have the file again as it was."""
    assert p.source is not None
    path = p.source.path
    here = Path.cwd()
    typed = shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
    return f"placement-audit revert {typed} takes it back"


def _take_back(changes: Sequence[files.Change], ours: Collection[Path]) -> None:
    """Undo what was applied last; an edit of ours from before stays, and its backup."""
    for change in changes:
        if change.path in ours:
            files.apply([replace(change, before=change.after, after=change.before)], force=True)
        else:
            files.revert(change.path)


# --------------------------------------------------------------------------- telling


def _with(report: Report, planned: Sequence[Planned], told: dict[Planned, tuple[EditStatus, str]]) -> Report:
    return replace(report, edits=tuple(_said(p.edit, told.get(p)) for p in planned))


def _said(edit: Edit, told: tuple[EditStatus, str] | None) -> Edit:
    return edit if told is None else replace(edit, status=told[0], proof=told[1])


def _after(final: Report, planned: Sequence[Planned], told: dict[Planned, tuple[EditStatus, str]]) -> Report:
    """The second report: what was applied, then what is left, as the files are now."""
    applied = [_said(p.edit, told[p]) for p in planned if told.get(p, ("",))[0] is EditStatus.APPLIED]
    rejected = {
        fingerprint: told[p]
        for p in planned
        if p in told and told[p][0] is EditStatus.REJECTED
        for fingerprint in p.edit.fingerprints
    }
    left = [_said(e, next((rejected[f] for f in e.fingerprints if f in rejected), None)) for e in final.edits]
    return replace(final, edits=(*applied, *left))


# --------------------------------------------------------------------------- another process


def audit_again(args: Namespace, *, measure: bool) -> Audit:
    """The same audit, typed anew: nothing that this process has imported gets in its way."""
    what = ["run", args.factory] if args.action == "run" else ["--config", args.config]
    command = [sys.executable, "-m", "placement_audit", *what, "--format", "json", "--quiet"]
    command.append("--measure" if measure else "--no-measure")
    for name in ("module", "world_size", "timeout", "device"):
        value = getattr(args, name, None)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]

    def audit(folder: Path | None) -> Report:
        environ = {**os.environ, overlay.PARENT: str(os.getpid())}
        environ.pop(overlay.VARIABLE, None)
        if folder is not None:
            environ[overlay.VARIABLE] = str(folder)
        with tempfile.TemporaryDirectory(prefix="placement-audit-") as place:
            out = Path(place) / "report.json"
            done, said = _run([*command, "--output-file", str(out), "--", *args.overrides], environ)
            if out.is_file():
                return loads(out.read_bytes())
        message = said.partition("placement-audit: error: ")[2].strip() or said.strip()
        raise IncompleteError(message or f"it ended with status {done}")

    return audit


def _run(command: Sequence[str], environ: dict[str, str]) -> tuple[int, str]:
    """(exit status, what it said on standard error); the process ends with this one."""
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            _, said = process.communicate()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            raise
    return process.returncode, said
