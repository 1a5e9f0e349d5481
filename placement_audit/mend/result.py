"""What a look at one source file found, and what it would become."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a fault and its mend stand in a file."""

    ABSENT = "absent"  # nothing here that could be at fault
    NOT_APPLIED = "not applied"
    APPLIED = "applied"
    OTHER_FORM = "other form"
    WRONG = "wrong"  # mended by someone, so that it is worse than before
    REFUSED = "refused"  # not understood: the reason says what


class Form(StrEnum):
    """Who sums what the ranks of the other mesh dims hold of a replicated weight's gradient."""

    REDUCED = "reduced"  # the parameter itself, in the reduce dtype
    DEFERRED = "deferred"  # whoever reads the gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One fault in one file.

    Attributes:
        name: of the fault: "replicate_compute" or "class cache".
        state: how it stands.
        line: where, from 1; 0 where there is no place.
        reason: a sentence: what was found.
        text: the whole file, mended; as it was where there is nothing to mend, or it cannot be.
    """

    name: str
    state: State
    line: int
    reason: str
    text: str
