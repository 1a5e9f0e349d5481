"""The folder beside an edited file: what the file was before, and the lock that edits take.

``.placement-audit/`` lies in the edited file's own folder, hence on its file system, and git ignores it. A backup is
named ``FILE.BEFORE.AFTER.backup``, with the first digits of the SHA-256 of the file before and after our edit: the
bytes of the file on disk say whether it is the one that we left, and which backup belongs to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from placement_audit.errors import UsageError

FOLDER = ".placement-audit"

_IGNORE = ".gitignore"
_LOCK = "lock"
_BACKUP = ".backup"
_TEMPORARY = ".part"
_DIGITS = 16
_WAIT = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """One file as it was.

    Attributes:
        path: of the backup.
        before: first digits of the SHA-256 of what it holds.
        after: first digits of the SHA-256 of what we wrote in its place.
    """

    path: Path
    before: str
    after: str


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def locked(target: Path) -> Generator[Path]:
    """Hold the folder beside ``target``; it goes again where nothing was left in it.

    Yields:
        The folder.

    Raises:
        UsageError: another process holds it too long.
        OSError: the folder cannot be made.
    """
    folder = target.parent / FOLDER
    handle = _lock(folder, target)
    try:
        if not (folder / _IGNORE).exists():
            (folder / _IGNORE).write_text("*\n")
        for stale in folder.glob(f"*{_TEMPORARY}"):  # of a process that was killed
            stale.unlink()
        yield folder
    finally:
        with contextlib.suppress(OSError):
            if {path.name for path in folder.iterdir()} <= {_IGNORE, _LOCK}:
                for name in (_IGNORE, _LOCK):
                    (folder / name).unlink(missing_ok=True)
                folder.rmdir()
        os.close(handle)


def _lock(folder: Path, target: Path) -> int:
    end = time.monotonic() + _WAIT
    while True:
        handle = _try_lock(folder)
        if handle is not None:
            return handle
        if time.monotonic() > end:
            raise UsageError(
                f"{target}: another placement-audit has been editing it for {_WAIT:.0f} s. "
                "Wait for it to end, or end it."
            )
        time.sleep(0.02)


def _try_lock(folder: Path) -> int | None:
    try:
        folder.mkdir(exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        return None  # the holder before us has just taken the folder away
    except FileExistsError:
        if folder.is_symlink() or folder.is_file():
            raise
        return None  # likewise: it was there a moment ago, and is not to be found now
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us may have unlinked the very file that we waited for.
        if os.path.samestat(os.fstat(handle), (folder / _LOCK).stat()):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def stage(folder: Path, data: bytes, like: Path) -> Path:
    """Write a new file near its place and wait until the disk has it.

    Args:
        folder: to write it in, as `locked` gave it.
        data: its content.
        like: the file whose mode it gets and, where we may, its owner.

    Returns:
        Its temporary path.
    """
    handle, name = tempfile.mkstemp(suffix=_TEMPORARY, dir=folder)
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        stat = like.stat()
        with contextlib.suppress(OSError):
            os.chown(path, stat.st_uid, stat.st_gid)
        path.chmod(stat.st_mode & 0o7777)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def put(staged: Path, target: Path) -> None:
    """Move a staged file to its place in one step, and wait until the disk has that too."""
    staged.replace(target)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
            os.fsync(handle)
    finally:
        os.close(handle)


def backups(target: Path) -> list[Backup]:
    """All backups of a file, in no order that means anything."""
    found = []
    for path in sorted((target.parent / FOLDER).glob(f"*{_BACKUP}")):
        match path.name.removesuffix(_BACKUP).rsplit(".", 2):
            case [target.name, before, after]:
                found.append(Backup(path=path, before=before, after=after))
    return found


def backup_for(target: Path, now: bytes) -> Backup | None:
    """The backup of what we replaced by these very bytes."""
    after = digest(now)[:_DIGITS]
    return next((one for one in backups(target) if one.after == after), None)


def content(backup: Backup) -> bytes:
    """What a backup holds.

    Raises:
        UsageError: it is not what was put into it.
        OSError: it cannot be read.
    """
    data = backup.path.read_bytes()
    if digest(data)[:_DIGITS] != backup.before:
        raise UsageError(
            f"{backup.path}: the backup is damaged: its SHA-256 should start with {backup.before}, and starts "
            f"with {digest(data)[:_DIGITS]}. Nothing was changed. Take the file from git, or install the package "
            "again."
        )
    return data


def keep(folder: Path, target: Path, before: bytes, after: bytes) -> None:
    """Keep what a file was, before it is replaced."""
    name = f"{target.name}.{digest(before)[:_DIGITS]}.{digest(after)[:_DIGITS]}{_BACKUP}"
    if not (folder / name).exists():
        put(stage(folder, before, target), folder / name)


def forget(target: Path, now: bytes) -> None:
    """Drop the backups that hold what the file is again."""
    before = digest(now)[:_DIGITS]
    for backup in backups(target):
        if backup.before == before:
            backup.path.unlink(missing_ok=True)
