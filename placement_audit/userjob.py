"""`Job` -> `Case`: checks what a user said of a program of their own, and says in one sentence what is wrong."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.nn.parallel import DistributedDataParallel

from placement_audit.case import Case, Reference, dim_names
from placement_audit.config import near_miss
from placement_audit.dtensor_api import clean_fqn, placement_of, root_mesh, spec_of
from placement_audit.engine.reducer import make_runnable
from placement_audit.engine.world import World
from placement_audit.errors import IncompleteError, UsageError
from placement_audit.job import Job
from placement_audit.model import REPLICATE, Placement
from placement_audit.userstep import Step, unwrapped, updater

_NO_REFERENCE = (
    "not measured: there is nothing to measure against. Give the job a reference, a function that makes the same "
    "model and step on one device."
)


def case_of(job: Job) -> Case:
    """The case that a user's program is.

    Args:
        job: as the user gave it.

    Raises:
        UsageError: something in it is wrong, or missing.
        IncompleteError: there is nothing to audit.
    """
    if not isinstance(job.model, nn.Module):
        raise UsageError(f"model: expected a torch.nn.Module, got {type(job.model).__name__}.")
    _check_callable("step", job.step)
    if any(isinstance(m, FullyShardedDataParallel) for m in job.model.modules()):
        raise UsageError(
            "model: it holds FullyShardedDataParallel (FSDP1), whose flat parameters have no placements to judge. "
            "Shard it with torch.distributed.fsdp.fully_shard."
        )
    model = unwrapped(job.model)
    name = job.name or type(model).__name__
    if not any(p.requires_grad for p in model.parameters()):
        raise IncompleteError(f"audited nothing: {name} has no trainable parameter.")
    given, world = _meshes(job.mesh, model)
    names = dim_names(world)
    batch = _placements("batch_placements", job.batch_placements or {}, given, names)
    batch_dims = tuple(d for d in names if d in batch and not batch[d].is_replicate)
    inputs = tuple(_tensors(job.inputs))
    device_type = "meta" if any(p.is_meta for p in model.parameters()) else world.device_type
    made: list[tuple[nn.Module, Any]] = []
    step = Step(job.step, "step")
    if isinstance(job.model, DistributedDataParallel):
        make_runnable(job.model)  # what it cannot be is said before anything runs
    case = Case(
        name=name,
        model=model,
        mesh=world,
        batch_dims=batch_dims,
        inputs=inputs,
        step=step,
        device_type=device_type,
        backend=_backend(device_type),
        reduce_dtype=None if job.reduce_dtype is None else str(job.reduce_dtype).removeprefix("torch."),
        reference=None if job.reference is None else reference_of(job.reference, made),
        no_reference="" if job.reference is not None else _NO_REFERENCE,
        update=updater(job.model, job.optimizer, lambda: made[-1] if made else None),
        own_readers=job.optimizer is not None,
        declared=_declared(job.declared or {}, model, given, names),
        catching=None if inputs else _catching(job.model, name, bool(batch_dims)),
    )
    try:
        World.of(case)
    except ValueError as error:
        raise UsageError(f"declared: {error}.") from None
    return case


def reference_of(
    build: Callable[[], Any], made: list[tuple[nn.Module, Any]], scale: float = 1.0
) -> Callable[[], Reference]:
    """`Case.reference` from the user's function.

    Args:
        build: `Job.reference`.
        made: gets (model, optimizer) each time that it is built.
        scale: of the loss.
    """
    _check_callable("reference", build)

    def reference() -> Reference:
        found = build()
        if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[0], nn.Module):
            raise UsageError(
                f"reference returned {type(found).__name__}; expected (model, step) or (model, step, optimizer): "
                "the model on one device, and its step on the global batch."
            )
        _check_callable("the reference's step", found[1])
        model = unwrapped(found[0])
        for p in model.parameters():
            p.grad = None  # the same model may come twice
        made.append((model, found[2] if len(found) == 3 else None))
        return Reference(model=model, step=Step(found[1], "the reference's step", scale))

    return reference


def _check_callable(what: str, function: object) -> None:
    if not callable(function):
        raise UsageError(f"{what}: expected a function, got {type(function).__name__}.")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsageError(
            f"{what} is called without arguments, and cannot be: {error}. Bind them: lambda: {what}(...)."
        ) from None
    except ValueError:  # a builtin without a signature
        return


def _meshes(given: DeviceMesh | None, model: nn.Module) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh that the user's placements are for, and the whole one that it is a part of."""
    if given is not None and not isinstance(given, DeviceMesh):
        raise UsageError(f"mesh: expected a DeviceMesh, got {type(given).__name__}.")
    found = given
    if found is None:
        own = [root_mesh(spec_of(p).mesh) for p in model.parameters() if isinstance(p, DTensor)]
        roots = list(dict.fromkeys(own))
        if not roots:
            raise UsageError(
                "mesh: none was given, and no parameter is a DTensor that has one. Pass mesh=, the DeviceMesh that "
                "the job runs on."
            )
        if len(roots) > 1:
            raise UsageError(
                f"mesh: none was given, and the parameters live on {len(roots)} meshes that are no parts of one: "
                f"{', '.join(str(m) for m in roots)}. Pass mesh=, the one with all mesh dims."
            )
        found = roots[0]
    world = root_mesh(found)
    if world.size() == 1:
        raise IncompleteError("audited nothing: the mesh has 1 rank, so no gradient needs a reduction.")
    if world.get_coordinate() is None:
        raise UsageError(f"mesh: rank {dist.get_rank()} is no part of it; audit on its ranks alone.")
    return found, world


