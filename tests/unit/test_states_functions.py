"""The algebra of states at autograd functions and raw collectives."""

from __future__ import annotations

from fractions import Fraction

import pytest

from placement_audit import states
from placement_audit.model import State, StateKind

pytestmark = pytest.mark.unit

I, V, Z = State(StateKind.INVARIANT), State(StateKind.VARYING), State(StateKind.ZERO)  # noqa: E741
T, M, L, A = (State(k) for k in (StateKind.TERM, StateKind.MIXED, StateKind.LOST, StateKind.AMBIGUOUS))


@pytest.mark.parametrize(
    ("output", "grad", "expected"),
    [
        (I, I, I), (I, V, T), (I, M, M), (I, L, L), (I, Z, Z), (I, A, A),
        (V, I, V), (V, V, V), (V, Z, Z), (V, L, L), (V, A, A),
    ],
)  # fmt: skip
def test_what_arrives_is_read_by_the_forward_s_output(output: State, grad: State, expected: State) -> None:
    assert states.into_function(output, grad) == expected


@pytest.mark.parametrize(
    ("value", "grad", "expected"),
    [
        (I, I, I), (I, V, V), (I, T, V), (I, M, M), (I, L, L), (I, Z, Z),
        (V, I, V), (V, V, V), (V, T, L), (V, M, L), (V, L, L), (V, Z, Z), (V, A, A),
    ],
)  # fmt: skip
def test_what_leaves_is_read_by_the_forward_s_input(value: State, grad: State, expected: State) -> None:
    assert states.out_of_function(value, grad) == expected


def test_a_value_s_gradient() -> None:
    assert [states.of_a_value(v, g) for v in (I, V) for g in (I, V, Z)] == [I, V, Z, V, V, Z]


@pytest.mark.parametrize(
    ("move", "expected"),
    [
        (lambda s: states.reduced(s, 2, "sum", is_grad=True), I),
        (lambda s: states.scattered(s, 2, "sum", is_grad=True), V),
        (lambda s: states.gathered(s), A),
        (lambda s: states.taken_from_one(s, is_term=False), L),
        (lambda s: states.exchanged(s, 2, is_grad=True), V),
        (lambda s: states.over_a_part(s, 2, "sum"), T),
        (lambda s: states.sliced(s, is_grad=True), L),
    ],
)
def test_what_becomes_of_a_term(move: object, expected: State) -> None:
    assert move(T) == expected  # type: ignore[operator]


def test_a_complete_gradient_that_is_dealt_out_and_added_up_is_counted_by_each_rank() -> None:
    assert states.exchanged(I, 4, is_grad=True) == State(StateKind.VARYING, Fraction(4))
    assert states.exchanged(I, 4, is_grad=False) == V
    assert states.exchanged(V, 4, is_grad=True) == V


@pytest.mark.parametrize(
    ("state", "op", "expected"),
    [
        (I, "sum", State(StateKind.INVARIANT, Fraction(2))),
        (I, "avg", I),
        (V, "sum", V),
        (V, "avg", State(StateKind.VARYING, Fraction(1, 2))),
        (Z, "sum", Z),
    ],
)
def test_a_reduction_over_a_part_of_the_ranks(state: State, op: str, expected: State) -> None:
    assert states.over_a_part(state, 2, op) == expected


@pytest.mark.parametrize(("state", "expected"), [(I, I), (V, L), (M, L), (Z, Z)])
def test_one_rank_s_gradient_for_all(state: State, expected: State) -> None:
    assert states.taken_from_one(state, is_term=True) == expected


def test_one_rank_s_value_for_all() -> None:
    assert states.taken_from_one(V, is_term=False) == I


def test_a_part_of_one_s_own() -> None:
    assert [states.sliced(s, is_grad=g) for g in (True, False) for s in (I, V, M)] == [V, V, L, V, V, M]


def test_a_term_and_a_complete_part_added_up_are_mixed() -> None:
    both = {"a_grad": True, "b_grad": True}
    assert states.combine(T, I, adds=True, **both).kind is StateKind.MIXED
    assert states.combine(T, I, adds=False, **both).kind is StateKind.TERM
    assert states.combine(T, L, adds=True, **both).kind is StateKind.LOST


def test_rescaling() -> None:
    assert states.rescaled(V, Fraction(1, 2)) == State(StateKind.VARYING, Fraction(1, 2))
    assert states.rescaled(State(StateKind.VARYING, None), Fraction(2)).scale is None
