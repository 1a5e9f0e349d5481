"""Lets DistributedDataParallel's reducer run on torch's fake process group, and follows what it does.

The reducer takes the result of its all-reduce out of a future, and the fake process group's futures are empty
(`placement_audit.engine.futures`). So it is given the hook that it would have by default, an average over its
group, as a collective that is seen like any other.

Buckets, `no_sync` and views of buckets are the reducer's own doing, and run as they are. Where gradients are
added up over several synchronised backwards, what was reduced before goes through it again: an average leaves it
alone, a sum counts it once for each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from placement_audit.ddp_api import before_forward, builtin_comm_hook, register_comm_hook
from placement_audit.dtensor_api import in_backward
from placement_audit.engine.flow import Flow
from placement_audit.engine.futures import done
from placement_audit.errors import UsageError
from placement_audit.model import State, StateKind
from placement_audit.states import rescaled

_hooked: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
"""Whose reducer has `_average`: a hook is for good."""


def make_runnable(model: DistributedDataParallel) -> None:
    """See to it that its reducer runs, and can be followed.

    Args:
        model: the wrapper; gets a hook where it has none, on the fake process group.

    Raises:
        UsageError: its reducer has a hook that cannot be followed.
    """
    builtin, fake = builtin_comm_hook(model), dist.get_backend() == "fake"
    # On the CPU, what C++ chains to a future runs in a thread where no dispatch mode sees it. ALLREDUCE chains nothing.
    if builtin and (fake or (builtin != "ALLREDUCE" and any(p.is_cpu for p in model.parameters()))):
        raise UsageError(
            f"DistributedDataParallel has torch's built-in communication hook {builtin}, in C++, which cannot be "
            "followed here. Register the one in Python that does the same: "
            f"torch.distributed.algorithms.ddp_comm_hooks.default_hooks.{builtin.lower()}_hook."
        )
    if fake and model not in _hooked and register_comm_hook(model, model.process_group, _average):
        _hooked[model] = None


@contextmanager
def runnable() -> Generator[None]:
    """For the duration, the reducer of each model that runs is made runnable before it does."""
    with before_forward(make_runnable):
        yield


@dataclass(slots=True)
class _Parts:
    """A gradient that is added up: what was reduced already, and what was not."""

    done: int
    rest: int
    both: int


class Reducers:
    """The reducers that run in one trace, and the gradients that go through them."""

    def __init__(self, flow: Flow) -> None:
        """See the class.

        Args:
            flow: knows the states.
        """
        self._flow = flow
        self._of: WeakKeyDictionary[DistributedDataParallel, _Averages] = WeakKeyDictionary()

    @contextmanager
    def installed(self) -> Generator[None]:
        """Follow them for the duration."""
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if in_backward():
                return original(*args, **kwargs)
            averages = list(self._of.values())
            for a in averages:
                a.part()
            try:
                return original(*args, **kwargs)
            finally:
                for a in averages:
                    a.join()

        torch.autograd.backward = backward
        try:
            with runnable(), before_forward(self._met):
                yield
        finally:
            torch.autograd.backward = original

    def _met(self, model: DistributedDataParallel) -> None:
        if model not in self._of:
            self._of[model] = _Averages(self._flow, model)


class _Averages:
    """The gradients that a reducer goes through."""

    def __init__(self, flow: Flow, model: DistributedDataParallel) -> None:
        self._flow = flow
        self._params = list(model.parameters())
        ranks = tuple(dist.get_process_group_ranks(model.process_group))
        self._dims = flow.world.dims_of_ranks(ranks) or ()
        self._parts: dict[int, _Parts] = {}

    def part(self) -> None:
        """A backward begins: what was reduced before stands aside, for to reduce it is another thing."""
        ledger = self._flow.ledger
        for p in self._params:
            if p.grad is None:
                self._parts.pop(id(p), None)
                continue
            now, known = ledger.get(p.grad), self._parts.get(id(p))
            if known is None or known.both != now:
                if not all(ledger.kind(now, d) is StateKind.INVARIANT for d in self._dims):
                    self._parts.pop(id(p), None)
                    continue
                known = self._parts[id(p)] = _Parts(now, ledger.as_grad(ledger.zero), now)
            self._put(p.grad, known.rest)

    def join(self) -> None:
        ledger = self._flow.ledger
        for p in self._params:
            known = self._parts.get(id(p))
            if known is None or p.grad is None:
                continue
            known.rest = ledger.get(p.grad)
            reduced = all(ledger.kind(known.rest, d) is StateKind.INVARIANT for d in self._dims)
            if reduced:
                known.done = ledger.changed(
                    known.done, functools.partial(self._reduced, ledger.vector(known.rest))
                )
            known.both = ledger.combine2(known.done, known.rest, adds=True)
            if reduced:
                known.done, known.rest = known.both, ledger.as_grad(ledger.zero)
            self._put(p.grad, known.both)

    def _reduced(self, like: Sequence[State], d: int, state: State) -> State:
        """What was equal on all ranks, after it went through the reduction that made this of the ranks' terms."""
        scale = like[d].scale
        if d not in self._dims:
            return state
        if scale is None:
            return State(state.kind, None, state.blame)
        # An average has 1/n of the sum, and n of what is equal on n ranks are summed.
        return rescaled(state, scale * self._flow.world.sizes[d])

    def _put(self, grad: torch.Tensor, sid: int) -> None:
        self._flow.ledger.written(grad, sid, lambda _inside, _was: sid)


def _average(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What the reducer does where it has no hook."""
    dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group)
    return done(bucket.buffer())
