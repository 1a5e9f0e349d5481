"""The CI kit: linted, pinned, and its script run with a `python` that only writes the reports."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "placement-audit"
WORKFLOWS = [
    *sorted((ROOT / ".github" / "workflows").glob("*.yml")),
    ROOT / "placement_audit" / "templates" / "workflow.yml",
]
ALL = [*WORKFLOWS, ACTION / "action.yml"]


def name_of(path: object) -> str:
    return str(Path(str(path)).relative_to(ROOT))


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    data = read(path)
    jobs = data["jobs"].values() if "jobs" in data else [data["runs"]]
    return [step for job in jobs for step in job["steps"]]


# --------------------------------------------------------------------------- linters


def linter(name: str) -> str:
    # beside this interpreter first: an environment need not be activated to be used
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_zizmor_finds_nothing() -> None:
    command = [linter("zizmor"), "--offline", "--no-progress", *map(str, ALL)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_finds_nothing() -> None:
    command = [linter("actionlint"), "-shellcheck=", *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# --------------------------------------------------------------------------- what no linter of ours may lose


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_actions_are_pinned_by_commit_and_alike(path: Path) -> None:
    everywhere: dict[str, set[str]] = {}
    for file in ALL:
        for name, pin in re.findall(r"uses: ([\w./-]+)@(\S+ # v\S+)$", file.read_text(), re.M):
            everywhere.setdefault(name, set()).add(pin)
    assert all(len(pins) == 1 for pins in everywhere.values())
    for step in steps(path):
        if "uses" in step and not step["uses"].startswith("./"):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_no_script_has_an_expression_in_it(path: Path) -> None:
    scripts = [step["run"] for step in steps(path) if "run" in step]
    assert scripts
    assert not [s for s in scripts if "${{" in s]


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_no_job_may_more_than_read_and_upload_sarif(path: Path) -> None:
    data = read(path)
    for job in data["jobs"].values():
        rights = job.get("permissions", data.get("permissions"))
        assert set(rights.items()) <= {("contents", "read"), ("security-events", "write")}


def test_every_input_of_the_workflow_is_used_and_every_one_given_is_known() -> None:
    path = ROOT / ".github" / "workflows" / "placement-audit.yml"
    declared = read(path)[True]["workflow_call"]["inputs"]  # YAML 1.1 reads `on` as true
    used = set(re.findall(r"inputs\.([\w-]+)", path.read_text()))
    assert declared.keys() == used
    known = read(ACTION / "action.yml")["inputs"].keys()
    for step in steps(path):
        if step.get("uses", "").startswith("./"):
            assert step["with"].keys() <= known


# --------------------------------------------------------------------------- the action's script

FAKE = """\
#!/usr/bin/env python3
import json, os, sys
from pathlib import Path
Path(os.environ["SAID"]).write_text(json.dumps(sys.argv[1:]))
print("the text report")
for word in sys.argv:
    name, colon, path = word.partition(":")
    if colon and name in os.environ["WRITES"].split():
        Path(path).write_text(f"a {name}\\n")
