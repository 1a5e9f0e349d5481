"""torchtitan 0.3.0 for tests: unpacked with what it needs, perhaps edited; audits run in a process of their own.

This environment has another torchtitan, and one process imports one.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from placement_audit.report.json_io import loads
from placement_audit.verdicts import Report
from tests.releases import Unreachable, release

ROOT = Path(__file__).parents[2]

NEEDS = ("spmd_types==0.2.3", "torch_checkpointing==0.1.1")
"""What 0.3.0 imports and this environment lacks."""

WRAPPER = "torchtitan/experiments/graph_trainer/simple_fsdp.py"

TP_PARTIAL = "tuple(Partial() if p.is_replicate() else p for p in x._spec.placements[-non_dp_mesh_dims:])"

PR_2532 = (
    "            sharded_local_tensor = x.to_local()\n",
    "            sharded_local_tensor = x.to_local(\n"
    f"                grad_placements=tuple(x._spec.placements[:-non_dp_mesh_dims]) + {TP_PARTIAL})\n",
)
"""The proposed fix, in our words, for this release's wrapper."""

OTHER_HALF = (
    "                replicated_local_tensor, non_dp_mesh, non_dp_placements\n",
    f"                replicated_local_tensor, non_dp_mesh, non_dp_placements, grad_placements={TP_PARTIAL}\n",
)
"""What it lacks."""

_AUDIT = """
import json, sys
from placement_audit import pipeline
from placement_audit.config import load
from placement_audit.report.json_io import dumps
for name, module, config, overrides in json.load(sys.stdin):
    report = pipeline.run(load(config, module=module, overrides=overrides))
    with open(f"{sys.argv[1]}/{name}.json", "w") as file:
        file.write(dumps(report))
"""

Job = tuple[str, str | None, str, Sequence[str]]
"""(a name, torchtitan's --module, its --config, overrides)."""


def needs() -> Path:
    """A folder with `NEEDS`, installed once.

    Raises:
        Unreachable: they cannot be fetched.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "placement-audit"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / "-".join(("needs", *NEEDS)).replace("=", "")
    with (cache / "needs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            done = subprocess.run(
                [*command, "--disable-pip-version-check", "--upgrade", "--target", str(folder), *NEEDS],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode != 0:
                raise Unreachable(f"{' '.join(NEEDS)}: {done.stderr.strip().splitlines()[-1:]}")
            (folder / "complete").touch()
    return folder


def titan03(folder: Path, *edits: tuple[str, str], with_needs: bool = True) -> dict[str, str]:
    """Unpack 0.3.0 into ``folder`` and edit its wrapper; returns the environment that finds it."""
    release("0.3.0", folder)
    file = folder / WRAPPER
    text = file.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    return seeing(folder, *([needs()] if with_needs else []))


def seeing(*folders: Path) -> dict[str, str]:
    """The environment of a process that finds modules there first."""
    path = os.pathsep.join(str(p) for p in (*folders, ROOT))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}


def reports(env: dict[str, str], folder: Path, jobs: Sequence[Job]) -> Iterator[tuple[str, Report]]:
    """The reports on several jobs, audited one after another in one process."""
    done = subprocess.run(
        [sys.executable, "-c", _AUDIT, str(folder)],
        input=json.dumps(jobs),
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, *_ in jobs:
        yield name, loads((folder / f"{name}.json").read_bytes())


def command(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """`placement-audit` as typed."""
    return subprocess.run(
        [sys.executable, "-m", "placement_audit", *words],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
