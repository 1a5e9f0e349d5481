"""Which files of a report lie in the working tree, and under what name there."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from placement_audit.model import CallSite


@dataclass(frozen=True, slots=True)
class Worktree:
    """A checkout.

    Attributes:
        root: its top folder: what CI services take paths relative to.
        folders: where the paths of call sites may start, the first first.
    """

    root: Path
    folders: tuple[Path, ...]

    @staticmethod
    def here() -> Worktree:
        """The checkout around the working directory; that directory itself where it is in none."""
        here = Path.cwd()
        root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
        return Worktree(root, (here, *(Path(p) for p in sys.path if p)))

    def inside(self, site: CallSite) -> str | None:
        """The path of ``site`` relative to the checkout; None for what is not of it (installed packages are not).

        A report may be rendered where its sources are not; then the path that was recorded must do.
        """
        file = _found(self.folders, site.path)
        if file is None:
            own = site.package is None and site.line > 0 and not site.path.startswith(("/", "<", ".."))
            return site.path if own else None
        if not file.is_relative_to(self.root):
            return None
        parts = file.relative_to(self.root).parts
        return None if "site-packages" in parts else "/".join(parts)


@cache
def _found(folders: tuple[Path, ...], path: str) -> Path | None:
    # not resolved: a link inside the checkout is of the checkout
    files = (Path(os.path.normpath(folder / path)) for folder in folders)
    return next((file for file in files if file.is_file()), None)
