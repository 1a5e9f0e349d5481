"""What the modules of a model put out, and the gradient that comes back to it: noted while a step runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from placement_audit.dtensor_api import clean_fqn, in_backward, in_recompute, unwatched
from placement_audit.engine import callsite

Key = tuple[str, int, int]
"""Module FQN, which of its calls in one pass of the model, which of the tensors that it put out."""


@dataclass(slots=True, eq=False)
class Output:
    """A tensor that a module put out.

    Attributes:
        key: see `Key`.
        run: which pass of the model it belongs to, 0 first.
        value: what `Notes.look` made of it.
        grad: what it made of its gradient; None where none came.
        site: where the module was called.
        node: of the autograd graph, and which of its results; None where nothing is differentiated.
        passed_on: it is an input of the module, so that others may use it, too, and its gradient is theirs.
        came: when the gradient did, see `Notes.now`.
    """

    key: Key
    run: int
    value: Any
    site: callsite.RawSite | None
    node: tuple[Any, int] | None
    passed_on: bool
    grad: Any = None
    came: tuple[int, int] = (-1, -1)


@dataclass(slots=True)
class Notes:
    """All outputs of a step.

    Attributes:
        look: called with each tensor, its key, its pass, and for a gradient what it made of the value.
        clock: counts something that goes on in backward.
        found: in forward order.
        runs: passes of the model.
    """

    look: Callable[[torch.Tensor, Key, int, Any], Any]
    clock: Callable[[], int] = int
    found: list[Output] = field(default_factory=list)
    runs: int = 0
    _calls: Counter[str] = field(default_factory=Counter)
    _moments: int = 0

    def now(self) -> tuple[int, int]:
        """A moment in backward: of ours and by the clock."""
        self._moments += 1
        return self._moments, self.clock()

    def enter(self) -> None:
        """A pass of the model begins."""
        if not _again():
            self.runs += 1
            self._calls.clear()

    def put_out(self, fqn: str, args: Any, out: Any) -> None:
        """A module is done. Activation checkpointing's second forward is no second call."""
        if _again() or not self.runs:
            return
        call = self._calls[fqn]
        self._calls[fqn] += 1
        site = callsite.take(2)[1]
        for n, x in enumerate(_tensors(out)):
            if not x.dtype.is_floating_point or not x.dim():
                continue
            key, run = (fqn, call, n), self.runs - 1
            with unwatched():
                value = self.look(x, key, run, None)
            differentiated = x.grad_fn is not None and torch.is_grad_enabled()
            o = Output(
                key=key,
                run=run,
                value=value,
                site=site,
                node=(x.grad_fn, x.output_nr) if differentiated else None,
                passed_on=any(x is a for a in _tensors(args)),
            )
            self.found.append(o)
            if differentiated:
                x.register_hook(self._came(o))

    def _came(self, o: Output) -> Callable[[torch.Tensor], None]:
        def came(grad: torch.Tensor) -> None:
            o.came = self.now()
            with unwatched():
                o.grad = self.look(grad, o.key, o.run, o.value)

        return came


def _again() -> bool:
    return in_recompute() or in_backward()


@contextmanager
def noted(model: nn.Module, notes: Notes) -> Generator[None]:
    """Note what every module puts out, as long as this is open."""
    handles = []
    seen: set[str] = set()
    for name, module in model.named_modules():
        fqn = clean_fqn(name)
        if fqn in seen:  # a wrapper and what it wraps
            continue
        seen.add(fqn)
        if not fqn:  # the model itself
            handles.append(module.register_forward_pre_hook(lambda _m, _a: notes.enter()))
        handles.append(module.register_forward_hook(_hook(notes, fqn)))
    try:
        yield
    finally:
        for h in handles:
            h.remove()


def _hook(notes: Notes, fqn: str) -> Callable[..., None]:
    def put_out(_module: nn.Module, args: Any, out: Any) -> None:
        notes.put_out(fqn, args, out)

    return put_out


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [t for y in x for t in _tensors(y)] if isinstance(x, tuple | list) else []
