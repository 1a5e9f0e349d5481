"""A report as JSON: nothing is lost, nothing is large, and what cannot be read says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import make_report as m
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placement_audit.errors import ReportError
from placement_audit.model import Layout, Placement
from placement_audit.report import json_io, render
from placement_audit.verdicts import Report

pytestmark = pytest.mark.unit

REPORTS = [m.stock_report, m.one_sided_report, m.two_sided_report, m.mixed_report]


@pytest.mark.parametrize("make", REPORTS, ids=lambda f: f.__name__)
def test_round_trip(make: Callable[[], Report]) -> None:
    report = make()
    assert json_io.loads(json_io.dumps(report)) == report


st.register_type_strategy(
    Layout,
    st.lists(st.tuples(st.text(max_size=3), st.from_type(Placement)), max_size=2).map(
        lambda pairs: Layout(tuple(d for d, _ in pairs), tuple(p for _, p in pairs))
    ),
)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))


@given(st.from_type(Report))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_round_trip_of_any_report(report: Report) -> None:
    report = replace(report, schema_version="1")
    assert json_io.loads(json_io.dumps(report)) == report


def test_order_is_stable() -> None:
    assert json_io.dumps(m.mixed_report()) == json_io.dumps(m.mixed_report())


def test_one_line_of_ascii() -> None:
    report = m.mixed_report()
    run = replace(report.trace.run, config_path="caf\N{LATIN SMALL LETTER E WITH ACUTE}.toml")
    report = replace(report, trace=replace(report.trace, run=run))
    text = json_io.dumps(report)
    assert text.isascii()
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    assert json_io.loads(text) == report


def test_render_json_is_dumps() -> None:
    report = m.mixed_report()
    assert render(report, "json") == json_io.dumps(report)


def test_what_scripts_read() -> None:
    raw = json.loads(json_io.dumps(m.mixed_report()))
    assert list(raw)[:3] == ["schema_version", "outcome", "exit_status"]
    assert (raw["schema_version"], raw["outcome"], raw["exit_status"]) == ("1", "findings", 1)
    finding = raw["findings"][-1]
    assert finding["rule_id"] == "PA202"
    # findings spell their places out: no table is needed to read them
    assert finding["path"][0]["call_site"]["line"] == 189
    assert {j["factor"] for j in raw["judgements"]} == {"1", "2", None}


def test_fractions_are_strings() -> None:
    report = m.stock_report(layers=1)
    half = replace(report.judgements[0], factor=Fraction(1, 2))
    report = replace(report, judgements=(half,))
    assert json.loads(json_io.dumps(report))["judgements"][0]["factor"] == "1/2"
    assert json_io.loads(json_io.dumps(report)) == report


def test_repeated_values_are_written_once() -> None:
    tables = json.loads(json_io.dumps(m.stock_report(layers=50)))["trace"]["tables"]
    assert {name: len(rows) for name, rows in tables.items()} == {
        "sites": 7,
        "layouts": 10,
        "states": 4,
        "tensors": 19,
    }


def test_states_that_differ_in_blame_stay_apart() -> None:
    report = m.one_sided_report(layers=1)
    blames = {s.blame for p in report.trace.params if p.grad for s in p.grad.state}
    assert len(blames) == 4
    # only the states of boundaries are in the table; three of them carry a blame
    states = json.loads(json_io.dumps(report))["trace"]["tables"]["states"]
    assert len({tuple(s["blame"]) for row in states for s in row}) == 4


def test_405b_is_small() -> None:
    report = m.stock_report(layers=126, activations=20)
    assert (len(report.trace.params), len(report.trace.boundaries)) == (1137, 8205)
    text = json_io.dumps(report)
    assert json_io.loads(text) == report
    assert len(text) < 7_000_000


# --------------------------------------------------------------------------- what cannot be read


def edited(edit: Callable[[Any], object]) -> str:
    raw = json.loads(json_io.dumps(m.mixed_report()))
    edit(raw)
    return json.dumps(raw)


def message(text: str | bytes) -> str:
    with pytest.raises(ReportError) as caught:
        json_io.loads(text)
    assert caught.value.exit_status == 2
    return caught.value.message


@pytest.mark.parametrize("text", ["", "{", "no", b"\xff\xfe", "[" * 100_000], ids=lambda t: repr(t[:5]))
def test_no_json(text: str | bytes) -> None:
    assert "is not JSON" in message(text)


def test_cut_short() -> None:
    text = json_io.dumps(m.mixed_report())
    assert "may be cut short" in message(text[: len(text) // 2])


@pytest.mark.parametrize("text", ["[]", "{}", '"x"', "1", "null", '{"version": "2.1.0", "runs": []}'])
def test_json_of_something_else(text: str) -> None:
    assert "no placement-audit report" in message(text)


@pytest.mark.parametrize("version", ["2", 1, None, ""])
def test_another_schema_version(version: object) -> None:
    text = edited(lambda raw: raw.update(schema_version=version))
    found = message(text)
    assert f"schema_version {version!r}" in found
    assert "reads '1'" in found
    assert "Render it with placement-audit 0.1.0" in found


def test_another_schema_version_of_another_shape() -> None:
    assert "schema_version '9'" in message('{"schema_version": "9", "trace": []}')


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw.pop("trace"),
        lambda raw: raw.pop("findings"),
        lambda raw: raw.update(trace=[]),
        lambda raw: raw.update(outcome="fine"),
        lambda raw: raw.update(exit_status="1"),
        lambda raw: raw["trace"].pop("tables"),
        lambda raw: raw["trace"]["tables"].pop("sites"),
        lambda raw: raw["trace"]["tables"]["sites"].clear(),
        lambda raw: raw["trace"]["boundaries"][0].update(call_site=-1),
        lambda raw: raw["trace"]["boundaries"][0].update(call_site=10**6),
        lambda raw: raw["trace"]["boundaries"][0].update(call_site="0"),
        lambda raw: raw["trace"]["boundaries"][0].update(call_site=True),
        lambda raw: raw["trace"]["boundaries"][0].update(call_site=None),
        lambda raw: raw["trace"]["boundaries"][0].pop("grad"),
        lambda raw: raw["trace"].update(boundaries=None),
        lambda raw: raw["trace"]["boundaries"].append(None),
        lambda raw: raw["trace"]["tables"]["layouts"][0]["dims"].append("x"),
        lambda raw: raw["judgements"][0].update(factor="1/0"),
        lambda raw: raw["judgements"][0].update(factor="half"),
        lambda raw: raw["judgements"][0].update(factor=1),
        lambda raw: raw["judgements"][0].update(verdict="maybe"),
        lambda raw: raw["judgements"][0]["expected"].update(kind="sharded"),
    ],
)
def test_damaged(edit: Callable[[Any], object]) -> None:
    assert "does not fit it" in message(edited(edit))


def test_damaged_names_the_field() -> None:
    text = edited(lambda raw: raw["judgements"][3].update(verdict="maybe"))
    assert "$.judgements[3].verdict" in message(text)


def test_unknown_fields_are_passed_over() -> None:
    text = edited(lambda raw: raw.update(added_later=1))
    assert json_io.loads(text) == m.mixed_report()
