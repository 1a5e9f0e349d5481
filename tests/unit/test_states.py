"""The algebra of states against what ranks with real numbers would hold."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement_audit import states
from placement_audit.model import REPLICATE, Placement, PlacementKind, State, StateKind
from placement_audit.states import INVARIANT, VARYING, ZERO, blamed, combine, relabel

pytestmark = pytest.mark.unit

SUM = Placement(PlacementKind.PARTIAL, reduce_op="sum")
AVG = Placement(PlacementKind.PARTIAL, reduce_op="avg")
MAX = Placement(PlacementKind.PARTIAL, reduce_op="max")
S0 = Placement(PlacementKind.SHARD, tensor_dim=0)
S1 = Placement(PlacementKind.SHARD, tensor_dim=1)
MIXED, LOST, AMBIGUOUS = State(StateKind.MIXED), State(StateKind.LOST), State(StateKind.AMBIGUOUS)

kinds = st.sampled_from(list(StateKind))
scales = st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 2), Fraction(4)])
any_state = st.builds(State, kinds, scales).map(lambda s: ZERO if s.kind is StateKind.ZERO else s)
labels = st.sampled_from([SUM, AVG, S0, S1, REPLICATE])


def named(value: object) -> str | None:
    """The same in every process, which a function's address is not."""
    return None if callable(value) else str(value)


def grads(a: State, b: State, *, adds: bool = True) -> State:
    return combine(a, b, a_grad=True, b_grad=True, adds=adds)


@pytest.mark.parametrize(
    ("a", "b", "adds", "kind"),
    [
        (INVARIANT, INVARIANT, True, StateKind.INVARIANT),
        (INVARIANT, VARYING, True, StateKind.MIXED),
        (INVARIANT, VARYING, False, StateKind.VARYING),
        (ZERO, VARYING, True, StateKind.VARYING),
        (ZERO, INVARIANT, True, StateKind.INVARIANT),
        (MIXED, VARYING, True, StateKind.MIXED),
        (MIXED, VARYING, False, StateKind.VARYING),
        (MIXED, INVARIANT, False, StateKind.MIXED),
        (LOST, VARYING, True, StateKind.LOST),
        (LOST, INVARIANT, False, StateKind.LOST),
        (AMBIGUOUS, INVARIANT, True, StateKind.AMBIGUOUS),
        (AMBIGUOUS, VARYING, True, StateKind.VARYING),
    ],
    ids=named,
)
def test_two_gradients_meet(a: State, b: State, adds: bool, kind: StateKind) -> None:
    assert grads(a, b, adds=adds).kind is kind


def test_values_of_the_forward_never_mix() -> None:
    assert combine(INVARIANT, VARYING, a_grad=False, b_grad=False, adds=True) == VARYING
    assert combine(INVARIANT, VARYING, a_grad=True, b_grad=False, adds=True).kind is StateKind.VARYING


def test_parts_of_different_scale_have_no_scale() -> None:
    twice = State(StateKind.VARYING, Fraction(2))
    assert grads(VARYING, twice).scale is None
    assert grads(twice, twice).scale == 2
    assert combine(twice, INVARIANT, a_grad=True, b_grad=False, adds=False).scale == 2


@given(any_state, any_state, st.booleans())
def test_combining_is_symmetric(a: State, b: State, adds: bool) -> None:
    assert grads(a, b, adds=adds) == grads(b, a, adds=adds)


