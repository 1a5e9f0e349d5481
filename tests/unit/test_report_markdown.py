"""Markdown for GitHub: it fits, and no text leaves the place it is written in."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import formats_shared as shared
import make_report as m
import pytest
from hostile import CODE, NAME, hostile_report
from markdown_it import MarkdownIt
from snapshot import assert_snapshot

from placement_audit.report import render
from placement_audit.report.markdown import LIMIT, code, fenced, markdown, prose
from placement_audit.verdicts import Severity

pytestmark = pytest.mark.unit


def test_whole() -> None:
    assert_snapshot("mixed.md", render(m.mixed_report(), "markdown"))


def test_suppressed() -> None:
    out = markdown(shared.suppressed())
    assert out.startswith("### :white_check_mark: placement-audit: clean but for 4 suppressed")
    assert "- PA201 lost\\-reduction on tp, `layers.1.attention_norm.weight`: known, see \\<T\\-12\\>" in out
    assert "- 3 findings of base.json are known." in out
    assert "- Gone: PA501 of norm.weight" in out
    assert "####" not in out


def test_an_incomplete_audit_is_not_green() -> None:
    assert markdown(shared.incomplete()).startswith("### :warning: placement-audit: incomplete")


def test_it_fits_and_counts_what_it_left_out() -> None:
    report = shared.many({Severity.ERROR: 400})
    out = markdown(report)
    assert LIMIT == 65_536
    assert 60_000 < len(out) <= LIMIT
    shown = out.count("#### `PA201")
    assert 0 < shown < 400
    assert f"**Cut here:** {400 - shown} more findings" in out
    assert out.endswith("did not fit; the text and JSON reports have everything.\n")


def test_what_is_cut_leaves_no_block_open() -> None:
    out = markdown(shared.many({Severity.ERROR: 400}), limit=9000)
    assert len(out) <= 9000
    assert out.count("```") % 2 == 0
    assert out.count("<details>") == out.count("</details>")


@pytest.mark.parametrize("layers", [1, 6])
def test_nothing_is_cut_where_all_fits(layers: int) -> None:
    assert "Cut here" not in markdown(m.one_sided_report(layers))


def test_hostile_text_stays_text() -> None:
    html = MarkdownIt("commonmark").enable("table").render(markdown(hostile_report()))
    tags = {tag.lower() for tag in re.findall(r"<(/?[a-zA-Z!][\w-]*)", html)}
    ours = {"h3", "h4", "ul", "li", "p", "code", "pre", "strong", "details", "summary"}
    ours |= {"table", "thead", "tbody", "tr", "th", "td"}
    assert {t.lstrip("/") for t in tags} - {"!--"} <= ours
    assert "javascript:" not in "".join(re.findall(r'href="[^"]*"', html))
    # the name is in a row of its own, whole, with the cells of the others beside it
    (row,) = [r for r in re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL) if "alert(1)" in r]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
    name = f"layers.1.{NAME}.weight".replace("\n", " ")
    assert [unescape(c) for c in cells[:2]] == [f"<code>{name}</code>", "1"]
    assert len(cells) == 4
    assert unescape(html).count(CODE) == 1
    assert "@octocat" not in re.sub(r"<code.*?</code>|<!-- -->", "|", html, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b", "`a.b`"),
        ("a|b", "`a\\|b`"),
        ("a`b", "``a`b``"),
        ("`a", "`` `a ``"),
        ("a``b`", "``` a``b` ```"),
        ("a\nb", "`a b`"),
        ("", ""),
    ],
)
def test_code(text: str, expected: str) -> None:
    assert code(text) == expected


def test_fenced() -> None:
    assert fenced(["a", "````", "b"]) == "`````text\na\n````\nb\n`````\n"
    assert fenced(["a"]) == "```text\na\n```\n"


def test_prose() -> None:
    assert prose("a_b <b> [x](y) @me\n# no") == "a\\_b \\<b\\> \\[x\\]\\(y\\) @<!-- -->me \\# no"


def test_a_row_without_a_cell_keeps_its_columns() -> None:
    report = m.mixed_report()
    report = replace(report, judgements=tuple(j for j in report.judgements if j.param_fqn != "rope.scale"))
    (row,) = [line for line in markdown(report).splitlines() if "`rope.scale`" in line]
    assert row == "| `rope.scale` | 1 |  |  |"
