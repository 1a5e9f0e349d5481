"""The founders' corpus through the API: the verdict that each case states, and no alarm on a trap."""

from __future__ import annotations

from typing import Any

import pytest

from placement_audit.verdicts import GOOD, Report, Verdict
from tests.faults.corpus import CASES, Item, items, measured, traced
from tests.gloo.ranks import apart, on_ranks

ALL = list(items())

pytestmark = pytest.mark.skipif(
    not ALL,
    reason="the corpus of shared/ is not beside this checkout (PLACEMENT_AUDIT_CORPUS names its cases)",
)

NUMBERS_ONLY = {
    "13_dp_averaged_twice": "an average of an average, or a loss that calls for it: how losses are summed",
    "24_local_mean_unequal_tokens": "which tokens are left out",
    "28_replicas_differ_at_init": "what replicas hold before the step",
    "T01_stock_simplefsdp": "its mismatch: a sum where the loss calls for an average",
}
"""Cases whose wrong variants leave no mark in a trace, by their own case.md, and why."""

TOLD = {
    ("12_grad_norm_counts_replicas", "bug_partial"): "PA108",
    ("21_reduce_dtype_tp", "bug"): "PA501",
    ("26_muon_on_shards", "bug"): "PA404",
}
"""Right gradients, and something that is told without failing the run."""

WRONG = ("WRONG", "MISSING")


@pytest.fixture(scope="module")
def reports() -> dict[Item, Any]:
    """The measured reports: two launches."""
    return {i: r for n in (2, 4) for i, r in on_ranks(n, measured, list(items(n)), deadline=280)[0].items()}


def verdicts(report: Report, name: str) -> set[Verdict]:
    """Of a parameter, which another module may hold."""
    return {j.verdict for j in report.judgements if j.param_fqn == name or j.param_fqn.endswith(f".{name}")}


def ids(item: object) -> str:
    return "-".join(item) if isinstance(item, tuple) else str(item)


@pytest.mark.trace
@pytest.mark.parametrize("item", ALL, ids=ids)
def test_traced(item: Item) -> None:
    found = apart(traced, item)
    if found is None:
        pytest.skip("this torch lacks what the variant needs")
    report, expected = found
    wrong = any(truth in WRONG for truth in expected.values())
    rules = {f.rule_id for f in report.findings}
    if item in TOLD:
        assert TOLD[item] in rules
        assert report.exit_status == 0
    elif wrong and item[0] not in NUMBERS_ONLY:
        assert report.exit_status == 1, rules
        for name in (n for n, truth in expected.items() if truth in WRONG and verdicts(report, n)):
            assert verdicts(report, name) - set(GOOD), name
    else:
        assert report.exit_status == 0, rules
        assert report.blind_spots
    if not wrong:
        for name, truth in expected.items():
            of_param = verdicts(report, name)
            assert of_param <= set(GOOD), name
            assert not of_param or (Verdict.DEFERRED in of_param) is (truth == "PENDING"), name


@pytest.mark.gloo
@pytest.mark.parametrize("item", ALL, ids=ids)
def test_measured(item: Item, reports: dict[Item, Any]) -> None:
    if reports[item] is None:
        pytest.skip("this torch lacks what the variant needs")
    report, expected = reports[item]
    rules = {f.rule_id for f in report.findings}
    assert "PA901" not in rules
    if item[0] == "21_reduce_dtype_tp":  # numbers of bfloat16 are none to judge by; dtypes are
        assert ("PA501" in rules) is (item[1] == "bug")
        return
    assert report.measurement is not None, report.trace.run.notes
    wrong = any(truth in WRONG for truth in expected.values())
    assert report.exit_status == (1 if wrong else 0), rules
    if "PA209" in rules:
        return  # all of them alike: told once, of the mesh dim
    for name, truth in expected.items():
        of_param = verdicts(report, name)
        if truth in WRONG and of_param:
            assert of_param - set(GOOD), name
        elif of_param:
            assert of_param <= set(GOOD), name
            assert (Verdict.DEFERRED in of_param) is (truth == "PENDING"), name


def test_the_whole_corpus_is_there() -> None:
    assert len({name for name, _ in ALL}) == len(list(CASES.glob("*/case.py")))
    assert {name for name, _ in ALL} >= set(NUMBERS_ONLY)
