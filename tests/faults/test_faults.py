"""placement-audit against the benchmark: every wrong variant found and named, no right one accused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from placement_audit.verdicts import GOOD, Outcome, Report, Severity, Verdict
from tests.faults import FAMILIES
from tests.faults.family import Expect, Family
from tests.faults.on_ranks import Item, reports, traced, truths
from tests.faults.truth import Truth
from tests.gloo.ranks import on_ranks

ITEMS = [(f, v) for f in FAMILIES for v in f.variants]
MEASURED = [(f, v) for f, v in ITEMS if f.measured]
TRACED = [(f, v) for f, v in ITEMS if f.fake]

VALUES = ("PA107", "PA108", "PA109", "PA110", "PA111", "PA404")
"""Of values that one device would hardly have, and of a backward that it would."""


def ids(item: object) -> str | None:
    return item.name.replace(" ", "-") if isinstance(item, Family) else str(item).replace(" ", "-")


def of_ranks(ranks: int) -> list[Item]:
    return [(f.name, v) for f, v in MEASURED if f.ranks == ranks]


@pytest.fixture(scope="module")
def true() -> dict[Item, Truth]:
    """The numbers of all, by ranks of their own: two launches."""
    return {i: t for n in (2, 4) for i, t in on_ranks(n, truths, of_ranks(n))[0].items()}


@pytest.fixture(scope="module")
def measured() -> dict[Item, Report | str]:
    """The measured reports on all: two launches."""
    return {i: r for n in (2, 4) for i, r in on_ranks(n, reports, of_ranks(n), deadline=240)[0].items()}


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.gloo
@pytest.mark.parametrize(("family", "variant"), MEASURED, ids=ids)
def test_the_numbers_are_as_said(family: Family, variant: str, true: dict[Item, Truth]) -> None:
    expect, truth = family.variants[variant], true[family.name, variant]
    if expect.scale != 1:
        assert truth.multiples == pytest.approx(dict.fromkeys(truth.errors, expect.scale), rel=1e-4)
        return
    assert truth.wrong == set(expect.gradients)
    assert {n for n, e in truth.updates.items() if e > 1e-3} == expect.updates


@pytest.mark.trace
@pytest.mark.parametrize(("family", "variant"), TRACED, ids=ids)
def test_traced(family: Family, variant: str, no_group: None) -> None:
    report = traced(family, variant)
    expect = family.variants[variant]
    seen = {n: w for n, w in expect.gradients.items() if w.traced}
    for name, wrong in seen.items():
        assert named(report, name)[wrong.on] in wrong.traced, name
    assert accused(report) == set(seen)
    known = {
        "PA104",
        "PA107",
        "PA111",
        "PA201",
        "PA202",
        "PA203",
        "PA204",
        "PA206",
        "PA301",
        "PA302",
        "PA403",
    }
    assert errors(report) <= known
    values = {r for r in expect.rules if r in VALUES}
    assert {f.rule_id for f in report.findings if f.rule_id in VALUES} == values
    assert {f.param_fqn for f in report.findings if f.rule_id == "PA403"} == expect.drifts
    assert report.outcome is (
        Outcome.FINDINGS if seen or expect.drifts or values & {"PA107", "PA111"} else Outcome.CLEAN
    )
    noted = {f.rule_id for f in report.findings if f.rule_id.startswith("PA5")}
    assert noted == {r for r in expect.rules if r.startswith("PA5")}
    assert report.blind_spots, "a trace is never a clean bill"


@pytest.mark.gloo
@pytest.mark.parametrize(("family", "variant"), MEASURED, ids=ids)
def test_measured(family: Family, variant: str, measured: dict[Item, Report | str]) -> None:
    expect, report = family.variants[variant], measured[family.name, variant]
    assert isinstance(report, Report), report
    assert report.measurement is not None, report.trace.run.notes
    assert "PA901" not in errors(report), [f.observed for f in report.findings if f.rule_id == "PA901"]
    for name, wrong in expect.gradients.items():
        assert named(report, name)[wrong.on] in wrong.measured, name
    if expect.scale == 1:
        assert accused(report) == {
            n for n, w in expect.gradients.items() if w.measured != (Verdict.NOT_JUDGED,)
        }
    assert {f.param_fqn for f in report.findings if f.rule_id == "PA402"} == expect.updates
    assert ("PA208" in errors(report)) is expect.forward
    assert {f.rule_id for f in report.findings if f.rule_id in VALUES} == {
        r for r in expect.rules if r in VALUES
    }
    assert ("PA209" in errors(report)) is ("PA209" in expect.rules)
    assert report.exit_status == (0 if expect.right else 1)


def named(report: Report, name: str) -> dict[str, Verdict]:
    return {j.mesh_dim: j.verdict for j in report.judgements if j.param_fqn == name}


def accused(report: Report) -> set[str]:
    """Parameters that are said to be wrong; "not judged" accuses nobody."""
    innocent = (*GOOD, Verdict.NOT_JUDGED)
    return {j.param_fqn for j in report.judgements if j.verdict not in innocent}


def errors(report: Report) -> set[str]:
    return {f.rule_id for f in report.findings if f.severity is Severity.ERROR}


@pytest.mark.unit
def test_every_family_has_a_right_variant_and_says_what_it_is_about() -> None:
    for family in FAMILIES:
        assert any(e == Expect(rules=e.rules) for e in family.variants.values()), family.name
        assert family.about
    assert len({f.name for f in FAMILIES}) == len(FAMILIES)
