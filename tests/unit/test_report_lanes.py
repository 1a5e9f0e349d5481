"""Ways as they are drawn and told in words: what is not known is no arrow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from xml.etree import ElementTree

import make_places as p
import pytest
from ways import drawn, forward, route_of, shown

from placement_audit.model import CallSite
from placement_audit.report.html import html
from placement_audit.report.json_io import dumps, loads
from placement_audit.report.lanes import lanes
from placement_audit.report.route_words import named_in_words
from placement_audit.report.routes import Routes
from placement_audit.report.sarif import sarif
from placement_audit.rules.hygiene import hygiene_finding
from placement_audit.verdicts import Report

pytestmark = pytest.mark.unit

TERMS = "really P(sum) on tp, mlp.bias in each of the 2 terms"


# --------------------------------------------------------------------------- what is not known


def test_a_place_of_which_nothing_is_known_has_no_edge() -> None:
    report = p.applied()
    (finding,) = [f for f in report.findings if f.rule_id == "PA108"]
    report = replace(report, trace=replace(report.trace, value_doubts=(), collectives=()))
    found = Routes(report).of(finding)
    assert found is not None
    assert {shown(e) for s in found.stops for e in (s.before, s.after, s.arrived, s.left)} == {"-"}
    assert found.wrong == ""
    assert drawn(found, right=False) == drawn(found, right=True) == ["dotted"] * 3
    assert "no faulty call" in lanes(found, "way", "tp")


def test_the_place_of_a_suppression_is_no_call() -> None:
    finding = hygiene_finding(
        "PA002", kind="comment", site=p.ADDED, message="m", expected="e", observed="o", next_step="n"
    )
    assert Routes(p.counted()).of(finding) is None


def test_no_place_and_no_call_is_no_drawing() -> None:
    report = p.never_summed()
    (finding,) = report.findings
    assert Routes(report).of(replace(finding, path=())) is None


def test_a_saved_report_has_the_same_ways() -> None:
    for name, make in p.REPORTS.items():
        report = make()
        saved = loads(dumps(report))
        ways = [[Routes(r).of(f) for f in r.findings] for r in (report, saved)]
        assert ways[0] == ways[1], name


# --------------------------------------------------------------------------- the drawing


ALL = pytest.mark.parametrize("make", p.REPORTS.values(), ids=p.REPORTS)


@ALL
def test_each_finding_has_a_cross_and_words_that_say_the_same(make: Callable[[], Report]) -> None:
    report = make()
    live = [f for f in report.findings if f.severity != "note"] or list(report.findings)
    assert live
    for f in live:
        found = Routes(report).of(f)
        assert found is not None
        drawing, words = lanes(found, "way", f.mesh_dim), named_in_words(found)
        edges = [e for s in (*found.stops, *found.readers) for e in (s.before, s.after, s.arrived, s.left)]
        wrong = [e for e in (*edges, found.grad) if e is not None and e.mark == "fault"]
        assert len(wrong) == 1
        assert drawing.count('class="cross"') == 1
        assert words.count("HERE IT GOES WRONG") + words.count("gone wrong by here") == 1
        assert " ".join(wrong[0].told.split()) in " ".join(words.split())
        said = " ".join(t.text or "" for t in ElementTree.fromstring(drawing).iter("text"))
        assert wrong[0].told in said
        for s in (*found.stops, *found.readers):
            assert s.kind in words
            assert s.kind in said
            for note in s.notes:
                assert note in " ".join(words.split())
                assert note in said


LINES = {
    "counted": ([">", "fault >", "carried >"], ["dotted >", "dotted", "dotted"]),
    "counted and labelled": ([">", "fault >", "carried >"], ["dotted >", "dotted >", ">"]),
    "applied": (["dotted >", "fault >", "carried >"], ["dotted"] * 3),
    "declared": (["dotted >", "fault >"], [">", ">"]),
    "left out": (["dotted >", "dotted >"], ["fault >", "dotted"]),
    "loss": (["fault dotted >", "dotted"], ["dotted"] * 2),
    "never summed": ([">", ">"], ["fault dotted >", "dotted"]),
    "no gradient": ([">", ">"], ["fault dotted", "dotted"]),
    "drifting": ([">", ">"], ["fault >", "dotted >", ">", ">"]),
    "clipped apart": ([">", ">"], ["carried >", "fault >", "dotted >", ">", ">"]),
    "updated with parts": ([">", ">"], ["carried >", "fault >", "dotted >", ">", ">"]),
    "norm of terms": (["dotted"], ["carried >", "fault >", "dotted >", "dotted"]),
    "wrong update": ([">", ">"], ["fault >", "dotted >", ">", ">"]),
    "departed": (
        [">", ">", "dotted >", "dotted >", "dotted >", "dotted", "fault dotted >"],
        ["carried >", ">", "dotted", "dotted >", "dotted >", "dotted", "dotted"],
    ),
    "departed in backward": (
        [">", ">", "dotted", "dotted", "dotted >", "dotted >", "dotted"],
        ["carried >", ">", "fault dotted >", "dotted", "dotted >", "dotted >", "dotted >"],
    ),
}
"""The lines of the left and the right lane: without a tip, nothing is known to pass."""


@pytest.mark.parametrize("name", LINES)
def test_no_arrow_where_nothing_is_known(name: str) -> None:
    report = p.REPORTS[name]()
    found = Routes(report).of(report.findings[0])
    assert found is not None
    assert (drawn(found, right=False), drawn(found, right=True)) == LINES[name]


def test_readers_stand_above_the_end_of_backward() -> None:
    drawing = ElementTree.fromstring(lanes(route_of(p.clipped_apart()), "way", "tp"))
    at = {t.text: float(t.get("y") or 0) for t in drawing.iter("text")}
    assert at["updated parameter"] < at["update"] < at["reader"] < at[".grad"] < at["meets the activations"]
    assert at["after backward"] < at["updated parameter"]
    assert at["backward"] > at["reader"]


def test_a_parameter_is_not_joined_to_the_term_that_it_is_added_to() -> None:
    """From its own layout to a plain value: ops that are not shown lie between."""
    report = p.judge(
        p.with_params(
            replace(p.DOWN, uses=()), value_doubts=(replace(p.COUNTED, counted=(("mlp.down", Fraction(1)),)),)
        )
    )
    found = route_of(report, "PA107")
    assert drawn(found, right=False) == ["dotted >", "fault >", "carried >"]


def test_a_pages_findings_have_figures_and_words() -> None:
    for name, make in p.REPORTS.items():
        text = html(make())
        for article in re.findall(r"<article.*?</article>", text, re.DOTALL):
            assert article.count("<figure>") == 1, name
            assert article.count("in words</summary>") == 1, name
            assert re.search(r"<figcaption>(<code>)?[a-z]", article), name


def test_a_place_without_a_line_is_named() -> None:
    nowhere = CallSite(path="", line=0, function="")
    report = p.of_doubt(replace(p.COUNTED, call_site=nowhere))
    assert forward(report)[0][1] == ""
    assert "addmm" in lanes(route_of(report), "way", "tp")


def test_the_code_flow_of_sarif_has_the_places_too() -> None:
    def flow(report: Report) -> list[tuple[str, str]]:
        (result,) = json.loads(sarif(report))["runs"][0]["results"]
        (thread,) = result["codeFlows"][0]["threadFlows"]
        return [(s["location"]["message"]["text"], s["importance"]) for s in thread["locations"]]

    assert flow(p.counted()) == [
        (f"forward of addmm: plain -> plain; here it goes wrong: {TERMS}", "essential"),
        ("forward of sum: plain -> ?; still wrong: with mlp.bias in it 2 times", "essential"),
    ]
    assert flow(p.clipped_apart())[0] == (
        "reader: plain -> plain; here it goes wrong: really each rank its own "
        "(cause: changes the gradient by what is each rank's own)",
        "essential",
    )
    assert flow(p.wrong_update())[0][0].endswith("here it goes wrong: relative error 0.25")
    departed = p.departed(backward=True)
    departed = replace(departed, findings=departed.findings[:1])
    assert flow(departed)[-1][0].startswith(
        "backward of own backward of Mine: ? -> ?; gone wrong by here: off by 0.5"
    )
