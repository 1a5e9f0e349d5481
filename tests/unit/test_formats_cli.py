"""Several formats from one run: `--format FORMAT[:FILE]`, files whole or not at all, and what lies in the checkout."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import make_report as m
import pytest
from hostile import hostile_report

from placement_audit import cli, output
from placement_audit.errors import UsageError
from placement_audit.formats import FORMATS, Target, parse_target
from placement_audit.model import CallSite
from placement_audit.report import render
from placement_audit.report.json_io import dumps
from placement_audit.worktree import Worktree

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved.json").write_text(dumps(m.mixed_report()))
    return "saved.json"


def called(capsys, *args: str) -> tuple[int, str, str]:
    status = cli.main(list(args))
    out, err = capsys.readouterr()
    return status, out, err


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} - {"saved.json"}


# --------------------------------------------------------------------------- several formats


def test_all_formats_of_one_run(saved: str, capsys, tmp_path: Path) -> None:
    asked = [a for f in FORMATS[1:] for a in ("--format", f"{f}:out.{f}")]
    status, out, err = called(capsys, "report", saved, "--format", "text", *asked)
    assert (status, err) == (1, "")
    assert out == render(m.mixed_report(), "text")
    for f in FORMATS[1:]:
        assert (tmp_path / f"out.{f}").read_text(encoding="utf-8") == render(m.mixed_report(), f), f
    assert files(tmp_path) == {f"out.{f}" for f in FORMATS[1:]}


def test_nothing_on_standard_output_where_all_have_files(saved: str, capsys) -> None:
    assert called(capsys, "report", saved, "--format", "html:x.html") == (1, "", "")


def test_the_default_is_text(saved: str, capsys) -> None:
    assert called(capsys, "report", saved)[1] == render(m.mixed_report(), "text")


def test_output_file_is_for_the_format_without_one(saved: str, capsys, tmp_path: Path) -> None:
    args = ("--format", "junit:x.xml", "--format", "github", "--output-file", "notes")
    assert called(capsys, "report", saved, *args) == (1, "", "")
    assert (tmp_path / "notes").read_text() == render(m.mixed_report(), "github")
    assert (tmp_path / "x.xml").read_text() == render(m.mixed_report(), "junit")


def test_quiet_drops_the_text_of_nothing_only(capsys, tmp_path: Path) -> None:
    (tmp_path / "clean.json").write_text(dumps(m.stock_report(layers=1)))
    args = ("report", str(tmp_path / "clean.json"), "--quiet")
    assert called(capsys, *args)[1] == ""
    assert called(capsys, *args, "--format", "github")[1].startswith("::notice ")
    file = tmp_path / "clean.txt"
    assert called(capsys, *args, "--format", f"text:{file}")[1] == ""
    assert file.read_text().splitlines()[-1].startswith("clean: ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--format", "xml"], "argument --format: invalid choice: 'xml' (choose from text, json, sarif,"),
        (["--format", "html:"], "expected a file after the colon of 'html:', or html alone"),
        (
            ["--format", "html", "--format", "text"],
            "html and text are all for standard output, which takes one",
        ),
        (
            ["--format", "html", "--format", "text", "--output-file", "x"],
            "html and text are all for --output-file, which takes one; give the others a file, such as "
            "--format text:FILE.",
        ),
        (["--format", "html:x", "--output-file", "y"], "every --format has a file of its own"),
        (["--format", "html:x", "--format", "text:./x"], "two reports for one file"),
        (["--format", "html:x", "--format", "text", "--output-file", "x"], "two reports for one file"),
        (["--format", "html:none/x"], "none/x: there is no folder"),
        (["--format", "text", "--format", "html:."], ".: is a directory"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_cannot_be_is_one_message(
    saved: str, capsys, tmp_path: Path, args: list[str], words: str
) -> None:
    status, out, err = called(capsys, "report", saved, *args)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("error:") == 1
    assert files(tmp_path) == set()


def test_it_is_said_before_the_audit(capsys, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("not toml")
    status, _, err = called(capsys, "--config", str(job), "--format", "html:/none/x.html")
    assert status == 2
    assert "/none/x.html: there is no folder /none" in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("html", Target("html")),
        ("html:a:b.html", Target("html", "a:b.html")),
        ("sarif:/x/y", Target("sarif", "/x/y")),
    ],
)
def test_targets(text: str, expected: Target) -> None:
    assert parse_target(text) == expected


def test_no_torch_for_any_format(saved: str, tmp_path: Path) -> None:
    asked = [a for f in FORMATS for a in ("--format", f"{f}:out.{f}")]
    script = (
        "import sys; from placement_audit.cli import main; status = main(sys.argv[1:]); "
        "print(status, sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'torchtitan', 'numpy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "report", saved, *asked],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stdout == "1 []\n", done.stderr


# --------------------------------------------------------------------------- all or nothing


def test_a_file_that_cannot_be_written_leaves_all_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(UsageError, match="none/b: cannot be written: No such file or directory"):
        output.write_files([(str(tmp_path / "a"), "new"), (str(tmp_path / "none" / "b"), "new")])
    assert (tmp_path / "a").read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"a"}


def test_all_are_written(tmp_path: Path) -> None:
    output.write_files([(str(tmp_path / n), n) for n in ("a", "b")])
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "a", "b": "b"}


def reported(*args: str, environ: dict[str, str], limit: int | None = None, out: Path) -> tuple[int, str]:
    """A report written to a file as standard output, which may not grow beyond ``limit``: (status, errors)."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    with out.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "placement_audit", "report", *args],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environ},
            preexec_fn=limited,
            check=False,
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_standard_output_that_takes_a_part_only_is_an_error(
    saved: str, tmp_path: Path, unbuffered: str
) -> None:
    status, err = reported(
        saved, environ={"PYTHONUNBUFFERED": unbuffered}, limit=1024, out=tmp_path / "out.txt"
    )
    assert (status, err) == (
        2,
        "placement-audit: error: standard output: cannot be written: File too large.\n",
    )


