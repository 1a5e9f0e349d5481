"""What is installed: versions from package metadata, checked before anything heavy is imported."""

from __future__ import annotations

import platform
import re
from importlib import metadata, util
from pathlib import Path

from placement_audit.errors import BuildError

TORCHTITAN = ((0, 2, 0), (0, 3))
"""Supported torchtitan: at least the first, below the second."""

TORCH_MIN = (2, 10)
"""Oldest torch that torchtitan 0.2.x was seen to run with here."""


def version_of(package: str) -> str | None:
    """Installed version by metadata; None where the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torchtitan_version() -> str | None:
    """Version of torchtitan: of a checkout on the path from its assets/version.txt, else by metadata."""
    # A checkout first: started from its root it shadows an installed torchtitan, in training as here.
    spec = util.find_spec("torchtitan")
    if spec is not None and spec.origin:
        text = Path(spec.origin).parent.parent / "assets" / "version.txt"
        if text.is_file():
            return text.read_text().strip()
    return version_of("torchtitan")


def versions() -> tuple[tuple[str, str], ...]:
    """Name and version of everything that an audit's result may depend on; "absent" where not installed."""
    return (
        ("python", platform.python_version()),
        ("torch", version_of("torch") or "absent"),
        ("torchtitan", torchtitan_version() or "absent"),
        ("triton", version_of("triton") or "absent"),
    )


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in found.group().split(".")) if found else ()


def check_versions() -> str:
    """Check that an adapter exists for what is installed.

    Returns:
        torchtitan's version.

    Raises:
        BuildError: something is missing or of an unsupported version.
    """
    torch, titan = version_of("torch"), torchtitan_version()
    if torch is None:
        raise BuildError(
            "torch is not installed. Install it first: pip install torch, or python3 scripts/run.py."
        )
    if _numbers(torch) < TORCH_MIN:
        raise BuildError(
            f"torch {torch} is not supported: expected 2.10 or newer. pip install --upgrade torch"
        )
    if titan is None:
        raise BuildError(
            "torchtitan is not installed in this environment, nor is a checkout of it the working directory. "
            "pip install torchtitan==0.2.2, or audit from the environment that you train in."
        )
    low, high = TORCHTITAN
    if not low <= _numbers(titan) < high:
        raise BuildError(
            f"torchtitan {titan} is not supported: expected 0.2.0 to 0.2.2 (TOML jobs; 0.3 is to come). "
            "pip install torchtitan==0.2.2"
        )
    if util.find_spec("triton") is None:
        raise BuildError(
            f"triton is not installed, and torchtitan {titan} cannot be imported without it (CPU builds of "
            "torch do "
            "not bring it). pip install triton"
        )
    return titan