sys.exit(int(os.environ["STATUS"]))
"""


PIP = """\
#!/usr/bin/env python3
import json, os, sys
with open(os.environ["SAID"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def installed(tmp_path: Path, path: Path, **environ: str) -> list[list[str]]:
    """What pip is called with where the step Install of an action or a workflow runs."""
    (step,) = [step for step in steps(path) if step.get("name") == "Install"]
    fake = tmp_path / "python"
    fake.write_text(PIP)
    fake.chmod(0o755)
    given = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SAID": str(tmp_path / "said"),
        "GITHUB_ACTION_PATH": str(ACTION),
        **environ,
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    subprocess.run(command, env=given, cwd=tmp_path, check=True)
    return [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]


def defaults(path: Path, *names: str) -> list[str]:
    """The defaults of inputs of an action or a reusable workflow."""
    data = read(path)
    inputs = data[True]["workflow_call"]["inputs"] if True in data else data["inputs"]
    return [inputs[name]["default"] for name in names]


def test_what_is_installed_can_audit_a_job_in_toml(tmp_path: Path) -> None:
    """Torchtitan 0.3, which pip finds first, has none."""
    action = ACTION / "action.yml"
    package, wanted, index = defaults(action, "package", "requirements", "torch-index")
    said = installed(tmp_path, action, PACKAGE=package, REQUIREMENTS=wanted, TORCH_INDEX=index)
    (words,) = said
    assert words[:3] == ["-m", "pip", "install"]
    assert (Path(words[3]) / "pyproject.toml").samefile(ROOT / "pyproject.toml")
    assert words[4:] == ["torchtitan>=0.2,<0.3"]
    assert defaults(ROOT / ".github" / "workflows" / "placement-audit.yml", "requirements") == [wanted]


def test_what_is_installed_is_as_it_was_asked(tmp_path: Path) -> None:
    given = {"PACKAGE": "pa @ git+x", "REQUIREMENTS": ". -r more.txt", "TORCH_INDEX": "an/index"}
    assert installed(tmp_path, ACTION / "action.yml", **given) == [
        ["-m", "pip", "install", "--index-url", "an/index", "torch"],
        ["-m", "pip", "install", "pa @ git+x", ".", "-r", "more.txt"],
    ]


def test_the_workflow_that_init_writes_installs_torchtitan_0_2(tmp_path: Path) -> None:
    path = ROOT / "placement_audit" / "templates" / "workflow.yml"
    environ = read(path)["jobs"]["cpu"]["env"]
    assert installed(tmp_path, path, **environ) == [
        ["-m", "pip", "install", "--index-url", environ["TORCH_INDEX"], "torch"],
        ["-m", "pip", "install", "placement-audit", "torchtitan>=0.2,<0.3"],
    ]


def audited(
    tmp_path: Path, status: int = 1, writes: str = "json sarif markdown github", **inputs: str
) -> Any:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python"
    fake.write_text(FAKE)
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    environ = {
        "PATH": f"{fake.parent}{os.pathsep}{os.environ['PATH']}",
        "SAID": str(tmp_path / "said"),
        "WRITES": writes,
        "STATUS": str(status),
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "CONFIG": "a job.toml",
        "OVERRIDES": "",
        "ARGUMENTS": "",
        "RANKS": "0",
        "DEVICE": "cpu",
        "MEASURE": "true",
        **inputs,
    }
    return subprocess.run(
        ["bash", str(ACTION / "audit.sh")],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def outputs(tmp_path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())


def said(tmp_path: Path) -> list[str]:
    return json.loads((tmp_path / "said").read_text())


@pytest.mark.parametrize("status", [0, 1, 3])
def test_the_script_keeps_the_status_and_shows_everything(tmp_path: Path, status: int) -> None:
    done = audited(tmp_path, status)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the text report\na github\n"
    assert (tmp_path / "summary").read_text() == "a markdown\n"
    out = outputs(tmp_path)
    assert out["status"] == str(status)
    assert Path(out["sarif"]).read_text() == "a sarif\n"
    assert (Path(out["folder"]) / "report.json").read_text() == "a json\n"


def test_the_script_says_so_where_there_are_no_reports(tmp_path: Path) -> None:
    done = audited(tmp_path, 2, writes="")
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path).keys() == {"status", "folder"}
    assert done.stdout.splitlines()[-1] == (
        "::error title=placement-audit::the audit ended with status 2 before there was a report; its log says why"
    )
    assert not (tmp_path / "summary").exists()


def test_the_script_runs_ranks_by_torchrun_and_words_stay_words(tmp_path: Path) -> None:
    evil = "$(touch evil) `touch evil`; touch evil"
    audited(tmp_path, RANKS="2", DEVICE="cuda", OVERRIDES=f"--x 1 {evil}", ARGUMENTS="--baseline b.json")
    words = said(tmp_path)
    assert words[:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    assert words[6:11] == ["placement_audit", "--measure", "--config", "a job.toml", "--device"]
    assert "cuda" in words
    at = words.index("--")
    assert words[at - 2 : at] == ["--baseline", "b.json"]
    assert words[at + 1 :] == ["--x", "1", *evil.split()]
    assert not (tmp_path / "evil").exists()


def test_the_script_refuses_what_is_neither_true_nor_false(tmp_path: Path) -> None:
    done = audited(tmp_path, MEASURE="yes")
    assert done.returncode == 2
    assert "measure: expected true or false; got yes" in done.stderr
    assert not (tmp_path / "said").exists()


def test_the_scripts_words_are_the_command_lines() -> None:
    from placement_audit import arguments

    words = ["--measure", "--config", "x", "--device", "cuda", "--format", "text"]
    for target in re.findall(r'--format "(\w+):', (ACTION / "audit.sh").read_text()):
        words += ["--format", f"{target}:f"]
    args = arguments.parse([*words, "--", "--a", "1"])
    assert [t.format for t in args.format] == ["text", "json", "sarif", "html", "markdown", "github"]
    assert args.overrides == ("--a", "1")


def test_the_pre_commit_hook_is_a_command_of_ours() -> None:
    from placement_audit import arguments

    (hook,) = read(ROOT / ".pre-commit-hooks.yaml")
    assert hook["language"] == "system"
    assert hook["entry"] == "python -m placement_audit"
    args = arguments.parse(hook["args"])
    assert (args.action, args.config, args.measure) == ("audit", "placement_audit.toml", False)
