"""Puts the fix in place of what is released, and back."""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from placement_audit.errors import BuildError
from placement_audit.fix import gather, register

_MODULES = (
    "torchtitan.experiments.simple_fsdp.simple_fsdp",  # 0.1.0 to 0.2.2
    "torchtitan.experiments.graph_trainer.simple_fsdp",  # 0.3.0
)
_CLASS, _COMPUTE, _REGISTER = "ReplicateComputation", "replicate_compute", "_register_parametrization"
_ATTRIBUTES = ("device_mesh", "compute_placements", "grad_placements", "param_dtype", "reduce_dtype")
_CALLS = ("to_local", "from_local", "redistribute")

_log = logging.getLogger("placement_audit.fix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What `install` did.

    Attributes:
        modules: the modules whose `ReplicateComputation` is fixed.
        deferred: whether ``.grad`` is left Partial on the mesh dims that replicate the weight.
        caches: those of them whose cache of wrapper classes no longer mixes up two models.
    """

    modules: tuple[str, ...]
    deferred: bool
    caches: tuple[str, ...]


_installed: Fixed | None = None
_released: list[tuple[Any, str, Any]] = []
"""(owner, name, value) of what was there before."""


def install(*, deferred: bool = False) -> Fixed:
    """Fix every SimpleFSDP of the installed torchtitan, for models parallelised before and after; once is enough.

    Args:
        deferred: leave the sum over the mesh dims that replicate a weight to whoever reads ``.grad``.

    Returns:
        What was done.

    Raises:
        BuildError: there is none, or it is not one that this fix knows how to mend. Nothing was changed then.
    """
    global _installed
    if _installed is not None and _installed.deferred == deferred:
        return _installed
    uninstall()
    found = list(_found())
    if not found:
        raise BuildError(
            f"no SimpleFSDP to fix: torchtitan 0.2 has it in {_MODULES[0]}, 0.3 in {_MODULES[1]}, and neither "
            "can be found here. Install torchtitan into this environment."
        )
    for module in found:
        _check(module)
    form = gather.deferred if deferred else gather.reduced
    for module in found:
        cls = getattr(module, _CLASS)
        _put(cls, _COMPUTE, form(getattr(cls, _COMPUTE)))
        if hasattr(module, register.CACHE):
            _put(module, register.CACHE, getattr(module, register.CACHE))
        registering = register.registering(module, getattr(module, _REGISTER), join=not deferred)
        _put(module, _REGISTER, registering)
    _installed = Fixed(
        modules=tuple(m.__name__ for m in found),
        deferred=deferred,
        caches=tuple(m.__name__ for m in found if hasattr(m, register.CACHE)),
    )
    _log.info(_words(_installed))
    return _installed


def uninstall() -> None:
    """Put back what was released. Models keep the wrapper classes that they have; those gather as released."""
    global _installed
    while _released:
        owner, name, value = _released.pop()
        setattr(owner, name, value)
    _installed = None


def _put(owner: Any, name: str, value: Any) -> None:
    _released.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _words(done: Fixed) -> str:
    when = (
        "left to whoever reads .grad"
        if done.deferred
        else "made after the data-parallel reduction, in its dtype"
    )
    caches = "; its cached wrapper classes no longer mix up two models" if done.caches else ""
    return (
        f"placement-audit fixed {' and '.join(done.modules)}: the sum over tensor-parallel ranks of a replicated "
        f"weight's gradient is {when}{caches}."
    )


def _found() -> Iterator[ModuleType]:
    """The modules that this torchtitan has."""
    for name in _MODULES:
        try:
            yield importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name and f"{name}.".startswith(f"{error.name}.")):
                raise BuildError(f"{name} cannot be imported: {error}.") from error


def _check(module: ModuleType) -> None:
    """Refuse a `ReplicateComputation` that is not built as the fix takes it to be."""
    cls, register_ = getattr(module, _CLASS, None), getattr(module, _REGISTER, None)
    problems = []
    if not inspect.isclass(cls) or not inspect.isfunction(getattr(cls, _COMPUTE, None)):
        problems.append(f"a class {_CLASS} with a method {_COMPUTE}; there is none")
    else:
        compute = getattr(cls, _COMPUTE)
        parameters = list(inspect.signature(compute).parameters)
        if len(parameters) != 2:
            problems.append(f"{_COMPUTE}(self, x); got ({', '.join(parameters)})")
        if missing := [n for n in _CALLS if n not in compute.__code__.co_names]:
            problems.append(f"{_COMPUTE} calling {', '.join(missing)}; it does not")
        stored = {i.argval for i in dis.get_instructions(cls.__init__) if i.opname == "STORE_ATTR"}
        if missing := [n for n in _ATTRIBUTES if n not in stored]:
            problems.append(f"{_CLASS} keeping {', '.join(missing)}; it does not")
    if not inspect.isfunction(register_) or len(inspect.signature(register_).parameters) != 3:
        problems.append(f"{_REGISTER}(module, param_names, parametrization); there is none")
    if problems:
        raise BuildError(
            f"{module.__name__} ({module.__file__}) is not a SimpleFSDP that placement-audit can fix. Expected "
            f"{'; expected '.join(problems)}. Nothing was changed. Audit it as it is: placement-audit --config FILE."
        )
