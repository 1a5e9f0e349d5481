"""Reads a collective out of the op that runs it: what it is, over which ranks, on which tensors.

Functional collectives (``_c10d_functional``, DTensor's and autograd's way) return their result;
``c10d`` ops write into tensors that they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from placement_audit.dtensor_api import collective_group_ranks, group_of

_KINDS = (
    ("all_reduce", "all_reduce"),
    ("allreduce", "all_reduce"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_gather", "all_gather"),
    ("allgather", "all_gather"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
)
"""Name parts, in the order in which they must be tried."""

_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective, before it is tied to a mesh.

    Attributes:
        name: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", ...
        reduce_op: "sum", "avg", ... for reductions, else None.
        ranks: world ranks of the group.
        in_place: results are among the arguments.
        targets_first: how many of the leading tensors are written (in-place forms with separate outputs).
    """

    name: str
    reduce_op: str | None
    ranks: tuple[int, ...]
    in_place: bool
    targets_first: int | None

    @property
    def reduces(self) -> bool:
        """Whether it sums values up."""
        return self.name in ("all_reduce", "reduce_scatter") and self.reduce_op == "sum"

    def inputs(self, ins: list[torch.Tensor]) -> list[torch.Tensor]:
        """What is sent."""
        if self.in_place and self.targets_first is not None:
            return ins[self.targets_first :]
        return ins

    def outputs(self, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> list[torch.Tensor]:
        """What holds the result."""
        if not self.in_place:
            return outs
        return ins if self.targets_first is None else ins[: self.targets_first]


def read_collective(func: Any, args: Any) -> CollectiveCall:
    """The collective that an op runs."""
    op = func._opname
    name = next((kind for part, kind in _KINDS if part in op), op)
    ranks: tuple[int, ...] | None = None
    reduce_op: str | None = None
    for a in args:
        if isinstance(a, str):
            if a.lower() in _REDUCE_OPS and name in ("all_reduce", "reduce_scatter", "reduce"):
                reduce_op = a.lower()
            elif a:
                ranks = collective_group_ranks(a)
        elif isinstance(a, torch._C.ScriptObject):
            group = group_of(a)
            if group is not None:
                ranks = group
            else:
                reduce_op = _reduce_op_of(a) or reduce_op
    in_place = func.namespace == "c10d" or op.endswith(("_out", "_"))
    targets = None
    if in_place:
        first = args[0] if args else None
        separate = name in ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")
        if separate:
            targets = sum(1 for _ in _walk(first))
    if name in ("all_reduce", "reduce_scatter", "reduce") and reduce_op is None:
        reduce_op = "sum"
    return CollectiveCall(name, reduce_op, ranks or (), in_place, targets)


def _walk(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for y in x:
            yield from _walk(y)


def _reduce_op_of(obj: Any) -> str | None:
    """The c10d ops carry their reduce op as a script object."""
    try:
        op = torch.distributed.ReduceOp.unbox(obj)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, TypeError):
        return None
    text = str(op).rsplit(".", 1)[-1].lower()
    return text if text in _REDUCE_OPS else None
