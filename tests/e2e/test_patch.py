"""``placement-audit patch`` on torchtitan's releases, as users type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from titan_copy import PR_2532  # type: ignore[import-not-found]

from placement_audit import cli
from tests.releases import Unreachable, release

pytestmark = pytest.mark.e2e

REPO = Path(__file__).parents[2]
FILES = {
    "0.1.0": "torchtitan/experiments/simple_fsdp/simple_fsdp.py",
    "0.2.0": "torchtitan/experiments/simple_fsdp/simple_fsdp.py",
    "0.2.1": "torchtitan/experiments/simple_fsdp/simple_fsdp.py",
    "0.2.2": "torchtitan/experiments/simple_fsdp/simple_fsdp.py",
    "0.3.0": "torchtitan/experiments/graph_trainer/simple_fsdp.py",
}
CACHES = {"0.3.0": "not applied"}
OTHERS_EDIT = ("class MixedPrecisionPolicy:", "class MixedPrecisionPolicy:  # ours")


def unpacked(version: str, folder: Path) -> Path:
    try:
        return release(version, folder)
    except Unreachable as why:
        pytest.skip(str(why))


@pytest.fixture(params=list(FILES))
def titan(request, tmp_path):
    """A release; returns its folder and the file in it."""
    root = unpacked(request.param, tmp_path / "site")
    return root, root / FILES[request.param], request.param


@pytest.fixture
def one(tmp_path):
    """One release, where any will do."""
    root = unpacked("0.2.1", tmp_path / "site")
    return root, root / FILES["0.2.1"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist tells its workers that lines have 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)


def patch(capsys, root: Path, *args: str, expect: int = 0) -> str:
    """Run the command here; its output, having checked the status and that errors are errors."""
    capsys.readouterr()
    status = cli.main(["patch", "--torchtitan", str(root), *args])
    out, err = capsys.readouterr()
    assert status == expect, out + err
    assert "Traceback" not in err
    if out:
        assert err == ""
        return out
    assert err == "" or (err.startswith("placement-audit: error: ") and expect == 2)
    return err


def states(capsys, root: Path, *args: str, expect: int = 0) -> dict[str, str]:
    said = json.loads(patch(capsys, root, "--format", "json", *args, expect=expect))
    (file,) = said["files"]
    return {part["name"]: part["state"] for part in file["parts"]}


def edit(path: Path, *edits: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def git(folder: Path, *args: str, data: bytes | None = None) -> bytes:
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "core.autocrlf=false"]
    return subprocess.run(
        ["git", "-C", folder, *who, *args], check=True, capture_output=True, input=data
    ).stdout


def commit(root: Path) -> None:
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "m")


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and ".git" not in p.parts
    }


# --------------------------------------------------------------------------- every release


@pytest.mark.parametrize("form", [(), ("--deferred",)])
def test_there_and_back(titan, form, capsys):
    root, path, version = titan
    start = tree(root)
    before = {"replicate_compute": "not applied", "class cache": CACHES.get(version, "absent")}
    after = {"replicate_compute": "applied", "class cache": "applied" if version in CACHES else "absent"}
    assert states(capsys, root, *form, expect=1) == before
    shown = patch(capsys, root, *form, "--diff").encode()
    assert tree(root) == start, "looking changed something"

    said = patch(capsys, root, *form, "--apply")
    assert f"PYTHONPATH={root} placement-audit --config" in said
    assert f"placement-audit patch --torchtitan {root} --revert" in said
    assert states(capsys, root, *form) == after
    assert f"torchtitan {version}" in (checked := patch(capsys, root, *form))
    assert f"with the {'deferred' if form else 'reduced'} form" in checked, "the manifest does not know it"
    compile(path.read_bytes(), path, "exec")

    once = path.read_bytes()
    assert "nothing to do" in patch(capsys, root, *form, "--apply")
    assert path.read_bytes() == once
    assert patch(capsys, root, *form, "--diff") == ""

    patch(capsys, root, "--revert")
    assert tree(root) == start

    git(root, "init", "-q")
    git(root, "apply", data=shown)
    assert path.read_bytes() == once, "the diff gives something else"


def test_the_manifest_is_what_the_mend_makes(tmp_path):
    for version in FILES:
        unpacked(version, tmp_path / version)
    done = subprocess.run(
        [sys.executable, REPO / "scripts" / "manifest.py", "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_edits_elsewhere_do_not_matter(titan, capsys):
    root, path, _ = titan
    edit(path, OTHERS_EDIT)
    mine = path.read_bytes()
    assert "drifted" in patch(capsys, root, expect=1)
    assert "git does not have it" in patch(capsys, root, "--apply", expect=2)
    assert path.read_bytes() == mine
    commit(root)  # clean now
    patch(capsys, root, "--apply")
    assert b"class MixedPrecisionPolicy:  # ours" in path.read_bytes()
    assert states(capsys, root)["replicate_compute"] == "applied"
    patch(capsys, root, "--revert")
    assert path.read_bytes() == mine
    edit(path, ("frozen=True", "frozen=bool(1)"))
    assert "not committed" in patch(capsys, root, "--apply", expect=2)
    patch(capsys, root, "--apply", "--force")


def test_a_rewritten_method_is_refused(titan, capsys):
    root, path, _ = titan
    edit(path, ("sharded_local_tensor = x.to_local()", "sharded_local_tensor = x._local_tensor"))
    mine = path.read_bytes()
    assert "a to_local is expected" in patch(capsys, root, expect=2)
    for what in ("--apply", "--diff"):
        said = patch(capsys, root, what, "--force", expect=2)
        assert f"{path}:" in said
        assert "replicate_compute" in said
    assert path.read_bytes() == mine


def test_pr_2532_is_told_and_mended(titan, capsys):
    root, path, version = titan
    if version == "0.1.0":
        pytest.skip("the proposal was made for later releases")
    stock = path.read_bytes()
    edit(path, PR_2532)
    assert states(capsys, root, expect=1)["replicate_compute"] == "wrong"
    assert "PR 2532" in patch(capsys, root, expect=1)
    patch(capsys, root, "--apply", "--force")
    assert states(capsys, root)["replicate_compute"] == "applied"
    mended = path.read_bytes()
    path.write_bytes(stock)
    patch(capsys, root, "--apply")
    assert path.read_bytes() == mended


def test_from_form_to_form_and_back_to_the_start(titan, capsys):
    root, path, _ = titan
    stock = path.read_bytes()
    patch(capsys, root, "--deferred", "--apply")
    deferred = path.read_bytes()
    assert states(capsys, root, expect=1)["replicate_compute"] == "other form"
    patch(capsys, root, "--apply")
    patch(capsys, root, "--deferred", "--apply")
    assert path.read_bytes() == deferred
    patch(capsys, root, "--revert")
    assert path.read_bytes() == stock


def test_the_method_without_its_full_dtensor_branch(titan, capsys):
    """torchtitan's main of August 2026, where the branch is gone again."""
    root, path, version = titan
    if version not in ("0.2.1", "0.2.2", "0.3.0"):
        pytest.skip("has no such branch")
    raised = (
        "            if self.full_dtensor:\n                raise NotImplementedError(\n"
        '                    "full_dtensor not implemented for nD parallelisms"\n                )\n'
    )
    edit(
        path,
        (raised, ""),
        (
            "            if not self.full_dtensor:\n                output = output.to_local",
            "            output = output.to_local",
        ),
        ("        self.full_dtensor = full_dtensor\n", ""),
    )
    commit(root)
    patch(capsys, root, "--apply")
    assert states(capsys, root)["replicate_compute"] == "applied"
    assert b"full_dtensor,\n        tuple" not in path.read_bytes()


