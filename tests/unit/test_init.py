"""``placement-audit init``: shows, asks, writes whole files, and overwrites nothing."""

from __future__ import annotations

import ast
import io
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from placement_audit import cli
from placement_audit.commands import init
from placement_audit.config import load

pytestmark = pytest.mark.unit

JOB = "[model]\nname = 'llama3'\n[parallelism]\n[training]\n"
WORKFLOW = ".github/workflows/placement-audit.yml"
NAMES = {"placement_audit.toml", "tests/test_placement_audit.py", WORKFLOW}

Init = Callable[..., tuple[int, str, str]]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a.toml").write_text(JOB)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


@pytest.fixture
def called(repo: Path, capsys: pytest.CaptureFixture[str]) -> Init:
    def call(*words: str) -> tuple[int, str, str]:
        status = cli.main(["init", "--dir", str(repo), *words])
        return status, *capsys.readouterr()

    return call


def files(repo: Path) -> dict[str, str]:
    return {
        str(p.relative_to(repo)): p.read_text()
        for p in repo.rglob("*")
        if p.is_file() and p.name not in ("a.toml", "b.toml", "pyproject.toml")
    }


def test_without_yes_it_shows_all_and_writes_nothing(repo: Path, called: Init) -> None:
    status, out, _ = called()
    assert status == 0
    assert [p.name for p in repo.iterdir() if p.name not in ("jobs", "pyproject.toml")] == []
    for name in NAMES:
        assert f"--- {name}\n" in out
    assert 'job = "jobs/a.toml"\n' in out
    assert "  - uses: actions/checkout@" in out
    assert (
        f"nothing written; --yes writes placement_audit.toml, tests/test_placement_audit.py, {WORKFLOW}\n"
        in out
    )


def test_with_yes_it_writes_what_it_shows(repo: Path, called: Init) -> None:
    shown = called()[1]
    status, out, _ = called("--yes")
    assert status == 0
    written = files(repo)
    assert written.keys() == NAMES
    for name, text in written.items():
        assert f"--- {name}\n{text}\n" in shown
        assert f"wrote {name}\n" in out
        assert "@JOB@" not in text
    assert {oct(repo.joinpath(n).stat().st_mode & 0o777) for n in NAMES} == {"0o644"}


def test_what_is_written_is_valid(repo: Path, called: Init) -> None:
    called("--yes")
    config = load(str(repo / "placement_audit.toml"))
    assert config.job == tomllib.loads(JOB)
    tree = ast.parse((repo / "tests" / "test_placement_audit.py").read_text())
    assert [n.name for n in tree.body if isinstance(n, ast.FunctionDef)] == ["test_gradient_placements"]


def test_a_second_time_all_is_there(called: Init) -> None:
    called("--yes")
    status, out, _ = called("--yes")
    assert status == 0
    assert out.count(": already there\n") == 3
    assert "wrote" not in out


def test_what_is_there_is_never_overwritten(repo: Path, called: Init) -> None:
    (repo / WORKFLOW).parent.mkdir(parents=True)
    (repo / WORKFLOW).write_text("mine\n")
    status, out, _ = called("--yes")
    assert status == 1
    assert f"--- {WORKFLOW}: there with other content, not overwritten\n" in out
    assert f"left as they are: {WORKFLOW}\n" in out
    assert files(repo)[WORKFLOW] == "mine\n"
    assert files(repo).keys() == NAMES


def test_not_even_a_file_that_appears_meanwhile(
    repo: Path, called: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = init._place

    def late(target: Path, text: str) -> None:
        if target.name == "placement-audit.yml":
            target.write_text("mine\n")
        place(target, text)

    monkeypatch.setattr(init, "_place", late)
    status, _, error = called("--yes")
    assert status == 2
    assert "placement-audit.yml: cannot be written: File exists. Nothing was written." in error
    assert files(repo) == {WORKFLOW: "mine\n"}
    assert not (repo / "tests").exists()


def test_a_folder_in_the_way_leaves_nothing_half_written(repo: Path, called: Init) -> None:
    (repo / "tests").write_text("a file\n")
    status, _, error = called("--yes")
    assert status == 2
    assert "cannot be written" in error
    assert files(repo) == {"tests": "a file\n"}
    assert not (repo / ".github").exists()


@pytest.mark.parametrize(
    ("answer", "wrote"), [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_on_a_terminal_it_asks(
    repo: Path, called: Init, monkeypatch: pytest.MonkeyPatch, answer: str, wrote: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    status, out, _ = called()
    assert status == 0
    assert "write these 3 files? [y/N] " in out
    assert (files(repo).keys() == NAMES) is wrote


def test_several_job_files_are_named_not_guessed(repo: Path, called: Init) -> None:
    (repo / "b.toml").write_text(JOB)
    (repo / ".venv").mkdir()
    (repo / ".venv" / "a.toml").write_text(JOB)
    status, out, error = called("--yes")
    assert (status, out) == (2, "")
    assert "2 torchtitan job files in it: b.toml, jobs/a.toml. Say which to audit: --config FILE." in error
    status, out, _ = called("--config", str(repo / "b.toml"), "--yes")
    assert status == 0
    assert 'job = "b.toml"\n' in (repo / "placement_audit.toml").read_text()


def test_what_was_written_is_no_job_file(called: Init) -> None:
    called("--yes")
    assert called()[0] == 0


def test_no_job_file(repo: Path, called: Init) -> None:
    (repo / "jobs" / "a.toml").write_text("broken =\n")
    assert "no torchtitan job file (TOML) in it. Say where one is: --config FILE." in called()[2]
    status, _, error = called("--config", "none.toml")
    assert status == 2
    assert "--config none.toml: no such file; expected a torchtitan job file (TOML)." in error


def test_no_such_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--dir", str(tmp_path / "none")]) == 2
    assert "no such folder; give the root of your repository." in capsys.readouterr().err
