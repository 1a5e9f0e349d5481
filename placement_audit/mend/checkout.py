"""Where torchtitan is, and which of its files hold SimpleFSDP. Nothing of it is imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from placement_audit.errors import UsageError

INSTALLED = "installed"

_NAME = "torchtitan"
_KNOWN = (
    Path("experiments/simple_fsdp/simple_fsdp.py"),  # to 0.2.2
    Path("experiments/graph_trainer/simple_fsdp.py"),  # from 0.3.0
)
_METHOD = b"def replicate_compute("
_LARGEST = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """One torchtitan on disk.

    Attributes:
        named: as the user named it.
        root: the folder that holds the package; ``git apply`` runs here.
        files: that hold SimpleFSDP, as they are reached.
    """

    named: str
    root: Path
    files: tuple[Path, ...]


def find(named: str) -> Checkout:
    """Find torchtitan.

    Args:
        named: a folder (a checkout, a site-packages, the package itself), or `INSTALLED`.

    Raises:
        UsageError: there is none, or it has no SimpleFSDP.
    """
    package = _installed() if named == INSTALLED else _in_folder(named)
    root = package.parent
    files = tuple(package / known for known in _KNOWN if os.path.lexists(package / known))
    files = files or tuple(_search(package))
    if not files:
        raise UsageError(
            f"--torchtitan {named}: {package} has no SimpleFSDP: neither {_KNOWN[0].as_posix()} nor "
            f"{_KNOWN[1].as_posix()}, and no other file with a method replicate_compute. "
            "Expected torchtitan 0.1 to 0.3."
        )
    return Checkout(named=named, root=root, files=files)


def _installed() -> Path:
    # find_spec runs nothing of a top-level package
    try:
        spec = importlib.util.find_spec(_NAME)
    except ValueError:
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise UsageError(
            "--torchtitan installed: no torchtitan in this environment. Install it, or name its checkout: "
            "--torchtitan DIR."
        )
    return Path(folders[0])


def _in_folder(named: str) -> Path:
    folder = Path(named)
    try:
        if not folder.is_dir():
            what = "is not a directory" if os.path.lexists(folder) else "there is no such directory"
            raise UsageError(f"--torchtitan {named}: {what}.")
        for package in (folder / _NAME, folder / "src" / _NAME, folder):
            if package.resolve().name == _NAME and _is_package(package):
                return package
    except OSError as error:
        raise UsageError(f"--torchtitan {named}: cannot be read: {error.strerror or error}.") from None
    raise UsageError(
        f"--torchtitan {named}: no torchtitan there. Expected a checkout or a site-packages with a folder "
        f"{_NAME}, or that folder itself."
    )


def _is_package(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "__init__.py").is_file() or (folder / "experiments").is_dir())


def _search(package: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(package):
        folders[:] = sorted(name for name in folders if name not in ("tests", "__pycache__"))
        for name in sorted(files):
            path = Path(folder) / name
            if name.endswith(".py") and not path.is_symlink() and _holds_method(path):
                yield path


def _holds_method(path: Path) -> bool:
    try:
        return path.stat().st_size <= _LARGEST and _METHOD in path.read_bytes()
    except OSError:
        return False
