"""Watches the boundary calls: `to_local`, `from_local`, `redistribute`, `full_tensor`, `distribute_tensor`.

Wraps the public methods and hooks the autograd node that each call leaves behind. `local_map` is seen
through the calls it makes. Holds no opinion: it notes what was declared, what arrived and what left, and
lets the ledger know what a gradient became.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.tensor as dtensor_module
from torch.distributed.tensor import DTensor

from placement_audit.dtensor_api import (
    dtype_name,
    in_backward,
    local_of,
    mark_node,
    marked_node,
    spec_of,
    storage_key,
    unwatched,
)
from placement_audit.engine import callsite
from placement_audit.engine.crossings import Crossings, RawBoundary, RawCrossing
from placement_audit.engine.flow import Flow, current_phase
from placement_audit.model import Layout, TensorInfo
from placement_audit.tracing import Phase

_METHODS = ("to_local", "from_local", "redistribute", "full_tensor")


class Interceptor:
    """Records the boundary calls of one step.

    Attributes:
        flow: where states are kept.
        boundaries: in call order.
        sketch: called with each activation, and each gradient of one, that crosses; kept with the crossing.
    """

    def __init__(
        self,
        flow: Flow,
        module_fqn: Callable[[], str],
        fingerprint: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        """See the class.

        Args:
            flow: where states are kept.
            module_fqn: tells the module whose forward is running.
            fingerprint: of a local tensor's values, kept with each crossing so that ranks can be compared
                afterwards; None where there are no values.
        """
        self._fingerprint = fingerprint
        self.sketch: Callable[[torch.Tensor], Any] | None = None
        self.boundaries: list[RawBoundary] = []
        self.flow = flow
        self._ledger = flow.ledger
        self._world = flow.world
        self._crossing = Crossings(flow.ledger, flow.world)
        self._module_fqn = module_fqn
        self._labelled: dict[tuple[int, int, int, str, bool], int] = {}
        self._delivered: dict[tuple[int, int, int, int, int], int] = {}
        self._depth = 0
        self._running: list[RawBoundary] = []
        self._crossings = 0

    def running(self) -> tuple[RawBoundary | None, Phase]:
        """The boundary whose call or backward is running now, and which of the two it is.

        Inside an autograd function's forward grad mode is off, so that a call made by activation
        checkpointing's second forward would look like backward: the call itself knows better.
        """
        if self._running:
            return self._running[-1], self._running[-1].phase
        phase = current_phase()
        return (marked_node() if phase is Phase.BACKWARD else None), phase

    @contextmanager
    def installed(self) -> Generator[None]:
        """Wrap the public methods for the duration."""
        originals = {name: DTensor.__dict__[name] for name in _METHODS}
        try:
            for name, original in originals.items():
                plain = original.__func__ if isinstance(original, staticmethod) else original
                wrapper = self._function(name, plain)
                setattr(
                    DTensor, name, staticmethod(wrapper) if isinstance(original, staticmethod) else wrapper
                )
            yield
        finally:
            for name, original in originals.items():
                setattr(DTensor, name, original)

    def functions(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        """Module-level boundary calls and what to put in their place (`replaced_everywhere`)."""
        original = dtensor_module.distribute_tensor
        return {original: self._function("distribute_tensor", original)}

    def _function(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._depth or in_backward():
                return original(*args, **kwargs)
            return self._call(kind, original, args, kwargs)

        wrapped.__name__ = wrapped.__qualname__ = kind
        wrapped.__doc__ = original.__doc__
        return wrapped

    # ---- any boundary

    @property
    def busy(self) -> bool:
        """Whether a DTensor boundary is running: what it calls is its own."""
        return bool(self._depth)

    def note(self, kind: str, x: torch.Tensor, *, printed: bool = True) -> RawBoundary:
        """Write down a boundary call on ``x``.

        Args:
            kind: of the boundary.
            x: what goes in.
            printed: take its fingerprint, too; not where a collective may be writing it.
        """
        if isinstance(x, DTensor):
            self.flow.labelled.believe(x)
        self.flow.given(kind, [x])
        site, user_site, local_map = callsite.take(3, exact=True)
        phase = current_phase()
        raw = RawBoundary(
            index=len(self.boundaries),
            kind="local_map" if local_map else kind,
            phase=phase,
            site=site,
            user_site=user_site,
            module_fqn=self._module_fqn(),
            param_fqn=self.flow.params.get(storage_key(local_of(x))) if phase is Phase.FORWARD else None,
            src=self._world.layout_of(x),
            value_sid=self._ledger.get(x),
            tensor=_info(x),
        )
        if printed:
            raw.value_print = self._print(x)
            raw.value_sketch = self._sketched(raw, x)
        self.boundaries.append(raw)
        return raw

    @contextmanager
    def within(self, raw: RawBoundary) -> Generator[None]:
        """While the forward of a boundary runs that others may lie in."""
        self._running.append(raw)
        try:
            yield
        finally:
            self._running.pop()

    def arrived(self, raw: RawBoundary, arrived: torch.Tensor, *, printed: bool = True) -> RawCrossing:
        """Write down a gradient that has come to a boundary; see `note`."""
        raw.grad = crossing = RawCrossing(
            self._crossings, self._world.layout_of(arrived), self._ledger.get(arrived), _info(arrived)
        )
        self._crossings += 1
        if printed:
            crossing.arrived_print = self._print(arrived)
            crossing.arrived_sketch = self._sketched(raw, arrived)
        return crossing

    def left(self, raw: RawBoundary, g: torch.Tensor, sid: int) -> None:
        """Write down what the gradient left as."""
        if raw.grad is not None:
            raw.grad.left_print, raw.grad.left_sketch = self._print(g), self._sketched(raw, g)
            raw.grad.left, raw.grad.left_sid = self._world.layout_of(g), sid

    # ---- forward

    def _call(self, kind: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        x = args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor))
        raw = self.note(kind, x)
        self._depth += 1
        self._running.append(raw)
        try:
            out = original(*args, **kwargs)
        finally:
            self._running.pop()
            self._depth -= 1
        raw.dst = self._world.layout_of(out)
        if raw.src is None and isinstance(out, DTensor):
            self.flow.labelled.settle(out, [x], alone=True)
            if kind == "from_local" and raw.phase is Phase.FORWARD and raw.dst is not None:
                raw.divided = self.flow.carry.declared(x, raw.dst)
        elif raw.src is not None and raw.dst is None and raw.phase is Phase.FORWARD:
            self.flow.carry.localised(out, raw.src, raw.tensor.global_shape if raw.tensor else ())
        side = x if isinstance(x, DTensor) else out
        raw.declared = self._declared(kwargs.get("grad_placements"), side)
        raw.own_dims = self._world.own_dims(side)
        if raw.param_fqn is not None and raw.phase is Phase.FORWARD:
            self.flow.params[storage_key(local_of(out))] = raw.param_fqn
        if out.grad_fn is not None and torch.is_grad_enabled():
            self._hook(raw, out.grad_fn, kind)
        return out

    def _print(self, x: torch.Tensor) -> Any:
        if self._fingerprint is None:
            return None
        with unwatched():
            # As it is: a collective that is still writing it is waited for.
            return self._fingerprint(x._local_tensor if isinstance(x, DTensor) else x)

    def _declared(self, given: Any, side: Any) -> Layout | None:
        return None if given is None else self._world.layout(spec_of(side).mesh, tuple(given))

    def _sketched(self, raw: RawBoundary, x: torch.Tensor) -> Any:
        if self.sketch is None or raw.param_fqn is not None or raw.phase is not Phase.FORWARD:
            return None
        with unwatched():
            return self.sketch(x)

    # ---- backward

    def _hook(self, raw: RawBoundary, node: Any, kind: str) -> None:
        def crossed(outs: Any, grads: Any) -> None:
            arrived, g = grads[0], outs[0]
            if arrived is None or g is None:
                return
            crossing = self.arrived(raw, arrived)
            self.left(raw, g, 0)
            if raw.src is not None and raw.dst is None:
                self._into_dtensor(raw, g, kind)
            elif raw.src is None:
                self._out_of_dtensor(raw, g)
            crossing.left_sid = self._ledger.get(g)

        node.register_hook(crossed)
        mark_node(node, raw)

    def _into_dtensor(self, raw: RawBoundary, g: torch.Tensor, kind: str) -> None:
        """Backward of `to_local`: a plain gradient got a label. Blame the call where the label is false."""
        if raw.grad is None or raw.src is None or raw.grad.left is None:
            return
        sid = self._ledger.get(g)
        equal = storage_key(local_of(g)) in self.flow.seeds
        key = (sid, id(raw.src), id(raw.grad.left), kind, equal)
        new = self._labelled.get(key)
        if new is None:
            new = self._crossing.labelled(raw, raw.src, raw.grad.left, sid, kind, equal=equal)
            if new == sid:  # nobody is blamed: the same for every call like it
                self._labelled[key] = new
        if new != sid:
            self._ledger.put_alone(g, new)

    def _out_of_dtensor(self, raw: RawBoundary, g: torch.Tensor) -> None:
        """Backward of `from_local`: the gradient of a varying plain tensor is varying."""
        if raw.grad is None or raw.dst is None:
            return
        found = self._ledger.get(g)
        sid = self._ledger.as_grad(found)
        key = (sid, raw.grad.arrived_sid, id(raw.dst), id(raw.declared), raw.value_sid)
        new = self._delivered.get(key)
        if new is None:
            new = self._crossing.delivered(raw, raw.dst, sid, raw.grad.arrived_sid)
            if new == sid:
                self._delivered[key] = new
        if new != found:
            self._ledger.put_alone(g, new)


def _info(x: torch.Tensor) -> TensorInfo:
    shape = tuple(x.shape)
    return TensorInfo(
        global_shape=shape,
        local_shape=tuple(local_of(x).shape) if isinstance(x, DTensor) else shape,
        dtype=dtype_name(x),
    )
