"""Runs edited copies of source files in place of the files: `PLACEMENT_AUDIT_OVERLAY` names a folder of them.

What imports one of the files gets the copy's text under the file's own name, so that call sites and tracebacks
are those of the file once edited. Nothing of it is written beside the file, bytecode neither. No torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import linecache
import os
import signal
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from placement_audit.errors import UsageError

VARIABLE = "PLACEMENT_AUDIT_OVERLAY"
"""Names the folder."""

PARENT = "PLACEMENT_AUDIT_PARENT"
"""Names the process that started this one to prove an edit."""

_PR_SET_PDEATHSIG = 1
_MAP = "overlay.json"


def write(folder: Path, copies: Mapping[Path, tuple[bytes, bytes]]) -> None:
    """Fill a folder.

    Args:
        folder: an empty one.
        copies: file -> its bytes, and the bytes to run in their place.
    """
    rows = []
    for number, (path, (before, after)) in enumerate(copies.items()):
        copy = folder / f"{number}.py"
        copy.write_bytes(after)
        rows.append(
            {"file": str(path), "copy": copy.name, "before": _digest(before), "after": _digest(after)}
        )
    (folder / _MAP).write_text(json.dumps(rows), encoding="utf-8")


def install(environ: Mapping[str, str] | None = None) -> bool:
    """Let imports of this process find the copies; False where the environment names none.

    Raises:
        UsageError: the folder is not as `write` left it, or a file has changed since.
    """
    folder = (os.environ if environ is None else environ).get(VARIABLE)
    if not folder:
        return False
    copies: dict[str, bytes] = {}
    try:
        for row in json.loads((Path(folder) / _MAP).read_bytes()):
            data = (Path(folder) / row["copy"]).read_bytes()
            if _digest(Path(row["file"]).read_bytes()) != row["before"] or _digest(data) != row["after"]:
                raise UsageError(f"{row['file']}: changed while an edit of it was being proven.")
            copies[row["file"]] = data
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{VARIABLE}={folder}: no overlay that can be read ({error}).") from error
    _load_from(copies)
    return True


def end_with(parent: int) -> None:
    """Let this process end when the one that started it does, by whatever signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise UsageError("the placement-audit that started this one is gone.")


def _load_from(copies: dict[str, bytes]) -> None:
    """Give the loader of all source files these copies, whoever found the file: a finder of an editable install too."""
    data_of, code_of = SourceFileLoader.get_data, SourceFileLoader.get_code

    def copy_of(path: str) -> bytes | None:
        return copies.get(str(Path(path).resolve())) if path.endswith(".py") else None

    def get_data(self: SourceFileLoader, path: str) -> bytes:
        copy = copy_of(path)
        return data_of(self, path) if copy is None else copy

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        copy = copy_of(path)
        if copy is None:
            return code_of(self, fullname)
        # Neither the bytecode of the file itself is read, nor the copy's written in its stead.
        text = self.get_source(fullname) or ""
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        return self.source_to_code(copy, path)

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
