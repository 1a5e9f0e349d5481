"""``placement-audit patch``: looks at the torchtitan on disk, shows the mend, makes it, takes it back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from placement_audit.errors import UsageError
from placement_audit.mend import checkout, diff, files
from placement_audit.mend.checkout import Checkout
from placement_audit.mend.files import Change
from placement_audit.mend.look import Look, look
from placement_audit.mend.manifest import released
from placement_audit.mend.result import Form, State


class Action(StrEnum):
    """What is asked for."""

    CHECK = "check"
    DIFF = "diff"
    APPLY = "apply"
    REVERT = "revert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One command.

    Attributes:
        action: what to do.
        torchtitan: a folder, or `checkout.INSTALLED`.
        form: of the mend.
        force: also where it would better be asked first.
    """

    action: Action
    torchtitan: str
    form: Form
    force: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What came of it.

    Attributes:
        asked: the command.
        checkout: the torchtitan that was found.
        looks: its files as they were found; none for a revert.
        changed: files that were changed on disk.
        refusals: why --apply would not touch a file as it stands, by its path.
        kept: where edits made after --apply went, for a forced revert.
        diff: of all files, for --diff.
    """

    asked: Asked
    checkout: Checkout
    looks: tuple[Look, ...] = ()
    changed: tuple[Path, ...] = ()
    refusals: dict[Path, str]
    kept: tuple[Path, ...] = ()
    diff: bytes = b""

    @property
    def exit_status(self) -> int:
        """0 where all is as asked for; 1 where --check finds that it is not, 2 where it cannot be made so."""
        if self.asked.action is not Action.CHECK:
            return 0
        states = {look.state for look in self.looks}
        if State.REFUSED in states:
            return 2
        return 0 if states == {State.APPLIED} else 1


def run(asked: Asked) -> Done:
    """Run one command.

    Raises:
        UsageError: no torchtitan, a file that cannot be read or is not understood, or that should not be touched.
    """
    found = checkout.find(asked.torchtitan)
    if asked.action is Action.REVERT:
        return _revert(asked, found)
    looks = tuple(look(files.read(path, found.root), asked.form, force=asked.force) for path in found.files)
    changes = [one.source.changed(one.text) for one in looks]
    refusals = {change.path: why for change in changes if (why := _refusal(change, asked))}
    if asked.action is Action.CHECK:
        return Done(asked=asked, checkout=found, looks=looks, refusals=refusals)
    for one, change in zip(looks, changes, strict=True):
        if one.state is State.REFUSED and change.before == change.after:
            parts = [part for part in one.parts if part.state is State.REFUSED]
            raise UsageError(
                "\n".join(f"{one.source.path}:{part.line}: {part.name}: {part.reason}" for part in parts)
            )
    if asked.action is Action.DIFF:
        return Done(asked=asked, checkout=found, looks=looks, refusals=refusals, diff=diff.unified(changes))
    todo = [change for change in changes if change.before != change.after]
    files.apply(todo, known=released(), force=asked.force)
    return Done(
        asked=asked, checkout=found, looks=looks, refusals={}, changed=tuple(change.path for change in todo)
    )


def _refusal(change: Change, asked: Asked) -> str | None:
    if change.before == change.after or asked.force:
        return None
    return files.refusal(change, known=released())


def _revert(asked: Asked, found: Checkout) -> Done:
    paths = [files.locate(path, found.root) for path in found.files]
    # A torchtitan with two such files may have had one of them mended only.
    ours = [path for path in paths if files.has_backup(path)] or paths
    kept = [files.revert(path, force=asked.force) for path in ours]
    return Done(
        asked=asked,
        checkout=found,
        refusals={},
        changed=tuple(ours),
        kept=tuple(path for path in kept if path is not None),
    )
