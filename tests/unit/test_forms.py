"""What complete values are made of, as far as numbers tell."""

from __future__ import annotations

from fractions import Fraction

import pytest

from placement_audit.engine import forms

pytestmark = pytest.mark.unit

HALF = Fraction(1, 2)


def test_a_value_is_counted_as_often_as_it_is_added() -> None:
    bias = forms.one(1)
    assert forms.plus(bias, bias) == ((1, Fraction(2)),)
    assert forms.plus(bias, forms.times(bias, HALF)) == ((1, Fraction(3, 2)),)
    assert forms.times(bias, Fraction(0)) == forms.NOTHING


def test_what_is_taken_back_leaves_nothing() -> None:
    bias, other = forms.one(1), forms.one(2)
    divided = forms.times(bias, HALF)
    hidden = forms.plus(divided, forms.times(bias, Fraction(-1)))
    assert forms.plus(bias, hidden) == divided
    assert forms.plus(forms.plus(bias, other), forms.times(bias, Fraction(-1))) == other


@pytest.mark.parametrize(
    ("often", "ranks", "miscounted"),
    [
        (HALF, 2, False),
        (-HALF, 2, False),
        (Fraction(-1), 2, True),
        (Fraction(1), 2, True),
        (HALF, 4, True),
        (Fraction(1, 4), 4, False),
    ],
)
def test_once_is_what_all_ranks_together_add_once(often: Fraction, ranks: int, miscounted: bool) -> None:
    form = forms.times(forms.one(7), often)
    assert forms.miscounted(form, ranks) == (form if miscounted else ())


@pytest.mark.parametrize(
    ("x", "exact"), [(0.5, HALF), (1 / 3, Fraction(1, 3)), (3, Fraction(3)), (1e-30, Fraction(1e-30))]
)
def test_numbers_are_taken_for_the_fractions_that_they_stand_for(x: float, exact: Fraction) -> None:
    assert forms.number(x) == exact


def test_long_forms_are_told() -> None:
    form = forms.NOTHING
    for value in range(8):
        form = forms.plus(form, forms.one(value))
    assert not forms.too_long(form)
    assert forms.too_long(forms.plus(form, forms.one(8)))
