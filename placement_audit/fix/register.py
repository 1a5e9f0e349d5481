"""What happens when SimpleFSDP gives a module its wrapper class: two things that the release leaves out.

- A weight that no mesh dim shards (DDP) has two reductions over whole weights, one after the other. Where one group
  spans both, torch makes them one; `DeviceMesh._flatten` makes that group. torchtitan calls it for its own meshes.
- torchtitan 0.3.0 keeps wrapper classes in a cache by module class alone. Their properties hold the first
  `ReplicateComputation` that they were made for, and with it the mesh and dtypes of a model gone by.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial

Register = Callable[[nn.Module, list[str], Any], None]
"""SimpleFSDP's `_register_parametrization`."""

CACHE = "_wrap_class_cache"
"""Where the cache is, in a module that has one."""


def registering(namespace: ModuleType, released: Register, *, join: bool) -> Register:
    """`_register_parametrization` with both seen to.

    Args:
        namespace: the module that ``released`` is of.
        released: as it was.
        join: whether gradients are reduced twice, so that the two can be one.
    """
    caches: dict[tuple[Any, ...], dict[Any, type]] = {}

    def _register_parametrization(module: nn.Module, param_names: list[str], parametrization: Any) -> None:
        for name in param_names if join else ():
            _join_reductions(module._parameters[name], parametrization)
        if not hasattr(namespace, CACHE):
            released(module, param_names, parametrization)
            return
        cache = caches.setdefault(_identity(parametrization), {})
        setattr(namespace, CACHE, cache)
        # The release makes each class known by its name in its own module, whoever has the name already.
        first = vars(namespace).get(f"SimpleFSDP{type(module).__name__}")
        released(module, param_names, parametrization)
        if first is not None and type(module) is vars(namespace).get(first.__name__) is not first:
            _rename(namespace, type(module), first)

    return _register_parametrization


def _identity(parametrization: Any) -> tuple[Any, ...]:
    """What two `ReplicateComputation` have in common that do the same; a mesh, though, is its own.

    Equal meshes may stand on process groups of which one is gone.
    """
    stored = {k: v for k, v in vars(parametrization).items() if not k.startswith("_") and k != "training"}
    mesh = stored.pop("device_mesh")
    return (id(mesh), *((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(stored.items())))


def _rename(namespace: ModuleType, made: type, first: type) -> None:
    """Give a name back to the class that had it first, for pickles; the other gets one of its own."""
    names = vars(namespace)
    names[first.__name__] = first
    number = 2
    while f"{first.__name__}_{number}" in names:
        number += 1
    made.__name__ = made.__qualname__ = f"{first.__name__}_{number}"
    names[made.__name__] = made


def _join_reductions(param: nn.Parameter | None, parametrization: Any) -> None:
    """Let one group span both reductions of a weight that no mesh dim shards."""
    if not isinstance(param, DTensor) or param.device_mesh.ndim == parametrization.device_mesh.ndim:
        return
    # A subclass of Partial may divide by a number of its own, which a joint reduction would not know of.
    plain = all(type(p) is Partial for p in parametrization.grad_placements)
    if plain and all(p.is_replicate() for p in param.placements):
        param.device_mesh._flatten()
