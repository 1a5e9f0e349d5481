"""What a user says about a program of their own: `Job`. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement_audit.config import DEFAULT_TIMEOUT, AuditConfig, near_miss
from placement_audit.errors import UsageError

if TYPE_CHECKING:
    from torch import dtype, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    Placements = Mapping[str, Placement] | Sequence[Placement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A parallelised model and one training step.

    Attributes:
        model: parallelised; its parameters are what is judged, DTensors or plain tensors.
        step: takes no arguments; runs one forward and backward on this rank's batch and leaves the gradients in
            ``.grad``. One that runs the forward alone returns the loss, and ``backward()`` is called on it. A trace
            runs it once; a measured audit runs it several times more, so that a step which takes its batch from
            a data loader gets another one each time and the runs cannot be compared: take the batch before.
        mesh: the DeviceMesh, or one of its parts; None to take it from the parameters.
            Dims without names are "dim0", "dim1" and so on.
        inputs: the tensors of the batch, in any nesting of tuples, lists and dicts; () where the batch is what
            the model's forward is called with.
        batch_placements: along which mesh dims the batch differs between ranks: ``{"dp": Shard(0)}``, or one
            placement for each dim of ``mesh``. What is not named is the same on all ranks.
        optimizer: whose reading of the gradients is measured: a torch optimizer of the model's parameters (it is
            left as it was, a copy of it steps), or a function of a model that clips and steps; it is called with
            this model and with the reference's, may return an optimizer to be stepped, or the total norm that
            it clipped by.
        declared: what plain-tensor parameters are along the mesh dims: ``{"w1": {"tp": Shard(0)}}``, or one
            placement for each dim of ``mesh``; names may have wildcards. What is not named is replicated.
        reference: makes the same model on one device, called on rank 0 alone: returns (model, step), or (model,
            step, optimizer). The same parameter names, the whole parameters; the step takes the global batch,
            and its gradients are the truth. None where there is no such thing: then nothing is measured.
        reduce_dtype: the dtype that gradients should be reduced in (FSDP's MixedPrecisionPolicy(reduce_dtype=...));
            a reduction in another one is noted. None where it does not matter.
        name: for people; "" for the model's class.
    """

    model: nn.Module
    step: Callable[[], object]
    mesh: DeviceMesh | None = None
    inputs: Any = ()
    batch_placements: Placements | None = None
    optimizer: Any = None
    declared: Mapping[str, Placements] | None = None
    reference: Callable[[], Any] | None = None
    reduce_dtype: dtype | None = None
    name: str = ""


def as_job(made: object, factory: str) -> Job:
    """What a factory returned, as a `Job`.

    Args:
        made: a Job, a dict of its fields, or (model, step) or (model, step, mesh).
        factory: its name, for the message.

    Raises:
        UsageError: it is none of these, or has other fields.
    """
    if isinstance(made, Job):
        return made
    known = [f.name for f in fields(Job)]
    if isinstance(made, tuple) and len(made) in (2, 3):
        made = dict(zip(known, made, strict=False))
    if not isinstance(made, Mapping):
        raise UsageError(
            f"{factory} returned {_article(type(made).__name__)}; expected a placement_audit.Job, (model, step, "
            f"mesh), or a dict with model and step and as many of {', '.join(known[2:])} as apply."
        )
    odd = [key for key in made if key not in known]
    if odd:
        hint = near_miss(str(odd[0]), known) or f" Known keys: {', '.join(known)}."
        raise UsageError(f"{factory} returned a dict with an unknown key {odd[0]!r}.{hint}")
    missing = [key for key in known[:2] if key not in made]
    if missing:
        raise UsageError(f"{factory} returned a dict without {' and '.join(map(repr, missing))}.")
    return Job(**made)


def config_of(
    factory: str,
    *,
    arguments: Iterable[str] = (),
    world_size: int | None = None,
    timeout: float | None = None,
    device: str | None = None,
) -> AuditConfig:
    """What to audit, for a function that makes a `Job`.

    Args:
        factory: FILE.py:FUNCTION or package.module:FUNCTION.
        arguments: for the function.
        world_size: ranks; None where not given.
        timeout: seconds without progress; None where not given.
        device: None where not given.

    Raises:
        UsageError: it has not this form, or the file cannot be read.
    """
    where, _, name = factory.rpartition(":")
    if not where or not name.isidentifier():
        raise UsageError(
            f"{factory}: expected FILE.py:FUNCTION or package.module:FUNCTION, such as train.py:build."
        )
    digest = ""
    if where.endswith(".py"):
        try:
            digest = hashlib.sha256(Path(where).read_bytes()).hexdigest()
        except OSError as error:
            raise UsageError(f"{where}: cannot be read: {error.strerror or error}.") from None
    return AuditConfig(
        path=factory,
        sha256=digest,
        job={},
        job_path="",
        factory=factory,
        overrides=tuple(arguments),
        world_size=world_size,
        timeout=DEFAULT_TIMEOUT if timeout is None else timeout,
        device=device or "auto",
    )


def _article(name: str) -> str:
    return "None" if name == "NoneType" else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
