"""Watches autograd functions that are not torch's own: the boundaries of code on plain tensors.

What flows through such a function's backward is up to who wrote it, so plain ops alone cannot keep the rule
that a gradient of a varying tensor is varying (`placement_audit.states`). Every call is noted as a boundary;
hooks on its autograd node read what arrives by the state of the forward's output, and what leaves by the
state of its input. A gradient whose state changes gets a tensor object of its own, for the tensor itself may
be anyone's: ``add`` hands one gradient to both its inputs, and an identity backward returns what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch

from placement_audit import states
from placement_audit.dtensor_api import (
    GENERATED_FOR_COLLECTIVES,
    DTensor,
    FunctionBase,
    in_backward,
    local_of,
    mark_node,
    storage_key,
    unwatched,
)
from placement_audit.engine.intercept import Interceptor, RawBoundary
from placement_audit.model import State, StateKind
from placement_audit.tracing import Phase

KIND = "autograd_function"


class Functions:
    """Records the calls of autograd functions of one step."""

    def __init__(self, interceptor: Interceptor) -> None:
        """See the class.

        Args:
            interceptor: keeps the boundaries.
        """
        self._interceptor = interceptor
        self._flow = interceptor.flow
        self._ledger = interceptor.flow.ledger
        self._delivered: dict[tuple[int, ...], int] = {}

    @contextmanager
    def installed(self) -> Generator[None]:
        """Watch every ``.apply`` for the duration, those that were taken from their class before as well."""

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            original = super(FunctionBase, cls).apply
            if not _is_watched(cls) or in_backward() or self._interceptor.busy:
                return original(*args, **kwargs)
            return self._call(cls, original, args, kwargs)

        FunctionBase.apply = classmethod(apply)
        try:
            yield
        finally:
            del FunctionBase.apply

    # ---- forward

    def _call(self, cls: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = _collective_of(cls) or cls.__name__
        ins = [a for a in args if isinstance(a, torch.Tensor)]
        if not ins or any(isinstance(x, DTensor) for x in ins):
            return original(*args, **kwargs)  # DTensor's labels say more
        ledger, params = self._ledger, self._flow.params
        named = {
            i: fqn for i, x in enumerate(ins) if (fqn := params.get(storage_key(local_of(x)))) is not None
        }
        # The one that the boundary is about.
        at = next(iter(named), next((i for i, x in enumerate(ins) if x.requires_grad), 0))
        self._flow.given(name, ins)
        raw = self._interceptor.note(KIND, ins[at])
        raw.name = name
        in_sids = [ledger.get(x) for x in ins]
        sums = [self._flow.carry.with_terms(x) for x in ins]
        sizes = [x.numel() for x in ins]
        with self._interceptor.within(raw):
            out = original(*args, **kwargs)
        if raw.phase is Phase.FORWARD and torch.is_grad_enabled():
            for i, fqn in named.items():
                self._flow.on_use(name, fqn, ins[i], out)
        outs = out if isinstance(out, tuple | list) else (out,)
        # A function may hand on a tensor that others made; in place on a view, autograd puts a node of its own.
        nodes = [o.grad_fn for o in outs if isinstance(o, torch.Tensor) and o.grad_fn is not None]
        own = (f"{cls.__name__}Backward", "CopySlices")
        node = next((n for n in nodes if type(n).__name__ in own), None)
        if node is None or not torch.is_grad_enabled():
            return out
        out_sids = [ledger.get(o) if isinstance(o, torch.Tensor) else None for o in outs]
        self._hook(raw, node, at, list(zip(in_sids, sizes, sums, strict=True)), out_sids)
        return out

    # ---- backward

    def _hook(
        self,
        raw: RawBoundary,
        node: Any,
        at: int,
        inputs: list[tuple[int, int, frozenset[int]]],
        out_sids: list[int | None],
    ) -> None:
        """Watch the backward of a call.

        Args:
            raw: the call.
            node: its autograd node.
            at: the input that the boundary is about.
            inputs: (state, elements, mesh dims along which it is a term with complete values added) of each.
            out_sids: states of the outputs; None for what is no tensor.
        """
        entered = self._ledger.invariant

        def arrives(grads: Any) -> Any:
            nonlocal entered
            came = [g for g in grads if g is not None]
            if not came:
                return None
            self._interceptor.arrived(raw, came[0])
            changed = list(grads)
            for i, (g, out_sid) in enumerate(zip(grads, out_sids, strict=False)):
                if g is not None and out_sid is not None:
                    changed[i] = self._retyped(g, self._into(out_sid, self._ledger.get(g)))
            sids = [self._ledger.get(g) for g in changed if g is not None]
            entered = self._ledger.combine(sids, adds=False)
            return tuple(changed)

        def leaves(grads: Any, _arrived: Any) -> Any:
            changed = list(grads)
            for i, (g, (in_sid, numel, sums)) in enumerate(zip(grads, inputs, strict=False)):
                if g is not None:
                    new = self._out_of(raw, in_sid, self._ledger.get(g), entered, numel, sums)
                    changed[i] = self._retyped(g, new)
            g = changed[at] if at < len(changed) else None
            if g is not None:
                self._interceptor.left(raw, g, self._ledger.get(g))
            return tuple(changed)

        node.register_prehook(arrives)
        node.register_hook(leaves)
        mark_node(node, raw)

    def _retyped(self, g: torch.Tensor, sid: int) -> torch.Tensor:
        """The gradient with its state: as it is, or as another tensor object."""
        if isinstance(g, DTensor) or self._ledger.get(g) == sid:
            return g
        with unwatched():
            alias = g.detach()
        self._ledger.put_alone(alias, sid)
        return alias

    def _into(self, out_sid: int, sid: int) -> int:
        key = (0, out_sid, sid)
        new = self._delivered.get(key)
        if new is None:
            vector = self._ledger.vector(out_sid)
            new = self._ledger.changed(sid, lambda d, s: states.into_function(vector[d], s), grad=True)
            self._delivered[key] = new
        return new

    def _out_of(
        self, raw: RawBoundary, in_sid: int, sid: int, arrived_sid: int, numel: int, sums: frozenset[int]
    ) -> int:
        value, before = self._ledger.vector(in_sid), self._ledger.vector(arrived_sid)
        # What the forward summed though it was equal on all ranks counts that many times.
        summed = {d for of, dims in raw.summed for d in dims if of == numel}
        sizes = self._flow.world.sizes

        def change(d: int, state: State) -> State:
            new = states.out_of_function(value[d], state, is_term=d in sums)
            if d in summed and value[d].kind is StateKind.INVARIANT:
                new = states.rescaled(new, Fraction(1, sizes[d]))
            if new.kind is StateKind.LOST is not before[d].kind or new.scale != before[d].scale:
                new = states.blamed(new, raw.index)
            return new

        return self._ledger.changed(sid, change, grad=True)


def _is_watched(cls: Any) -> bool:
    module: str = cls.__module__
    return (
        not module.startswith("torch.")
        or module.startswith("torch.distributed.nn.")
        or _collective_of(cls) != ""
    )


def _collective_of(cls: Any) -> str:
    """The functional collective whose autograd node a class makes; "" for another."""
    op = cls.__name__.removeprefix(GENERATED_FOR_COLLECTIVES)
    return "" if op == cls.__name__ or op.startswith(("wait_", "_")) else op.removesuffix("_default")
