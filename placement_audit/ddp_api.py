"""DistributedDataParallel's reducer: private names of torch, as in `placement_audit.dtensor_api`.

Seen in torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def before_forward(call: Callable[[DistributedDataParallel], None]) -> Generator[None]:
    """Call ``call(model)`` before each forward of one: of the wrapper, and of what ``replicate`` made of a module."""
    original = DistributedDataParallel._pre_forward

    @functools.wraps(original)
    def pre_forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        call(self)
        return original(self, *inputs, **kwargs)

    DistributedDataParallel._pre_forward = pre_forward
    try:
        yield
    finally:
        DistributedDataParallel._pre_forward = original


def register_comm_hook(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> bool:
    """Give the reducer a hook; False where it has one, for it takes one only."""
    try:
        dist._register_comm_hook(model.reducer, state, hook)
    except RuntimeError:
        return False
    return True


def builtin_comm_hook(model: DistributedDataParallel) -> str:
    """The hook in C++ that the reducer has, torch's name; "" for none."""
    return str(model._get_ddp_logging_data().get("comm_hook", "")).partition("BuiltinCommHookType.")[2]