def test_documents_are_utf_8_and_text_is_as_the_terminal_wants_it(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text(dumps(hostile_report()))
    asked = {f: render(hostile_report(), f, width=200) for f in ("html", "junit", "markdown", "text")}
    assert not any(text.isascii() for text in asked.values())
    for f, text in asked.items():
        out = tmp_path / f
        status, err = reported(
            str(tmp_path / "h.json"), "--format", f, environ={"PYTHONIOENCODING": "ascii"}, out=out
        )
        assert (status, err) == (1, ""), f
        expected = text.encode("ascii", "backslashreplace") if f == "text" else text.encode()
        assert out.read_bytes() == expected, f


# --------------------------------------------------------------------------- the checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Worktree:
    for name in (".git/x", "train/model.py", "titan/torchtitan/a.py", ".venv/lib/site-packages/torch/b.py"):
        (tmp_path / "repo" / name).parent.mkdir(parents=True)
        (tmp_path / "repo" / name).touch()
    (tmp_path / "outside.py").touch()
    repo = tmp_path / "repo"
    return Worktree(repo, (repo / "train", repo / "titan", repo / ".venv/lib/site-packages", tmp_path))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.py", "train/model.py"),
        ("torchtitan/a.py", "titan/torchtitan/a.py"),
        ("torch/b.py", None),
        ("outside.py", None),
        ("../outside.py", None),
        ("nowhere.py", "nowhere.py"),
        ("../nowhere.py", None),
        ("/nowhere.py", None),
        ("<unknown>", None),
    ],
)
def test_what_lies_in_the_checkout(checkout: Worktree, path: str, expected: str | None) -> None:
    assert checkout.inside(CallSite(path=path, line=1, function="f")) == expected


def test_what_is_nowhere_and_of_a_package_is_not_ours(checkout: Worktree) -> None:
    assert checkout.inside(CallSite(path="torch/c.py", line=1, function="f", package="torch")) is None


def test_the_checkout_is_found_from_below(checkout: Worktree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout.root / "train")
    here = Worktree.here()
    assert here.root == checkout.root
    assert here.inside(CallSite(path="model.py", line=1, function="f")) == "train/model.py"


def test_annotations_point_into_the_checkout(saved: str, capsys, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "job" / "my_model").mkdir(parents=True)
    (tmp_path / "job" / "my_model" / "norm.py").touch()
    os.chdir(tmp_path / "job")
    _, out, _ = called(
        capsys, "report", str(tmp_path / saved), "--format", "github", "--format", "sarif:s.json"
    )
    assert out.startswith("::error file=job/my_model/norm.py,line=31,")
    sarif = json.loads((tmp_path / "job" / "s.json").read_text())
    (uri,) = {
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        for r in sarif["runs"][0]["results"]
        if r["ruleId"] == "PA201"
    }
    assert uri == "job/my_model/norm.py"
