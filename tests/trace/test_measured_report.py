"""A measured report: its lines, and that it survives being saved."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from placement_audit.judge import judge
from placement_audit.report import render
from placement_audit.report.json_io import dumps, loads
from placement_audit.verdicts import Report
from tests.trace.test_matrix import CELLS, run_cell
from tests.trace.test_weigh import numbers

pytestmark = pytest.mark.trace


@pytest.fixture(scope="module")
def report() -> Report:
    trace = run_cell(next(c for c in CELLS if str(c) == "v0-N")).trace
    return judge(trace, numbers(trace))


def line(text: str, label: str) -> str:
    return next(row for row in text.splitlines() if row.startswith(label))


def test_it_says_how_far_the_numbers_are_off(report: Report) -> None:
    text = render(report, "text", width=200)
    assert line(text, "measured") == (
        "measured    1 of 1 gradient within 1e-05 of one device's (float32, seed 0); the worst is off by 1.0e-07"
    )
    assert line(text, "loss") == "loss        1, 1 on one device: relative error 0.0e+00"
    assert line(text, "states").endswith("set against the ranks' values: all agree")


def test_an_average_is_told(report: Report) -> None:
    assert report.measurement is not None
    averaged = replace(report, measurement=replace(report.measurement, grad_scale=Fraction(1, 2)))
    assert "all are 1/2 of it: the data-parallel ranks' parts are averaged" in render(
        averaged, "text", width=300
    )


def test_it_survives_being_saved(report: Report) -> None:
    assert loads(dumps(report)) == report
