"""Which state every tensor is in, kept by storage.

A state vector has one `State` per world mesh dim. Vectors are interned to small integers (*sids*): a whole
model has a few dozen, so that combining two is a dictionary look-up however many mesh dims there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from placement_audit import states
from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.engine.opargs import covers, extent, place_of
from placement_audit.engine.pieces import Piece, Pieces
from placement_audit.model import State, StateKind

Vector = tuple[State, ...]


def _itself(storage: torch.UntypedStorage) -> object:
    """Hold a storage whole."""
    return storage


class Ledger:
    """States of tensors.

    Attributes:
        dims: world mesh dim names, in mesh order.
        any_own: whether some tensor's state differs from its storage's.
        pieces: what of a storage is in another state than the rest.
        assumed: tensors met that nothing had written down; they were taken as invariant.
        unclear: mesh dims that have had an ambiguous gradient of which not even a shard's own part is known.
    """

    def __init__(self, dims: tuple[str, ...], *, keep_alive: bool) -> None:
        """Start empty.

        Args:
            dims: world mesh dim names.
            keep_alive: hold every storage. Free on the meta device; with real tensors it would hold the whole
                step's memory, so there only what names a storage is held. Either way no address is used twice:
                torch also makes storages where no op is seen, and they must not inherit a dead one's state.
        """
        self.dims = dims
        self.assumed = 0
        self.unclear: set[int] = set()
        self._kept: list[object] = []
        self._hold = _itself if keep_alive else StorageWeakRef
        self._by_storage: dict[int, int] = {}
        self._own: dict[int, WeakIdKeyDictionary] = {}
        self.pieces = Pieces()
        self._cut = self.pieces.of  # asked at each op
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

    def as_value(self, sid: int) -> int:
        """A gradient's vector, read as mere numbers."""
        return self.changed(sid, lambda _, s: states.as_value(s), grad=False) if self._grads[sid] else sid

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

    def knows(self, key: int) -> bool:
        """Whether anything was written down of a storage."""
        return key in self._by_storage

    def rest(self, key: int) -> int:
        """The state of what of a storage is in no piece."""
        return self._by_storage[key]

    def get(self, x: torch.Tensor) -> int:
        """The number of the tensor's vector; unknown tensors count as invariant, and are counted."""
        x = local_of(x)
        return self.get_by(x, storage_key(x))

    def get_by(self, x: torch.Tensor, key: int) -> int:
        """`get` for a caller who has the tensor's storage key already."""
        if self.any_own and (own := self._own.get(key)) is not None:
            sid = own.get(local_of(x))
            if sid is not None:
                return sid
        sid = self._by_storage.get(key)
        if sid is None:
            if x.dim() == 0:  # a Python number that C++ made a tensor of
                return self.invariant
            self.assumed += 1
            self._by_storage[key] = self.invariant
            self._kept.append(self._hold(local_of(x).untyped_storage()))
            return self.invariant
        if self._cut and key in self._cut:
            # Side by side in one gradient, a complete part and a per-rank part have no one label.
            one = key in self.pieces.period
            return self.combine([s for *_, s in self._over(x, key)] or [sid], adds=one)
        return sid

    def _over(self, x: torch.Tensor, key: int) -> list[Piece]:
        return self.pieces.over(key, *self._reach(local_of(x), key), self._by_storage[key])

    def _reach(self, x: torch.Tensor, key: int) -> tuple[int, int]:
        """Where in its storage's pieces a tensor lies."""
        return self.pieces.reach(key, place_of(x)) if key in self.pieces.period else extent(x)

    def put(self, x: torch.Tensor, sid: int) -> None:
        """Write down a tensor whose storage is its own, and everything that shares it."""
        x = local_of(x)
        self.put_by(x, storage_key(x), sid)

    def put_by(self, x: torch.Tensor, key: int, sid: int) -> None:
        """`put` for a caller who has the tensor's storage key already."""
        if key not in self._by_storage:
            self._kept.append(self._hold(local_of(x).untyped_storage()))
        self._by_storage[key] = sid
        if self._cut:
            self.pieces.forget(key)
        if self.any_own and (own := self._own.get(key)) is not None:
            own.pop(local_of(x), None)

    def put_pieces(self, x: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Write down what lies in a tensor, in order, where that is not in one state."""
        key = storage_key(local_of(x))
        if len({sid for *_, sid in pieces}) > 1 and key in self._by_storage:
            self.pieces.put(key, pieces[0][0], pieces[-1][1], pieces)

    def put_alone(self, x: torch.Tensor, sid: int) -> None:
        """Write down one tensor and leave the others that share its storage as they are."""
        x = local_of(x)
        key = storage_key(x)
        own = self._own.get(key)
        if self._by_storage.get(key) == sid and key not in self._cut:
            if own is not None:
                own.pop(x, None)
            return
        if own is None:
            own = self._own[key] = WeakIdKeyDictionary()
        self.any_own = True
        own[x] = sid

    def has_own(self, x: torch.Tensor) -> bool:
        """Whether the tensor's state may differ from its storage's."""
        if not self.any_own:
            return False
        x = local_of(x)
        own = self._own.get(storage_key(x))
        return own is not None and x in own

    def written(self, x: torch.Tensor, new: int, others: Callable[[bool, int], int]) -> None:
        """A tensor's memory was written: what shares it has changed as well, whatever its own state.

        What shares the storage but none of the memory stays as it was where gradients are written, for many may
        lie in one buffer. A forward's values are taken together: which part of a tensor it writes may well depend
        on the rank.

        Args:
            x: the tensor.
            new: its state now.
            others: (whether it lies within the tensor, its state before) -> its state now, of something that
                shares the memory in another state.
        """
        x = local_of(x)
        key = storage_key(x)
        own = self._own.get(key) if self.any_own else None
        whole = covers(x)
        if whole and not own and key not in self._cut:
            self.put_by(x, key, new)
            return
        before = self.get_by(x, key)
        first, end = extent(x)
        for alias, sid in list(own.items()) if own is not None else ():
            a, b = extent(alias)
            if alias is x or b <= first or end <= a:
                continue
            after = new if sid == before else others(first <= a and b <= end, sid)
            self._own[key][alias] = after if (a, b) == (first, end) else self._kept_apart(before, sid, after)
        rest = self._by_storage.get(key, before)
        grad = self._grads[new] or self._grads[rest] or key in self._cut
        within = (own and x in own) or not self._fills(x, key)
        if not grad or (within and (whole or key not in self._cut)):
            self.put_by(x, key, new)
            return
        if own is not None:
            own.pop(x, None)
        first, end = self._reach(x, key)
        found = self.pieces.over(key, first, end, rest)
        if within:  # some of each piece
            one = key in self.pieces.period
            pieces = [(a, b, self.combine2(sid, new, adds=one)) for a, b, sid in found]
        else:
            pieces = [(a, b, new if sid == before else others(True, sid)) for a, b, sid in found]
        if whole and len({sid for *_, sid in pieces}) == 1:
            self.put_by(x, key, pieces[0][2])
        elif key in self._cut or any(sid != rest for *_, sid in pieces):
            self.pieces.put(key, first, end, pieces)

    def _fills(self, x: torch.Tensor, key: int) -> bool:
        """Whether a tensor is all of what it reaches over in its storage's pieces."""
        period = self.pieces.period.get(key)
        if period is None:
            return x.is_contiguous()
        first, end = self._reach(x, key)
        return x.numel() * x.element_size() == (end - first) * (x.untyped_storage().nbytes() // period)

    def lay(self, x: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Write down a tensor whose storage is its own and which is in pieces.

        Args:
            x: the tensor.
            pieces: by bytes of its storage, in order; the rest of it is in the state of all of them together.
        """
        x = local_of(x)
        key = storage_key(x)
        self.put_by(x, key, self.combine([sid for *_, sid in pieces], adds=False))
        if len({sid for *_, sid in pieces}) > 1:
            self.pieces.put(key, pieces[0][0], pieces[-1][1], pieces)

    def laid(self, x: torch.Tensor, nbytes: int) -> list[Piece]:
        """The pieces of a tensor's first bytes, from 0; empty where it is in one state."""
        x = local_of(x)
        key = storage_key(x)
        if not self._cut or key not in self._cut or key in self.pieces.period or not x.is_contiguous():
            return []
        first, _ = extent(x)
        found = self.pieces.over(key, first, first + nbytes, self._by_storage[key])
        return [(a - first, b - first, sid) for a, b, sid in found]

    def copied(self, out: torch.Tensor, key: int, x: torch.Tensor, sid: int) -> None:
        """Write down a copy of a tensor, in another dtype perhaps: what is in pieces stays so."""
        pieces = self.laid(x, x.numel() * x.element_size()) if out.is_contiguous() and covers(out) else []
        if not pieces:
            self.put_by(out, key, sid)
            return
        size, was = out.element_size(), x.element_size()
        self.lay(out, [(a // was * size, b // was * size, piece) for a, b, piece in pieces])

    def _kept_apart(self, before: int, was: int, after: int) -> int:
        """Ranks' different pieces of what is equal differ, whatever is done to all of it alike."""
        whole, piece = self._vectors[before], self._vectors[was]

        def change(d: int, state: State) -> State:
            apart = whole[d].kind is StateKind.INVARIANT and piece[d].kind is StateKind.VARYING
            return states.as_part(state) if apart else state

        return self.changed(after, change)

    def is_equal(self, x: torch.Tensor) -> bool:
        """Whether a tensor is the same on all ranks."""
        return all(s.kind in (StateKind.INVARIANT, StateKind.ZERO) for s in self._vectors[self.get(x)])

    def kind(self, sid: int, dim: int) -> StateKind:
        """The kind along one mesh dim."""
        return self._vectors[sid][dim].kind
