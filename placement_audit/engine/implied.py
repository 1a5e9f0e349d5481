"""What placements a plain op gives its results: torch's own sharding rules, where they need no communication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placement_audit.dtensor_api import local_of
from placement_audit.dtensor_rules import Part, sharding_rule, takes_a_shape
from placement_audit.engine.additive import additive
from placement_audit.engine.optraits import OpTraits
from placement_audit.model import Placement, PlacementKind

PARTIAL_SUM = "sum"


@dataclass(frozen=True, slots=True)
class Implied:
    """One op, along one mesh dim.

    Attributes:
        outs: of each tensor that comes out; None for unknown.
        added: positions of the complete inputs that each rank adds to its own term of a sum.
        applied: positions of the terms of a sum that a rule wants summed before the op, which is not additive.
        whole: a rule wants the whole of what is a part.
        followed: whether torch has a rule that holds here without communication.
    """

    outs: tuple[Placement | None, ...]
    added: tuple[int, ...] = ()
    applied: tuple[int, ...] = ()
    whole: bool = False
    followed: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a plain op.

    Attributes:
        func: the op.
        traits: of it.
        args: its arguments.
        kwargs: likewise.
        ins: the tensors among them.
        outs: what came out.
    """

    func: Any
    traits: OpTraits
    args: Any
    kwargs: Any
    ins: list[torch.Tensor]
    outs: list[torch.Tensor]


class Rules:
    """Torch's rules, each asked once."""

    def __init__(self) -> None:
        """Begin without any."""
        self._found: dict[Any, Implied] = {}

    def of(self, call: Call, ranks: int, given: Sequence[Placement]) -> Implied:
        """What an op does along one mesh dim.

        Args:
            call: the op.
            ranks: along the mesh dim.
            given: placement of each tensor among its arguments, in order.
        """
        nothing = Implied((None,) * len(call.outs), followed=False)
        if any(isinstance(a, torch.Tensor) for a in call.kwargs.values()):
            return nothing
        key = (call.func, ranks, _token(call.args), _token(tuple(sorted(call.kwargs.items()))), tuple(given))
        try:
            found = self._found.get(key)
        except TypeError:  # an argument that is no plain data
            return nothing
        if found is None:
            found = self._found[key] = self._ask(call, ranks, given)
        return found

    def _ask(self, call: Call, ranks: int, given: Sequence[Placement]) -> Implied:
        func, args, kwargs, outs = call.func, call.args, call.kwargs, call.outs
        adds, passes_on = call.traits.adds, call.traits.passes_on
        nothing = Implied((None,) * len(outs), followed=False)
        if adds and len(given) == 2 and any(_is_sum(p) for p in given) and any(p.is_replicate for p in given):
            # Into a complete value as well: the rule of an op in place would have the term summed before.
            term, complete = (0, 1) if _is_sum(given[0]) else (1, 0)
            return Implied((given[term],), added=(complete,))
        if adds and len(given) == 1 and _is_sum(given[0]):
            return Implied((given[0],))  # a number: whose part it is, its reader must know
        if passes_on and len(given) == 1 and not given[0].is_shard:
            return Implied((given[0],) * len(outs))
        whole, sharded = _as_whole(func, ranks, args, given, outs)
        answer = sharding_rule(func, ranks, whole, kwargs) if whole is not None else None
        if answer is None and passes_on and len(outs) == 1 and whole and outs[0].shape == args[0].shape:
            return Implied((given[0],))
        if answer is None or len(answer[0]) != len(given) or len(answer[1]) != len(outs):
            return nothing
        wants, comes = answer
        off = [i for i, (w, g) in enumerate(zip(wants, given, strict=True)) if w != g]
        if not off and (sharded is None or comes == (Placement(PlacementKind.SHARD, sharded),)):
            return Implied(comes)
        added = tuple(i for i in off if given[i].is_replicate and _is_sum(wants[i]))
        if off and len(added) == len(off) and "add" in func._opname and all(_is_sum(p) for p in comes):
            return Implied(comes, added=added)
        terms = tuple(i for i, p in enumerate(given) if _is_sum(p))
        if any(given[i].is_shard for i in off):
            return Implied(nothing.outs, whole=True, followed=False)
        if not off or adds or not all(_is_sum(given[i]) and not _is_sum(wants[i]) for i in off):
            return nothing
        match additive(func, args, kwargs, terms):
            case True:
                return Implied(tuple(given[terms[0]] if o.is_floating_point() else None for o in outs))
            case False:
                return Implied(nothing.outs, applied=terms, followed=False)
            case _:
                return nothing


def _is_sum(p: Placement | None) -> bool:
    return p is not None and p.is_partial and p.reduce_op == PARTIAL_SUM


def _as_whole(
    func: Any, ranks: int, args: Any, given: Sequence[Placement], outs: Sequence[torch.Tensor]
) -> tuple[Any, int | None]:
    """The arguments as one device would have them.

    Returns:
        (them, the tensor dim of the result that was made larger where one of them is the result's shape); None
        for them where it is not clear which.
    """
    whole = _wholes(args, iter(given), ranks)
    at = takes_a_shape(func)
    if at is None or at >= len(whole) or len(outs) != 1:
        return whole, None
    shape = list(outs[0].shape)
    sharded = None
    if len(given) == 1 and given[0].tensor_dim is not None:
        sharded = _goes_to(tuple(args[0].shape), given[0].tensor_dim, tuple(shape))
        if sharded is None:
            return None, None
        shape[sharded] *= ranks
    return (*whole[:at], shape, *whole[at + 1 :]), sharded


def _goes_to(shape: tuple[int, ...], sharded: int, out: tuple[int, ...]) -> int | None:
    """The tensor dim of a view's result that is sharded where a tensor dim of its input is; None for none.

    A part is so many runs of memory, one for each index of the tensor dims before: as many must come before
    it in the result. A tensor dim of size 1 beside it leaves open which of the two that is.
    """
    if math.prod(shape) != math.prod(out):  # expand: the last tensor dims are the same
        at = sharded + len(out) - len(shape)
        return at if at >= 0 and out[at] == shape[sharded] else None
    before = math.prod(shape[:sharded])
    same = 0
    while same < sharded and same < len(out) and out[same] == shape[same]:
        same += 1
    found = [at for at in range(same, len(out)) if math.prod(out[:at]) == before]
    if len(found) > 1 and same == sharded and out[same] == shape[same]:
        return same
    return found[0] if len(found) == 1 else None


def _wholes(args: Any, placements: Iterator[Placement], ranks: int) -> Any:
    if isinstance(args, torch.Tensor):
        return _whole(args, next(placements), ranks)
    if isinstance(args, list | tuple):
        return type(args)(_wholes(a, placements, ranks) for a in args)
    return args


def _whole(x: torch.Tensor, p: Placement, ranks: int) -> Part:
    """The tensor that a rank's part is of; its parts are taken to be of one size."""
    x = local_of(x)
    shape, stride = list(x.shape), list(x.stride())
    at = p.tensor_dim
    if at is not None and at < len(shape):
        shape[at] *= ranks
        stride = [s * ranks if i != at and s > stride[at] else s for i, s in enumerate(stride)]
    return Part(tuple(shape), tuple(stride), x.dtype, p)


def _token(a: Any) -> Any:
    """A hashable stand-in for an argument."""
    if isinstance(a, torch.Tensor):
        return (tuple(a.shape), a.stride(), a.dtype)
    if isinstance(a, list | tuple):
        return tuple(_token(x) for x in a)
    return type(a), a
