"""Right gradients, read wrong: optimizers and clipping that take the local part for the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from placement_audit import Job
from placement_audit.dtensor_api import local_of
from tests.faults.family import RIGHT, Bag, Expect, Family, R, draw, laid_out, mine, on, one_device

T, D, H = 8, 6, 8


def _model(mesh: DeviceMesh, update: Callable[[nn.Module], Any]) -> Job:
    """A norm weight whose gradient is left Partial, and a sharded weight."""
    x, y = draw("x", T, D, scale=1), draw("y", T, H)
    values = {"norm": 1 + draw("norm", D), "w": draw("w", H, D)}
    model = Bag(norm=laid_out(values["norm"], mesh, R), w=laid_out(values["w"], mesh, Shard(0)))

    def step() -> torch.Tensor:
        rows = on(mine(x, mesh, "tp"), mesh, Shard(0))
        out = F.linear(F.rms_norm(rows, (D,), model.norm).redistribute(placements=[R]), model.w)
        return (out - on(y, mesh, R).redistribute(placements=out.placements)).square().mean().full_tensor()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(F.rms_norm(x, (D,), m.norm), m.w) - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        optimizer=update,
        reference=one_device(Bag(**values), loss),
    )


# --------------------------------------------------------------------------- optimizers


def _optimizer(mesh: DeviceMesh, variant: str) -> Job:
    @torch.no_grad()
    def by_hand(model: nn.Module) -> None:
        for p in model.parameters():
            g = p.grad
            if variant == "of its whole" and isinstance(g, DTensor):
                g = g.redistribute(placements=p.placements)
            local_of(p).sub_(g.to_local() if isinstance(g, DTensor) else g, alpha=0.1)

    made: dict[str, Callable[[nn.Module], Any]] = {
        "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False),
        "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
        "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
        "sgd with momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    }
    return _model(mesh, made.get(variant, by_hand))


OPTIMIZER = Family(
    name="optimizer on a gradient left Partial",
    about="a hand-written one updates each replica with its own term of the gradient",
    mesh={"tp": 2},
    variants={
        "adamw": RIGHT,
        "adamw foreach": RIGHT,
        "adamw fused": RIGHT,
        "sgd with momentum": RIGHT,
        "of its whole": RIGHT,
        "of its own term": Expect(updates=frozenset({"norm"})),
    },
    job=_optimizer,
)


# --------------------------------------------------------------------------- clipping


def _clipping(mesh: DeviceMesh, variant: str) -> Job:
    group = mesh.get_group("tp")

    @torch.no_grad()
    def clip_and_step(model: nn.Module) -> float:
        grads = [p.grad for p in model.parameters()]
        parallel = isinstance(grads[0], DTensor)
        if parallel and variant == "counts replicas":
            grads = [
                g.redistribute(placements=p.placements)
                for g, p in zip(grads, model.parameters(), strict=True)
            ]
        if parallel and variant != "torch's own":
            squares = sum(g.to_local().square().sum() for g in grads)
            dist.all_reduce(squares, group=group)
            total = squares.sqrt().item()
        else:
            norm = torch.nn.utils.get_total_norm(grads)
            total = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        for p in model.parameters():
            g = p.grad.redistribute(placements=p.placements) if parallel else p.grad
            local_of(p).sub_(local_of(g), alpha=min(1.0, 1 / total))
        return total

    return _model(mesh, clip_and_step)


CLIPPING = Family(
    name="total norm by hand",
    about="local squares summed over tp count a replicated gradient n times, and a sum's terms one by one",
    mesh={"tp": 2},
    variants={
        "torch's own": RIGHT,
        "counts replicas": Expect(updates=frozenset({"norm", "w"})),
        "squares of terms": Expect(updates=frozenset({"norm", "w"})),
    },
    job=_clipping,
)


# --------------------------------------------------------------------------- whole-matrix optimizers


def _orthogonal(g: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthogonal rows, or columns, as Newton and Schulz come to it."""
    x = g / g.norm()
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(12):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return x if wide else x.T


def _muon(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"w1": draw("w1", H, D), "w2": draw("w2", D, H)}
    model = Bag(w1=laid_out(values["w1"], mesh, Shard(0)), w2=laid_out(values["w2"], mesh, Shard(1)))

    @torch.no_grad()
    def update(of: nn.Module) -> None:
        for p in of.parameters():
            g = p.grad
            if not isinstance(g, DTensor):
                p.sub_(_orthogonal(g), alpha=0.1)
            elif variant == "of each shard":
                local_of(p).sub_(_orthogonal(g.to_local()), alpha=0.1)
            else:
                whole = on(_orthogonal(g.full_tensor()), mesh, R)
                local_of(p).sub_(local_of(whole.redistribute(placements=p.placements)), alpha=0.1)

    def step() -> torch.Tensor:
        z = F.linear(F.linear(on(x, mesh, R), model.w1).relu(), model.w2)
        return (z.full_tensor() - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(F.linear(x, m.w1).relu(), m.w2) - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        optimizer=update,
        reference=one_device(Bag(**values), loss),
    )


MUON = Family(
    name="matrix optimizer on shards",
    about="the orthogonal matrix of a block of rows is no block of rows of the whole one",
    mesh={"tp": 2},
    variants={"of the whole": RIGHT, "of each shard": Expect(updates=frozenset({"w1", "w2"}))},
    job=_muon,
)

FAMILIES = (OPTIMIZER, CLIPPING, MUON)
