"""scripts/run.py, run as a process of its own with a fake venv module, pip and nvidia-smi."""

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

REPO = Path(__file__).resolve().parents[2]

# Stands in for every interpreter: notes how it was called, then acts as pip or as the program run.
FAKE_PYTHON = """\
import json, os, signal, sys, time
from pathlib import Path

home, args = Path(os.environ["FAKE_HOME"]), sys.argv[1:]
call = {
    "args": args,
    "cwd": os.getcwd(),
    "stamped": (Path(sys.argv[0]).parent.parent / ".placement-audit.stamp").exists(),
    "pythonpath": os.environ.get("PYTHONPATH", "").split(os.pathsep),
}
with (home / "calls").open("a") as calls:
    calls.write(json.dumps(call) + "\\n")
if args[:3] == ["-m", "pip", "index"]:
    print(f"Available versions: 2, {os.environ['FAKE_TORCH']}")
elif args[:2] == ["-m", "pip"]:
    print("pip talks")
    match os.environ.get("FAKE_PIP"):
        case "fail":
            sys.exit(7)
        case "kill":
            os.kill(os.getppid(), signal.SIGKILL)
        case "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.2)
        case "hold":
            (home / "holding").touch()
            while not (home / "let go").exists():
                time.sleep(0.01)
else:
    print("program talks")
    if "FAKE_SIGNAL" in os.environ:
        os.kill(os.getpid(), int(os.environ["FAKE_SIGNAL"]))
    if os.environ.get("FAKE_FAILS", "") in args:
        sys.exit(int(os.environ["FAKE_STATUS"]))
"""

FAKE_VENV = """\
import os, sys
from pathlib import Path

if os.environ.get("FAKE_VENV") == "fail":
    sys.exit(1)
python = Path(sys.argv[1]) / "bin" / "python"
python.parent.mkdir(parents=True, exist_ok=True)
python.unlink(missing_ok=True)
python.symlink_to(Path(os.environ["FAKE_HOME"]) / "python")
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


class Project:
    """A copy of the script in a project of its own, on a machine of fakes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "pro ject"
        self.venv = self.root / ".venv"
        self.script = self.root / "scripts" / "run.py"
        self.script.parent.mkdir(parents=True)
        shutil.copy(REPO / "scripts" / "run.py", self.script)
        (self.root / "pyproject.toml").write_text("[project]\n")
        self.pins = self.root / "scripts" / "constraints-cpu.txt"
        self.pins.write_text("torch==1\n")
        (self.root / "scripts" / "constraints-cuda.txt").write_text("torch==1\n")
        self.elsewhere = home / "some" / "where"
        self.bin = home / "bin"
        for folder in (self.elsewhere, self.bin, home / "modules"):
            folder.mkdir(parents=True)
        self.python = executable(home / "python", f"#!{sys.executable} -S\n{FAKE_PYTHON}")
        (home / "modules" / "venv.py").write_text(FAKE_VENV)
        # None of the variables of the run that tests us, and none of its PATH.
        self.env = {
            "PATH": str(self.bin),
            "PYTHONPATH": str(home / "modules"),
            "FAKE_HOME": str(home),
            "FAKE_STATUS": "0",
            "FAKE_TORCH": "1+cpu, 1",
        }

    def command(self, *args: str) -> list[str]:
        return [sys.executable, str(self.script), *args]

    def run(self, *args: str, **env: object) -> subprocess.CompletedProcess[str]:
        full = self.env | {name: str(value) for name, value in env.items()}
        return subprocess.run(
            self.command(*args), env=full, cwd=self.elsewhere, capture_output=True, text=True, timeout=60
        )

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*args), env=self.env | env, cwd=self.elsewhere, stderr=subprocess.PIPE, text=True
        )

    @property
    def calls(self) -> list[dict]:
        log = self.home / "calls"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def pip_calls(self) -> list[list[str]]:
        return [call["args"] for call in self.calls if call["args"][:3] == ["-m", "pip", "install"]]

    @property
    def program_calls(self) -> list[list[str]]:
        return [call["args"] for call in self.calls if call["args"][:2] != ["-m", "pip"]]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)


# --------------------------------------------------------------------------- which pins

GPU = "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'"