@given(any_state, st.booleans())
def test_zero_is_neutral(a: State, adds: bool) -> None:
    assert grads(a, ZERO, adds=adds) == a


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("state", "src", "dst", "kind", "scale"),
    [
        # (what it is, label before, label after) -> what it is then, over the true gradient for n ranks
        (VARYING, SUM, REPLICATE, "invariant", lambda n: 1),
        (INVARIANT, SUM, REPLICATE, "invariant", lambda n: n),
        (VARYING, AVG, REPLICATE, "invariant", lambda n: Fraction(1, n)),
        (INVARIANT, AVG, REPLICATE, "invariant", lambda n: 1),
        (VARYING, SUM, S0, "varying", lambda n: 1),
        (INVARIANT, SUM, S0, "varying", lambda n: n),
        (VARYING, AVG, S0, "varying", lambda n: Fraction(1, n)),
        (INVARIANT, REPLICATE, SUM, "varying", lambda n: 1),
        (VARYING, REPLICATE, SUM, "varying", lambda n: Fraction(1, n)),
        (INVARIANT, REPLICATE, S0, "varying", lambda n: 1),
        (VARYING, REPLICATE, S0, "lost", lambda n: 1),
        (MIXED, REPLICATE, S0, "lost", lambda n: 1),
        (VARYING, S0, REPLICATE, "invariant", lambda n: 1),
        (VARYING, S0, S1, "varying", lambda n: 1),
        (LOST, S0, REPLICATE, "lost", lambda n: 1),
        (MIXED, SUM, REPLICATE, "invariant", lambda n: None),
        (MIXED, AVG, REPLICATE, "invariant", lambda n: None),
        (MIXED, SUM, S0, "varying", lambda n: None),
        (MIXED, MAX, REPLICATE, "mixed", lambda n: 1),
    ],
    ids=named,
)
def test_relabel(state: State, src: Placement, dst: Placement, kind: str, scale: object, size: int) -> None:
    after = relabel(state, src, dst, size, is_grad=True)
    assert (after.kind.value, after.scale) == (kind, scale(size))  # type: ignore[operator]


@given(any_state, labels, st.sampled_from([2, 4, 8]))
def test_relabel_to_the_same_changes_nothing(state: State, label: Placement, size: int) -> None:
    assert relabel(state, label, label, size, is_grad=True) is state


@given(labels, labels, st.sampled_from([2, 4, 8]))
def test_a_value_keeps_its_scale_and_is_never_lost(src: Placement, dst: Placement, size: int) -> None:
    for state in (INVARIANT, VARYING):
        after = relabel(state, src, dst, size, is_grad=False)
        assert after.scale == 1
        assert after.kind in (StateKind.INVARIANT, StateKind.VARYING)


TRUE_GRADIENT = Fraction(12)


def ranks_of(state: State, size: int) -> list[Fraction]:
    """Numbers that ranks could hold for a replicated tensor's gradient in this state."""
    assert state.scale is not None
    total = TRUE_GRADIENT * state.scale
    if state.kind is StateKind.INVARIANT:
        return [total] * size
    terms = [total * Fraction(i + 1, size * (size + 1) // 2) for i in range(size)]
    assert sum(terms) == total
    return terms


@given(
    st.sampled_from([INVARIANT, VARYING]),
    st.sampled_from([(SUM, REPLICATE), (AVG, REPLICATE), (REPLICATE, SUM)]),
    st.sampled_from([2, 3, 4]),
)
def test_relabel_agrees_with_numbers(state: State, move: tuple[Placement, Placement], size: int) -> None:
    src, dst = move
    held = ranks_of(state, size)
    if dst.is_replicate:
        total = sum(held) / (size if src == AVG else 1)
        held = [Fraction(total)] * size
    else:
        held = [h / size for h in held]
    after = relabel(state, src, dst, size, is_grad=True)
    assert after.scale is not None
    if after.kind is StateKind.INVARIANT:
        assert held == [TRUE_GRADIENT * after.scale] * size
    else:
        assert sum(held) == TRUE_GRADIENT * after.scale


def test_blame_keeps_the_first_places_once() -> None:
    state = VARYING
    for i in (7, 3, 7, 5, 1, 9):
        state = blamed(state, i)
    assert state.blame == (7, 3, 5, 1)
    assert grads(blamed(VARYING, 1), blamed(VARYING, 2)).blame == (1, 2)


@pytest.mark.parametrize(
    ("label", "state", "false"),
    [
        (REPLICATE, INVARIANT, False),
        (REPLICATE, VARYING, True),
        (REPLICATE, MIXED, True),
        (SUM, VARYING, False),
        (SUM, INVARIANT, True),
        (SUM, MIXED, True),
        (AVG, INVARIANT, False),
        (S0, VARYING, False),
        (S0, LOST, True),
        (REPLICATE, AMBIGUOUS, False),
        (SUM, AMBIGUOUS, False),
        (SUM, ZERO, False),
    ],
    ids=named,
)
def test_belies(label: Placement, state: State, false: bool) -> None:
    assert states.belies(label, state) is false
