"""The commands that need no job: they import no torch, and say what they should."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from placement_audit import cli, output
from placement_audit.errors import UsageError

pytestmark = pytest.mark.unit

PROBE = """\
import sys
from placement_audit.cli import main
status = main(sys.argv[1:])
names = {m.partition(".")[0] for m in sys.modules}
heavy = sorted(names & {"torch", "torchtitan", "triton", "numpy", "tyro"})
print(f"status {status} heavy {heavy}", file=sys.stderr)
"""


ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # a checkout need not be installed


def words_of(value: object) -> str | None:
    """A test id from a command line."""
    return (" ".join(value) or "nothing") if isinstance(value, list) else None


def ran(command: list[str], cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=ENV)


def called(capsys, *args: str) -> tuple[int, str, str]:
    status = cli.main(list(args))
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["--help"], 0),
        (["explain", "--help"], 0),
        (["--version"], 0),
        (["rules"], 0),
        (["explain", "PA201"], 0),
        (["explain", "lost-reduction"], 0),
        (["report", "none.json"], 2),
        (["diff", "none.json", "none.json"], 2),
        (["baseline", "--report", "none.json", "--write", "b.json"], 2),
        (["report", "none.json", "--baseline", "none.json"], 2),
        (["--config", "none.toml"], 2),
        ([], 2),
    ],
    ids=words_of,
)
def test_no_heavy_import(args, status, tmp_path):
    done = ran([sys.executable, "-c", PROBE, *args], cwd=str(tmp_path))
    assert done.stderr.splitlines()[-1] == f"status {status} heavy []", done.stderr


def test_version_names_everything_that_matters(capsys):
    status, out, _ = called(capsys, "--version")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        "placement-audit",
        "python",
        "torch",
        "torchtitan",
        "triton",
    ]


def test_help_has_the_exit_statuses_and_examples(capsys):
    status, out, _ = called(capsys, "--help")
    assert status == 0
    assert "3  the audit did not complete" in out
    assert "placement-audit --config configs/fsdp_tp.toml" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "the following arguments are required: --config"),
        (["audi"], "unknown action 'audi'. Did you mean 'audit'?"),
        (
            ["--config", "a.toml", "--world-size", "0"],
            "--world-size: expected a whole number, 1 or more; got '0'",
        ),
        (
            ["--config", "a.toml", "--timeout", "nan"],
            "--timeout: expected a number of seconds, more than 0; got 'nan'",
        ),
        (["--config", "a.toml", "--form", "json"], "unrecognized arguments: --form"),
        (["--config", "a.toml", "--format", "xml"], "invalid choice: 'xml'"),
        (["--config", "a.toml", "stray"], "unexpected 'stray'; torchtitan overrides go after --."),
        (["rules", "--", "--model.flavor", "8B"], "rules takes no torchtitan overrides."),
        (["explain", "PA999"], "There is no rule 'PA999'"),
        (
            ["explain", "norm.weight"],
            "say of which job: --config FILE, --run FILE.py:FUNCTION or --report SAVED",
        ),
        (["explain", "norm.weight", "--config", "a", "--report", "b"], "takes one of --config, --run"),
        (["explain", "norm.weight", "--run", "a.py:b", "--report", "b"], "takes one of --config, --run"),
        (["explain", "norm.weight", "--run", "no.py:build"], "no.py: cannot be read"),
        (["report", "none.json"], "none.json: no such file"),
    ],
    ids=words_of,
)
def test_usage_errors_are_one_message(capsys, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    status, out, err = called(capsys, *args)
    assert status == 2
    assert words in err
    assert out == ""
    assert "Traceback" not in err
    assert err.count("error:") == 1


def test_a_saved_report_that_is_none_is_named(capsys, tmp_path):
    path = tmp_path / "saved.json"
    path.write_text("{")
    status, _, err = called(capsys, "report", str(path))
    assert status == 2
    assert str(path) in err


def test_an_error_of_ours_is_status_3_and_says_whose_fault(capsys, monkeypatch):
    def broken(_args, _talk):
        raise ZeroDivisionError("oops")

    monkeypatch.setitem(cli._ACTIONS, "rules", broken)
    status, _, err = called(capsys, "rules")
    assert status == 3
    assert "placement-audit itself failed: ZeroDivisionError: oops" in err
    assert "Traceback" not in err


def test_interrupt_is_130(monkeypatch):
    def interrupted(_args, _talk):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._ACTIONS, "rules", interrupted)
    assert cli.main(["rules"]) == 130


def test_a_reader_who_leaves_is_no_error():
    command = f"{sys.executable} -m placement_audit rules | true"
    script = f"set -o pipefail; {command}; echo status $?"
    done = ran(["bash", "-c", script])
    assert done.stdout == "status 0\n"
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_standard_output_on_a_full_disk():
    script = f"{sys.executable} -m placement_audit rules > /dev/full; echo status $?"
    done = ran(["bash", "-c", script])
    assert done.stdout == "status 2\n"
    assert (
        done.stderr
        == "placement-audit: error: standard output: cannot be written: No space left on device.\n"
    )


# --------------------------------------------------------------------------- the output file


def test_a_report_file_is_whole_and_readable_by_others(tmp_path):
    path = tmp_path / "report.txt"
    output.write_file(str(path), "whole\n")
    assert path.read_text() == "whole\n"
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_full_disk_leaves_the_old_report_and_no_half_one(tmp_path, monkeypatch):
    path = tmp_path / "report.txt"
    path.write_text("old\n")

    class Full:
        def __init__(self, handle, *_args, **_kwargs):
            self.handle = handle

        def __enter__(self):
            return self

        def __exit__(self, *_args):
            os.close(self.handle)

        def write(self, _text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output.os, "fdopen", Full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        output.write_file(str(path), "new\n")
    assert [p.name for p in tmp_path.iterdir()] == ["report.txt"]
    assert path.read_text() == "old\n"


def test_a_link_is_followed_not_replaced(tmp_path):
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old\n")
    link.symlink_to(target)
    output.write_file(str(link), "new\n")
    assert link.is_symlink()
    assert target.read_text() == "new\n"


def test_a_device_is_written_to_not_replaced():
    output.write_file(os.devnull, "text\n")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize(
    ("name", "words"), [("", "is a directory"), ("none/report.txt", "there is no folder")]
)
def test_a_target_that_cannot_be_is_refused_early(tmp_path, name, words):
    with pytest.raises(UsageError, match=words):
        output.check_target(str(tmp_path / name))
