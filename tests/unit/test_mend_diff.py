"""The diff is one that git apply takes, and gives the same bytes."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement_audit.mend import diff
from placement_audit.mend.files import Change

pytestmark = pytest.mark.unit

LINES = st.lists(
    st.sampled_from(
        [b"a\n", b"b\n", b"\n", b"c\r\n", b"\x0cd\n", b"e\rf\n", b"\xe9\xff\n", b" x\t \n", b"+\n"]
    )
)
TEXT = st.tuples(LINES, st.sampled_from([b"", b"end", b"end\r"])).map(lambda t: b"".join(t[0]) + t[1])


def applied(name: str, before: bytes, after: bytes) -> bytes:
    """What git apply makes of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(before)
        change = Change(path=path, shown=PurePosixPath(name), before=before, after=after)
        subprocess.run(
            ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn"],
            input=diff.unified([change]),
            cwd=folder,
            check=True,
            env={"PATH": "/usr/bin:/bin:/usr/local/bin", "GIT_CEILING_DIRECTORIES": folder, "HOME": folder},
        )
        return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(before=TEXT.filter(bool), after=TEXT.filter(bool))
def test_git_takes_it(before, after):
    if before != after:
        assert applied("pkg/code.py", before, after) == after


@pytest.mark.parametrize("name", ["a b/c d.py", "é.py", 'q"uote\\.py', "tab\there.py", "plain-1.py"])
def test_any_name(name):
    assert applied(name, b"one\n", b"two") == b"two"


def test_a_name_with_blanks_ends_with_a_tab_as_gits_own_do():
    change = Change(path=Path("x"), shown=PurePosixPath("a b.py"), before=b"a\n", after=b"b\n")
    assert diff.unified([change]).startswith(b"--- a/a b.py\t\n+++ b/a b.py\t\n@@")


def test_nothing_is_nothing():
    path = PurePosixPath("a.py")
    assert diff.unified([Change(path=Path("a.py"), shown=path, before=b"a\n", after=b"a\n")]) == b""
    assert diff.unified([]) == b""
