"""Edited copies run in place of files, which stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from placement_audit import overlay
from placement_audit.errors import UsageError

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PROBE = """\
import sys
from placement_audit import overlay
assert overlay.install()
import linecache, inspect
{load}
print(m.value(), m.__file__, inspect.getsource(m.value).strip().splitlines()[-1].strip())
linecache.checkcache()
try:
    m.fail()
except RuntimeError as error:
    import traceback
    print(traceback.format_exc().splitlines()[-2].strip())
"""
OLD = "def value():\n    return 'old'\n\n\ndef fail():\n    raise RuntimeError('old')\n"
NEW = "import os\n\n\ndef value():\n    return 'new'\n\n\ndef fail():\n    raise RuntimeError('new')\n"


def probed(folder: Path, copies: Path, load: str = "import mod as m") -> list[str]:
    environ = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", overlay.VARIABLE: str(copies)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(load=load)],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(the user's, the copies')."""
    user, copies = tmp_path / "user", tmp_path / "copies"
    user.mkdir()
    copies.mkdir()
    (user / "mod.py").write_text(OLD)
    return user, copies


def test_the_copy_runs_and_is_what_tracebacks_show(folders: tuple[Path, Path]) -> None:
    user, copies = folders
    overlay.write(copies, {user / "mod.py": (OLD.encode(), NEW.encode())})
    assert probed(user, copies) == [f"new {user}/mod.py return 'new'", "raise RuntimeError('new')"]


def test_bytecode_of_the_file_is_neither_read_nor_written(folders: tuple[Path, Path]) -> None:
    user, copies = folders
    run = [sys.executable, "-c", "import mod; print(mod.value())"]
    environ = {**os.environ, "PYTHONPATH": str(user)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(run, env=environ, check=True, capture_output=True)
    cached = {p: p.read_bytes() for p in user.rglob("*.pyc")}
    assert cached
    overlay.write(copies, {user / "mod.py": (OLD.encode(), NEW.encode())})
    assert probed(user, copies)[0].startswith("new")
    assert {p: p.read_bytes() for p in user.rglob("*.pyc")} == cached
    assert subprocess.run(run, env=environ, capture_output=True, text=True).stdout == "old\n"


def test_a_module_of_a_package(folders: tuple[Path, Path]) -> None:
    user, copies = folders
    (user / "pack").mkdir()
    for name in ("__init__", "inner"):
        (user / "pack" / f"{name}.py").write_text(OLD)
    overlay.write(copies, {user / "pack" / "inner.py": (OLD.encode(), NEW.encode())})
    assert probed(user, copies, "import pack.inner as m")[0].startswith("new")
    assert probed(user, copies, "import pack as m")[0].startswith("old")


def test_a_file_behind_a_symlink(folders: tuple[Path, Path], tmp_path: Path) -> None:
    user, copies = folders
    (tmp_path / "link").symlink_to(user)
    overlay.write(copies, {user / "mod.py": (OLD.encode(), NEW.encode())})
    assert probed(tmp_path / "link", copies)[0].startswith("new")


def test_a_file_loaded_by_its_path(folders: tuple[Path, Path]) -> None:
    user, copies = folders
    overlay.write(copies, {user / "mod.py": (OLD.encode(), NEW.encode())})
    load = (
        "import importlib.util as u\n"
        f"s = u.spec_from_file_location('other', {str(user / 'mod.py')!r})\n"
        "m = u.module_from_spec(s)\ns.loader.exec_module(m)"
    )
    assert probed(user, copies, load)[0].startswith("new")


def test_nothing_is_asked_for() -> None:
    before = SourceFileLoader.get_code
    assert overlay.install({}) is False
    assert SourceFileLoader.get_code is before


def test_a_file_that_changed_since(folders: tuple[Path, Path]) -> None:
    user, copies = folders
    overlay.write(copies, {user / "mod.py": (OLD.encode(), NEW.encode())})
    (user / "mod.py").write_text(OLD + "\n")
    with pytest.raises(UsageError, match=r"mod\.py: changed while an edit of it was being proven"):
        overlay.install({overlay.VARIABLE: str(copies)})


@pytest.mark.parametrize("text", [None, "{", "[{}]", "[1]"])
def test_no_overlay_there(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "overlay.json").write_text(text)
    with pytest.raises(UsageError, match="no overlay that can be read"):
        overlay.install({overlay.VARIABLE: str(tmp_path)})