# --------------------------------------------------------------------------- files as they come


@pytest.mark.parametrize("kind", ["crlf", "bom", "no newline", "latin-1"])
def test_bytes_as_they_come(kind, one, capsys):
    root, path = one
    data = path.read_bytes()
    data = {
        "crlf": data.replace(b"\n", b"\r\n"),
        "bom": b"\xef\xbb\xbf" + data,
        "no newline": data.rstrip(b"\n"),
        "latin-1": b"# -*- coding: latin-1 -*-\n# \xe9\n" + data,
    }[kind]
    path.write_bytes(data)
    path.chmod(0o640)
    commit(root)
    shown = subprocess.run(
        [sys.executable, "-m", "placement_audit", "patch", "--torchtitan", root, "--diff"],
        check=True,
        capture_output=True,
        cwd=REPO,
    ).stdout
    patch(capsys, root, "--apply")
    mended = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o640
    compile(mended, path, "exec")
    if kind == "crlf":
        assert mended.count(b"\n") == mended.count(b"\r\n") > data.count(b"\n")
    assert mended.startswith(data[:40])
    patch(capsys, root, "--revert")
    assert path.read_bytes() == data
    git(root, "apply", data=shown)
    assert path.read_bytes() == mended


@pytest.mark.parametrize("where", ["torchtitan", "src"])
def test_other_ways_to_name_it(where, one, capsys, tmp_path, monkeypatch):
    root, _ = one
    if where == "src":
        (tmp_path / "checkout").mkdir()
        root = root.rename(tmp_path / "checkout" / "src").parent
        named = root
    else:
        named = root / "torchtitan"
    patch(capsys, named, "--apply")
    monkeypatch.chdir(named)
    assert states(capsys, Path())["replicate_compute"] == "applied"
    patch(capsys, Path(), "--revert")


