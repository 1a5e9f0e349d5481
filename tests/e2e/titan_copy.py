"""A copy of the installed torchtitan with an edit, for commands typed as a user would type them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

WRAPPER = "torchtitan/experiments/simple_fsdp/simple_fsdp.py"

PR_2532 = (
    "            sharded_local_tensor = x.to_local()\n",
    "            grads = [Partial() if p.is_replicate() else p for p in x.placements[-non_dp_mesh_dims:]]\n"
    "            grads = (*x.placements[:-non_dp_mesh_dims], *grads)\n"
    "            sharded_local_tensor = x.to_local(grad_placements=grads)\n",
)
"""The proposed fix, in our words."""


def copy_of_torchtitan(folder: Path, *edits: tuple[str, str]) -> dict[str, str]:
    """Copy torchtitan into ``folder`` and edit its wrapper; returns the environment that finds the copy."""
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0])
    shutil.copytree(source, folder / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / WRAPPER
    text = file.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    path = os.pathsep.join(p for p in (str(folder), os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "110"}
