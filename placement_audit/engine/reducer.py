"""Lets DistributedDataParallel's reducer run on torch's fake process group, and follows what it does.

The reducer takes the result of its all-reduce out of a future, and the fake process group's futures are empty
(torch 2.10 to 2.13). So it is given the hook that it would have by default, an average over its group, as a
collective that is seen like any other; and a hook of the user's is given futures that hold what was reduced.

Buckets, `no_sync` and views of buckets are the reducer's own doing, and run as they are. Where gradients are
added up over several synchronised backwards, what was reduced before goes through it again: an average leaves it
alone, a sum counts it once for each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from placement_audit.dtensor_api import in_backward, register_comm_hook, replaced_everywhere
from placement_audit.engine.flow import Flow
from placement_audit.errors import UsageError
from placement_audit.model import State, StateKind
from placement_audit.states import rescaled

_hooked: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
"""Whose reducer has `_average`: a hook is for good."""


def running(model: DistributedDataParallel, step: Callable[[], Any]) -> Callable[[], Any]:
    """The same step, in which the reducer of a model on the fake process group runs.

    Args:
        model: the wrapper; gets a hook where it has none.
        step: one forward and backward.
    """
    if model not in _hooked and register_comm_hook(model, model.process_group, _average):
        _hooked[model] = None

    @functools.wraps(step)
    def run() -> Any:
        try:
            with _filled_futures():
                return step()
        except RuntimeError as error:
            if "hook result" not in str(error):
                raise
            raise UsageError(
                "DistributedDataParallel has a communication hook whose result the fake process group cannot give "
                "(one of torch's built-in ones, in C++). Trace the model without it, or run on real ranks."
            ) from error

    return run


@contextmanager
def _filled_futures() -> Generator[None]:
    """All-reduces on the fake process group give futures that hold what was reduced, as on others."""
    made: WeakKeyDictionary[dist.Work, list[torch.Tensor]] = WeakKeyDictionary()
    all_reduce, get_future = dist.all_reduce, dist.Work.get_future

    @functools.wraps(all_reduce)
    def reduced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        if work is not None:
            made[work] = [tensor]
        return work

    def future(self: dist.Work) -> Any:
        found = get_future(self)
        return _done(made[self]) if self in made and found.value() is None else found

    with replaced_everywhere({all_reduce: reduced}):
        dist.Work.get_future = future
        try:
            yield
        finally:
            dist.Work.get_future = get_future


@dataclass(slots=True)
class _Parts:
    """A gradient that is added up: what was reduced already, and what was not."""

    done: int
    rest: int
    both: int


class Averages:
    """The gradients that a reducer goes through, over one trace."""

    def __init__(self, flow: Flow, model: DistributedDataParallel) -> None:
        """See the class.

        Args:
            flow: knows the states.
            model: the wrapper.
        """
        self._flow = flow
        self._model = model
        ranks = tuple(dist.get_process_group_ranks(model.process_group))
        self._dims = flow.world.dims_of_ranks(ranks) or ()
        self._parts: dict[int, _Parts] = {}

    @contextmanager
    def installed(self) -> Generator[None]:
        """Follow them for the duration."""
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if in_backward() or not self._dims:
                return original(*args, **kwargs)
            self._part()
            try:
                return original(*args, **kwargs)
            finally:
                self._join()

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original

    def _part(self) -> None:
        """A backward begins: what was reduced before stands aside, for to reduce it is another thing."""
        ledger = self._flow.ledger
        for p in self._model.parameters():
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

    def _join(self) -> None:
        ledger = self._flow.ledger
        for p in self._model.parameters():
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
    return _done(bucket.buffer())


def _done(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future
