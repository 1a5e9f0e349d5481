"""Forwards that are not one device's, and what only values tell: biases, loss parallelism, embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from placement_audit import Job
from placement_audit.verdicts import Verdict
from tests.faults.family import (
    RIGHT,
    Bag,
    Expect,
    Family,
    P,
    R,
    Wrong,
    draw,
    laid_out,
    off,
    on,
    one_device,
)  # fmt: skip

T, D, H, V = 8, 6, 8, 10


# --------------------------------------------------------------------------- the bias of a row-parallel linear


def _row_bias(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"w1": draw("w1", H, D), "w2": draw("w2", D, H), "bias": draw("bias", D, scale=1)}
    model = Bag(
        w1=laid_out(values["w1"], mesh, Shard(0)),
        w2=laid_out(values["w2"], mesh, Shard(1)),
        bias=laid_out(values["bias"], mesh, R),
    )
    n = mesh.size()

    def step() -> torch.Tensor:
        h = F.linear(on(x, mesh, R), model.w1).relu()
        term = F.linear(h.to_local(), model.w2.to_local())
        bias = model.bias.to_local(grad_placements=[P] if variant == "divided, summed" else None)
        if variant in ("divided", "divided, summed"):
            bias = bias / n
        elif variant == "divided, not differentiated":
            bias = bias + (bias / n - bias).detach()
        if variant == "added after":
            return (on(term, mesh, P).full_tensor() + bias - y).square().mean()
        return (on(term + bias, mesh, P).full_tensor() - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(F.linear(x, m.w1).relu(), m.w2, m.bias) - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


ROW_BIAS = Family(
    name="bias of a row-parallel linear",
    about="every rank adds the bias to its term of a sum: counted n times, or its gradient 1/n",
    mesh={"tp": 2},
    variants={
        "added after": RIGHT,
        "divided, summed": RIGHT,
        "divided, not differentiated": RIGHT,
        "divided": Expect(
            gradients={"bias": Wrong(on="tp", traced=(Verdict.WRONG_SCALE,), measured=(Verdict.WRONG_SCALE,))}
        ),
        "whole on every rank": Expect(gradients=off("w1", "w2", "bias"), forward=True, rules=("PA107",)),
    },
    job=_row_bias,
)


def _stock_bias(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))

    model = parallelize_module(made(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def loss(m: Any) -> torch.Tensor:
        return (m(x) - y).square().mean()

    return Job(model=model, step=lambda: loss(model), mesh=mesh, reference=one_device(made(), loss))


STOCK_BIAS = Family(
    name="torch's RowwiseParallel with a bias",
    about="looks like a bias added once a rank, and DTensor divides it",
    mesh={"tp": 2},
    variants={"as it is": RIGHT},
    job=_stock_bias,
)


# --------------------------------------------------------------------------- loss parallelism


def _entropy(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), torch.arange(T) % V
    values = {"proj": draw("proj", D, D), "head": draw("head", V, D, scale=1)}
    model = Bag(proj=laid_out(values["proj"], mesh, R), head=laid_out(values["head"], mesh, Shard(0)))

    def entropy(logp: Any) -> Any:
        return (logp.exp() * logp).sum(-1)

    def step() -> None:
        logits = F.linear(F.linear(on(x, mesh, R), model.proj), model.head)
        with loss_parallel():
            if variant == "inside":
                extra = entropy(F.log_softmax(logits, -1)).redistribute(placements=[R]).mean()
            else:
                whole = F.log_softmax(logits.full_tensor(), -1)
                extra = on(entropy(whole).mean(), mesh, R)
            loss = F.cross_entropy(logits, on(y, mesh, R)) + 0.5 * extra
            loss.full_tensor().backward()

    def loss(m: Any) -> torch.Tensor:
        logits = F.linear(F.linear(x, m.proj), m.head)
        return F.cross_entropy(logits, y) + 0.5 * entropy(F.log_softmax(logits, -1)).mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


ENTROPY = Family(
    name="log_softmax under loss_parallel",
    about="its backward there is right for nll_loss alone; an entropy term gets a wrong gradient",
    mesh={"tp": 2},
    variants={
        "on whole logits": RIGHT,
        "inside": Expect(gradients=off("proj", "head"), rules=("PA111",)),
    },
    job=_entropy,
)


def _read(logp: torch.Tensor, y: Any, variant: str) -> Any:
    """What is made of one log_softmax's result; `y` are the labels."""
    nll = F.nll_loss(logp, y)
    match variant:
        case "twice":
            return 0.3 * nll + F.nll_loss(logp, y, reduction="sum") / 3
        case "scaled":
            return F.nll_loss(
                logp * 0.9, y
            )  # nll_loss's backward takes what it is given for log_softmax's result
        case "rows":
            return F.nll_loss(logp.view(T // 2, 2, V).transpose(1, 2), y.view(T // 2, 2))
        case "some rows":
            return F.nll_loss(logp[: T // 2], y[: T // 2]) + F.nll_loss(logp[0], y[0])
        case "penalised":
            return nll - 0.1 * logp.mean()
        case "penalty":
            return -0.1 * logp.mean()
        case _:
            return nll + F.nll_loss(logp - 0.1 * logp.exp(), y)


def _readers(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), torch.arange(T) % V
    values = {"head": draw("head", V, D, scale=1)}
    model = Bag(head=laid_out(values["head"], mesh, Shard(0)))

    def step() -> None:
        with loss_parallel():
            logp = F.log_softmax(F.linear(on(x, mesh, R), model.head), -1)
            _read(logp, on(y, mesh, R), variant).full_tensor().backward()

    def loss(m: Any) -> torch.Tensor:
        return _read(F.log_softmax(F.linear(x, m.head), -1), y, variant)

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


_UNREAD = Expect(gradients=off("head"), rules=("PA111",))

LOG_SOFTMAX = Family(
    name="what reads a log_softmax under loss_parallel",
    about="sums of nll_loss's gradients have the backward of log_softmax in them; nothing else has",
    mesh={"tp": 2},
    variants={
        "twice": RIGHT,
        "rows": RIGHT,
        "some rows": RIGHT,
        "scaled": _UNREAD,
        "penalised": _UNREAD,
        "penalty": _UNREAD,
        "mixed": _UNREAD,
    },
    job=_readers,
)


# --------------------------------------------------------------------------- a vocabulary in parts, tied


def _tied(mesh: DeviceMesh, variant: str) -> Job:
    x, y = torch.arange(T) * 7 % V, torch.arange(T) * 3 % V
    values = {"emb": draw("emb", V, D, scale=1), "proj": draw("proj", D, D)}
    model = Bag(emb=laid_out(values["emb"], mesh, Shard(0)), proj=laid_out(values["proj"], mesh, R))

    def step() -> None:
        h = F.embedding(on(x, mesh, R), model.emb).redistribute(placements=[Shard(0)])
        h = h.redistribute(placements=[R])
        with loss_parallel():
            logits = F.linear(F.linear(h, model.proj), model.emb)
            F.cross_entropy(logits, on(y, mesh, R)).full_tensor().backward()

    def loss(m: Any) -> torch.Tensor:
        return F.cross_entropy(F.linear(F.linear(F.embedding(x, m.emb), m.proj), m.emb), y)

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


TIED = Family(
    name="tied vocabulary in parts",
    about="a masked Partial, a tied head and loss parallelism: strange placements, right numbers",
    mesh={"tp": 2},
    variants={"as it is": RIGHT},
    job=_tied,
)

FAMILIES = (ROW_BIAS, STOCK_BIAS, ENTROPY, LOG_SOFTMAX, TIED)
