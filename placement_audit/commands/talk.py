"""Standard error: progress lines and messages."""

from __future__ import annotations

import sys
from collections.abc import Callable

Tell = Callable[[str, float | None], None]
"""Called with a phase's name and None when it begins, or its seconds when it ends."""

_WORDS = {
    "import": "importing torch and torchtitan",
    "build": "building the model",
    "weights": "giving it weights",
    "trace": "tracing one step",
    "measure": "measuring",
    "judge": "judging",
}


class Talk:
    """What a command says while it works."""

    def __init__(self, *, progress: bool, verbose: bool) -> None:
        self._progress = progress
        self._verbose = verbose
        self._in_line = False

    def phase(self, name: str, seconds: float | None) -> None:
        """One line a phase, with its seconds."""
        if not self._progress:
            return
        sys.stderr.write(f"{_WORDS.get(name, name)} ... " if seconds is None else f"{seconds:.1f} s\n")
        sys.stderr.flush()
        self._in_line = seconds is None

    def error(self, message: str, details: str = "") -> None:
        """A message of one or more lines; details only where asked for."""
        start = "\n" if self._in_line else ""
        self._in_line = False
        more = f"\n{details.rstrip()}" if details and self._verbose else ""
        sys.stderr.write(f"{start}placement-audit: error: {message}{more}\n")
        sys.stderr.flush()
