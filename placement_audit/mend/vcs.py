"""What git says about one file: committed as it is, edited, or not its business."""

from __future__ import annotations

import os
import subprocess
from enum import StrEnum
from pathlib import Path

_TIMEOUT = 60


class Standing(StrEnum):
    """How a file stands with git."""

    CLEAN = "clean"
    EDITED = "edited"
    OUTSIDE = "outside"  # no git checkout around it, untracked or ignored
    UNKNOWN = "unknown"  # a checkout, and git could not be asked


def standing(path: Path) -> tuple[Standing, str]:
    """Ask git.

    Args:
        path: a file, no symlink on its way.

    Returns:
        The standing, and for `Standing.UNKNOWN` what git said.
    """
    if not any((folder / ".git").exists() for folder in path.parents):
        return Standing.OUTSIDE, ""
    # GIT_DIR and its kin, set inside a hook, would name another checkout.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(path.parent), "status", "--porcelain=v1", "-z"]
    try:
        done = subprocess.run(
            [*command, "--ignored", "--untracked-files=all", "--", path.name],
            env=env | {"LC_ALL": "C", "GIT_LITERAL_PATHSPECS": "1"},
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Standing.UNKNOWN, str(error)
    if done.returncode != 0:
        return Standing.UNKNOWN, done.stderr.decode(errors="replace").strip()
    if not done.stdout:
        return Standing.CLEAN, ""
    return (Standing.OUTSIDE if done.stdout[:2] in (b"??", b"!!") else Standing.EDITED), ""
