"""A unified diff that ``git apply`` takes, byte for byte."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Protocol

_ESCAPES = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}


class Pair(Protocol):
    """What `unified` needs of a change; `files.Change` has it."""

    @property
    def shown(self) -> PurePosixPath: ...
    @property
    def before(self) -> bytes: ...
    @property
    def after(self) -> bytes: ...


def unified(changes: Iterable[Pair]) -> bytes:
    """Render changes as one diff.

    Args:
        changes: with paths relative to the folder that ``git apply`` is to be run in.

    Returns:
        The diff in bytes, for files may be in any encoding; b"" where nothing differs.
    """
    return b"".join(_one(change) for change in changes if change.before != change.after)


def _one(change: Pair) -> bytes:
    # latin-1 maps every byte to one character and back: difflib compares text, and nothing gets lost.
    before, after = (_lines(data.decode("latin-1")) for data in (change.before, change.after))
    name = str(change.shown)
    lines = difflib.unified_diff(before, after, _quoted(f"a/{name}"), _quoted(f"b/{name}"))
    cut = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + cut for line in lines).encode("latin-1")


def _lines(text: str) -> list[str]:
    """Lines as git sees them: only a newline ends one, not the form feeds that str.splitlines cuts at."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _quoted(name: str) -> str:
    data = name.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in (34, 92) for byte in data):
        # What follows a blank in a file's name would be taken for a date.
        return f"{name}\t" if " " in name else name
    return '"' + "".join(_escaped(byte) for byte in data) + '"'


def _escaped(byte: int) -> str:
    if byte in _ESCAPES:
        return _ESCAPES[byte]
    return chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}"
