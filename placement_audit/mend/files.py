"""Source files in and out: read with their encoding, replaced in one step, backed up, restored.

A file is never opened for writing. What replaces it is written beside it, synced, and moved over it, so a full disk
or a kill leaves the old file or the new one.
"""

from __future__ import annotations

import contextlib
import io
import os
import tokenize
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from placement_audit.errors import UsageError
from placement_audit.mend import backups
from placement_audit.mend.backups import digest
from placement_audit.mend.vcs import Standing, standing

_LARGEST = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One file before and after.

    Attributes:
        path: of the real file, no symlink on its way.
        shown: relative to the checkout's root, for diffs and messages.
        before: the file's bytes as they were read.
        after: what they are to become.
    """

    path: Path
    shown: PurePosixPath
    before: bytes
    after: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source file as it was read.

    Attributes:
        path: of the real file, no symlink on its way.
        shown: relative to the checkout's root, for diffs and messages.
        data: its bytes.
        text: decoded, without the byte order mark, line endings as they are.
        encoding: Python's name of it; "utf-8-sig" has a byte order mark.
    """

    path: Path
    shown: PurePosixPath
    data: bytes
    text: str
    encoding: str

    @property
    def sha256(self) -> str:
        return digest(self.data)

    def changed(self, text: str) -> Change:
        """The change that makes this file's text ``text``.

        Raises:
            UsageError: the file's encoding has no such character.
        """
        try:
            after = text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{self.path}: the new text cannot be written in {self.encoding}: {error.reason}."
            ) from None
        return Change(path=self.path, shown=self.shown, before=self.data, after=after)


def locate(path: Path, root: Path) -> Path:
    """The real file that a path of a checkout leads to.

    Args:
        path: the file.
        root: the checkout; a file outside it is refused, by whichever symlink it is reached.

    Raises:
        UsageError: not there, outside, no regular file, too large.
    """
    try:
        real = path.resolve(strict=True)
        top = root.resolve(strict=True)
        if not real.is_relative_to(top):
            link = "a symlink out of" if path.absolute().is_relative_to(root.absolute()) else "outside"
            raise UsageError(
                f"{path}: {link} {root}: it is {real}. Name the folder that holds the file itself."
            )
        if not real.is_file():
            raise UsageError(f"{path}: not a regular file.")
        if (size := real.stat().st_size) > _LARGEST:
            raise UsageError(f"{path}: {size} bytes are no source file.")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file.") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: symlinks that go round in a circle
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return real


def read(path: Path, root: Path) -> Source:
    """Read one source file of a checkout.

    Args:
        path: the file.
        root: the checkout, as for `locate`.

    Raises:
        UsageError: as for `locate`; no permission, not decodable.
    """
    real = locate(path, root)
    try:
        data = real.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}.") from None
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be decoded: {error}.") from None
    shown = PurePosixPath(real.relative_to(root.resolve()).as_posix())
    return Source(path=real, shown=shown, data=data, text=text, encoding=encoding)


def refusal(change: Change, *, known: Collection[str] | None) -> str | None:
    """Why a file should not be touched without --force.

    Args:
        change: the edit.
        known: SHA-256 of files that may be edited where no version control has them; None where any may, a
            backup being kept.

    Returns:
        The reason with what to do next; None where there is none.
    """
    if backups.backup_for(change.path, change.before):
        return None  # as we left it
    state, said = standing(change.path)
    if state is Standing.EDITED:
        return f"{change.path}: has edits that are not committed. Commit or stash them first, or add --force."
    if state is Standing.UNKNOWN:
        return f"{change.path}: git could not say whether it is committed ({said}). To edit it all the same: --force."
    if state is Standing.OUTSIDE and known is not None and digest(change.before) not in known:
        return (
            f"{change.path}: is not the file of any release that is known, and git does not have it. "
            "See --diff; to edit it all the same: --force (a backup is kept)."
        )
    return None


