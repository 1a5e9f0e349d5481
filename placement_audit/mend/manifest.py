"""The files of torchtitan's releases, by SHA-256: as released, and as each form of the mend makes them.

``patches/manifest.toml`` is made by ``scripts/manifest.py`` from the releases themselves. It says what a file is; what
is done to a file follows from the file alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from placement_audit.mend.result import Form

_PACKAGE = Path(__file__).parent.parent
_PLACES = (_PACKAGE / "patches", _PACKAGE.parent / "patches")  # in a wheel; in a checkout


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of one release.

    Attributes:
        release: of torchtitan.
        path: of the file, from the folder that holds the package.
        before: SHA-256 as released.
        after: SHA-256 of each form.
    """

    release: str
    path: str
    before: str
    after: dict[Form, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a SHA-256 says.

    Attributes:
        releases: of torchtitan that have this file.
        form: of the mend in it; None where it is as released.
    """

    releases: tuple[str, ...]
    form: Form | None


@cache
def entries() -> tuple[Entry, ...]:
    """All of the manifest."""
    path = next(folder / "manifest.toml" for folder in _PLACES if (folder / "manifest.toml").is_file())
    return tuple(
        Entry(
            release=one["release"],
            path=one["path"],
            before=one["before"],
            after={form: one[form.value] for form in Form},
        )
        for one in tomllib.loads(path.read_text(encoding="utf-8"))["file"]
    )


def known_as(sha256: str) -> Known | None:
    """What the manifest knows of a file; None for nothing."""
    for form in (None, *Form):
        releases = tuple(e.release for e in entries() if sha256 == (e.after[form] if form else e.before))
        if releases:
            return Known(releases=releases, form=form)
    return None


def released() -> frozenset[str]:
    """SHA-256 of all files that are as released, or as we leave them."""
    return frozenset(sha for e in entries() for sha in (e.before, *e.after.values()))


def rendered(all_entries: Iterable[Entry]) -> str:
    """The manifest's text."""
    blocks = [
        "# Made by scripts/manifest.py from torchtitan's releases. See README.md beside this file.\n",
    ]
    for e in all_entries:
        fields = {"release": e.release, "path": e.path, "before": e.before}
        fields |= {form.value: e.after[form] for form in Form}
        blocks.append("[[file]]\n" + "".join(f'{key} = "{value}"\n' for key, value in fields.items()))
    return "\n".join(blocks)
