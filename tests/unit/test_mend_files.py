"""Source files in and out: whole or not at all, nothing lost, whatever happens meanwhile."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from placement_audit.errors import UsageError
from placement_audit.mend import backups, files
from placement_audit.mend.files import Change

pytestmark = pytest.mark.unit

OLD, NEW = b"one\n", b"two\nlines\n"


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "pkg" / "code.py"
    path.parent.mkdir()
    path.write_bytes(OLD)
    return path


def change(path: Path, after: bytes = NEW) -> Change:
    source = files.read(path, path.parents[1])
    return Change(path=source.path, shown=source.shown, before=source.data, after=after)


def left(path: Path) -> list[str]:
    """What lies in the file's folder."""
    return sorted(p.name for p in path.parent.iterdir())


def git(folder: Path, *args: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "-C", str(folder), *who, *args], check=True, capture_output=True)


# --------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        ("a = 'é'\r\n".encode(), "a = 'é'\r\n", "utf-8"),
        (b"\xef\xbb\xbfa = 1\n", "a = 1\n", "utf-8-sig"),
        (b"# -*- coding: latin-1 -*-\na = '\xe9'\n", "# -*- coding: latin-1 -*-\na = 'é'\n", "iso-8859-1"),
        (b"", "", "utf-8"),
    ],
)
def test_bytes_go_through_text_unchanged(target, data, text, encoding):
    target.write_bytes(data)
    source = files.read(target, target.parents[1])
    assert (source.text, source.encoding, str(source.shown)) == (text, encoding, "pkg/code.py")
    assert source.changed(source.text).after == data


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"a = '\xe9'\n", "cannot be decoded"),
        (b"# coding: nonesuch\n", "cannot be decoded"),
        (b"x" * 2**25, "no source file"),
    ],
)
def test_what_is_no_source(target, data, why):
    target.write_bytes(data)
    with pytest.raises(UsageError, match=why):
        files.read(target, target.parents[1])


def test_a_character_that_the_encoding_lacks(target):
    target.write_bytes(b"# coding: ascii\n")
    with pytest.raises(UsageError, match="cannot be written in ascii"):
        files.read(target, target.parents[1]).changed("é")


def test_symlinks(target, tmp_path):
    root = tmp_path / "pkg"
    (root / "inside.py").symlink_to("code.py")
    assert files.read(root / "inside.py", root).path == target.resolve()
    (tmp_path / "other.py").write_bytes(OLD)
    (root / "out.py").symlink_to(tmp_path / "other.py")
    (root / "round.py").symlink_to("round.py")
    (root / "gone.py").symlink_to("nowhere.py")
    for name, why in (
        ("out.py", "a symlink out of"),
        ("round.py", "cannot be read"),
        ("gone.py", "no such file"),
        ("../other.py", "outside|symlink"),
    ):
        with pytest.raises(UsageError, match=why):
            files.read(root / name, root)
    with pytest.raises(UsageError, match="not a regular file"):
        files.read(root, tmp_path)


# --------------------------------------------------------------------------- there and back


def test_there_and_back_leaves_nothing_behind(target):
    target.chmod(0o640)
    inode = target.stat().st_ino
    files.apply([change(target)])
    assert target.read_bytes() == NEW
    assert target.stat().st_mode & 0o7777 == 0o640
    assert target.stat().st_ino != inode, "the old file was written into"
    assert left(target) == [".placement-audit", "code.py"]
    backup = next((target.parent / ".placement-audit").glob("*.backup"))
    assert backup.read_bytes() == OLD
    assert backup.stat().st_mode & 0o7777 == 0o640
    files.revert(target)
    assert target.read_bytes() == OLD
    assert target.stat().st_mode & 0o7777 == 0o640
    assert left(target) == ["code.py"]


def test_edits_upon_edits_go_back_to_the_first(target):
    files.apply([change(target)])
    files.apply([change(target, b"three\n")])
    files.apply([change(target, NEW)])
    files.revert(target)
    assert target.read_bytes() == OLD
    assert left(target) == ["code.py"]


def test_nothing_to_do_does_nothing(target):
    files.apply([change(target, OLD)])
    assert left(target) == ["code.py"]


