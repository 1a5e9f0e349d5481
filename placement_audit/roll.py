"""What the ranks' answers mean: pure functions from what each rank posted to one message."""

from __future__ import annotations

import hashlib
import json
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any

from placement_audit.errors import IncompleteError
from placement_audit.verdicts import Report


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
        verb = "waiting in" if waits else "got as far as"
        what = f"{verb} {text}" if text else f"in phase {phase}"
        seconds = min(answers[r].seconds for r in ranks)
        lines.append(f"  {named(ranks)}: {what}, {seconds:.0f} s ago; at {place}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trail:
    """What a rank's records say once it can't answer for itself.

    Attributes:
        phase: "build", "trace", ...; "start" before the first.
        text: what it noted last in this phase; "" for nothing.
        failed: the error that it met, where it could still record one; else "".
    """

    phase: str = "start"
    text: str = ""
    failed: str = ""

    def __str__(self) -> str:
        text = f"during {self.phase}" + (f", at or after {self.text}" if self.text else "")
        if self.failed:
            text += f"; then failed: {shorten(self.failed, 220, placeholder=' ...')}"
        return text


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status} before the audit was done,"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-status}{name}"


def lost_message(lost: Mapping[int, int], trails: Mapping[int, Trail]) -> str:
    """Which ranks ended without a word, and where all of them stood.

    Args:
        lost: exit statuses by rank, negative for a signal; at least one.
        trails: of all ranks.
    """
    first = min(lost)
    alike = [r for r, status in lost.items() if (status, trails[r]) == (lost[first], trails[first])]
    verb = _ended(lost[first])
    if len(alike) > 1:
        verb = verb.replace("was killed", "were killed")
    lines = [f"{named(alike)} {verb} {trails[first]}."]
    if lost[first] == -signal.SIGKILL:
        lines.append("  If nobody sent it, memory ran out: take fewer ranks, or a smaller model.")
    lines += [f"  rank {r}: {_ended(status)} {trails[r]}" for r, status in lost.items() if r not in alike]
    return "\n".join(lines + trail_lines({r: t for r, t in trails.items() if r not in lost}))


def stuck_message(trails: Mapping[int, Trail], timeout: float) -> str:
    """No rank makes progress, and none has a watchdog that answers.

    Args:
        trails: of all ranks.
        timeout: seconds.
    """
    first = (
        f"all {len(trails)} ranks hang: no progress for {timeout:g} s (--timeout), and no watchdog answers."
    )
    return "\n".join([first, *trail_lines(trails)])


def trail_lines(trails: Mapping[int, Trail]) -> list[str]:
    """One line for each group of ranks that stood at the same place."""
    groups: dict[Trail, list[int]] = defaultdict(list)
    for rank, trail in trails.items():
        groups[trail].append(rank)
    return [f"  {named(ranks)}: {trail}" for trail, ranks in sorted(groups.items(), key=lambda g: g[1])]


def failure_message(
    failures: Mapping[int, Mapping[str, Any]], world_size: int, silent: Mapping[int, Trail]
) -> tuple[str, str, int]:
    """The failure to tell, of those posted: the first one, for the others often follow from it.

    Args:
        failures: by rank: "order" (1 first), "status", "message", "details".
        world_size: ranks.
        silent: ranks that gave no answer, and where each was seen last.

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
    if silent and first["status"] != 2:
        # What the others met, such as a lost connection, most often follows from that.
        lines = [
            f"{named(silent)} gave no answer: killed (out of memory?), or busy outside Python.",
            f"  {message}",
        ]
        lines[1:1] = [f"  {named([r])} was last seen {trail}" for r, trail in silent.items()]
        return "\n".join(lines), first["details"], IncompleteError.exit_status
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
