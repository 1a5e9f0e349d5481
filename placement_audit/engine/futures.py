"""Lets what is chained to the future of a collective run where it is seen: in this thread.

A backend runs ``then`` of a future that is still open in a thread of its own, out of any dispatch mode's sight
(gloo; NCCL's futures are done once the kernel is queued). And the fake process group's futures are empty (torch
2.10 to 2.13), so that they are given what was communicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from placement_audit.dtensor_api import replaced_everywhere

_INTO = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "all_to_all_single": "output",
}
"""Collectives of torch.distributed, and the argument that each writes: the first one."""


@contextmanager
def answered() -> Generator[None]:
    """For the duration, the futures of collectives are done when they are given out, and hold a result."""
    made: WeakKeyDictionary[dist.Work, list[torch.Tensor]] = WeakKeyDictionary()
    get_future = dist.Work.get_future

    def noted(collective: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(collective)
        def noting(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            if work is not None:
                into = kwargs[name] if name in kwargs else args[0]
                made[work] = [into] if isinstance(into, torch.Tensor) else list(into)
            return work

        return noting

    def future(self: dist.Work) -> Any:
        found = get_future(self)
        if self in made and found.value() is None:
            return done(made[self])
        if not found.done():
            found.wait()
        return found

    collectives = _INTO.items() if dist.get_backend() == "fake" else ()
    with replaced_everywhere({(c := getattr(dist, name)): noted(c, into) for name, into in collectives}):
        dist.Work.get_future = future
        try:
            yield
        finally:
            dist.Work.get_future = get_future


def done(value: Any) -> Any:
    """A future that holds a value already."""
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future