def test_found_by_structure_where_it_has_moved(one, capsys):
    root, path = one
    path.rename(root / "torchtitan" / "wrapper.py")
    assert "torchtitan/wrapper.py" in patch(capsys, root, expect=1)


def test_installed(one, monkeypatch):
    """Found without being imported: torchtitan's own import takes seconds and needs torch."""
    root, _ = one
    (root / "torchtitan" / "__init__.py").write_text("raise SystemExit('imported')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(REPO)))}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "placement_audit", "patch"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert str(root) in done.stdout
    assert " torch\n" not in done.stderr
    assert "torchtitan.experiments" not in done.stderr


# --------------------------------------------------------------------------- errors


def test_no_torchtitan(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow" / "torchtitan" / "experiments").mkdir(parents=True)
    for name, why in (
        ("nowhere", "there is no such directory"),
        ("file", "is not a directory"),
        ("empty", "no torchtitan there"),
        ("hollow", "has no SimpleFSDP"),
    ):
        for what in ("--check", "--diff", "--apply", "--revert"):
            said = patch(capsys, tmp_path / name, what, expect=2)
            assert why in said
            assert len(said.splitlines()) == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["patch"]) == 2
    assert "no torchtitan in this environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"def broken(:\n", "no Python that can be read"),
        (b"\xff\xfe", "cannot be decoded"),
        (b"a = 1\n", "no class here has a method"),
    ],
)
def test_files_that_are_no_good(data, why, one, capsys):
    root, path = one
    path.write_bytes(data)
    for what in ("--check", "--diff", "--apply"):
        said = patch(capsys, root, what, "--force", expect=2)
        assert why in " ".join(said.split())
    assert path.read_bytes() == data


def test_a_symlink_out_of_the_checkout(one, capsys, tmp_path):
    root, path = one
    outside = path.rename(tmp_path / "outside.py")
    path.symlink_to(outside)
    before = outside.read_bytes()
    for what in ("--check", "--apply", "--revert"):
        assert "a symlink out of" in patch(capsys, root, what, "--force", expect=2)
    assert outside.read_bytes() == before


def test_one_thing_at_a_time(one, capsys):
    root, _ = one
    assert cli.main(["patch", "--torchtitan", str(root), "--apply", "--revert"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_revert_of_what_was_edited_since(one, capsys):
    root, path = one
    assert "keeps no backup" in patch(capsys, root, "--revert", expect=2)
    patch(capsys, root, "--apply")
    edit(path, OTHERS_EDIT)
    mine = path.read_bytes()
    assert "edited since --apply" in patch(capsys, root, "--revert", expect=2)
    assert path.read_bytes() == mine
    said = patch(capsys, root, "--revert", "--force")
    (kept,) = [line.rsplit(" ", 1)[1] for line in said.splitlines() if line.startswith("kept")]
    assert Path(kept).read_bytes() == mine


def test_two_processes_at_once(one):
    root, path = one
    before = path.read_bytes()
    command = [sys.executable, "-m", "placement_audit", "patch", "--torchtitan", str(root), "--apply"]
    running = [
        subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    told = [process.communicate(timeout=200) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], told
    assert path.read_bytes() != before
    assert cli.main(["patch", "--torchtitan", str(root), "--revert"]) == 0
    assert path.read_bytes() == before
