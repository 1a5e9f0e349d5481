"""Programs made by chance (tests/faults/chance.py), traced and set against their numbers; see bench.py --chance."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version

CHUNK = 50
"""Programs to a launch of ranks."""

MISTAKES = ("missed", "false alarm")


def chance(programs: int, first: int) -> int:
    """Print what becomes of so many programs on each mesh, and every mistake; 1 where there is one.

    Args:
        programs: how many.
        first: number of the first one; others are other programs.
    """
    from tests.faults.chance_run import MESHES, outcomes, reports, truths
    from tests.gloo.ranks import apart, on_ranks

    mistakes = 0
    for ranks, names in MESHES.items():
        told: Counter[str] = Counter()
        for start in range(first, first + programs, CHUNK):
            seeds = list(range(start, min(start + CHUNK, first + programs)))
            true = on_ranks(ranks, truths, seeds, deadline=600)[0]
            found = apart(reports, seeds, ranks, deadline=600)
            for seed in seeds:
                truth, report = true[seed], found[seed]
                if isinstance(truth, str) or isinstance(report, str):
                    told["programs that torch refuses"] += 1
                    continue
                for name, outcome in outcomes(truth, report).items():
                    told[outcome] += 1
                    if outcome in MISTAKES:
                        mistakes += 1
                        elsewhere = " (others of it are wrong)" if truth.wrong - {name} else ""
                        print(f"program {seed} on {ranks} ranks: {name}: {outcome}{elsewhere}", flush=True)
        counts = ", ".join(f"{n} {what}" for what, n in sorted(told.items()))
        print(f"{programs} programs on {' x '.join(names)}, {ranks} ranks; gradients: {counts}", flush=True)
    print(f"versions: placement-audit {version('placement-audit')}, torch {version('torch')}")
    return 1 if mistakes else 0
