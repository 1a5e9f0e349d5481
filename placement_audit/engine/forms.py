"""What a complete value is made of: how often which other values went into it, as far as numbers tell. No torch.

A value that is equal on all ranks may be added to each rank's term of a sum, if it was divided before by the
ranks that add it. The division may stand anywhere, be taken back (``b + (b / n - b)``), or be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

Form = tuple[tuple[int, Fraction], ...]
"""(value, how often), by value; what adds up to nothing is left out."""

NOTHING: Form = ()

NUMBER = 0
"""Stands for the value 1, of which every number is so many times."""

_LARGEST = 1 << 20
_LONGEST = 8
"""Values that one form names at most; a longer one counts as a value of its own."""


def one(value: int) -> Form:
    """The form of a value that is made of nothing else."""
    return ((value, Fraction(1)),)


def times(form: Form, by: Fraction) -> Form:
    """So many times it."""
    return tuple((v, n * by) for v, n in form) if by else NOTHING


def plus(a: Form, b: Form) -> Form:
    """Both added up."""
    if not a or not b:
        return a or b
    total = dict(a)
    for v, n in b:
        total[v] = total.get(v, Fraction(0)) + n
    return tuple(sorted((v, n) for v, n in total.items() if n))


def too_long(form: Form) -> bool:
    """Whether it is better taken as a value of its own."""
    return len(form) > _LONGEST


def number(x: float) -> Fraction:
    """A Python number; a third is meant where 0.333... stands. One too near to zero stays what it is."""
    exact = Fraction(x)
    return exact.limit_denominator(_LARGEST) or exact


def miscounted(form: Form, ranks: int) -> Form:
    """What is not counted (or taken off) just once where ``ranks`` ranks each add the form to their term."""
    return tuple((v, n) for v, n in form if abs(n) * ranks != 1)


@dataclass(frozen=True, slots=True)
class Made:
    """What a value is made of, and what autograd knows of it.

    Attributes:
        value: all that went in.
        grad: what a gradient flows back to; less where something was detached.
    """

    value: Form = NOTHING
    grad: Form = NOTHING

    def times(self, by: Fraction) -> Made:
        """So many times it."""
        return Made(times(self.value, by), times(self.grad, by))

    def plus(self, other: Made) -> Made:
        """Both added up."""
        return Made(plus(self.value, other.value), plus(self.grad, other.grad))


EMPTY = Made()
