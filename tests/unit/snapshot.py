"""Whole outputs, compared with files; ``UPDATE_SNAPSHOTS=1`` writes them anew (then read the diff)."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "snapshots"


def assert_snapshot(name: str, text: str) -> None:
    """``text`` equals the file ``snapshots/NAME``."""
    file = FOLDER / name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