def _placements(
    what: str,
    given: Mapping[str, TorchPlacement] | Sequence[TorchPlacement],
    mesh: DeviceMesh,
    names: tuple[str, ...],
) -> dict[str, Placement]:
    """By mesh dim, of a mapping or of one placement for each dim of the user's mesh.

    Args:
        what: for messages.
        given: as the user has it.
        mesh: the user's.
        names: of the whole mesh.
    """
    if isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        own = dim_names(mesh)
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(own):
            raise UsageError(
                f"{what}: expected a dict by mesh dim, or one placement for each of {', '.join(own)}; got {given!r}."
            )
        pairs = list(zip(own, given, strict=True))
    out = {}
    for dim, placement in pairs:
        if str(dim).partition("[")[0] not in names:
            hint = near_miss(str(dim), names) or f" Mesh dims: {', '.join(names)}."
            raise UsageError(f"{what}: {dim!r} is no mesh dim.{hint}")
        if not isinstance(placement, TorchPlacement):
            raise UsageError(f"{what}: {dim}: expected a placement such as Shard(0), got {placement!r}.")
        if placement.is_partial():
            raise UsageError(f"{what}: {dim}: {placement} is no placement of a value; Shard or Replicate is.")
        out[dim] = placement_of(placement)
    return out


def _declared(
    given: Mapping[str, Any], model: nn.Module, mesh: DeviceMesh, names: tuple[str, ...]
) -> dict[str, dict[str, Placement]]:
    params = {clean_fqn(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    out: dict[str, dict[str, Placement]] = {}
    for pattern, placements in given.items():
        matched = [fqn for fqn in params if fnmatch.fnmatchcase(fqn, pattern)]
        if not matched:
            hint = near_miss(pattern, params) or f" It has {', '.join(list(params)[:8])}."
            raise UsageError(f"declared: the model has no parameter {pattern!r}.{hint}")
        by_dim = _placements(f"declared: {pattern}", placements, mesh, names)
        for fqn in matched:
            own: torch.Tensor = params[fqn]
            if isinstance(own, DTensor):
                raise UsageError(
                    f"declared: {fqn} is a DTensor, whose placements {spec_of(own).placements} say it "
                    "already; declare plain tensors only."
                )
            for dim, p in by_dim.items():
                if p.tensor_dim is not None and not -params[fqn].dim() <= p.tensor_dim < params[fqn].dim():
                    raise UsageError(
                        f"declared: {fqn}: {p} on {dim}, but it has {params[fqn].dim()} tensor dims."
                    )
            dims = params[fqn].dim()
            out[fqn] = {
                d: p if p.tensor_dim is None else replace(p, tensor_dim=p.tensor_dim % dims)
                for d, p in by_dim.items()
                if p != REPLICATE
            }
    return out


def _tensors(x: Any) -> Iterable[torch.Tensor]:
    """The tensors in any nesting."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, Mapping):
        for y in x.values():
            yield from _tensors(y)
    elif isinstance(x, Sequence) and not isinstance(x, str | bytes):
        for y in x:
            yield from _tensors(y)


def _backend(device_type: str) -> str:
    backend = dist.get_backend()
    if backend == "fake" or ("," not in backend and ":" not in backend):
        return backend
    by_device = dict(part.split(":") for part in backend.split(","))
    return by_device.get(device_type, backend)


def _catching(model: nn.Module, name: str, varies: bool) -> Callable[[Callable[[torch.Tensor], None]], Any]:
    """Takes what the model's forward is called with for the batch."""

    @contextmanager
    def catching(take: Callable[[torch.Tensor], None]) -> Generator[None]:
        seen = False

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal seen
            for x in _tensors((args, kwargs)):
                seen = True
                take(x)

        handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            handle.remove()
        if varies and not seen:
            raise UsageError(
                f"batch_placements says that the batch varies, but the forward of {name} was not called with a "
                "tensor, so that nobody knows what the batch is. Pass inputs=, the batch's tensors."
            )

    return catching
