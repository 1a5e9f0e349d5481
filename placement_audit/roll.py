"""What the ranks' answers mean: pure functions from what each rank posted to one message."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from placement_audit.errors import IncompleteError
from placement_audit.model import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One rank's answer to a roll call.

    Attributes:
        count: notes taken so far; lower is further behind.
        phase: "build", "trace", ...
        text: the collective it noted last; "" for none.
        seconds: since then.
        place: where its main thread stands.
    """

    count: int
    phase: str
    text: str
    seconds: float
    place: str

    def to_json(self) -> str:
        """As text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """Back from text."""
        return cls(**json.loads(text))


def named(ranks: Iterable[int]) -> str:
    """``rank 3``; ``ranks 0-2, 5``."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for r in ordered:
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'' if len(ordered) == 1 else 's'} {text}"


def hang_message(answers: Mapping[int, Answer], world_size: int, timeout: float) -> str:
    """Who hung, where, and what the others wait in.

    Args:
        answers: by rank; a rank that did not answer is absent.
        world_size: ranks.
        timeout: seconds.
    """
    silent = [r for r in range(world_size) if r not in answers]
    lowest = min((a.count for a in answers.values()), default=0)
    highest = max((a.count for a in answers.values()), default=0)
    behind = [r for r, a in answers.items() if a.count == lowest < highest]
    hung = silent or behind
    if hung:
        lines = [f"{named(hung)} hung: no progress for {timeout:g} s (--timeout)."]
    else:
        lines = [f"all {world_size} ranks hang: no progress for {timeout:g} s (--timeout)."]
    if silent:
        lines.append(f"  {named(silent)}: no answer; stopped, gone, or busy outside Python")
    groups: dict[tuple[bool, str, str, str], list[int]] = defaultdict(list)
    for rank, a in answers.items():
        groups[rank not in behind, a.phase, a.text, a.place].append(rank)
    for (waits, phase, text, place), ranks in sorted(groups.items(), key=lambda g: (g[0][0], g[1])):
        verb = "waiting in" if waits else "last collective was"
        what = f"{verb} {text}" if text else f"in phase {phase}"
        seconds = min(answers[r].seconds for r in ranks)
        lines.append(f"  {named(ranks)}: {what}, {seconds:.0f} s ago; at {place}")
    return "\n".join(lines)


def failure_message(failures: Mapping[int, Mapping[str, Any]], world_size: int) -> tuple[str, str, int]:
    """The failure to tell, of those posted: the first one, for the others often follow from it.

    Args:
        failures: by rank: "order" (1 first), "status", "message", "details".
        world_size: ranks.

    Returns:
        Message, details, exit status.
    """
    if not failures:
        return "a rank failed and left no message.", "", IncompleteError.exit_status
    first = min(failures.values(), key=lambda f: f["order"])
    alike = [r for r, f in failures.items() if f["message"] == first["message"]]
    # What all ranks say alike, or what a user can mend, is about the job and not about a rank.
    about_job = len(alike) == world_size or first["status"] == 2
    message = first["message"] if about_job else f"{named(alike)}: {first['message']}"
    return message, first["details"], first["status"]


def digest(report: Report) -> str:
    """A hash of what a report judged; equal on ranks that agree."""
    rows = [
        (
            j.param_fqn,
            j.mesh_dim,
            str(j.verdict),
            str(j.placement),
            str(j.expected),
            str(j.observed),
            str(j.factor),
        )
        for j in report.judgements
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def check_digests(digests: Mapping[int, str]) -> None:
    """Check that all ranks judged alike.

    Raises:
        IncompleteError: they did not.
    """
    common, _ = Counter(digests.values()).most_common(1)[0]
    others = [r for r, d in digests.items() if d != common]
    if others:
        alike = [r for r in digests if r not in others]
        raise IncompleteError(
            f"the ranks judge differently: {named(alike)} agree, {named(others)} "
            f"{'differs' if len(others) == 1 else 'differ'}. Either the job does something else on these "
            "ranks, or "
            "placement-audit is wrong: compare with a run in one process."
        )
