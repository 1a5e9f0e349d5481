"""Where in the code a call came from."""

from __future__ import annotations

import linecache
import os
import sys
import tokenize
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

from placement_audit.dtensor_api import CORE_DIRS, LOCAL_MAP_FILE, TORCH_DIR
from placement_audit.model import CallSite, Comment

_OWN_DIR = str(Path(__file__).parents[1]) + "/"

_CORE, _TORCH, _USER = 0, 1, 2

_class_of: dict[CodeType, int] = {}

RawSite = tuple[CodeType, int, int]
"""A code object, a line and an instruction (-1: any): cheap to take, made into a `CallSite` at the end."""


def _classify(code: CodeType) -> int:
    name = code.co_filename
    if name.startswith(("<", _OWN_DIR)) or name.startswith(CORE_DIRS):
        return _CORE
    if name.startswith(TORCH_DIR):
        return _TORCH
    return _USER


def take(depth: int, *, exact: bool = False) -> tuple[RawSite | None, RawSite | None, bool]:
    """The nearest places outside DTensor's core, and outside torch.

    Args:
        depth: frames to skip, 0 for the caller's.
        exact: tell two calls on one line apart.

    Returns:
        (first frame outside DTensor's core, first frame outside torch, whether `local_map` made the call).
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    site: RawSite | None = None
    local_map = False
    while frame is not None:
        code = frame.f_code
        kind = _class_of.get(code)
        if kind is None:
            kind = _class_of[code] = _classify(code)
        if kind == _CORE:
            local_map = local_map or (site is None and code.co_filename == LOCAL_MAP_FILE)
        elif kind == _USER:
            user = (code, frame.f_lineno, frame.f_lasti if exact else -1)
            return site or user, user, local_map
        elif site is None:
            site = (code, frame.f_lineno, frame.f_lasti if exact else -1)
        frame = frame.f_back
    return site, None, local_map


class SiteTable:
    """Turns raw sites into `CallSite`s, each once."""

    def __init__(self) -> None:
        """Take the import path once: it is what paths are shortened by."""
        # As imports spell them and as they are: an environment may lie behind a symlink.
        roots = {str(as_is(p or ".")) for p in sys.path for as_is in (os.path.abspath, os.path.realpath)}
        self._roots = sorted((r + "/" for r in roots if r != "/"), key=len, reverse=True)
        self._cwd = str(Path.cwd()) + "/"
        self._made: dict[RawSite, CallSite] = {}

    def get(self, raw: RawSite | None) -> CallSite:
        """The `CallSite` of a raw site; a stand-in where there was none."""
        if raw is None:
            return CallSite(path="<unknown>", line=0, function="?")
        made = self._made.get(raw)
        if made is None:
            made = self._made[raw] = self._make(*raw)
        return made

    def _make(self, code: CodeType, line: int, instruction: int) -> CallSite:
        path, package = self._shorten(code.co_filename)
        span = _span(code, instruction) if instruction >= 0 else None
        first, last = (span[0], span[2]) if span is not None else (line, line)
        return CallSite(
            path=path,
            line=line,
            function=code.co_name,
            code_line=linecache.getline(code.co_filename, line).strip(),
            package=package,
            span=span,
            comments=_comments(code.co_filename, first, last),
        )

    def _shorten(self, filename: str) -> tuple[str, str | None]:
        """(path relative to the nearest import root or the working directory, package)."""
        if not filename.startswith("/"):
            filename = str(Path(filename).resolve()) if Path(filename).exists() else filename
        in_site = "/site-packages/" in filename
        if not in_site and filename.startswith(self._cwd):
            return filename[len(self._cwd) :], None
        for root in self._roots:
            if filename.startswith(root):
                short = filename[len(root) :]
                top = short.split("/", 1)[0]
                is_package = in_site or (Path(root) / top / "__init__.py").exists()
                return short, top if is_package and "/" in short else None
        return filename, None


_MARK = "placement-audit:"


def _comments(filename: str, first: int, last: int) -> tuple[Comment, ...]:
    """What comments on these lines say to us."""
    if not any(_MARK in linecache.getline(filename, line) for line in range(first, last + 1)):
        return ()  # as nearly always; to take a file apart costs more
    lines = tuple(linecache.getlines(filename))
    return tuple(c for c in _all_comments(lines) if first <= c.line <= last)


@lru_cache
def _all_comments(lines: tuple[str, ...]) -> tuple[Comment, ...]:
    tokens: list[tokenize.TokenInfo] = []
    # where it is not Python as this one reads it, what came before counts
    with suppress(tokenize.TokenError, SyntaxError):
        tokens.extend(tokenize.generate_tokens(iter(lines).__next__))
    return tuple(
        Comment(token.start[0], token.string.partition(_MARK)[2].strip())
        for token in tokens
        if token.type == tokenize.COMMENT and _MARK in token.string
    )


def _span(code: CodeType, instruction: int) -> tuple[int, int, int, int] | None:
    """Where the call that an instruction makes begins and ends; Python counts columns in bytes."""
    line, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None  # python -X no_debug_ranges

    def characters(at_line: int, at: int) -> int:
        text = linecache.getline(code.co_filename, at_line).encode()
        return len(text[:at].decode(errors="replace"))

    return line, characters(line, column), end_line, characters(end_line, end_column)
