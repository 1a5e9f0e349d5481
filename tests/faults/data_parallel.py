"""Sums and averages over ranks that have different data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard

from placement_audit import Job
from tests.faults.family import (
    RIGHT,
    Bag,
    Expect,
    Family,
    P,
    R,
    draw,
    laid_out,
    lost,
    mine,
    off,
    on,
    one_device,
)  # fmt: skip

N, T, D, H, V = 4, 4, 6, 8, 10


# --------------------------------------------------------------------------- whose sum is divided by what


def _by_hand(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", N, T, D, scale=1), draw("y", N, T, H)
    values = {"w": draw("w", H, D), "bias": draw("bias", H)}
    model = Bag(**values)
    divided = "global" in variant
    group = mesh.get_group("dp")

    def step() -> None:
        out = F.linear(mine(x, mesh, "dp"), model.w, model.bias) - mine(y, mesh, "dp")
        loss = out.square().sum() / y.numel() if divided else out.square().mean()
        loss.backward()
        if "never" in variant:
            return
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            if variant.endswith("averaged by a tensor"):
                p.grad.mul_(torch.tensor(1 / mesh.size()))
            elif "averaged" in variant:
                p.grad.div_(mesh.size())

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(x, m.w, m.bias) - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        reference=one_device(Bag(**values), loss),
    )


BY_HAND = Family(
    name="gradients all-reduced by hand",
    about="the loss is divided by the global count, and the gradients are averaged on top",
    mesh={"dp": 2},
    variants={
        "own mean, averaged": RIGHT,
        "own mean, averaged by a tensor": RIGHT,
        "global mean, summed": RIGHT,
        "global mean, averaged": Expect(scale=0.5, rules=("PA209",)),
        "own mean, summed": Expect(scale=2.0, rules=("PA209",)),
        "global mean, never summed": Expect(gradients=lost("w", "bias", on="dp")),
    },
    job=_by_hand,
)


# --------------------------------------------------------------------------- the same by label


def _labelled(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", N, T, D, scale=1), draw("y", N, T, H)
    w = draw("w", H, D)
    model = Bag(w=laid_out(w, mesh, Shard(0)))
    average = variant.endswith("avg")

    def step() -> torch.Tensor:
        label = Partial("avg") if average else P
        whole = model.w.redistribute(placements=[R]).to_local(grad_placements=[label])
        out = (F.linear(mine(x, mesh, "dp"), whole) - mine(y, mesh, "dp")).square()
        return out.mean() if variant.startswith("own mean") else out.sum() / y.numel()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(x, m.w) - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        reference=one_device(Bag(w=w), loss),
    )


LABELLED = Family(
    name="gradients reduced by their label",
    about="Partial(avg) fits a loss that is each rank's own mean, Partial(sum) one that is divided globally",
    mesh={"dp": 2},
    variants={
        "own mean, avg": RIGHT,
        "global mean, sum": RIGHT,
        "global mean, avg": Expect(scale=0.5, rules=("PA209",)),
    },
    job=_labelled,
)


# --------------------------------------------------------------------------- tokens that count unequally


def _tokens(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", N, T, D, scale=1), torch.arange(N * T).view(N, T) % V
    y[0, 1:] = y[1, 2:] = -100
    w = draw("w", V, D, scale=1)
    model = Bag(w=laid_out(w, mesh, R))
    group = mesh.get_group("dp")

    def entropy(weight: Any, rows: Any, labels: Any, reduction: str) -> torch.Tensor:
        return F.cross_entropy(F.linear(rows, weight).flatten(0, 1), labels.flatten(), reduction=reduction)

    def step() -> None:
        weight = model.w.to_local(grad_placements=[P])
        own = (weight, mine(x, mesh, "dp"), mine(y, mesh, "dp"))
        if variant == "mean of means":
            loss = entropy(*own, "mean") / mesh.size()
        else:
            loss = entropy(*own, "sum") / (y != -100).sum()
        loss.backward()
        logged = loss.detach()
        dist.all_reduce(logged, group=group)  # in place, as logs do

    def loss(m: Any) -> torch.Tensor:
        return entropy(m.w, x, y, "mean")

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        reference=one_device(Bag(w=w), loss),
    )


TOKENS = Family(
    name="mean over unequal counts",
    about="a mean of the ranks' means is not the mean over all tokens",
    mesh={"dp": 2},
    variants={"global count": RIGHT, "mean of means": Expect(gradients=off("w", on="dp"), forward=True)},
    job=_tokens,
)


# --------------------------------------------------------------------------- a term in bfloat16


def _coarse(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    norm = 1 + draw("norm", D)
    model = Bag(norm=laid_out(norm, mesh, R))

    def step() -> torch.Tensor:
        coarse = model.norm.to(torch.bfloat16)
        if variant == "in float32":
            weight = model.norm.to_local(grad_placements=[P]).to(torch.bfloat16)
        else:
            weight = coarse.redistribute(placements=[R]).to_local(grad_placements=[P])
        rows = mine(x, mesh, "tp").to(torch.bfloat16)
        out = on((rows * weight).float(), mesh, Shard(0)).full_tensor()
        return (out - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reduce_dtype=torch.float32)


COARSE = Family(
    name="summed in bfloat16",
    about="a gradient is reduced in bfloat16 where float32 was asked for",
    mesh={"tp": 2},
    variants={"in float32": RIGHT, "in bfloat16": Expect(rules=("PA501",))},
    job=_coarse,
    measured=False,
)

FAMILIES = (BY_HAND, LABELLED, TOKENS, COARSE)
