"""Backwards that torch leaves out, because another op's is to do their work.

Under `loss_parallel` the backward of log_softmax hands on what comes in: nll_loss, which it expects behind it, has
computed both. Whatever else is made of log_softmax's result then gets a wrong gradient (pytorch/pytorch#190746).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from placement_audit.dtensor_api import DTensor, local_of, storage_key
from placement_audit.engine import callsite
from placement_audit.engine.doubts import Doubts
from placement_audit.engine.optraits import OpTraits
from placement_audit.engine.world import World

_FORWARD, _BACKWARD = "_log_softmax", "_log_softmax_backward_data"
_DOES_BOTH = frozenset({"nll_loss_backward", "nll_loss2d_backward"})
_WATCHED = frozenset({_FORWARD, _BACKWARD, *_DOES_BOTH})
_OF_ROWS = frozenset({"slice_backward", "select_backward"})


class LeftOut:
    """Follows, in backward, the gradients that have the work of two backwards in them.

    A sum of such gradients is one, and so is one in another form. A multiple is none: it was scaled between log_softmax
    and nll_loss, which takes what it is given for the result of log_softmax.
    """

    def __init__(self, world: World, doubts: Doubts) -> None:
        """See the class.

        Args:
            world: the world mesh.
            doubts: takes down what comes up.
        """
        self._world = world
        self._doubts = doubts
        self._sites: dict[int, tuple[callsite.RawSite | None, str]] = {}
        self._both: dict[int, bool] = {}

    def watches(self, op: str) -> bool:
        """Whether it wants to hear of an op on DTensors."""
        return bool(self._both) or op in _WATCHED

    def begins(self, op: str, ins: Sequence[torch.Tensor]) -> None:
        """An op is about to run; what it hands on untouched is known by what goes in."""
        if op == _BACKWARD:
            self._both.setdefault(_key(ins[0]), False)

    def ran(
        self, op: str, traits: OpTraits, args: Any, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """An op has run."""
        if op == _FORWARD:
            self._sites[_key(outs[0])] = callsite.take(2)[1], self._doubts.module_fqn()
        elif op == _BACKWARD:
            if self._both.get(_key(outs[0])) is False:
                self._note(ins[1], args[2])
        elif op in _DOES_BOTH:
            self._both[_key(outs[0])] = True
        else:
            known = self._result(op, traits, ins)
            for o in outs:
                if known is None:
                    self._both.pop(_key(o), None)
                else:
                    self._both[_key(o)] = known

    def _result(self, op: str, traits: OpTraits, ins: Sequence[torch.Tensor]) -> bool | None:
        """Whether what comes of these has both backwards in it; None where that is not followed."""
        if not ins:
            return None
        first, *others = [self._both.get(_key(x)) for x in ins]
        if traits.adds:
            return first if all(x is first for x in others) else None
        return first if traits.passes_on or traits.views or op in _OF_ROWS else None

    def _note(self, log_softmax: torch.Tensor, classes: int) -> None:
        """Write it down, of the mesh dim that the classes are spread over."""
        site, module_fqn = self._sites.get(_key(log_softmax), (None, ""))
        layout = self._world.layout_of(log_softmax) if isinstance(log_softmax, DTensor) else None
        for d, name in enumerate(self._world.dims):
            placement = layout.on(name) if layout is not None else None
            if placement is not None and placement.tensor_dim == classes % log_softmax.dim():
                self._doubts.left_out(d, placement, site, module_fqn)


def _key(x: torch.Tensor) -> int:
    return storage_key(local_of(x))
