"""Reads a collective out of the op that runs it: what it is, over which ranks, on which tensors.

Functional collectives (``_c10d_functional``, DTensor's and autograd's way) return their result;
``c10d`` ops write into tensors that they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from placement_audit.dtensor_api import collective_group_ranks, group_of, reduce_op_of
from placement_audit.engine.opargs import flat

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
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""Of the c10d ops these write over what they read; the others have their targets first, their sources second."""

PEER_TO_PEER = ("send", "recv")
"""They talk to one rank of their group, not to all."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective, before it is tied to a mesh.

    Attributes:
        name: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", ...
        reduce_op: "sum", "avg", ... for reductions, else None.
        ranks: world ranks of the group; of a send or recv, the peer alone.
        source: which argument holds what is sent; None where nothing is.
        target: which argument is written; None where the result is returned.
    """

    name: str
    reduce_op: str | None
    ranks: tuple[int, ...]
    source: int | None
    target: int | None

    @property
    def reduces(self) -> bool:
        """Whether it sums values up and hands the sum to every rank."""
        return self.name in ("all_reduce", "reduce_scatter") and self.reduce_op == "sum"

    def inputs(self, args: Any) -> list[torch.Tensor]:
        """What is sent."""
        return [] if self.source is None else flat(args[self.source])

    def pairs(self, args: Any, out: Any) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """What is sent, and what holds the result of that; a coalesced call is several in one."""
        sent = [] if self.source is None else args[self.source]
        written = out if self.target is None else args[self.target]
        if self.name == "recv":
            return [([], flat(written) + flat(out))]
        if (
            isinstance(sent, list | tuple)
            and isinstance(written, list | tuple)
            and len(sent) == len(written)
            and self.name != "all_to_all"  # its parts go to and come from all
        ):
            return [(flat(i), flat(o)) for i, o in zip(sent, written, strict=True)]
        return [(flat(sent), flat(written))]


def read_collective(func: Any, args: Any) -> CollectiveCall:
    """The collective that an op runs."""
    op: str = func._opname
    name = next((kind for part, kind in _KINDS if part in op), op)
    ranks: tuple[int, ...] = ()
    reduce_op: str | None = None
    numbers: list[int] = []
    for a in args:
        if isinstance(a, str):
            if a.lower() in _REDUCE_OPS and name in _REDUCING:
                reduce_op = a.lower()
            elif a:
                ranks = collective_group_ranks(a)
        elif isinstance(a, torch._C.ScriptObject):
            group = group_of(a)
            if group is not None:
                ranks = group
            else:
                reduce_op = reduce_op_of(a) or reduce_op
        elif isinstance(a, int):
            numbers.append(a)
    if name in _REDUCING and (reduce_op is None or reduce_op not in _REDUCE_OPS):
        reduce_op = "sum"
    if name in PEER_TO_PEER and numbers and op != "recv_any_source_":
        ranks = (ranks[numbers[0]],)
    source, target = _places(func, op, name)
    return CollectiveCall(name, reduce_op, ranks, source, target)


def _places(func: Any, op: str, name: str) -> tuple[int | None, int | None]:
    """(argument that is sent, argument that is written)."""
    if name == "recv":
        return None, 0
    if func.namespace != "c10d":
        return 0, 0 if op.endswith("_") else None
    if name in _IN_PLACE:
        return 0, 0
    return (0, None) if name == "send" else (1, 0)
