"""README's blocks are what the commands print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from titan_copy import PR_2532, copy_of_torchtitan  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e


def block(name: str) -> str:
    """The fenced text between README's marks ``<!-- name: begin -->`` and ``<!-- name: end -->``."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name}: begin -->\n```text\n(.*?)```\n<!-- {name}: end -->", text, re.DOTALL)
    assert found is not None, name
    return found.group(1)


def steady(text: str) -> str:
    """Without what differs from machine to machine: seconds and the versions line."""
    return re.sub(r", [\d.]+ s$", ", N s", re.sub(r"^placement-audit .*$", "", text, flags=re.M), flags=re.M)


def test_help_is_what_help_prints() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "placement_audit", "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},  # argparse wraps at the terminal's width, too
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == block("help")


def test_the_report_is_what_the_command_prints(tmp_path: Path) -> None:
    env = copy_of_torchtitan(tmp_path, PR_2532)
    command = [sys.executable, "-m", "placement_audit", "--config", "configs/fsdp_tp.toml"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert steady(done.stdout) == steady(block("report"))
