"""``placement-audit init``: a workflow, a test and a table of ours for the user's repository."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from placement_audit import output
from placement_audit.commands.talk import Talk
from placement_audit.errors import UsageError

TEMPLATES = {
    "placement_audit.toml": "placement_audit.toml",
    "tests/test_placement_audit.py": "test_placement_audit.py.txt",
    ".github/workflows/placement-audit.yml": "workflow.yml",
}
"""File, from the repository's root -> the template that it is made of."""

_JOB_TABLES = {"model", "parallelism", "training"}
"""A torchtitan job file has these."""

_NOT_OURS = ("node_modules", "site-packages", "outputs")

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """What is to be written, and what is there: None for nothing."""

    name: str
    text: str
    there: bytes | None

    @property
    def wanted(self) -> bool:
        return self.there is None


def run(args: Namespace, _talk: Talk) -> int:
    """Show what would be written, and write it where --yes or the terminal's user says so.

    Returns:
        1 where a file of the name is there with other content, which is left as it is; else 0.

    Raises:
        UsageError: no such folder, no job file, or a file cannot be written.
    """
    root = Path(args.dir)
    if not root.is_dir():
        raise UsageError(f"--dir {args.dir}: no such folder; give the root of your repository.")
    job = _job_file(root, args.config)
    files = [_file(root, name, template, job) for name, template in TEMPLATES.items()]
    output.write_stdout("".join(_shown(f) for f in files))
    kept = [f.name for f in files if f.there is not None and f.there != f.text.encode()]
    new = [f for f in files if f.wanted]
    if new and (args.yes or _agreed(len(new))):
        _write(root, new)
        output.write_stdout("".join(f"wrote {f.name}\n" for f in new))
    elif new:
        output.write_stdout(f"nothing written; --yes writes {', '.join(f.name for f in new)}\n")
    if kept:
        output.write_stdout(f"left as they are: {', '.join(kept)}\n")
    return 1 if kept else 0


def _job_file(root: Path, given: str | None) -> str:
    """The job file's path from ``root``."""
    if given is not None:
        if not Path(given).is_file():
            raise UsageError(f"--config {given}: no such file; expected a torchtitan job file (TOML).")
        return Path(os.path.relpath(Path(given).resolve(), root.resolve())).as_posix()
    found = sorted(_job_files(root))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"{root}: no torchtitan job file (TOML) in it. Say where one is: --config FILE.")
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise UsageError(
        f"{root}: {len(found)} torchtitan job files in it: {', '.join(found[:_SHOWN])}{more}. "
        "Say which to audit: --config FILE."
    )


def _job_files(root: Path) -> Iterator[str]:
    for folder, below, names in os.walk(root):
        below[:] = [n for n in below if not n.startswith(".") and n not in _NOT_OURS]
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".toml" and _is_job(path):
                yield path.relative_to(root).as_posix()


def _is_job(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return tomllib.load(file).keys() >= _JOB_TABLES
    except (OSError, ValueError):
        return False


def _file(root: Path, name: str, template: str, job: str) -> _File:
    text = (resources.files("placement_audit") / "templates" / template).read_text(encoding="utf-8")
    target = root / name
    try:
        there = target.read_bytes() if target.exists() or target.is_symlink() else None
    except OSError as error:
        raise UsageError(f"{target}: cannot be read: {error.strerror or error}.") from None
    # a JSON string is a TOML string
    return _File(name=name, text=text.replace("@JOB@", json.dumps(job)), there=there)


def _shown(file: _File) -> str:
    if file.there is None:
        return f"--- {file.name}\n{file.text}\n"
    same = file.there == file.text.encode()
    what = "already there" if same else "there with other content, not overwritten"
    return f"--- {file.name}: {what}\n"


def _agreed(count: int) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    output.write_stdout(f"write {'this file' if count == 1 else f'these {count} files'}? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _write(root: Path, files: list[_File]) -> None:
    """Write all or none, and over nothing, whatever has appeared since."""
    done: list[Path] = []
    try:
        for file in files:
            target = root / file.name
            done += _folders(target.parent)
            _place(target, file.text)
            done.append(target)
    except OSError as error:
        for path in reversed(done):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise UsageError(
            f"{error.filename2 or error.filename}: cannot be written: {error.strerror or error}. Nothing was written."
        ) from None


def _folders(folder: Path) -> list[Path]:
    """Make a folder and those above it; returns those that were made."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _place(target: Path, text: str) -> None:
    """A file appears whole, or not at all; a link never replaces what is there."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        mask = os.umask(0o022)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        target.hardlink_to(temporary)
    finally:
        temporary.unlink()
