"""Which state every tensor is in, kept by storage.

A state vector has one `State` per world mesh dim. Vectors are interned to small integers (*sids*): a whole
model has a few dozen, so that combining two is a dictionary look-up however many mesh dims there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from placement_audit import states
from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.model import State, StateKind

Vector = tuple[State, ...]


class Ledger:
    """States of tensors.

    Attributes:
        dims: world mesh dim names, in mesh order.
        any_own: whether some tensor's state differs from its storage's.
        assumed: tensors met that nothing had written down; they were taken as invariant.
        unclear: mesh dims that have had an ambiguous gradient of which not even a shard's own part is known.
    """

    def __init__(self, dims: tuple[str, ...], *, keep_alive: bool) -> None:
        """Start empty.

        Args:
            dims: world mesh dim names.
            keep_alive: hold every storage, so that no address is used twice. Free on the meta device; with
                real tensors it would hold the whole step's memory, and every op's result is written down
                anyway.
        """
        self.dims = dims
        self.assumed = 0
        self.unclear: set[int] = set()
        self._kept: list[torch.UntypedStorage] | None = [] if keep_alive else None
        self._by_storage: dict[int, int] = {}
        self._by_tensor: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.any_own = False
        self._sids: dict[tuple[Vector, bool], int] = {}
        self._vectors: list[Vector] = []
        self._grads: list[bool] = []
        self._combined: dict[tuple[int, int, bool], int] = {}
        self.invariant = self.sid((states.INVARIANT,) * len(dims), grad=False)
        self.zero = self.sid((states.ZERO,) * len(dims), grad=False)

    # ---- vectors

    def sid(self, vector: Vector, *, grad: bool) -> int:
        """The number of a vector."""
        key = (vector, grad)
        found = self._sids.get(key)
        if found is None:
            found = self._sids[key] = len(self._vectors)
            self._vectors.append(vector)
            self._grads.append(grad)
        return found

    def vector(self, sid: int) -> Vector:
        """The vector of a number."""
        return self._vectors[sid]

    def is_grad(self, sid: int) -> bool:
        """Whether it is a gradient's."""
        return self._grads[sid]

    def changed(self, sid: int, change: Callable[[int, State], State], *, grad: bool | None = None) -> int:
        """The number of the vector with ``change(dim index, state)`` applied to each entry."""
        vector = tuple([change(i, s) for i, s in enumerate(self._vectors[sid])])
        return self.sid(vector, grad=self._grads[sid] if grad is None else grad)

    def as_grad(self, sid: int) -> int:
        """The same vector, of a gradient."""
        return sid if self._grads[sid] else self.sid(self._vectors[sid], grad=True)

    def combine(self, sids: Sequence[int], *, adds: bool) -> int:
        """The vector of an op's result."""
        out = sids[0]
        for sid in sids[1:]:
            if sid != out:
                out = self.combine2(out, sid, adds=adds)
        return out

    def combine2(self, a: int, b: int, *, adds: bool) -> int:
        """`combine` of two."""
        key = (a, b, adds)
        found = self._combined.get(key)
        if found is None:
            found = self._combined[key] = self._combine(a, b, adds=adds)
        return found

    def _combine(self, a: int, b: int, *, adds: bool) -> int:
        a_grad, b_grad = self._grads[a], self._grads[b]
        vector = tuple(
            states.combine(x, y, a_grad=a_grad, b_grad=b_grad, adds=adds)
            for x, y in zip(self._vectors[a], self._vectors[b], strict=True)
        )
        return self.sid(vector, grad=a_grad or b_grad)

    # ---- tensors

    def get(self, x: torch.Tensor) -> int:
        """The number of the tensor's vector; unknown tensors count as invariant, and are counted."""
        x = local_of(x)
        return self.get_by(x, storage_key(x))

    def get_by(self, x: torch.Tensor, key: int) -> int:
        """`get` for a caller who has the tensor's storage key already."""
        if self.any_own:
            own = self._by_tensor.get(local_of(x))
            if own is not None:
                return own
        sid = self._by_storage.get(key)
        if sid is None:
            if x.dim() == 0:  # a Python number that C++ made a tensor of
                return self.invariant
            self.assumed += 1
            self._by_storage[key] = self.invariant
            if self._kept is not None:
                self._kept.append(local_of(x).untyped_storage())
            return self.invariant
        return sid

    def put(self, x: torch.Tensor, sid: int) -> None:
        """Write down a tensor whose storage is its own, and everything that shares it."""
        x = local_of(x)
        self.put_by(x, storage_key(x), sid)

    def put_by(self, x: torch.Tensor, key: int, sid: int) -> None:
        """`put` for a caller who has the tensor's storage key already."""
        if self._kept is not None and key not in self._by_storage:
            self._kept.append(local_of(x).untyped_storage())
        self._by_storage[key] = sid
        if self.any_own:
            self._by_tensor.pop(local_of(x), None)

    def put_alone(self, x: torch.Tensor, sid: int) -> None:
        """Write down one tensor and leave the others that share its storage as they are."""
        x = local_of(x)
        if self._by_storage.get(storage_key(x)) == sid:
            if self.any_own:
                self._by_tensor.pop(x, None)
            return
        self.any_own = True
        self._by_tensor[x] = sid

    def kind(self, sid: int, dim: int) -> StateKind:
        """The kind along one mesh dim."""
        return self._vectors[sid][dim].kind
