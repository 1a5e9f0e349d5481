"""The algebra of states: what a value or a gradient really is along one mesh dim.

A placement is a claim. This module computes the other side of the comparison, the fact, from nothing
but the dataflow: which tensors went into an op, which collective ran over which mesh dim, which relabel
moved what. It is pure: no torch, no parameter names, no versions.

States of a value (forward): *invariant*, all ranks along the mesh dim hold the same value; *varying*, they
need not.

States of a gradient (backward), for the gradient of a tensor that is

- invariant: *invariant*, complete and equal on all ranks; *varying*, each rank holds its own term and the
  truth is the sum over the ranks (torch's Partial); *mixed*, a complete part and a per-rank part were added
  up, so that no single label is right (summed over the ranks it is equal on all, and the complete part too large);
- varying (each rank its own part, a shard or a term of a sum): *varying*, its own part's gradient.

*Ambiguous* is a gradient that a value declared Partial received: equal on all ranks, although each rank's
value was its own term. For a replicated parameter that fed it, equal may mean complete (the forward counted
it once by other means) or one term of a sum (it divided by the mesh dim's size): only values decide.
*Term* is a varying gradient that is known to be one term of a sum: within the backward of an autograd
function whose output was invariant, and nowhere else. There it must be told from a part, because a function
that hands it to a varying input without summing it has lost the other terms.
*Lost* is a gradient some of whose terms were thrown away (a sum over ranks that was cut into shards before
it was summed); nothing downstream can mend it. *Zero* adds nothing and is neutral.

One rule makes this sound: a gradient that flows into a varying tensor is varying, whatever its values
happen to be (JAX's shard_map types cotangents the same way). All sources of gradients (the loss, the
boundaries, the collectives) obey it in `placement_audit.engine.flow`, and plain ops then keep it by themselves.

The scale says how many times the true gradient a state holds: reducing a value that is already complete
multiplies by the mesh dim's size, relabelling a per-rank term from Replicate to Partial divides by it, and
an average divides.
"""

from __future__ import annotations

from fractions import Fraction

from placement_audit.model import REPLICATE, Placement, State, StateKind

INVARIANT = State(StateKind.INVARIANT)
VARYING = State(StateKind.VARYING)
ZERO = State(StateKind.ZERO)

_BLAME_CAP = 4
"""Places kept per state: enough to tell a story, and bounded however deep the model."""

_RANK = {
    StateKind.ZERO: 0,
    StateKind.INVARIANT: 1,
    StateKind.AMBIGUOUS: 2,
    StateKind.VARYING: 3,
    StateKind.MIXED: 3,
    StateKind.TERM: 4,
    StateKind.LOST: 5,
}


_A_COMPLETE_AND_A_PER_RANK_PART = (
    {StateKind.INVARIANT, StateKind.VARYING},
    {StateKind.INVARIANT, StateKind.TERM},
)


_ADDING = ("sum", "avg")
"""Reductions of which the true gradient is made."""


def blamed(state: State, boundary: int) -> State:
    """The same state with one more place in its story."""
    if boundary in state.blame or len(state.blame) >= _BLAME_CAP:
        return state
    return State(state.kind, state.scale, (*state.blame, boundary))


def combine(a: State, b: State, *, a_grad: bool, b_grad: bool, adds: bool) -> State:
    """State of an op's result from two of its inputs.

    Args:
        a: one input.
        b: the other.
        a_grad: whether ``a`` is a gradient (it then carries scale and blame).
        b_grad: likewise.
        adds: whether the op adds its inputs up, as gradient accumulation does.
    """
    if a == b:
        return a
    both = a_grad and b_grad
    kinds = {a.kind, b.kind}
    if StateKind.ZERO in kinds:
        other = b if a.kind is StateKind.ZERO else a
        return State(other.kind, other.scale, _merge(a.blame, b.blame))
    if StateKind.LOST in kinds:
        kind = StateKind.LOST
    elif both and adds and kinds in _A_COMPLETE_AND_A_PER_RANK_PART:
        kind = StateKind.MIXED
    elif StateKind.MIXED in kinds:
        # A per-rank factor makes every rank's result its own; a sum, or an equal factor, stays mixed.
        kind = StateKind.VARYING if StateKind.VARYING in kinds and not (both and adds) else StateKind.MIXED
    else:
        kind = max(a.kind, b.kind, key=_RANK.__getitem__)
    if both:
        scale = a.scale if a.scale == b.scale else None
    else:
        scale = a.scale if a_grad else b.scale if b_grad else Fraction(1)
    return State(kind, scale, _merge(a.blame, b.blame))


