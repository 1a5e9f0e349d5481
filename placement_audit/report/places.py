"""Where in the user's own repository a finding belongs. Pure: what lies there is told from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from placement_audit.model import CallSite
from placement_audit.verdicts import PathStep

Inside = Callable[[CallSite], str | None]
"""The path of a call site relative to the user's repository; None where it is not in it."""


def recorded(site: CallSite) -> str | None:
    """An `Inside` for where no file system is to be asked: files of no package, by the path that was recorded."""
    return None if site.package or site.line < 1 or site.path.startswith("/") else site.path


def primary(path: Sequence[PathStep], inside: Inside) -> PathStep | None:
    """The first place that is in the user's repository, else the cause; None for no place at all."""
    return next((step for step in path if inside(step.call_site)), path[0] if path else None)
