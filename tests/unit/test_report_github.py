"""GitHub annotations: what the runner makes of every line."""

from __future__ import annotations

import re
from dataclasses import replace

import formats_shared as shared
import make_report as m
import pytest
from hostile import MESSAGE, NAME, hostile_report
from snapshot import assert_snapshot

from placement_audit.model import CallSite
from placement_audit.report import render
from placement_audit.report.github import LIMIT, TITLE_LIMIT, command, github
from placement_audit.verdicts import Means, Severity, Suppressed

pytestmark = pytest.mark.unit

COMMAND = re.compile(r"::(\w+)(?: (.*?))?::(.*)")


def parsed(text: str) -> list[tuple[str, dict[str, str], str]]:
    """As GitHub's runner reads commands: properties to the first "::", then the message; both unescaped."""
    out = []
    for line in text.removesuffix("\n").split("\n"):
        found = COMMAND.fullmatch(line)
        assert found is not None, line
        said = [p.partition("=") for p in (found[2] or "").split(",") if p]
        properties = {k: v.replace("%3A", ":").replace("%2C", ",") for k, _, v in said}
        out.append((found[1], {k: _data(v) for k, v in properties.items()}, _data(found[3])))
    return out


def _data(text: str) -> str:
    return text.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def test_whole() -> None:
    assert_snapshot("mixed.github", render(m.mixed_report(), "github"))


def test_the_line_is_the_users() -> None:
    name, properties, message = parsed(github(m.mixed_report()))[0]
    assert (name, properties) == (
        "error",
        {
            "file": "my_model/norm.py",
            "line": "31",
            "title": "PA201 lost-reduction: layers.1.attention_norm.weight on tp",
        },
    )
    assert "to_local (cause): my_model/norm.py:31 in forward" in message


def test_no_line_of_an_installed_package() -> None:
    name, properties, message = parsed(github(m.mixed_report()))[1]
    assert (name, set(properties)) == ("error", {"title"})
    assert f"{m.WRAPPER}:189" in message


def test_a_package_in_the_checkout_has_its_line() -> None:
    def inside(site: CallSite) -> str | None:
        return f"vendor/{site.path}" if site.package == "torchtitan" else None

    by_title = {p["title"]: p for _, p, _ in parsed(github(m.mixed_report(), inside))}
    assert (
        by_title["PA202 double-reduction: layers.*.ffn_norm.weight (3) on tp"]["file"]
        == f"vendor/{m.WRAPPER}"
    )
    assert "file" not in by_title["PA201 lost-reduction: layers.1.attention_norm.weight on tp"]


def test_one_annotation_a_cause() -> None:
    report = m.one_sided_report()
    assert len(report.findings) == 13
    (error,) = [x for x in parsed(github(report)) if x[0] == "error"]
    assert error[1]["title"] == "PA202 double-reduction: 13 parameters on tp"
    assert "of layers.*.attention_norm.weight (6), layers.*.ffn_norm.weight (6) and norm.weight" in error[2]


def test_the_most_severe_first_and_no_more_than_github_shows() -> None:
    report = shared.many({Severity.NOTE: 14, Severity.ERROR: 12, Severity.WARNING: 10})
    names = [name for name, _, _ in parsed(github(report))]
    assert names == ["error"] * 10 + ["warning"] * 10 + ["notice"] * 10
    assert LIMIT == 10
    last = parsed(github(report))[-1]
    assert "Not shown here, for GitHub shows 10 of a type: 2 more errors and 5 more notes." in last[2]


def test_all_fit_and_none_is_counted() -> None:
    report = shared.many({Severity.NOTE: 9, Severity.ERROR: 10, Severity.WARNING: 10})
    commands = parsed(github(report))
    assert len(commands) == 30
    assert "Not shown" not in commands[-1][2]


def test_clean_is_one_notice() -> None:
    ((name, properties, message),) = parsed(github(m.stock_report()))
    assert (name, properties) == ("notice", {"title": "placement-audit"})
    assert message.startswith("clean: 57 parameters judged")


def test_what_is_suppressed_is_not_annotated() -> None:
    ((name, _, message),) = parsed(github(shared.suppressed()))
    assert name == "notice"
    assert message.startswith("clean but for 4 suppressed")
    assert message.splitlines()[1:] == [
        "suppressed: PA201 lost-reduction on tp: known, see <T-12> (config job.toml:40, until 2027-01-31)",
        "suppressed: PA202 double-reduction on tp: known (baseline base.json)",
    ]


def test_many_that_are_suppressed_are_counted() -> None:
    mark = Suppressed(by=Means.CONFIG, reason="known", where="job.toml:40")
    report = shared.many({Severity.ERROR: 15})
    hidden = tuple(replace(f, suppressed=mark) for f in report.findings)
    ((_, _, message),) = parsed(github(replace(report, findings=hidden)))
    lines = message.splitlines()
    assert sum(line.startswith("suppressed: ") for line in lines) == 12
    assert lines[-1] == "and 3 more suppressed; the report has them all."


def test_hostile_text_stays_in_its_command() -> None:
    commands = parsed(github(hostile_report()))
    assert [name for name, _, _ in commands] == ["error", "error", "notice"]
    assert commands[0][1]["file"] == "my model/no%rm,1:2.py"
    assert MESSAGE in commands[0][2]
    assert NAME in commands[0][2]


@pytest.mark.parametrize("text", ["%", "%0A", "a\r\nb", "x,y=z", "::error::", "%3A", ""])
def test_escapes_come_back(text: str) -> None:
    line = command("error", text, title=text)
    assert "\n" not in line
    ((_, properties, message),) = parsed(line)
    assert message == text
    assert properties.get("title", "") == text


def test_a_long_title_is_cut_the_message_is_not() -> None:
    report = m.mixed_report()
    name = "layers." * 100 + "weight"
    finding = replace(shared.lost(report), module_fqn=name, param_fqn=None, message=name)
    _, properties, message = parsed(github(replace(report, findings=(finding,))))[0]
    assert len(properties["title"]) == TITLE_LIMIT
    assert properties["title"].endswith("...")
    assert name in message