def test_git_ignores_the_backups(target):
    git(target.parents[1], "init", "-q")
    git(target.parents[1], "add", ".")
    git(target.parents[1], "commit", "-qm", "m")
    files.apply([change(target)])
    said = subprocess.run(
        ["git", "-C", target.parent, "status", "--porcelain"], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["M", "pkg/code.py"]


@pytest.mark.parametrize("edit", [b"two\nlines\nmine\n", b"mine\n"])
def test_edits_made_since_are_not_lost(target, edit):
    files.apply([change(target)])
    target.write_bytes(edit)
    with pytest.raises(UsageError, match="edited since --apply"):
        files.revert(target)
    assert target.read_bytes() == edit
    kept = files.revert(target, force=True)
    assert target.read_bytes() == OLD
    assert kept is not None
    assert kept.read_bytes() == edit
    assert kept.is_file(), "swept away with the backups"
    with pytest.raises(UsageError, match="nothing to revert"):
        files.revert(target)


def test_two_backups_and_an_edit_are_for_the_user_to_choose(target):
    files.apply([change(target)])
    target.write_bytes(b"mine\n")
    files.apply([change(target, b"mine, mended\n")])
    files.revert(target)
    assert target.read_bytes() == b"mine\n"
    files.apply([change(target, b"mine, mended\n")])
    target.write_bytes(b"mine again\n")
    for force in (False, True):
        with pytest.raises(UsageError, match="more than one state"):
            files.revert(target, force=force)
    assert target.read_bytes() == b"mine again\n"


def test_a_damaged_backup_is_not_put_back(target):
    files.apply([change(target)])
    next((target.parent / ".placement-audit").glob("*.backup")).write_bytes(b"rot\n")
    with pytest.raises(UsageError, match="damaged"):
        files.revert(target)
    assert target.read_bytes() == NEW


def test_nothing_to_revert(target):
    with pytest.raises(UsageError, match="keeps no backup"):
        files.revert(target)
    files.apply([change(target)])
    target.write_bytes(OLD)
    with pytest.raises(UsageError, match="as it was before"):
        files.revert(target)


# --------------------------------------------------------------------------- refused


def test_uncommitted_edits(target):
    root = target.parents[1]
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "m")
    files.apply([change(target)], known=())
    files.apply([change(target, b"again\n")], known=())  # ours is not an edit of the user's
    files.revert(target)
    target.write_bytes(b"mine\n")
    with pytest.raises(UsageError, match="not committed"):
        files.apply([change(target)], known=())
    assert target.read_bytes() == b"mine\n"
    git(root, "add", ".")
    with pytest.raises(UsageError, match="not committed"):
        files.apply([change(target)], known=())
    assert left(target) == ["code.py"]
    files.apply([change(target)], known=(), force=True)
    files.revert(target)
    assert target.read_bytes() == b"mine\n"


def test_a_hooks_environment_does_not_mislead(target, tmp_path, monkeypatch):
    root = target.parents[1]
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "m")
    target.write_bytes(b"mine\n")
    other = tmp_path / "elsewhere"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    with pytest.raises(UsageError, match="not committed"):
        files.apply([change(target)])


@pytest.mark.parametrize("checkout", [False, True])
def test_unknown_and_not_in_git(target, checkout):
    if checkout:
        git(target.parents[1], "init", "-q")
        (target.parents[1] / ".gitignore").write_text("pkg\n")
    with pytest.raises(UsageError, match="not the file of any release"):
        files.apply([change(target)], known={"0" * 64})
    files.apply([change(target)], known={backups.digest(OLD)})
    files.apply([change(target, b"again\n")], known=())


def test_git_that_cannot_say(target):
    (target.parents[1] / ".git").write_text("gitdir: nowhere\n")
    with pytest.raises(UsageError, match="git could not say"):
        files.apply([change(target)])
    files.apply([change(target)], force=True)


def test_read_only(target):
    target.chmod(0o444)
    with pytest.raises(UsageError, match="read-only"):
        files.apply([change(target)])
    assert left(target) == ["code.py"]
    files.apply([change(target)], force=True)
    assert target.stat().st_mode & 0o777 == 0o444


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(target):
    todo = change(target)
    target.parent.chmod(0o555)
    with pytest.raises(UsageError, match="Permission denied"):
        files.apply([todo])
    target.parent.chmod(0o755)