def reduced(state: State, size: int, reduce_op: str | None, *, is_grad: bool) -> State:
    """After an all-reduce over ``size`` ranks: the same value everywhere."""
    kind = state.kind
    if kind is StateKind.ZERO:
        return state
    if kind is StateKind.MIXED and is_grad and reduce_op in _ADDING:
        return State(
            StateKind.INVARIANT, None, state.blame
        )  # the complete part so many times, the other once
    if kind in (StateKind.VARYING, StateKind.TERM):
        kind = StateKind.INVARIANT
    return State(kind, _reduce_scale(state, size, reduce_op) if is_grad else state.scale, state.blame)


def scattered(state: State, size: int, reduce_op: str | None, *, is_grad: bool) -> State:
    """After a reduce-scatter over ``size`` ranks: each rank its own part of the sum."""
    if state.kind is StateKind.ZERO:
        return state
    if state.kind is StateKind.MIXED and is_grad and reduce_op in _ADDING:
        return State(StateKind.VARYING, None, state.blame)  # as in `reduced`
    kind = StateKind.VARYING if state.kind in (StateKind.INVARIANT, StateKind.TERM) else state.kind
    return State(kind, _reduce_scale(state, size, reduce_op) if is_grad else state.scale, state.blame)


def gathered(state: State) -> State:
    """After an all-gather: the same value everywhere."""
    if state.kind is StateKind.VARYING:
        return State(StateKind.INVARIANT, state.scale, state.blame)
    if state.kind is StateKind.TERM:  # side by side: whether they are added up then, only values show
        return State(StateKind.AMBIGUOUS, state.scale, state.blame)
    return state


def taken_from_one(state: State, *, is_term: bool) -> State:
    """After a broadcast: one rank's value everywhere.

    Args:
        state: before.
        is_term: it is a gradient, and varying means that each rank holds a term of it.
    """
    if state.kind is StateKind.TERM or (is_term and state.kind in (StateKind.VARYING, StateKind.MIXED)):
        return State(StateKind.LOST, state.scale, state.blame)
    return gathered(state)


def exchanged(state: State, size: int, *, is_grad: bool) -> State:
    """After an all-to-all: each rank its own part.

    A gradient of something equal on all ranks that is dealt out so is added up after: that is the sum of the
    ranks' pieces of each part, a reduce-scatter by hand.
    """
    if is_grad and state.kind in (StateKind.TERM, StateKind.INVARIANT):
        return scattered(state, size, "sum", is_grad=True)
    return as_part(state)


def over_a_part(state: State, ranks: int, reduce_op: str | None) -> State:
    """A gradient after a reduction over some of the ranks along the mesh dim: a term still, if of fewer."""
    if state.kind is StateKind.ZERO:
        return state
    return State(state.kind, _reduce_scale(state, ranks, reduce_op), state.blame)


def as_part(state: State) -> State:
    """An equal value read as each rank's own part (a shard, or a term of a sum); zero stays neutral."""
    if state.kind is StateKind.INVARIANT:
        return State(StateKind.VARYING, state.scale, state.blame)
    return state


def as_value(state: State) -> State:
    """A gradient read as mere numbers: a norm of it, or a weight that it was added to."""
    kind = state.kind
    if kind is StateKind.MIXED:
        kind = StateKind.VARYING
    return State(StateKind.INVARIANT if kind is StateKind.ZERO else kind)


def _reduce_scale(state: State, size: int, reduce_op: str | None) -> Fraction | None:
    """Scale after a reduction: an average divides, a sum of something complete multiplies."""
    if state.scale is None or reduce_op not in _ADDING:
        return state.scale
    complete = state.kind is StateKind.INVARIANT
    if reduce_op == "avg":
        return state.scale if complete else state.scale / size
    return state.scale * size if complete else state.scale


