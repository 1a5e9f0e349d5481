"""Remedies of a report -> edits of files, each as a diff. Reads sources and writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from placement_audit.errors import UsageError
from placement_audit.mend import boundary, diff, files, replicate
from placement_audit.mend.imports import Refused
from placement_audit.mend.result import Form
from placement_audit.model import CallSite
from placement_audit.verdicts import Edit, Remedy, Report

_EDITABLE_PACKAGES = ("torchtitan",)
"""Installed packages whose files are as good as the user's: training code is run from them, and patched in them."""

_HEAD_LINES = 10
"""Where a file says that a program wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An edit, and all it takes to make it.

    Attributes:
        edit: what the report shows.
        source: the file; None where no edit can be made.
        remedies: what its calls should say; () where the whole wrapper is mended.
        wrapper: whether the edit is the mend of ReplicateComputation (`placement_audit.mend.replicate`).
    """

    edit: Edit
    source: files.Source | None
    remedies: tuple[Remedy, ...]
    wrapper: bool = False


def attach(report: Report, folders: Iterable[Path]) -> tuple[Report, tuple[Planned, ...]]:
    """The report with an edit for each call that has a remedy.

    Args:
        report: of the files as they are.
        folders: where modules are imported from, the first first.
    """
    remedies: dict[tuple[CallSite, str, str], list[tuple[Remedy, str]]] = {}
    for f in report.findings:
        if f.remedy is not None and f.suppressed is None:
            key = (f.remedy.call_site, f.remedy.kind, f.remedy.argument)
            remedies.setdefault(key, []).append((f.remedy, f.fingerprint))
    roots = tuple(dict.fromkeys(folder.absolute() for folder in folders))
    planned = _once(_planned(found, roots) for found in remedies.values())
    return replace(report, edits=tuple(p.edit for p in planned)), planned


def _once(planned: Iterable[Planned]) -> tuple[Planned, ...]:
    """Edits that are the same edit, such as all of one wrapper, as one."""
    kept: dict[object, Planned] = {}
    for p in planned:
        key = (p.edit.path, p.edit.diff) if p.edit.diff else (p.edit.path, p.edit.line, p.edit.reason)
        before = kept.get(key)
        if before is not None:
            together = dict.fromkeys((*before.edit.fingerprints, *p.edit.fingerprints))
            p = replace(before, edit=replace(before.edit, fingerprints=tuple(together)))
        kept[key] = p
    return tuple(kept.values())


def combined(planned: Sequence[Planned]) -> tuple[files.Change, ...]:
    """The changes of several edits, one a file.

    Raises:
        UsageError: the new text does not fit the file's encoding.
        Refused: the edits contradict each other.
    """
    by_file: dict[Path, list[Planned]] = {}
    for p in planned:
        if p.source is not None:
            by_file.setdefault(p.source.path, []).append(p)
    changes = []
    for together in by_file.values():
        source = together[0].source
        assert source is not None
        text = boundary.edited(source.text, [r for p in together for r in p.remedies])
        if any(p.wrapper for p in together):
            text = replicate.mend(text, Form.REDUCED).text
        changes.append(source.changed(text))
    return tuple(changes)


def _planned(found: Sequence[tuple[Remedy, str]], roots: Sequence[Path]) -> Planned:
    remedy = next((r for r, _ in found if not r.safe), found[0][0])
    site = remedy.call_site
    edit = Edit(
        path=site.path,
        line=site.line,
        diff="",
        safe=False,
        reason=remedy.why,
        fingerprints=tuple(dict.fromkeys(fingerprint for _, fingerprint in found)),
    )
    wrapper = site.function == replicate.NAME
    if not remedy.placements and not wrapper:
        return Planned(edit=edit, source=None, remedies=())
    try:
        source = _source(site, roots)
        if wrapper:
            return _wrapper_mended(edit, source)
        change = source.changed(boundary.edited(source.text, [remedy]))
    except (Refused, UsageError) as error:
        why = error.reason if isinstance(error, Refused) else error.message.rstrip(".")
        return Planned(edit=replace(edit, reason=f"no edit: {why}"), source=None, remedies=())
    text = diff.unified([change]).decode(source.encoding, errors="replace")
    edit = replace(edit, path=str(source.shown), diff=text, safe=remedy.safe)
    return Planned(edit=edit, source=source, remedies=(remedy,))


def _wrapper_mended(edit: Edit, source: files.Source) -> Planned:
    """The mend of the wrapper, for any call in it: one of its calls alone is no half of it, but a new fault."""
    part = replicate.mend(source.text, Form.REDUCED)
    if part.text == source.text:
        reason = f"no edit: the wrapper {part.state}: {part.reason}".rstrip(".")
        return Planned(edit=replace(edit, path=str(source.shown), reason=reason), source=None, remedies=())
    text = diff.unified([source.changed(part.text)]).decode(source.encoding, errors="replace")
    edit = replace(
        edit,
        path=str(source.shown),
        line=part.line,
        diff=text,
        safe=True,
        reason="the wrapper is mended as a whole, as placement-audit patch does: one call of it alone is no half",
    )
    return Planned(edit=edit, source=source, remedies=(), wrapper=True)


# --------------------------------------------------------------------------- the file


def _source(site: CallSite, roots: Sequence[Path]) -> files.Source:
    """The file of a call site, if it is the user's to edit.

    Raises:
        Refused: it is not, or it is not there as it ran.
    """
    if site.path.startswith("<"):
        raise Refused("the code was made while the job ran, no file holds it")
    if site.package == "torch":
        raise Refused("the call is in torch itself")
    for root in roots if not Path(site.path).is_absolute() else (Path(site.path).parent,):
        path = root / site.path
        if not path.is_file():
            continue
        source = files.read(path, root)
        lines = source.text.splitlines()
        if site.line > len(lines) or lines[site.line - 1].strip() != site.code_line:
            continue
        _refuse_foreign(source, site)
        return source
    raise Refused(f"{site.path} is not found as it ran")


def _refuse_foreign(source: files.Source, site: CallSite) -> None:
    installed = {"site-packages", "dist-packages"} & set(source.path.parts)
    top = Path(site.path).parts[0]
    if installed and top not in _EDITABLE_PACKAGES:
        raise Refused(f"{top} is an installed package, not yours: mend it where it comes from")
    head = "\n".join(source.text.splitlines()[:_HEAD_LINES]).lower()
    if "@generated" in head or "do not edit" in head:
        raise Refused("the file says that a program wrote it: mend what writes it")
