"""`scripts/bench.py --faults`: the seeded faults of tests/faults, caught, missed and false alarms.

Each variant is judged by placement-audit, by a trace alone and by numbers on gloo ranks, and, where it is installed, by
spmd_types: over the forward, as its guide has it, and to the end of the step, with the gradients typed as well
(tests/faults/spmd.py says how the programs are annotated).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placement_audit.verdicts import Report
    from tests.faults.family import Family

Item = tuple[str, str]
"""A family's name and a variant's."""

OUTCOMES = ("caught", "missed", "false alarm", "right")
UNSUPPORTED = "does not run"
SPMD_TYPES = "spmd_types"
NEEDED = (0, 3)
"""The spmd_types that brought typing rules for autograd functions."""


def faults() -> int:
    """Print the table, the tallies, and which versions were compared."""
    from tests.faults import FAMILIES

    columns: dict[str, Mapping[Item, str]] = {"traced": by_trace(FAMILIES), "measured": by_numbers(FAMILIES)}
    reasons: dict[str, Mapping[Item, str]] = {}
    lacking = not_compared(SPMD_TYPES)
    if lacking is None:
        for how, gradients in ((SPMD_TYPES, False), (f"{SPMD_TYPES}, gradients too", True)):
            columns[how], reasons[how] = by_types(FAMILIES, gradients=gradients)
    truth = {(f.name, v): e.right for f in FAMILIES for v, e in f.variants.items()}
    wide, less = (2 + max(len(item[i]) for item in truth) for i in (0, 1))
    head = f"{'family':<{wide}}{'variant':<{less}}{'truth':<8}"
    print((head + "".join(f"{how:<14}" for how in columns)).rstrip())
    for (family, variant), right in truth.items():
        cells = [outcome_of(right, column.get((family, variant))) for column in columns.values()]
        row = f"{family:<{wide}}{variant:<{less}}{'right' if right else 'wrong':<8}"
        print((row + "".join(f"{c:<14}" for c in cells)).rstrip())
    for how, column in columns.items():
        print(f"{how}: {tally(truth, column)}")
        for line in summed_up(reasons.get(how, {})):
            print(f"  {UNSUPPORTED}: {line}")
    packages = ("placement-audit", "torch", *([SPMD_TYPES] if lacking is None else []))
    print("versions: " + ", ".join(f"{p} {version(p)}" for p in packages))
    print(
        lacking
        or f"{SPMD_TYPES} checks the forward, up to backward(); how it was asked: tests/faults/spmd.py"
    )
    return 0


# --------------------------------------------------------------------------- the judges


def by_trace(families: Iterable[Family]) -> dict[Item, str]:
    """What a trace says of each variant."""
    from tests.faults.on_ranks import traced

    return {(f.name, v): said(traced(f, v)) for f in families for v in f.variants}


def by_numbers(families: Iterable[Family]) -> dict[Item, str]:
    """What a measured audit says of each variant that numbers can tell of."""
    from tests.faults.on_ranks import reports
    from tests.gloo.ranks import on_ranks

    verdicts = {}
    for ranks in sorted({f.ranks for f in families}):
        items = [(f.name, v) for f in families if f.ranks == ranks and f.measured for v in f.variants]
        for item, report in on_ranks(ranks, reports, items, deadline=600)[0].items():
            verdicts[item] = said(report)
    return verdicts


def by_types(families: Iterable[Family], *, gradients: bool) -> tuple[dict[Item, str], dict[Item, str]]:
    """What spmd_types says of each variant, and why of those that it cannot check."""
    from tests.faults.spmd import checked

    answers = {(f.name, v): answer for f in families for v, answer in checked(f, gradients=gradients).items()}
    verdicts = {item: answer.verdict for item, answer in answers.items()}
    return verdicts, {item: a.why for item, a in answers.items() if a.verdict == UNSUPPORTED}


def not_compared(package: str, needed: tuple[int, ...] = NEEDED) -> str | None:
    """Why it is not, in a line, with what to do; None where it can be."""
    least = ".".join(map(str, needed))
    get = f'To compare: pip install "{package}>={least}"'
    try:
        there = version(package)
    except PackageNotFoundError:
        return f"{package}: not installed. {get}"
    if tuple(int(n) for n in there.split(".")[: len(needed)]) < needed:
        return f"{package}: {there} is installed, and {least} or later is needed. {get}"
    return None


# --------------------------------------------------------------------------- what they said


def said(report: Report | str) -> str:
    """In one word: right or wrong; "fault" where there is no report, or one that contradicts itself."""
    if isinstance(report, str) or any(f.rule_id == "PA901" for f in report.findings):
        return "fault"
    return "wrong" if report.exit_status == 1 else "right"


def outcome_of(right: bool, verdict: str | None) -> str:
    """A cell of the table; "-" where nothing was run."""
    if verdict is None:
        return "-"
    if verdict == UNSUPPORTED:
        return UNSUPPORTED
    if right:
        return "right" if verdict == "right" else "false alarm"
    return "caught" if verdict == "wrong" else "missed"


def tally(truth: Mapping[Item, bool], column: Mapping[Item, str]) -> str:
    """How often each outcome came."""
    counts = Counter(outcome_of(right, column.get(item)) for item, right in truth.items())
    shown = [*OUTCOMES, *([UNSUPPORTED] if counts[UNSUPPORTED] else [])]
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in shown)


def summed_up(reasons: Mapping[Item, str]) -> list[str]:
    """A line for each family and reason."""
    counts = Counter((family, why) for (family, _), why in reasons.items())
    return [f"{family} ({n} variant{'s' * (n > 1)}): {why}" for (family, why), n in counts.items()]
