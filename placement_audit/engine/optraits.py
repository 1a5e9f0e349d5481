"""What the flow must know of an op, told from its name and namespace once and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_COLLECTIVE_NAMESPACES = frozenset(
    {"_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"}
)
_NOT_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"})
"""`_wrap_tensor_autograd` came between torch 2.10 and 2.13."""

_ADDS = frozenset({"add", "add_", "sub", "sub_", "_foreach_add_", "_foreach_add", "_foreach_sub_"})
_FRESH = frozenset(
    {
        "empty_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
        "new_ones", "new_full", "new_empty_strided", "empty_strided", "fill", "fill_",
    }
)  # fmt: skip
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero_", "zero", "_foreach_zero_"})
_SCALES = frozenset(
    {"div", "div_", "mul", "mul_", "_foreach_div", "_foreach_div_", "_foreach_mul", "_foreach_mul_"}
)
_BY_PLACE = ("_foreach", "_fused_ad", "_fused_sgd")
"""`_fused_rms_norm`, `_fused_sdp_choice` and their like have nothing to do with lists."""
_MEASURES = frozenset(
    {
        "linalg_vector_norm", "norm", "pow", "square", "_foreach_norm", "_foreach_pow",
        "mul", "dot", "vdot", "mm", "_foreach_mul",
    }
)  # fmt: skip
_RANDOM = ("rand", "normal", "bernoulli", "dropout", "uniform", "multinomial", "exponential")
_PASSES_ON = frozenset(
    {
        "t", "transpose", "view", "_to_copy", "alias", "detach", "clone", "permute", "_unsafe_view",
        "view_as", "slice", "reshape", "unsqueeze", "squeeze", "expand", "wait_tensor", "lift_fresh",
        "_wrap_tensor_autograd",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpTraits:
    """One op.

    Attributes:
        collective: it talks to other ranks.
        zeros: its result is zero whatever went in.
        fresh: its result's values do not depend on its input tensors.
        ones: it makes autograd's first gradient.
        random: its result is random.
        adds: it adds its inputs up, as gradient accumulation does.
        joins: it puts its inputs side by side.
        puts_beside: it joins tensors or puts one into zeros: its result may be in different states side by side.
        copies: it overwrites its first input with its second.
        overwrites: it overwrites its first input with what depends on no tensor.
        scales: it multiplies or divides its first input by its second.
        divides: it divides.
        subtracts: it adds up, its second input with the other sign.
        packs: it is FSDP2's, which puts gradients into one buffer.
        duplicates: its result is its one input once more, in another dtype perhaps.
        into: it writes its result into one tensor that it is given for that.
        measures: of gradients alone it makes what is none: a norm, squares, a product.
        mutates: its result is one of its inputs, changed.
        foreach: it goes through lists of tensors, place by place.
        foreach_in_place: it changes lists of tensors and returns nothing.
        changes: the positions of the lists that it changes.
        views: its results share its one input's storage, as its schema says.
        passes_on: with one input, its result is that tensor in another form.
        pointwise: at each place its result depends on what stands there in every input.
        lifts: it makes a tensor of Python numbers, whose address may have been another tensor's.
    """

    collective: bool
    zeros: bool
    fresh: bool
    ones: bool
    random: bool
    adds: bool
    joins: bool
    puts_beside: bool
    copies: bool
    overwrites: bool
    scales: bool
    divides: bool
    subtracts: bool
    packs: bool
    duplicates: bool
    into: bool
    measures: bool
    mutates: bool
    foreach: bool
    foreach_in_place: bool
    changes: tuple[int, ...]
    views: bool
    passes_on: bool
    pointwise: bool
    lifts: bool


_JOINS = ("cat", "stack")

known: dict[Any, OpTraits] = {}
"""Ops met so far."""


def traits_of(func: Any) -> OpTraits:
    """The traits of an op overload."""
    name: str = func._opname
    schema = func._schema
    traits = known[func] = OpTraits(
        collective=func.namespace in _COLLECTIVE_NAMESPACES and name not in _NOT_COLLECTIVES,
        zeros=name in _ZEROS,
        fresh=name in _FRESH,
        ones=name == "ones_like",
        random=any(part in name for part in _RANDOM),
        adds=name in _ADDS,
        joins=name in _JOINS,
        puts_beside=name in (*_JOINS, "slice_backward", "select_backward"),
        copies=name in ("copy_", "_foreach_copy_"),
        overwrites=schema.is_mutable and (name in _ZEROS or name in _FRESH),
        scales=name in _SCALES,
        divides=name in _SCALES and "div" in name,
        subtracts=name in _ADDS and "sub" in name,
        packs=func.namespace == "fsdp" and name == "chunk_cat",
        duplicates=name in ("_to_copy", "clone"),
        into=func._overloadname == "out",
        measures=name in _MEASURES,
        mutates=schema.is_mutable,
        foreach=name.startswith(_BY_PLACE),
        foreach_in_place=name.startswith(_BY_PLACE) and schema.is_mutable,
        changes=tuple(
            i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ),
        views=_is_view(schema),
        passes_on=name in _PASSES_ON,
        pointwise=torch.Tag.pointwise in func.tags,
        lifts=name == "lift_fresh",
    )
    return traits


def _is_view(schema: Any) -> bool:
    """All results are annotated as aliases of a read-only argument, and one tensor goes in."""
    tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
    if len(tensors) != 1 or not schema.returns or schema.is_mutable:
        return False
    return all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
