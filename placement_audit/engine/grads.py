"""Watches gradients outside of boundaries: where backward begins, what is done to `.grad`, and who reads it first.

Code on plain tensors reduces its gradients by hand, in hooks or after backward. Such a collective becomes a
boundary of its own, so that it is shown on the parameter's way and named where it is one too many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from placement_audit import states
from placement_audit.dtensor_api import (
    DTensor,
    accumulating,
    clean_fqn,
    dtype_name,
    in_backward,
    in_recompute,
    local_of,
    mark_of,
    registered,
    storage_key,
)
from placement_audit.engine import callsite
from placement_audit.engine.collectives import CollectiveCall
from placement_audit.engine.crossings import RawBoundary
from placement_audit.engine.intercept import Interceptor
from placement_audit.engine.opargs import extent
from placement_audit.model import Layout, State, StateKind
from placement_audit.tracing import Phase


@dataclass(frozen=True, slots=True)
class RawGrad:
    """A parameter's gradient, as somebody found it."""

    layout: Layout | None
    sid: int
    dtype: str
    spoilt: int | None = None
    """Its state, where it was complete and equal on all ranks once, and is no more; None where it is as it was."""


class Grads:
    """The gradients of one step.

    Attributes:
        before: state of each parameter before the step, by id().
        losses: (state, place) of the tensors that backwards began at -> see `_unsummed`.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        params: Sequence[tuple[str, nn.Parameter]],
        batch_dims: Collection[str],
        model: nn.Module | None = None,
    ) -> None:
        """See the class.

        Args:
            interceptor: keeps the boundaries.
            params: (FQN, parameter), in the model's order.
            batch_dims: mesh dims over which the batch varies.
            model: whose parameters they are; FSDP2 puts others in their places while it computes.
        """
        self._places = [
            (clean_fqn(f"{prefix}.{name}" if prefix else name), module, name)
            for prefix, module in (model.named_modules() if model is not None else ())
            for name in registered(module)
        ]
        self._of_batch = [parent in batch_dims for parent in interceptor.flow.world.parents]
        self.losses: dict[tuple[int, callsite.RawSite | None], dict[int, str]] = {}
        self._interceptor = interceptor
        self._flow = interceptor.flow
        self._params = params
        self._names = {id(p): fqn for fqn, p in reversed(params)}
        self._read: dict[int, RawGrad | None] = {}
        self._by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
        self._stale = True
        self.before: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._spoilt_at: dict[int, callsite.RawSite | None] = {}

    @contextmanager
    def installed(self) -> Generator[None]:
        """Watch for the duration."""
        backward, grad = torch.autograd.backward, torch.autograd.grad

        def seeded(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._begin(*args, **kwargs)
                self._flow.seeding = True
                try:
                    return original(*args, **kwargs)
                finally:
                    self._flow.seeding = False
                    self._stale = True
                    if original is backward and not in_backward():
                        self._take_stock()

            return call

        handle = register_optimizer_step_pre_hook(self._about_to_step)
        torch.autograd.backward, torch.autograd.grad = seeded(backward), seeded(grad)
        try:
            yield
        finally:
            torch.autograd.backward, torch.autograd.grad = backward, grad
            handle.remove()

    def _begin(self, *args: Any, **kwargs: Any) -> None:
        """A backward begins, at its first argument; a gradient that is given is the gradient of that."""
        if in_backward() or in_recompute():
            return
        at = args[0] if args else next(iter(kwargs.values()), ())
        given = kwargs.get("grad_tensors", kwargs.get("grad_outputs", args[1] if len(args) > 1 else None))
        ledger = self._flow.ledger
        site = callsite.take(2)[1]
        roots = [at] if isinstance(at, torch.Tensor) else list(at)
        self._flow.given("backward", [x for x in roots if isinstance(x, torch.Tensor)])
        seeds = [given] if isinstance(given, torch.Tensor) else list(given or ())
        for x in roots:
            if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
                self.losses[ledger.get(x), site] = self._unsummed(x)
        for x, g in zip(roots, seeds, strict=False):
            if isinstance(g, torch.Tensor) and not isinstance(g, DTensor):
                of = ledger.vector(ledger.get(x))
                seed = ledger.changed(
                    ledger.get(g), lambda d, s, of=of: states.of_a_value(of[d], s), grad=True
                )
                ledger.put_alone(g, seed)

    def _unsummed(self, loss: torch.Tensor) -> dict[int, str]:
        """Mesh dim -> a parameter sharded on it that reaches a varying loss with no collective over it between."""
        ledger = self._flow.ledger
        found: dict[int, str] = {}
        for d, state in enumerate(ledger.vector(ledger.get(loss))):
            if state.kind is not StateKind.VARYING or self._of_batch[d]:
                continue
            seen: set[Any] = set()
            nodes = [loss.grad_fn]
            while nodes and d not in found:
                node = nodes.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                leaf = getattr(node, "variable", None)
                if leaf is not None and ledger.kind(ledger.get(leaf), d) is StateKind.VARYING:
                    name = self._names.get(id(leaf))
                    found |= {} if name is None else {d: name}
                mark = mark_of(node)
                if mark is None or d not in mark.spanned:
                    nodes += [n for n, _ in node.next_functions]
        return found

    def begin(self) -> None:
        """Before the step: what the parameters are."""
        self.before = {id(p): self._flow.ledger.get(p) for _, p in self._params}

    # ---- who reads them

    def _about_to_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note what an optimizer finds, the first time that it reads a gradient."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._names and id(p) not in self._read:
                    self._read[id(p)] = self._now(p)

    def read(self) -> None:
        """Note what the job's readers find, which are about to begin."""
        for _, p in self._params:
            self._read.setdefault(id(p), self._now(p))

    def of(self, p: nn.Parameter) -> RawGrad | None:
        """The gradient as an optimizer first read it, else as it is now."""
        return self._read[id(p)] if id(p) in self._read else self._now(p)

    def spoilt(self, p: nn.Parameter) -> tuple[int, callsite.RawSite | None] | None:
        """(State, where it was made so) of a gradient that a reader has made the ranks' own; None for none."""
        for found in (self._read.get(id(p)), self._now(p)):
            if found is not None and found.spoilt is not None:
                return found.spoilt, self._spoilt_at.get(id(p))
        return None

    def _now(self, p: nn.Parameter) -> RawGrad | None:
        g = p.grad
        if g is None:
            return None
        ledger = self._flow.ledger
        sid = ledger.get(g)
        of, was = ledger.vector(self.before.get(id(p), sid)), ledger.vector(self._known.get(id(p), sid))
        kept = ledger.changed(
            sid, lambda d, now: was[d] if spoils(of[d], now) and spoils(was[d], now) else now
        )
        return RawGrad(
            self._flow.world.layout_of(g), kept, dtype_name(g), spoilt=sid if kept != sid else None
        )

    def _take_stock(self) -> None:
        """A backward is over: what it left is the gradient; what is done to it then makes it better or spoils it."""
        ledger = self._flow.ledger
        for _, p in self._params:
            if p.grad is not None:
                self._known[id(p)] = ledger.get(p.grad)

    def written(self, xs: Sequence[torch.Tensor]) -> None:
        """Tensors were written in place, after a backward: a sum that was due, or a factor that is each rank's own?"""
        for x in xs:
            for _, p in self._stored(storage_key(local_of(x))):
                now = self._now(p)
                if now is not None and now.spoilt is None:
                    self._known[id(p)] = now.sid
                elif now is not None:
                    self._spoilt_at.setdefault(id(p), callsite.take(2)[1])

    @property
    def there(self) -> bool:
        """Whether a backward is over that has left any."""
        return bool(self._known)

    # ---- collectives on them

    def reduced(
        self, call: CollectiveCall, sent: torch.Tensor, before: int, after: int
    ) -> tuple[Callable[[int, int], int], RawBoundary | None]:
        """A collective changed a gradient: a boundary of its own, unless it is part of one.

        Returns:
            (state before, state after) -> the state after, with the boundary in its story where that is what went
            wrong; the boundary.
        """
        owner, _ = self._interceptor.running()
        if owner is not None or self._flow.inside_dtensor_op:
            return lambda _before, after: after, None
        raw = self._interceptor.note(call.name, sent, printed=False)
        raw.phase = Phase.BACKWARD
        raw.value_sid = before
        raw.param_fqn = self._name_of(sent)
        ledger = self._flow.ledger

        def told(before: int, after: int) -> int:
            was = ledger.vector(before)

            def change(d: int, state: State) -> State:
                lost = state.kind is StateKind.LOST and was[d].kind is not StateKind.LOST
                return states.blamed(state, raw.index) if lost or state.scale != was[d].scale else state

            return ledger.changed(after, change)

        crossing = self._interceptor.arrived(raw, sent, printed=False)
        crossing.arrived_sid, crossing.left_sid = before, told(before, after)
        return told, raw

    def _name_of(self, g: torch.Tensor) -> str | None:
        """The parameter whose gradient it is."""
        p = accumulating()
        if p is not None and p.shape == g.shape:
            return self._names.get(id(p))
        key, at = storage_key(local_of(g)), extent(local_of(g))
        # Several may lie in one buffer; a reduction of more than one is none's own.
        for fqn, p in self._stored(key):
            if _lies_at(p.grad, key, at):
                return fqn
        if not in_backward():
            return None
        in_place = ((fqn, registered(module).get(name)) for fqn, module, name in self._places)
        return next((fqn for fqn, p in in_place if p is not None and _lies_at(p.grad, key, at)), None)

    def _stored(self, key: int) -> Sequence[tuple[str, nn.Parameter]]:
        """The parameters whose gradients lie in a storage."""
        if self._stale and key not in self._by_storage:
            self._by_storage = {}
            for fqn, p in self._params:
                if p.grad is not None:
                    self._by_storage.setdefault(storage_key(local_of(p.grad)), []).append((fqn, p))
            self._stale = False
        return self._by_storage.get(key, ())


def spoils(was: State, now: State) -> bool:
    """Whether what was complete and equal on all ranks is each rank's own now."""
    return was.kind is StateKind.INVARIANT and now.kind in (
        StateKind.VARYING,
        StateKind.MIXED,
        StateKind.LOST,
        StateKind.TERM,
    )


def _lies_at(grad: torch.Tensor | None, key: int, at: tuple[int, int]) -> bool:
    """Whether a gradient is at these bytes of this storage."""
    if grad is None:
        return False
    local = local_of(grad)
    return storage_key(local) == key and extent(local) == at
