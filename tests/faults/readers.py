"""Right gradients, read wrong: optimizers and clipping that take the local part for the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from tests.faults.functions import Copy, Reduce

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
            own = g.to_local() if isinstance(g, DTensor) else g
            mine = local_of(p)
            match variant if isinstance(g, DTensor) and p.placements != g.placements else "":
                case "of its own term, reduced by hand":
                    own = own.clone()
                    dist.all_reduce(own, group=mesh.get_group("tp"))
                    mine.sub_(own, alpha=0.1)
                case "of its own term, foreach":
                    torch._foreach_add_([mine], [own], alpha=-0.1)
                case "of its own term, fused":
                    torch._fused_sgd_(
                        [mine], [own], [], weight_decay=0, momentum=0, lr=0.1, dampening=0, nesterov=False,
                        maximize=False, is_first_step=True,
                    )  # fmt: skip
                case "of its own term, by momentum":
                    moment = torch.zeros_like(own)
                    moment.mul_(0.9).add_(own)
                    mine.add_(moment, alpha=-0.1)
                case "of one rank's term":
                    own = own.clone()
                    dist.broadcast(own, 0, group=mesh.get_group("tp"))
                    mine.sub_(own, alpha=0.1)
                case "of its own term, averaged after":
                    mine.sub_(own, alpha=0.1)
                    dist.all_reduce(mine, group=mesh.get_group("tp"))
                    mine.div_(mesh.size())
                case _:
                    mine.sub_(own, alpha=0.1)

    made: dict[str, Callable[[nn.Module], Any]] = {
        "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False),
        "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
        "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
        "sgd with momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    }
    return _model(mesh, made.get(variant, by_hand))


_DRIFTS = Expect(updates=frozenset({"norm"}), drifts=frozenset({"norm"}))

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
        "of its own term, reduced by hand": RIGHT,
        "of its own term": _DRIFTS,
        "of its own term, foreach": _DRIFTS,
        "of its own term, fused": _DRIFTS,
        "of its own term, by momentum": _DRIFTS,
        "of one rank's term": _DRIFTS,
        # Equal on all ranks in the end, and too small: only numbers tell.
        "of its own term, averaged after": Expect(updates=frozenset({"norm"})),
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
        "counts replicas": Expect(updates=frozenset({"norm", "w"}), rules=("PA107",)),
        "squares of terms": Expect(updates=frozenset({"norm", "w"}), rules=("PA108",)),
    },
    job=_clipping,
)


# --------------------------------------------------------------------------- clipping of plain tensors


def _plain_clipping(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, H)
    values = {"gain": 1 + draw("gain", D), "w": draw("w", H, D)}
    model = Bag(gain=values["gain"], w=mine(values["w"], mesh, "tp"))
    group = mesh.get_group("tp")

    def step() -> torch.Tensor:
        out = F.linear(Copy.apply(x * model.gain, group), model.w)
        return Reduce.apply((out - mine(y, mesh, "tp", 1)).square().sum() / y.numel(), group)

    def norm_of(m: Any) -> torch.Tensor:
        if variant == "own norm":
            return torch.nn.utils.get_total_norm([m.gain.grad, m.w.grad])
        shards, replicated = m.w.grad.square().sum(), m.gain.grad.square().sum()
        if variant == "own norm, averaged":
            total = (shards + replicated).sqrt()
            dist.all_reduce(total, group=group)
            return total / mesh.size()
        dist.all_reduce(shards, group=group)
        return (shards + replicated).sqrt()

    @torch.no_grad()
    def clip_and_step(m: Any) -> Any:
        params = list(m.parameters())
        if m is not model:
            torch.nn.utils.clip_grad_norm_(params, 0.1)
        elif variant == "torch's own":
            torch.nn.utils.clip_grad_norm_(params, 0.1, foreach=True)
        elif variant == "torch's own, one by one":
            torch.nn.utils.clip_grad_norm_(params, 0.1, foreach=False)
        else:
            torch.nn.utils.clip_grads_with_norm_(params, 0.1, norm_of(m))
        return torch.optim.SGD(params, lr=0.1)

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        declared={"w": {"tp": Shard(0)}},
        optimizer=clip_and_step,
        reference=one_device(
            Bag(**values), lambda m: (F.linear(x * m.gain, m.w) - y).square().mean(), clip_and_step
        ),
    )


_CLIPPED_APART = Expect(updates=frozenset({"gain", "w"}), drifts=frozenset({"gain"}))

PLAIN_CLIPPING = Family(
    name="clipping of plain tensors",
    about="a total norm over this rank's shards alone clips the same gradient by another factor on each rank",
    mesh={"tp": 2},
    variants={
        "squares of shards reduced": RIGHT,
        "own norm": _CLIPPED_APART,
        "torch's own": _CLIPPED_APART,
        "torch's own, one by one": replace(_CLIPPED_APART, rules=("PA404",)),
        # The same on all ranks, and not the norm.
        "own norm, averaged": Expect(updates=frozenset({"gain", "w"}), rules=("PA108",)),
    },
    job=_plain_clipping,
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
    variants={
        "of the whole": RIGHT,
        "of each shard": Expect(updates=frozenset({"w1", "w2"}), rules=("PA404",)),
    },
    job=_muon,
)

FAMILIES = (OPTIMIZER, CLIPPING, PLAIN_CLIPPING, MUON)