def test_changed_meanwhile(target):
    todo = change(target)
    target.write_bytes(b"mine\n")
    with pytest.raises(UsageError, match="changed while"):
        files.apply([todo], force=True)
    assert target.read_bytes() == b"mine\n"
    assert left(target) == ["code.py"]


def test_all_or_none(target):
    second = target.with_name("second.py")
    second.write_bytes(OLD)
    todo = [change(target), change(second)]
    second.write_bytes(b"mine\n")
    with pytest.raises(UsageError, match="changed while"):
        files.apply(todo)
    assert target.read_bytes() == OLD
    assert left(target) == ["code.py", "second.py"]


def test_a_failure_half_way_takes_back_what_was_done(target, monkeypatch):
    second = target.with_name("second.py")
    second.write_bytes(OLD)
    real = backups.put

    def put(staged, to):
        if to == second and staged.read_bytes() == NEW:
            raise OSError(28, "No space left on device")
        real(staged, to)

    monkeypatch.setattr(backups, "put", put)
    with pytest.raises(UsageError, match="No space left"):
        files.apply([change(target), change(second)])
    assert (target.read_bytes(), second.read_bytes()) == (OLD, OLD)
    assert left(target) == ["code.py", "second.py"]


# --------------------------------------------------------------------------- others, disks and kills


def _apply_and_revert(path: str, after: bytes, times: int) -> None:
    target = Path(path)
    for _ in range(times):
        for act in (lambda: files.apply([change(target, after)]), lambda: files.revert(target)):
            try:
                act()
            except UsageError as error:
                if not any(
                    word in error.message for word in ("changed while", "nothing to revert", "edited since")
                ):
                    raise


def test_two_at_once(target):
    """Whatever they do to each other, the file is always one of the whole texts, and the original comes back."""
    allowed = {OLD, NEW, b"three\n" * 1000}
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_apply_and_revert, args=(str(target), after, 20))
        for after in (NEW, b"three\n" * 1000)
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        assert target.read_bytes() in allowed
    assert [worker.exitcode for worker in workers] == [0, 0]
    if target.read_bytes() != OLD:
        files.revert(target)
    assert target.read_bytes() == OLD


def test_the_same_edit_twice_at_once_is_one(target):
    first, second = change(target), change(target)
    files.apply([first])
    files.apply([second])
    assert target.read_bytes() == NEW


TOUCHES = {"open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "os.rmdir", "fcntl.flock"}
"""What Python tells of before it touches the disk."""


def _killed_at(step: int, path: Path, *, revert: bool) -> bool:
    """Run an edit in a child that kills itself at its n-th touch of the disk; whether it came so far."""
    child = os.fork()
    if child == 0:
        steps = itertools.count()

        def hook(event: str, args: object) -> None:
            if event in TOUCHES and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        todo = None if revert else change(path)
        sys.addaudithook(hook)
        if todo is None:
            files.revert(path)
        else:
            files.apply([todo])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("revert", [False, True])
def test_killed_at_any_moment(target, revert):
    steps = 0
    for step in itertools.count():
        target.write_bytes(OLD)
        if revert:
            files.apply([change(target)])
        killed = _killed_at(step, target, revert=revert)
        now = target.read_bytes()
        assert now in (OLD, NEW), step
        # The next one finds its way: back to the start, and nothing is left over.
        if now == OLD:
            files.apply([change(target)])
        files.revert(target)
        assert target.read_bytes() == OLD
        assert left(target) == ["code.py"], step
        if not killed:
            break
        steps = step
    assert steps >= 8


@pytest.mark.parametrize("room", [0, 1, 5, 9])
def test_a_full_disk(target, room):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    todo = change(target)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(UsageError, match="cannot be edited: File too large"):
            files.apply([todo])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert target.read_bytes() == OLD
    assert left(target) == ["code.py"]


def test_a_lock_that_its_last_holder_took_away_is_none(target, monkeypatch):
    folder = target.parent / ".placement-audit"
    real = backups.fcntl.flock

    def flock(handle: int, how: int) -> None:
        (folder / "lock").unlink()
        (folder / "lock").touch()  # another process has made the next one
        real(handle, how)

    monkeypatch.setattr(backups.fcntl, "flock", flock)
    assert backups._try_lock(folder) is None
    monkeypatch.undo()
    assert backups._try_lock(folder) is not None