def relabel(state: State, src: Placement, dst: Placement, size: int, *, is_grad: bool) -> State:
    """State after DTensor moved a tensor from placement ``src`` to ``dst`` along a mesh dim.

    Args:
        state: what it really was, which its label ``src`` may have belied.
        src: the label before.
        dst: the label after.
        size: ranks along the mesh dim.
        is_grad: gradients carry a scale and can lose terms; values can't.
    """
    if src == dst:
        return state
    if src.is_partial:
        if dst.is_replicate:
            return reduced(state, size, src.reduce_op, is_grad=is_grad)
        if dst.is_shard:
            return scattered(state, size, src.reduce_op, is_grad=is_grad)
        return state
    if src.is_shard:
        if dst.is_shard:
            return as_part(state)
        whole = gathered(state)
        return relabel(whole, REPLICATE, dst, size, is_grad=is_grad) if dst.is_partial else whole
    # src is Replicate
    if dst.is_shard:
        if is_grad and state.kind in (StateKind.VARYING, StateKind.MIXED):
            # Each rank keeps its slice of its own term: the other ranks' terms of that slice are gone.
            return State(StateKind.LOST, state.scale, state.blame)
        return as_part(state)
    if dst.reduce_op == "avg":
        return as_part(state) if not is_grad else state
    scale = state.scale
    if is_grad and scale is not None and state.kind is StateKind.VARYING:
        scale /= size
    part = as_part(state)
    return State(part.kind, scale, state.blame)


# --------------------------------------------------------------------------- autograd functions


def of_a_value(value: State, grad: State) -> State:
    """A gradient, read as the gradient of a value: that of a varying value is varying."""
    return grad if value.kind in (StateKind.INVARIANT, StateKind.ZERO) else as_part(grad)


def into_function(output: State, grad: State) -> State:
    """A gradient at the output of an autograd function, on its way into the function's backward.

    Args:
        output: of the forward's output.
        grad: of what arrives.
    """
    if output.kind is not StateKind.INVARIANT:
        return as_part(grad)
    if grad.kind is StateKind.VARYING:
        return State(StateKind.TERM, grad.scale, grad.blame)
    return grad


def out_of_function(value: State, grad: State, *, is_term: bool = False) -> State:
    """A gradient that an autograd function's backward made for one of its inputs.

    Whoever wrote the backward decides what it holds; what it means depends on the input. A complete gradient
    of a varying input is that of each rank's own part. A term for a varying input is all that this rank will
    ever have of it.

    Args:
        value: of the forward's input.
        grad: of what the backward returned.
        is_term: each rank's input was one term of a sum, with complete values added to it: their gradient is the
            sum's, and it depends on how they were divided whether that is all of it.
    """
    if value.kind is StateKind.INVARIANT or value.kind is StateKind.ZERO:
        return State(StateKind.VARYING, grad.scale, grad.blame) if grad.kind is StateKind.TERM else grad
    if grad.kind in (StateKind.TERM, StateKind.MIXED):
        return State(StateKind.LOST, grad.scale, grad.blame)
    if is_term and grad.kind is StateKind.INVARIANT:
        return State(StateKind.AMBIGUOUS, grad.scale, grad.blame)
    return as_part(grad)


def rescaled(state: State, by: Fraction) -> State:
    """The same, so many times as large relative to the true gradient."""
    return State(state.kind, None if state.scale is None else state.scale * by, state.blame)


def sliced(state: State, *, is_grad: bool) -> State:
    """After each rank took another part of it, by a number that differs between ranks."""
    if is_grad and state.kind in (StateKind.TERM, StateKind.MIXED):
        return State(StateKind.LOST, state.scale, state.blame)
    return as_part(state)


def misread(state: State) -> State:
    """After a part was taken for another, or for the whole: what is made of it then is no one's gradient."""
    return state if state.kind is StateKind.ZERO else State(StateKind.LOST, state.scale, state.blame)


def belies(label: Placement, state: State) -> bool:
    """Whether a gradient's label along a mesh dim is false, given what the gradient really is.

    Replicate is false of anything that is not equal and complete; Partial of what already is. A shard's
    label can't be told from the state along one mesh dim.
    """
    if label.is_replicate:
        return state.kind in (StateKind.VARYING, StateKind.MIXED, StateKind.LOST)
    if label.is_partial and label.reduce_op != "avg":
        return state.kind in (StateKind.INVARIANT, StateKind.MIXED, StateKind.LOST)
    return state.kind in (StateKind.MIXED, StateKind.LOST)


def _merge(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Both stories, each place once, the earlier first."""
    if not b or a == b:
        return a
    if not a:
        return b
    return tuple(dict.fromkeys((*a, *b)))[:_BLAME_CAP]