@pytest.mark.parametrize(
    ("nvidia_smi", "url", "pins"),
    [
        pytest.param(None, "", "cpu", id="no nvidia-smi"),
        pytest.param(GPU, "", "cuda", id="a GPU"),
        pytest.param("echo 'No devices found.'", "", "cpu", id="nvidia-smi without a GPU"),
        pytest.param(f"{GPU}; exit 9", "", "cpu", id="nvidia-smi fails"),
        pytest.param(GPU, "https://index/whl/cpu/", "cpu", id="CPU index on a GPU machine"),
        pytest.param(None, "https://index/whl/cu130", "cuda", id="CUDA index on a machine without a GPU"),
    ],
)
def test_pins_follow_the_machine_and_the_index(project, nvidia_smi, url, pins):
    if nvidia_smi:
        executable(project.bin / "nvidia-smi", f"#!/bin/sh\n{nvidia_smi}\n")
    assert project.run("audit", TORCH_INDEX_URL=url).returncode == 0
    wanted = str(project.root / "scripts" / f"constraints-{pins}.txt")
    assert [call[call.index("-c") + 1] for call in project.pip_calls] == [wanted] * (2 if url else 1)


def test_the_two_files_differ_by_triton_alone():
    cpu, cuda = (
        {
            line
            for line in (REPO / "scripts" / f"constraints-{kind}.txt").read_text().split("\n")
            if "==" in line
        }
        for kind in ("cpu", "cuda")
    )
    assert {pin.split("==")[0] for pin in cpu ^ cuda} == {"triton"}


def test_torch_alone_comes_from_its_index(project):
    project.run("audit", TORCH_INDEX_URL="https://index/whl/cpu")
    torch, rest = project.pip_calls
    assert torch[-4:] == ["--no-deps", "--index-url", "https://index/whl/cpu", "torch"]
    assert "--index-url" not in rest


