"""Writes reports: to standard output, or whole to files or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from placement_audit.errors import UsageError


def check_target(path: str) -> None:
    """Refuse what cannot be written before an audit is spent on it.

    Raises:
        UsageError: no such folder, a folder itself, or no right to write there.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path}: is a directory; give the name of a file.")
    folder = target.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{path}: there is no folder {folder}. Make it first.")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{path}: no permission to write in {folder}.")


def write_file(path: str, text: str) -> None:
    """Write one file, whole or not at all; see `write_files`."""
    write_files([(path, text)])


def write_files(files: Sequence[tuple[str, str]]) -> None:
    """Write each (path, text) under a temporary name in its folder, then rename all: nobody sees half a report.

    Raises:
        UsageError: one cannot be written (disk full, no permission, ...); older files of these names stay.
    """
    staged: list[tuple[Path, Path]] = []
    path = ""
    try:
        for path, text in files:
            target = Path(path).resolve()
            if target.exists() and not target.is_file():
                target.write_text(text, encoding="utf-8")  # a pipe or a device: nothing to rename over
                continue
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            staged.append((Path(name), target))
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            mode = target.stat().st_mode if target.exists() else 0o666 & ~_umask()
            Path(name).chmod(mode & 0o777)  # mkstemp's is 0600, which CI artifact steps cannot read
        for temporary, target in staged:
            path = str(target)
            temporary.replace(target)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}.") from error
    finally:
        for temporary, _ in staged:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_stdout(text: str) -> None:
    """Write to standard output; a reader who has gone (``| head``) is no error.

    What its encoding has no sign for is shown as Python escapes it.

    Raises:
        UsageError: it cannot be written (disk full, ...).
    """
    if hasattr(sys.stdout, "buffer"):
        write_stdout_bytes(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
    else:
        _write_stdout(lambda: sys.stdout.write(text))  # a notebook's, or io.StringIO


def write_stdout_bytes(data: bytes) -> None:
    """The same for what may be in any encoding."""

    def write() -> None:
        sys.stdout.flush()
        left = memoryview(data)
        while left:
            # under PYTHONUNBUFFERED this is the file itself, which may take a part: a disk that has filled up says so
            # only when it is asked for the rest
            left = left[sys.stdout.buffer.write(left) :]

    _write_stdout(write)


def _write_stdout(write: Callable[[], object]) -> None:
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
    except OSError as error:
        _drop_stdout()
        raise UsageError(f"standard output: cannot be written: {error.strerror or error}.") from error


def _drop_stdout() -> None:
    """Python flushes standard output once more when it ends, and would complain again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
