"""What is installed: versions from package metadata, checked before anything heavy is imported."""

from __future__ import annotations

import platform
import re
from importlib import metadata, util
from pathlib import Path

from placement_audit.errors import BuildError

TOML_JOBS = ((0, 2, 0), (0, 3))
"""torchtitan with TOML job files: at least the first, below the second."""

REGISTERED_JOBS = ((0, 3), (0, 4))
"""torchtitan with jobs in Python, found by --module and --config."""

TORCH_MIN = (2, 10)
"""Oldest torch that torchtitan 0.2.x was seen to run with here."""

REGISTERED_TORCH_MIN = (2, 11)
"""The same for 0.3: torch_checkpointing cannot be imported with an older one."""

REGISTERED_NEEDS = {"spmd_types": "spmd_types==0.2.3", "torch_checkpointing": "torch_checkpointing"}
"""What 0.3 imports on the way to any model and no older one does, and how to ask pip for it."""


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


def check_versions(*, registered: bool = False) -> str:
    """Check that an adapter exists for what is installed.

    Args:
        registered: for a job of a Python config registry (torchtitan 0.3), not of a TOML file (0.2).

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
    oldest = REGISTERED_TORCH_MIN if registered else TORCH_MIN
    if _numbers(torch) < oldest:
        raise BuildError(
            f"torch {torch} is not supported: expected {'.'.join(map(str, oldest))} or newer. "
            "pip install --upgrade torch"
        )
    fitting = "0.3.0" if registered else "0.2.2"
    if titan is None:
        raise BuildError(
            "torchtitan is not installed in this environment, nor is a checkout of it the working directory. "
            f"pip install torchtitan=={fitting}, or audit from the environment that you train in."
        )
    _check_era(titan, registered)
    if util.find_spec("triton") is None:
        raise BuildError(
            f"triton is not installed, and torchtitan {titan} cannot be imported without it (CPU builds of "
            "torch do "
            "not bring it). pip install triton"
        )
    missing = [name for name in REGISTERED_NEEDS if registered and util.find_spec(name) is None]
    if missing:
        raise BuildError(
            f"torchtitan {titan} needs {' and '.join(missing)}, not installed in this environment. "
            f"pip install {' '.join(REGISTERED_NEEDS[name] for name in missing)}"
        )
    return titan


def _check_era(titan: str, registered: bool) -> None:
    """Jobs of torchtitan were TOML files up to 0.2 and are Python since 0.3."""
    low, high = REGISTERED_JOBS if registered else TOML_JOBS
    if low <= _numbers(titan) < high:
        return
    if registered and TOML_JOBS[0] <= _numbers(titan) < TOML_JOBS[1]:
        raise BuildError(
            f"a job by --module and --config is torchtitan 0.3's, and torchtitan {titan} is installed, whose "
            "jobs are TOML files: --config FILE, without --module; or pip install torchtitan==0.3.0"
        )
    if not registered and REGISTERED_JOBS[0] <= _numbers(titan) < REGISTERED_JOBS[1]:
        raise BuildError(
            f"a TOML job file is torchtitan 0.2's, and torchtitan {titan} is installed, whose jobs are Python: "
            "name one with --module MODULE --config NAME, as for training, or in the file with "
            "placement_audit.module and placement_audit.config; or pip install torchtitan==0.2.2"
        )
    raise BuildError(
        f"torchtitan {titan} is not supported: expected 0.2.0 to 0.2.2 (TOML job files) or 0.3.0 (jobs in "
        "Python). pip install torchtitan==0.2.2"
    )
