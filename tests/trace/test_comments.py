"""Comments to placement-audit in source files: found on the lines of the very call, and nowhere else."""

from __future__ import annotations

import linecache
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from placement_audit.engine import callsite
from placement_audit.model import CallSite, Comment

pytestmark = pytest.mark.trace


def seen_in(folder: Path, body: str) -> list[CallSite]:
    """The sites of the calls of ``probe`` in a function with this body."""
    path = folder / "user_code.py"
    path.write_text("def step(probe, x):\n" + textwrap.indent(textwrap.dedent(body), "    "))
    module = ModuleType("user_code")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    table = callsite.SiteTable()
    sites: list[CallSite] = []

    def probe(*_args: object) -> None:
        raw, _, _ = callsite.take(1, exact=True)
        sites.append(table.get(raw))

    step: Callable[..., None] = module.step
    step(probe, None)
    return sites


def told(folder: Path, body: str) -> list[tuple[Comment, ...]]:
    return [site.comments for site in seen_in(folder, body)]


def test_at_the_end_of_the_line(tmp_path):
    assert told(tmp_path, "probe(x)  # placement-audit: ignore[PA201] why until 2027-01-31\n") == [
        (Comment(2, "ignore[PA201] why until 2027-01-31"),)
    ]


@pytest.mark.parametrize("line", [1, 2, 3, 4])
def test_on_any_line_of_the_call(tmp_path, line):
    lines = ["y = probe(", "    x,", "    x,", ")"]
    lines[line - 1] += "  # placement-audit: ignore[PA201] why"
    assert told(tmp_path, "\n".join(lines) + "\n") == [(Comment(line + 1, "ignore[PA201] why"),)]


@pytest.mark.parametrize(
    "body",
    [
        "# placement-audit: ignore[PA201] why\nprobe(x)\n",
        "probe(x)\n# placement-audit: ignore[PA201] why\n",
        'probe("# placement-audit: ignore[PA201] why")\n',
        'probe("""\n# placement-audit: ignore[PA201] why\n""")\n',
        "probe(x)  # placement-audits: ignore[PA201] why\n",
    ],
    ids=["above", "below", "string", "long string", "other word"],
)
def test_nowhere_else(tmp_path, body):
    assert told(tmp_path, body) == [()]


def test_beside_others_and_for_one_of_two_calls(tmp_path):
    body = """\
    probe(x)  # noqa: E501  # placement-audit: ignore[PA201] why
    probe(x)
    """
    assert told(tmp_path, body) == [(Comment(2, "ignore[PA201] why"),), ()]


def test_two_in_one_call(tmp_path):
    body = """\
    probe(  # placement-audit: ignore[PA201] one
        x  # placement-audit: ignore[PA202] two
    )
    """
    assert told(tmp_path, body) == [(Comment(2, "ignore[PA201] one"), Comment(3, "ignore[PA202] two"))]


def test_without_columns_the_line_alone_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(callsite, "_span", lambda code, instruction: None)
    (site,) = seen_in(
        tmp_path, "probe(  # placement-audit: ignore[PA201] one\n    x  # placement-audit: no\n)\n"
    )
    assert site.span is None
    assert site.comments == (Comment(2, "ignore[PA201] one"),)


def test_a_file_that_was_edited_is_read_anew(tmp_path):
    assert (
        told(tmp_path, "probe(x)  # placement-audit: ignore[PA201] one\n")[0][0].text == "ignore[PA201] one"
    )
    body = "probe(x)  # placement-audit: ignore[PA201] another\n"
    (tmp_path / "user_code.py").write_text(body)
    linecache.checkcache()
    assert told(tmp_path, body)[0][0].text == "ignore[PA201] another"


def test_code_of_no_file(tmp_path):
    sites: list[CallSite] = []
    table = callsite.SiteTable()
    code = compile("probe()", str(tmp_path / "gone.py"), "exec")
    exec(code, {"probe": lambda: sites.append(table.get((sys._getframe(1).f_code, 1, 0)))})
    assert sites[0].comments == ()
