"""Follows what code of one's own multiplies a gradient by: 1/n after a sum over n ranks makes an average of it.

Autograd's own ops are no such code: that a forward divides shows in its backward as well, and changes nothing of
how the gradient relates to the true one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from fractions import Fraction

import torch

from placement_audit import states
from placement_audit.dtensor_api import (
    TORCH_DIR,
    DTensor,
    accumulating,
    in_backward,
    in_recompute,
    local_of,
    storage_key,
)
from placement_audit.engine import callsite, forms
from placement_audit.engine.intercept import Interceptor
from placement_audit.model import State
from placement_audit.tracing import Phase

_FSDP_DIR = f"{TORCH_DIR}distributed/fsdp/"


def _by_fsdp() -> bool:
    """Whether FSDP2's reduction makes this call: of a backward it is a part that derives nothing."""
    site = callsite.take(1)[0]
    return site is not None and site[0].co_filename.startswith(_FSDP_DIR)


class Scaling:
    """The multiplications of one step."""

    def __init__(self, interceptor: Interceptor, batch_dims: Collection[str]) -> None:
        """See the class.

        Args:
            interceptor: knows the boundary that is running.
            batch_dims: mesh dims over which the batch varies.
        """
        self._interceptor = interceptor
        self._flow = interceptor.flow
        self._before: dict[int, tuple[Fraction, int | None]] = {}
        self._reduced: dict[int, set[int]] = {}
        self._batch = [parent in batch_dims for parent in interceptor.flow.world.parents]

    def scaled(self, x: torch.Tensor, by: float) -> None:
        """A tensor was multiplied by a number: by how many ranks, and along which mesh dim?"""
        factor = forms.number(by) if by > 0 else Fraction(1)
        ranks = factor if factor > 1 else 1 / factor if factor else Fraction(1)
        if ranks == 1 or isinstance(x, DTensor):
            return
        if ranks not in self._flow.world.sizes:
            self._averaged(x, factor)
            return
        owner, phase = self._interceptor.running()
        function = owner if owner is not None and owner.kind == "autograd_function" else None
        if function is not None and phase is not Phase.BACKWARD:
            function.scaled = True
            return
        ledger = self._flow.ledger
        vector = ledger.vector(ledger.get(x))
        if not ledger.is_grad(ledger.get(x)):
            return
        fitting = [d for d, size in enumerate(self._flow.world.sizes) if size == ranks]
        off = [d for d in fitting if vector[d].scale == 1 / factor]
        if function is not None:
            # Where the forward scaled too, it is a derivative that is taken.
            if len(off) == 1 and not function.scaled:
                self._rescale(x, off[0], factor)
        elif accumulating() is not None or not (in_backward() or in_recompute()) or _by_fsdp():
            of_batch = [d for d in fitting if self._batch[d]]
            # What was just summed over the ranks of a batch and no average yet is made one, whatever else is off.
            over = self._reduced.get(storage_key(local_of(x)), ())
            sums = [d for d in of_batch if d in over and vector[d].scale == 1]
            at = next((found[0] for found in (sums, off, of_batch) if len(found) == 1), None)
            if at is not None:
                self._rescale(x, at, factor)
            if at not in off:
                self._before[storage_key(local_of(x))] = factor, at

    def _averaged(self, x: torch.Tensor, factor: Fraction) -> None:
        """FSDP divides by all data-parallel ranks at once, what it summed over several mesh dims, or over none."""
        of_batch = [d for d, b in enumerate(self._batch) if b]
        sizes = [self._flow.world.sizes[d] for d in of_batch]
        if len(of_batch) > 1 and math.prod(sizes) * factor == 1 and _by_fsdp():
            for d, size in zip(of_batch, sizes, strict=True):
                self._rescale(x, d, Fraction(1, size))

    def reduced(self, x: torch.Tensor, before: int, after: int) -> int:
        """The state after a reduction that is an average, for what it counts too often was divided before."""
        ledger = self._flow.ledger
        key = storage_key(local_of(x))
        found = self._before.get(key)
        was, now = ledger.vector(before), ledger.vector(after)
        self._reduced[key] = {d for d, (a, b) in enumerate(zip(was, now, strict=True)) if a != b}
        if found is None:
            return after
        factor, at = found
        too_large = [
            d
            for d, (a, b) in enumerate(zip(was, now, strict=True))
            if a.scale is not None and b.scale is not None and b.scale * factor == a.scale and d != at
        ]
        if len(too_large) != 1:
            return after
        del self._before[key]

        def change(d: int, state: State) -> State:
            if d == at:
                return states.rescaled(state, 1 / factor)
            return states.rescaled(state, factor) if d in too_large else state

        return ledger.changed(after, change)

    def _rescale(self, x: torch.Tensor, at: int, factor: Fraction) -> None:
        ledger = self._flow.ledger

        def rescaled(sid: int) -> int:
            return ledger.changed(sid, lambda d, s: states.rescaled(s, factor) if d == at else s)

        ledger.written(x, rescaled(ledger.get(x)), lambda _inside, was: rescaled(was))