def apply(changes: Sequence[Change], *, known: Collection[str] | None = None, force: bool = False) -> None:
    """Replace files, all or none; a backup of each stays for `revert`.

    Args:
        changes: one a file; those that change nothing are passed over.
        known: as for `refusal`.
        force: edit what `refusal` would keep from it, and read-only files.

    Raises:
        UsageError: refused, changed since it was read, or it cannot be written. No file is changed then.
    """
    todo = [change for change in changes if change.before != change.after]
    with contextlib.ExitStack() as stack:
        folders = {}
        for parent in sorted({change.path.parent for change in todo}):
            first = next(change.path for change in todo if change.path.parent == parent)
            with _told(first):
                folders[parent] = stack.enter_context(backups.locked(first))
        ready = []
        for change in todo:
            stack.callback(_forget_unused, change)
            with _told(change.path):
                if change.path.read_bytes() == change.after:
                    continue  # another placement-audit was quicker
                _check(change, known=known, force=force)
                staged = backups.stage(folders[change.path.parent], change.after, change.path)
                stack.callback(staged.unlink, missing_ok=True)
                old = backups.backup_for(change.path, change.before)
                # Edits upon edits of ours go back to what the file was before the first.
                before = backups.content(old) if old else change.before
                backups.keep(folders[change.path.parent], change.path, before, change.after)
                ready.append((staged, change))
        _swap(ready, folders)


def _forget_unused(change: Change) -> None:
    """Where an edit failed, the file is its own backup."""
    with contextlib.suppress(OSError):
        if change.path.read_bytes() == change.before:
            backups.forget(change.path, change.before)


def _swap(ready: Sequence[tuple[Path, Change]], folders: dict[Path, Path]) -> None:
    """Move all new files to their places; where one fails, the others go back."""
    done: list[Change] = []
    for staged, change in ready:
        done.append(change)
        try:
            with _told(change.path):
                backups.put(staged, change.path)
        except BaseException:
            for back in done:
                backups.put(backups.stage(folders[back.path.parent], back.before, back.path), back.path)
            raise


def has_backup(path: Path) -> bool:
    """Whether a file was edited by us and not reverted since."""
    return bool(backups.backups(path))


def revert(path: Path, *, force: bool = False) -> Path | None:
    """Give a file the bytes that it had before our first edit.

    Args:
        path: the real file, as in `Source.path`.
        force: even where it was edited since. Those edits are kept in a backup.

    Returns:
        Where the edits made since are kept; None where there were none.

    Raises:
        UsageError: nothing of ours to take back, edited since, a damaged backup, or it cannot be written.
    """
    with _told(path), backups.locked(path) as folder:
        now = path.read_bytes()
        kept = None
        backup = backups.backup_for(path, now)
        if backup is None:
            backup, kept = _edited_since(path, now, folder, force=force)
        before = backups.content(backup)
        backups.put(backups.stage(folder, before, path), path)
        backups.forget(path, before)
        return kept


def _edited_since(path: Path, now: bytes, folder: Path, *, force: bool) -> tuple[backups.Backup, Path]:
    all_of_it = backups.backups(path)
    if not all_of_it:
        raise UsageError(f"{path}: nothing to revert: placement-audit keeps no backup of it.")
    if digest(now).startswith(tuple(one.before for one in all_of_it)):
        raise UsageError(f"{path}: nothing to revert: it is as it was before --apply.")
    if len({one.before for one in all_of_it}) > 1:
        names = ", ".join(one.path.name for one in all_of_it)
        raise UsageError(
            f"{path}: edited since --apply, and there are backups of more than one state in {folder}: {names}. "
            "Copy the right one over the file by hand."
        )
    if not force:
        raise UsageError(
            f"{path}: edited since --apply; to revert would lose those edits. Undo them or take the mend out by "
            "hand, or add --force: the edited file is then kept as a backup."
        )
    kept = folder / f"{path.name}.{digest(now)[:16]}.edited"
    backups.put(backups.stage(folder, now, path), kept)
    return all_of_it[0], kept


# --------------------------------------------------------------------------- one file


def _check(change: Change, *, known: Collection[str] | None, force: bool) -> None:
    if change.path.is_symlink() or change.path.read_bytes() != change.before:
        raise UsageError(
            f"{change.path}: changed while placement-audit looked at it. Nothing was written; run it again."
        )
    if force:
        return
    if why := refusal(change, known=known):
        raise UsageError(why)
    if not os.access(change.path, os.W_OK) or not change.path.stat().st_mode & 0o222:
        raise UsageError(f"{change.path}: is read-only. Make it writable (chmod u+w), or add --force.")


@contextlib.contextmanager
def _told(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be edited: {error.strerror or error} ({error.filename or path.parent}). "
            "The file is as it was."
        ) from error
