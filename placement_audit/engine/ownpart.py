"""Gradients that are zero but in this rank's own part of a tensor dim: of a whole tensor, cut by the rank.

Each is a term of a sum, and yet complete where it is not zero: to keep the own part of it loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.optraits import OpTraits
from placement_audit.engine.world import World
from placement_audit.model import StateKind

_SAME = frozenset({"_to_copy", "clone", "detach", "alias", "view", "_unsafe_view"})
"""Of these a result of the same shape is the same tensor, place by place."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a gradient is not zero: in the part of a tensor dim that is this rank's along a mesh dim.

    Attributes:
        shape: of the gradient.
        stride: likewise; the same memory may be another tensor, too.
        mesh_dim: index.
        tensor_dim: index.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    mesh_dim: int
    tensor_dim: int


class OwnPart:
    """The gradients of one step that are so."""

    def __init__(self, ledger: Ledger, world: World) -> None:
        """See the class.

        Args:
            ledger: tells what is zero.
            world: tells which part is this rank's.
        """
        self._ledger = ledger
        self._world = world
        self._at: dict[int, Part] = {}

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return bool(self._at)

    def cut(self, op: str, args: Any, out: torch.Tensor, mesh_dims: Iterable[int]) -> None:
        """An op of the backward put a gradient into a larger one, where it differs between ranks along mesh dims.

        Args:
            op: its name.
            args: its arguments.
            out: the larger one.
            mesh_dims: indices.
        """
        found = self._place(op, args, out)
        if found is None:
            return
        tensor_dim, start, length = found
        for d in mesh_dims:
            size, at = self._world.sizes[d], self._world.here[d]
            if length * size == out.shape[tensor_dim] and start == at * length:
                self._at[storage_key(local_of(out))] = Part(out.shape, tuple(out.stride()), d, tensor_dim)

    def _place(self, op: str, args: Any, out: torch.Tensor) -> tuple[int, int, int] | None:
        """(tensor dim, start, length) of what is not zero in the result."""
        if op == "slice_backward" and args[5] == 1:
            return args[2] % out.dim(), args[3], args[0].shape[args[2]]
        if op == "select_backward":
            return args[2] % out.dim(), args[3] % out.shape[args[2]], 1
        if op != "cat":
            return None
        parts = args[0]
        filled = [i for i, x in enumerate(parts) if not self._is_zero(x)]
        if len(filled) != 1:
            return None
        tensor_dim = (args[1] if len(args) > 1 else 0) % out.dim()
        before = sum(x.shape[tensor_dim] for x in parts[: filled[0]])
        return tensor_dim, before, parts[filled[0]].shape[tensor_dim]

    def _is_zero(self, x: torch.Tensor) -> bool:
        return all(s.kind is StateKind.ZERO for s in self._ledger.vector(self._ledger.get(x)))

    def ran(
        self, func: Any, traits: OpTraits, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """An op has run: place by place, zero stays zero."""
        found = next((f for x in ins if (f := self._of(x)) is not None), None)
        keeps = traits.scales or func._opname in _SAME or _keeps_zero(func, traits)
        for o in outs:
            if keeps and found is not None and o.shape == found.shape:
                self._at[storage_key(local_of(o))] = replace(found, stride=tuple(o.stride()))
            elif traits.mutates:
                self._at.pop(storage_key(local_of(o)), None)

    def keeps(self, x: torch.Tensor, mesh_dim: int, tensor_dim: int | None) -> bool:
        """Whether its part of a tensor dim is all that a mesh dim's rank has of a gradient."""
        found = self._of(x)
        return found is not None and (found.mesh_dim, found.tensor_dim) == (mesh_dim, tensor_dim)

    def _of(self, x: torch.Tensor) -> Part | None:
        x = local_of(x)
        found = self._at.get(storage_key(x))
        return found if found is not None and (x.shape, x.stride()) == (found.shape, found.stride) else None


def _keeps_zero(func: Any, traits: OpTraits) -> bool:
    """Whether an op makes zero of a gradient that is zero, place by place: it is a factor of what comes out."""
    return traits.pointwise and func._opname.endswith("_backward")
