"""Who reads gradients that are left Partial after backward, through what, and from where.

A DTensor op sees the label and reduces; `to_local()` hands out one rank's term whatever it is used for.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from placement_audit.dtensor_api import EagerMode, local_of, spec_of, storage_key
from placement_audit.engine import callsite
from placement_audit.engine.opargs import tensors
from placement_audit.measurement import Reader


@dataclass(slots=True)
class Readings:
    """What was read while the watch was on.

    Attributes:
        found: (through, place, user's place) -> FQNs, in order.
    """

    found: dict[tuple[str, callsite.RawSite | None, callsite.RawSite | None], dict[str, None]] = field(
        default_factory=dict
    )

    def note(self, through: str, fqn: str, depth: int) -> None:
        """One reading."""
        site, user_site, _ = callsite.take(depth + 1)
        self.found.setdefault((through, site, user_site), {})[fqn] = None

    def frozen(self) -> tuple[Reader, ...]:
        """As plain data."""
        sites = callsite.SiteTable()
        return tuple(
            Reader(
                params=tuple(fqns),
                through=through,
                whole=through != "to_local",
                call_site=sites.get(site),
                user_site=sites.get(user_site),
            )
            for (through, site, user_site), fqns in self.found.items()
        )


class _Ops(EagerMode):
    """Sees every DTensor op on one of the gradients."""

    def __init__(self, partial: dict[int, str], readings: Readings) -> None:
        super().__init__()
        self._partial = partial
        self._readings = readings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            for x in tensors(args, kwargs):
                fqn = self._partial.get(storage_key(local_of(x))) if isinstance(x, DTensor) else None
                if fqn is not None and _is_partial(x):
                    self._readings.note(f"{func.namespace}.{func._opname}", fqn, 1)
        return func(*args, **kwargs)


@contextmanager
def watched(params: Mapping[str, nn.Parameter]) -> Generator[Readings]:
    """Note who reads the Partial ones among the gradients of ``params``.

    Args:
        params: by FQN, with gradients.
    """
    readings = Readings()
    partial = {
        storage_key(local_of(p.grad)): fqn
        for fqn, p in params.items()
        if isinstance(p.grad, DTensor) and _is_partial(p.grad)
    }
    if not partial:
        yield readings
        return
    original = DTensor.to_local

    def to_local(self: DTensor, **kwargs: Any) -> torch.Tensor:
        fqn = partial.get(storage_key(local_of(self)))
        if fqn is not None and _is_partial(self):
            readings.note("to_local", fqn, 1)
        return original(self, **kwargs)

    DTensor.to_local = to_local  # type: ignore[method-assign]
    try:
        with _Ops(partial, readings):
            yield readings
    finally:
        DTensor.to_local = original  # type: ignore[method-assign]


def _is_partial(x: torch.Tensor) -> bool:
    return isinstance(x, DTensor) and any(p.is_partial() for p in spec_of(x).placements)
