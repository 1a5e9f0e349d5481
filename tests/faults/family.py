"""What a family of seeded faults is, and what most of them need.

A family is one small program in several variants, right ones and wrong ones. Each says of itself what is true:
which parameters' gradients differ from one device's, and which verdict that calls for. `truth.py` proves it with
numbers and without placement-audit; `test_faults.py` sets placement-audit against it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from placement_audit import Job
from placement_audit.verdicts import Verdict

R, P = Replicate(), Partial()


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A wrong gradient.

    Attributes:
        on: the mesh dim to name.
        traced: what a trace alone must say of it, one of these; () where only values tell.
        measured: likewise, once numbers are there.
    """

    on: str
    traced: tuple[Verdict, ...] = ()
    measured: tuple[Verdict, ...]


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What is true of a variant; without arguments: right.

    Attributes:
        gradients: parameter -> what is wrong with its gradient.
        updates: parameters that are wrong after a step of the optimizer, though their gradients are right.
        drifts: those of them of which a trace sees that the ranks' replicas part.
        scale: every gradient is this many times what the loss calls for; 1 for right.
        forward: the loss differs from one device's.
        rules: findings to expect that are no matter of one parameter, or mere notes.
    """

    gradients: Mapping[str, Wrong] = field(default_factory=dict)
    updates: frozenset[str] = frozenset()
    drifts: frozenset[str] = frozenset()
    scale: float = 1.0
    forward: bool = False
    rules: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return not (self.gradients or self.updates or self.scale != 1 or self.forward)


RIGHT = Expect()


def lost(*params: str, on: str = "tp") -> dict[str, Wrong]:
    """Gradients that miss a sum."""
    return _all(params, on, Verdict.LOST_REDUCTION)


def doubled(*params: str, on: str = "tp") -> dict[str, Wrong]:
    """Gradients that were summed once more."""
    return _all(params, on, Verdict.DOUBLE_REDUCTION)


def mixed(*params: str, on: str = "tp") -> dict[str, Wrong]:
    """Gradients of which one part is right and the other is not: no one sum mends them, so no one name fits."""
    return _all(params, on, Verdict.LOST_REDUCTION, Verdict.DOUBLE_REDUCTION, Verdict.WRONG_SCALE)


def _all(params: tuple[str, ...], on: str, *verdicts: Verdict) -> dict[str, Wrong]:
    return {p: Wrong(on=on, traced=verdicts, measured=verdicts) for p in params}


def unevenly(*params: str, on: str = "dp") -> dict[str, Wrong]:
    """Gradients that are another multiple than the others' are, of which numbers may say no more than that."""
    wrong = Wrong(
        on=on, traced=(Verdict.WRONG_SCALE,), measured=(Verdict.WRONG_SCALE, Verdict.WRONG_GRADIENT)
    )
    return dict.fromkeys(params, wrong)


def off(*params: str, on: str = "tp") -> dict[str, Wrong]:
    """Gradients that are wrong in a way that only values show."""
    return {p: Wrong(on=on, measured=(Verdict.WRONG_GRADIENT,)) for p in params}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One program in its variants.

    Attributes:
        name: short.
        about: what goes wrong, one sentence.
        mesh: ranks by mesh dim.
        variants: what is true of each.
        job: builds one on a mesh.
        measured: whether numbers can tell; not where the fault is one of precision.
        fake: whether it runs on torch's fake process group.
    """

    name: str
    about: str
    mesh: Mapping[str, int]
    variants: Mapping[str, Expect]
    job: Callable[[DeviceMesh, str], Job]
    measured: bool = True
    fake: bool = True

    @property
    def ranks(self) -> int:
        size = 1
        for n in self.mesh.values():
            size *= n
        return size


# --------------------------------------------------------------------------- for the programs


class Bag(nn.Module):
    """Parameters under short names."""

    def __init__(self, **values: torch.Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            own = value if isinstance(value, nn.Parameter) else nn.Parameter(value.clone())
            self.register_parameter(name, own)


def draw(name: str, *shape: int, scale: float = 0.5) -> torch.Tensor:
    """Normal values, the same on every rank and each time."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return scale * torch.randn(*shape, generator=generator)


def laid_out(value: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> nn.Parameter:
    """A parameter on the mesh, of a value that every rank has."""
    return nn.Parameter(distribute_tensor(value.clone(), mesh, placements, src_data_rank=None))


def on(x: torch.Tensor, mesh: DeviceMesh, *placements: Any, **kwargs: Any) -> DTensor:
    """A local tensor with a label."""
    return DTensor.from_local(x, mesh, placements, run_check=False, **kwargs)


def mine(x: torch.Tensor, mesh: DeviceMesh, mesh_dim: str, tensor_dim: int = 0) -> torch.Tensor:
    """This rank's piece of what every rank has."""
    return x.chunk(mesh[mesh_dim].size(), tensor_dim)[mesh.get_local_rank(mesh_dim)]


def one_device(
    model: nn.Module, loss: Callable[[Any], torch.Tensor], update: Any = None
) -> Callable[[], Any]:
    """`Job.reference` of a model and its loss."""
    if update is None:
        return lambda: (model, lambda: loss(model))
    return lambda: (model, lambda: loss(model), update)
