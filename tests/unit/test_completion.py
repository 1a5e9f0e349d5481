"""The completion scripts, as a shell runs them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from placement_audit import arguments, cli
from placement_audit.formats import FORMATS

pytestmark = pytest.mark.unit

ASK = """\
source script.bash
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMPREPLY=()
_shtab_placement_audit
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(capsys, shell: str) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (["ba"], {"baseline"}),
        ([""], set(arguments.ACTIONS)),
        (["--basel"], {"--baseline"}),
        (["audit", "--fix"], {"--fix", "--fix-dry-run"}),
        (["diff", "--color", ""], {"auto", "always", "never"}),
        (["diff", "--format", "j"], {"json"}),
        (["audit", "--format", "ht"], {"html"}),
        (["--format", ""], set(FORMATS)),
        (["completion", ""], {"bash", "fish", "zsh"}),
        (["report", "sav"], {"saved.json"}),
        (["--config", "sav"], {"saved.json"}),
        (["audit", "--log-dir", "fol"], {"folder"}),
        (["diff", "saved.json", "sav"], {"saved.json"}),
    ],
    ids=lambda words: " ".join(sorted(words) if isinstance(words, set) else words),
)
def test_bash(capsys, tmp_path, typed, wanted):
    (tmp_path / "script.bash").write_text(script(capsys, "bash"))
    (tmp_path / "saved.json").write_text("")
    (tmp_path / "folder").mkdir()
    command = ["bash", "--norc", "-c", ASK, "bash", "placement-audit", *typed]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == ""
    assert set(done.stdout.split()) == wanted


@pytest.mark.parametrize(("shell", "start"), [("zsh", "#compdef placement-audit"), ("fish", "# AUTO")])
def test_the_others_know_every_command(capsys, shell, start):
    text = script(capsys, shell)
    assert text.startswith(start)
    for action in arguments.ACTIONS:
        assert action in text
    assert "set two saved reports side by side" in text
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=text, text=True, check=True)


def test_another_shell_is_refused(capsys):
    assert cli.main(["completion", "tcl"]) == 2
    assert "invalid choice: 'tcl'" in capsys.readouterr().err


def test_no_torch_for_it():
    code = (
        "import sys; from placement_audit.cli import main; status = main(['completion', 'zsh'])\n"
        "assert status == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
