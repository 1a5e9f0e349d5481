"""The pytest plugin on real jobs: stock torchtitan, and a copy with the proposed fix of PR 2532."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from titan_copy import PR_2532, WRAPPER, copy_of_torchtitan  # type: ignore[import-not-found]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]

MARKED = """\
import pytest

@pytest.mark.placement_audit(config={config!r}, nproc=2, device="cpu")
def test_measured(placement_report):
    assert placement_report.exit_status == 0
    assert len(placement_report.trace.params) == 57
    assert placement_report.measurement.backend == "gloo"
"""


def run_pytest(folder: Path, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "placement_audit.pytest_plugin",
        "-p",
        "no:cacheprovider",
    ]
    environ = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(ROOT)]))}
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [*command, *words], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def test_stock_torchtitan_passes_traced_and_measured(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "tp.toml")
    (tmp_path / "test_job.py").write_text(MARKED.format(config=config))
    done = run_pytest(tmp_path, dict(os.environ), "--placement-audit", config, "-rfE")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
    assert "PA202-double-reduction" not in done.stdout


def test_gpus_are_counted_as_torch_counts_them() -> None:
    import torch

    from placement_audit.pytest_audit import gpus

    assert gpus() == torch.cuda.device_count()


def test_the_proposed_fix_fails_one_rule_with_its_block(tmp_path: Path) -> None:
    environ = copy_of_torchtitan(tmp_path, PR_2532)
    config = str(ROOT / "configs" / "fsdp_tp.toml")
    done = run_pytest(
        tmp_path, environ, "--placement-audit", config, "--junit-xml=junit.xml", "torchtitan/config"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [
        case for case in ET.parse(tmp_path / "junit.xml").iter("testcase") if case.find("failure") is not None
    ]
    assert [case.get("name") for case in failed] == ["PA202-double-reduction"]
    text = failed[0].find("failure").text or ""  # type: ignore[union-attr]
    assert text.startswith("PA202 double-reduction   13 parameters   mesh dim tp   error\n")
    assert f"{WRAPPER}:191 in replicate_compute\n" in text
    assert "Traceback" not in done.stdout