@pytest.mark.parametrize(
    ("versions", "indexed"),
    [
        pytest.param("1+cpu, 1", False, id="a CPU build at hand"),
        pytest.param("1", True, id="only PyPI's"),
        pytest.param("2+cpu, 1", True, id="a CPU build of another torch"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has CUDA builds on PyPI")
def test_a_cpu_machine_never_fetches_a_cuda_build(project, versions, indexed):
    assert project.run("audit", FAKE_TORCH=versions).returncode == 0
    cpu = ["--no-deps", "--index-url", "https://download.pytorch.org/whl/cpu", "torch"]
    assert [call[-4:] for call in project.pip_calls[:-1]] == [cpu] * indexed


def test_a_gpu_machine_takes_what_pip_finds(project):
    executable(project.bin / "nvidia-smi", f"#!/bin/sh\n{GPU}\n")
    project.run("audit", FAKE_TORCH="1")
    assert len(project.pip_calls) == 1


# --------------------------------------------------------------------------- what is installed, and when


def test_the_first_run_installs_and_the_second_only_runs(project):
    project.run("audit")
    project.run("audit")
    assert len(project.pip_calls) == 1
    assert project.pip_calls[0][-2:] == ["-e", f"{project.root}[test]"]
    assert project.program_calls == [["-m", "placement_audit"]] * 2


def test_the_stamp_is_written_last(project):
    project.run("audit", TORCH_INDEX_URL="https://index/whl/cpu")
    assert [call["stamped"] for call in project.calls] == [False, False, True]


@pytest.mark.parametrize(
    ("how", "status"),
    [("kill", -signal.SIGKILL), ("interrupt", 130), ("fail", 3)],
)
def test_a_set_up_cut_short_is_taken_up_again(project, how, status):
    assert project.run("audit", FAKE_PIP=how).returncode == status
    assert project.program_calls == []
    assert project.run("audit").returncode == 0
    assert len(project.pip_calls) == 2
    assert len(project.program_calls) == 1


def test_an_environment_that_lost_its_interpreter_is_made_again(project):
    project.run("audit")
    (project.venv / "bin" / "python").unlink()
    assert project.run("audit").returncode == 0
    assert len(project.pip_calls) == 2


def test_a_venv_cut_short_is_taken_up_again(project):
    assert project.run("audit", FAKE_VENV="fail").returncode == 3
    assert project.run("audit").returncode == 0


@pytest.mark.parametrize("name", ["pyproject.toml", "scripts/constraints-cpu.txt"])
def test_changed_pins_are_installed(project, name):
    project.run("audit")
    with (project.root / name).open("a") as file:
        file.write("# changed\n")
    project.run("audit")
    assert len(project.pip_calls) == 2


def test_pins_changed_and_changed_back_are_installed_after_an_interruption(project):
    project.run("audit")
    before = project.pins.read_text()
    project.pins.write_text("torch==2\n")
    project.run("audit", FAKE_PIP="kill")
    project.pins.write_text(before)
    project.run("audit")
    assert len(project.pip_calls) == 3


def test_an_environment_of_another_checkout_is_installed_anew(project, tmp_path):
    project.run("audit", PLACEMENT_AUDIT_VENV=tmp_path / "shared")
    (tmp_path / "second").mkdir()
    shutil.copytree(project.root, tmp_path / "second" / "clone")
    project.script = tmp_path / "second" / "clone" / "scripts" / "run.py"
    project.run("audit", PLACEMENT_AUDIT_VENV=tmp_path / "shared")
    assert project.pip_calls[1][-1] == f"{tmp_path / 'second' / 'clone'}[test]"


def test_a_test_run_adds_the_lint_tools_and_an_audit_keeps_them(project):
    for command in ("audit", "test", "audit", "lint"):
        assert project.run(command).returncode == 0
    assert [call[-1] for call in project.pip_calls] == [f"{project.root}[test]", f"{project.root}[lint,test]"]


def test_another_sort_of_torch_makes_the_environment_anew(project):
    project.run("audit")
    leftover = project.venv / "lib" / "torch"
    leftover.mkdir(parents=True)
    executable(project.bin / "nvidia-smi", f"#!/bin/sh\n{GPU}\n")
    assert project.run("audit").returncode == 0
    assert not leftover.exists()


def test_an_environment_that_was_there_before_is_never_emptied(project):
    subprocess.run([sys.executable, "-m", "venv", str(project.venv)], env=project.env, check=True, timeout=60)
    theirs = project.venv / "theirs"
    theirs.touch()
    project.run("audit")
    executable(project.bin / "nvidia-smi", f"#!/bin/sh\n{GPU}\n")
    project.run("audit")
    assert len(project.pip_calls) == 2
    assert theirs.exists()


def test_a_folder_that_is_no_environment_is_refused(project):
    theirs = project.elsewhere / "notes"
    theirs.touch()
    done = project.run("audit", PLACEMENT_AUDIT_VENV=project.elsewhere)
    assert done.returncode == 2
    assert "neither empty nor a virtual environment" in done.stderr
    assert theirs.exists()
    assert project.calls == []


# --------------------------------------------------------------------------- two runs at once


def test_a_second_run_waits_for_the_first_and_installs_nothing(project):
    first = project.start("audit", FAKE_PIP="hold")
    wait_for(project.home / "holding")
    second = project.start("audit")
    said = second.stderr.readline()
    assert "waiting for it" in said
    (project.home / "let go").touch()
    assert [run.wait(60) for run in (first, second)] == [0, 0]
    assert len(project.pip_calls) == 1
    for run in (first, second):
        run.stderr.close()


def test_a_finished_environment_needs_no_lock(project):
    project.run("audit")
    with (project.venv / ".placement-audit.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = project.run("audit")
    assert done.returncode == 0
    assert done.stderr == ""


def test_pip_keeps_the_lock_where_its_run_is_killed(project):
    first = project.start("audit", FAKE_PIP="hold")
    wait_for(project.home / "holding")
    first.kill()
    first.wait(60)
    second = project.start("audit")
    assert "waiting for it" in second.stderr.readline()
    (project.home / "let go").touch()
    assert second.wait(60) == 0
    for run in (first, second):
        run.stderr.close()


# --------------------------------------------------------------------------- the program that is run


@pytest.mark.parametrize(("command", "module"), [("audit", "placement_audit"), ("test", "pytest")])
def test_arguments_pass_unchanged(project, command, module):
    arguments = ["--config", "a b.toml", "", "-h", "--", "--training.steps=1"]
    project.run(command, *arguments)
    assert project.program_calls == [["-m", module, *arguments]]


@pytest.mark.parametrize("status", [0, 1, 3, 5])
@pytest.mark.parametrize("command", ["audit", "test"])
def test_the_exit_status_passes_unchanged(project, command, status):
    assert project.run(command, "x", FAKE_FAILS="x", FAKE_STATUS=status).returncode == status


def test_a_signal_reaches_the_shell_as_128_and_its_number(project):
    project.env["FAKE_SIGNAL"] = str(int(signal.SIGTERM))
    shell = ["/bin/sh", "-c", f'{shlex.join(project.command("audit"))}; exit "$?"']
    assert subprocess.run(shell, env=project.env, capture_output=True, timeout=60).returncode == 128 + 15


def test_an_audit_runs_where_the_user_is_and_tests_run_in_the_project(project):
    project.run("audit")
    project.run("test")
    folders = [call["cwd"] for call in project.calls if call["args"][1] != "pip"]
    assert folders == [str(project.elsewhere), str(project.root)]


def test_stdout_belongs_to_the_program(project):
    done = project.run("audit")
    assert done.stdout == "program talks\n"
    assert "pip talks" in done.stderr


def test_lint_runs_every_check_and_returns_the_first_failure(project):
    done = project.run("lint", FAKE_FAILS="format", FAKE_STATUS=4)
    assert done.returncode == 4
    checks = [args[1] for args in project.program_calls]
    assert checks[:3] == ["ruff", "ruff", "pyrefly"]
    assert "importlinter" in checks[3]


def test_lint_types_against_the_environment_it_runs_in(project):
    project.run("lint")
    pyrefly = next(args for args in project.program_calls if "pyrefly" in args)
    assert pyrefly[-2:] == ["--python-interpreter-path", str(project.venv / "bin" / "python")]


# --------------------------------------------------------------------------- an interpreter that is given


def test_a_given_interpreter_is_used_as_it_is(project):
    done = project.run("audit", "x", PLACEMENT_AUDIT_PYTHON=project.python, FAKE_FAILS="x", FAKE_STATUS=1)
    assert done.returncode == 1
    assert [call["args"] for call in project.calls] == [["-m", "placement_audit", "x"]]
    assert project.calls[0]["pythonpath"] == [str(project.root), project.env["PYTHONPATH"]]
    assert not project.venv.exists()


def test_a_given_interpreter_may_be_relative_to_where_the_user_is(project):
    done = project.run("test", PLACEMENT_AUDIT_PYTHON=os.path.relpath(project.python, project.elsewhere))
    assert done.returncode == 0, done.stderr


def test_a_given_interpreter_is_not_followed_out_of_its_environment(project):
    link = project.elsewhere / "python"
    link.symlink_to(project.python)
    executable(project.python, f'#!/bin/sh\necho "$0" > {shlex.quote(str(project.home / "name"))}\n')
    project.run("audit", PLACEMENT_AUDIT_PYTHON=link)
    assert (project.home / "name").read_text().strip() == str(link)


def test_a_given_interpreter_that_is_not_there_is_a_mistake(project):
    done = project.run("audit", PLACEMENT_AUDIT_PYTHON="/no/python")
    assert done.returncode == 2
    assert "PLACEMENT_AUDIT_PYTHON=/no/python" in done.stderr


# --------------------------------------------------------------------------- what it says when it cannot


@pytest.mark.parametrize(
    ("args", "words"),
    [
        pytest.param([], "no command", id="nothing"),
        pytest.param(["adit"], "unknown command 'adit'", id="misspelt"),
        pytest.param(["lint", "--fix"], "lint takes no arguments", id="lint with arguments"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(project, args, words):
    done = project.run(*args)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert project.calls == []


def test_help_says_what_there_is(project):
    done = project.run("--help")
    assert done.returncode == 0
    for word in (
        "audit",
        "test",
        "lint",
        "PLACEMENT_AUDIT_VENV",
        "PLACEMENT_AUDIT_PYTHON",
        "TORCH_INDEX_URL",
    ):
        assert word in done.stdout


def test_an_old_python_is_told_in_one_line(project):
    old = (
        "import runpy, sys; sys.version_info = (3, 10, 0); sys.version = '3.10.0 (old)'; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", old, str(project.script), "audit"],
        env=project.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "run.py: Python 3.11 or newer is needed, this is 3.10.0: try python3.11\n"
    assert not project.venv.exists()


def test_a_failing_pip_is_told_with_its_command_and_no_password(project):
    done = project.run("audit", FAKE_PIP="fail", TORCH_INDEX_URL="https://me:secret@index/whl/cpu")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 3
    assert "exit status 7" in last
    assert "-m pip install" in last
    assert "secret" not in done.stderr


def test_a_missing_venv_module_is_told_with_what_to_install(project):
    done = project.run("audit", FAKE_VENV="fail")
    assert done.returncode == 3
    assert "python3-venv" in done.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_made_is_told_in_one_line(project):
    done = project.run("audit", PLACEMENT_AUDIT_VENV=project.pins / "venv")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "constraints-cpu.txt" in done.stderr
