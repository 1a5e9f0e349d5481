"""Programs made by chance: no wrong gradient passes a trace, and no right program is accused."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.chance_run import outcomes, reports, truths
from tests.gloo.ranks import apart, on_ranks

SEEDS = {2: range(160), 4: range(1000, 1050)}
"""By the ranks; `scripts/bench.py --chance N` runs others."""


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", SEEDS)
def test_a_trace_says_what_the_numbers_say(ranks: int) -> None:
    seeds = list(SEEDS[ranks])
    true = on_ranks(ranks, truths, seeds, deadline=240)[0]
    found = apart(reports, seeds, ranks, deadline=240)
    told: Counter[str] = Counter()
    for seed in seeds:
        truth, report = true[seed], found[seed]
        if isinstance(truth, str) or isinstance(report, str):
            continue  # torch itself refuses the labels
        outcome = outcomes(truth, report)
        assert "missed" not in outcome.values(), seed
        if not truth.wrong:  # one wrong may make up for another in a part of a program
            assert "false alarm" not in outcome.values(), seed
            assert report.exit_status == 0, (seed, [f.rule_id for f in report.findings])
        told.update(outcome.values())
    assert min(told["right"], told["caught"]) > len(seeds) / 4, "a good part of them is right, and one wrong"
    assert told["not judged"] <= told.total() / 20, "not to judge is no way out"
