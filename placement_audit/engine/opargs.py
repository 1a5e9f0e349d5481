"""The tensors that go into an op and come out of it."""

from __future__ import annotations

from typing import Any

import torch

from placement_audit.dtensor_api import local_of, storage_key


def tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an op's arguments, lists of them included."""
    found = []
    for a in args:
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif isinstance(a, list | tuple):
            found += [b for b in a if isinstance(b, torch.Tensor)]
    if kwargs:
        found += tensors(kwargs.values(), None)
    return found


def flat(out: Any) -> list[torch.Tensor]:
    """The tensors among an op's results, nested lists included."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, list | tuple):
        return [x for o in out for x in flat(o)]
    return []


def shares(out: Any, args: Any) -> bool:
    """Whether a view op really made a view: reshape, contiguous and to may copy."""
    first = out if isinstance(out, torch.Tensor) else out[0] if out else None
    return first is not None and storage_key(local_of(first)) == storage_key(local_of(args[0]))


def covers(x: torch.Tensor) -> bool:
    """Whether the tensor is all of its storage."""
    return x.numel() * x.element_size() == x.untyped_storage().nbytes()


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor's elements lie between: (first, one after the last)."""
    first = int(x.storage_offset())
    last = first + sum((int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
    return first * x.element_size(), (last + 1 if x.numel() else first) * x.element_size()


def place_of(x: torch.Tensor) -> tuple[int, list[tuple[int, int]], int]:
    """Where a tensor lies in its storage; see `placement_audit.engine.pieces.Place`."""
    size = x.element_size()
    dims = [(n, step * size) for n, step in zip(x.shape, x.stride(), strict=True)]
    return int(x.storage_offset()) * size, dims, size
