"""Megatron-style programs: plain tensors, raw collectives, autograd functions of one's own; no DTensor anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from placement_audit import Job
from placement_audit.verdicts import Verdict
from tests.faults.data_parallel import flat_grads
from tests.faults.family import (
    RIGHT,
    Bag,
    Expect,
    Family,
    Wrong,
    doubled,
    draw,
    lost,
    mine,
    mixed,
    one_device,
)
from tests.faults.functions import Copy, Gather, Reduce, ReduceTwice, Scatter, gathered, summed

T, D, H = 8, 8, 16


def _parts(values: Mapping[str, torch.Tensor], mesh: DeviceMesh, shards: Mapping[str, int]) -> Bag:
    """A plain model: this rank's piece of what is sharded over tp, the whole of the rest."""
    return Bag(**{n: mine(v, mesh, "tp", shards[n]) if n in shards else v for n, v in values.items()})


def _declared(shards: Mapping[str, int]) -> dict[str, Any]:
    return {n: {"tp": Shard(d)} for n, d in shards.items()}


# --------------------------------------------------------------------------- the handbook's MLP


_MLP = {
    "norm_w": 1 + draw("norm_w", D),
    "norm_b": draw("norm_b", D),
    "w1": draw("w1", H, D),
    "b1": draw("b1", H),
    "w2": draw("w2", D, H),
    "b2": draw("b2", D),
}
_MLP_SHARDS = {"w1": 0, "b1": 0, "w2": 1}


def _mlp_loss(x: torch.Tensor, y: torch.Tensor) -> Any:
    def loss(m: Any) -> torch.Tensor:
        h = F.layer_norm(x, (D,), m.norm_w, m.norm_b)
        return (x + F.linear(F.gelu(F.linear(h, m.w1, m.b1)), m.w2, m.b2) - y).square().mean()

    return loss


def _tensor_parallel(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    model = _parts(_MLP, mesh, _MLP_SHARDS)
    group = mesh.get_group("tp")
    f, g = (Reduce, Copy) if variant == "f and g swapped" else (Copy, Reduce)
    if variant == "g sums backward, too":
        g = ReduceTwice

    def step() -> torch.Tensor:
        if variant == "in a flat buffer":
            flat_grads(model)
        h = F.layer_norm(x, (D,), model.norm_w, model.norm_b)
        h = h if variant == "without f" else f.apply(h, group)
        h = F.linear(F.gelu(F.linear(h, model.w1, model.b1)), model.w2)
        return (x + g.apply(h, group) + model.b2 - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        declared=_declared(_MLP_SHARDS),
        reference=one_device(Bag(**_MLP), _mlp_loss(x, y)),
    )


def _sequence_parallel(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    model = _parts(_MLP, mesh, _MLP_SHARDS)
    group = mesh.get_group("tp")

    def step() -> None:
        if "flat buffer" in variant:
            flat_grads(model)
        rows = mine(x, mesh, "tp")
        h = Gather.apply(F.layer_norm(rows, (D,), model.norm_w, model.norm_b), group)
        h = F.linear(F.gelu(F.linear(h, model.w1, model.b1)), model.w2)
        out = rows + Scatter.apply(h, group) + model.b2
        ((out - mine(y, mesh, "tp")).square().sum() / y.numel()).backward()
        for name in ("norm_w", "norm_b", "b2"):
            if not variant.endswith("summed") or (variant.endswith("LayerNorm not summed") and name == "b2"):
                dist.all_reduce(getattr(model, name).grad, group=group)

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        # Each rank has its own rows, and its own part of the loss.
        batch_placements={"tp": Shard(0)},
        declared=_declared(_MLP_SHARDS),
        reference=one_device(Bag(**_MLP), _mlp_loss(x, y)),
    )


def handbook(size: int) -> tuple[Family, Family]:
    """The MLP with LayerNorm, tensor parallel and sequence parallel, on ``size`` ranks."""
    every = ("norm_w", "norm_b", "w1", "b1", "w2")
    return (
        Family(
            name=f"MLP, tensor parallel over {size}",
            about="f copies forward and sums backward, g the other way round",
            mesh={"tp": size},
            variants={
                "as it is": RIGHT,
                "in a flat buffer": RIGHT,
                "without f": Expect(gradients=lost("norm_w", "norm_b")),
                "f and g swapped": Expect(gradients=_swapped(*every, "b2"), forward=True, rules=("PA108",)),
                "g sums backward, too": Expect(gradients=doubled(*every)),
            },
            job=_tensor_parallel,
        ),
        Family(
            name=f"MLP, sequence parallel over {size}",
            about="what LayerNorm's weights get is each rank's rows' part, and somebody must sum it",
            mesh={"tp": size},
            variants={
                "as it is": RIGHT,
                "in a flat buffer": RIGHT,
                "in a flat buffer, LayerNorm not summed": Expect(gradients=lost("norm_w", "norm_b")),
                "LayerNorm not summed": Expect(gradients=lost("norm_w", "norm_b")),
                "nothing summed": Expect(gradients=lost("norm_w", "norm_b", "b2")),
            },
            job=_sequence_parallel,
        ),
    )


def _swapped(*every: str) -> dict[str, Wrong]:
    """The forward is wrong, so all gradients are; a trace sees those that miss a sum."""
    lost_too = lost("norm_w", "norm_b", "b2")
    return {n: lost_too.get(n) or Wrong(on="tp", measured=(Verdict.WRONG_GRADIENT,)) for n in every}


# --------------------------------------------------------------------------- grouped-query attention


def _attention(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, heads: int, kv_heads: int) -> Any:
    """Causal attention, with each key and value head used by several query heads."""
    n, size = x.shape[0], wq.shape[0] // heads
    q = F.linear(x, wq).view(n, heads, size).transpose(0, 1)
    k, v = (F.linear(x, w).view(n, kv_heads, size).transpose(0, 1) for w in (wk, wv))
    k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(out.transpose(0, 1).reshape(n, -1), wo)


_GQA = {"wq": draw("wq", 16, D), "wk": draw("wk", 8, D), "wv": draw("wv", 8, D), "wo": draw("wo", D, 16)}


def _gqa(mesh: DeviceMesh, variant: str) -> Job:
    """Four query heads on four ranks, two key and value heads: each is held by the two ranks along "copy"."""
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    tp = mesh.size()
    rank = mesh.get_local_rank("kv") * mesh["copy"].size() + mesh.get_local_rank("copy")
    kv = mesh.get_local_rank("kv")
    model = Bag(
        wq=_GQA["wq"].chunk(tp)[rank].clone(),
        wk=_GQA["wk"].chunk(2)[kv].clone(),
        wv=_GQA["wv"].chunk(2)[kv].clone(),
        wo=_GQA["wo"].chunk(tp, 1)[rank].clone(),
    )
    everywhere, copies = dist.group.WORLD, mesh.get_group("copy")

    def step() -> None:
        h = Copy.apply(x, everywhere)
        out = Reduce.apply(_attention(h, model.wq, model.wk, model.wv, model.wo, 1, 1), everywhere)
        (out - y).square().mean().backward()
        if variant == "as it is":
            for p in (model.wk, model.wv):
                dist.all_reduce(p.grad, group=copies)
        elif variant == "summed over all of tp":
            for p in (model.wk, model.wv):
                dist.all_reduce(p.grad, group=everywhere)

    def loss(m: Any) -> torch.Tensor:
        return (_attention(x, m.wq, m.wk, m.wv, m.wo, 4, 2) - y).square().mean()

    both = {"kv": Shard(0), "copy": Shard(0)}
    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        declared={
            "wq": both,
            "wk": {"kv": Shard(0)},
            "wv": {"kv": Shard(0)},
            "wo": {"kv": Shard(1), "copy": Shard(1)},
        },
        reference=one_device(Bag(**_GQA), loss),
    )


GQA = Family(
    name="fewer key and value heads than ranks",
    about="ranks that hold the same key and value head each have one query head's term of its gradient",
    mesh={"kv": 2, "copy": 2},
    variants={
        "as it is": RIGHT,
        "copies not summed": Expect(gradients=lost("wk", "wv", on="copy")),
        # Different heads' gradients were added up: complete parts, and no sum was due.
        "summed over all of tp": Expect(
            gradients={
                n: Wrong(
                    on="kv",
                    traced=(Verdict.WRONG_PLACEMENT,),
                    measured=(Verdict.DOUBLE_REDUCTION, Verdict.WRONG_PLACEMENT, Verdict.WRONG_GRADIENT),
                )
                for n in ("wk", "wv")
            }
        ),
    },
    job=_gqa,
)


# --------------------------------------------------------------------------- one weight, two ways out


_LATENT = {"down": draw("down", 7, D), "up": draw("up", 12, 4), "out": draw("out", D, 12)}


def _latent(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    shards = {"up": 0, "out": 1}
    model = _parts(_LATENT, mesh, shards)
    group = mesh.get_group("tp")

    def heads(c: torch.Tensor, rope: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        n = up.shape[0] // 3
        return (F.linear(c, up).view(T, n, 3) * rope.sin().unsqueeze(1).expand(T, n, 3)).flatten(1)

    def step() -> None:
        a = F.linear(x, model.down)
        if variant == "above the split":
            c, rope = Copy.apply(a, group).split([4, 3], -1)
        else:
            c, rope = a.split([4, 3], -1)
            c = Copy.apply(c, group)
        out = Reduce.apply(F.linear(heads(c, rope, model.up), model.out), group)
        (out - y).square().mean().backward()
        if variant == "below, then all summed":
            dist.all_reduce(model.down.grad, group=group)

    def loss(m: Any) -> torch.Tensor:
        c, rope = F.linear(x, m.down).split([4, 3], -1)
        return (F.linear(heads(c, rope, m.up), m.out) - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        declared=_declared(shards),
        reference=one_device(Bag(**_LATENT), loss),
    )


LATENT = Family(
    name="one weight, two ways out",
    about="half of a projection is summed in backward, its other half is not; no one sum mends both",
    mesh={"tp": 2},
    variants={
        "above the split": RIGHT,
        "below the split": Expect(gradients=mixed("down")),
        "below, then all summed": Expect(gradients=mixed("down")),
    },
    job=_latent,
)


# --------------------------------------------------------------------------- a gather that autograd does not see


_ROUTED = {"gate": draw("gate", 4, D), "experts": draw("experts", 4, D, D)}


def _detached(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    shards = {"experts": 0}
    model = _parts(_ROUTED, mesh, shards)
    group = mesh.get_group("tp")

    def step() -> None:
        rows = mine(x, mesh, "tp")
        scores = F.linear(rows, model.gate).softmax(-1)
        whole = gathered(scores.detach(), group) if variant == "detached" else Gather.apply(scores, group)
        local = mine(whole, mesh, "tp", 1)
        out = torch.einsum("te,td,edf->tf", local, Gather.apply(rows, group), model.experts)
        out = Scatter.apply(out, group)
        ((out - mine(y, mesh, "tp")).square().sum() / y.numel()).backward()
        if model.gate.grad is not None:
            model.gate.grad = summed(model.gate.grad, group)

    def loss(m: Any) -> torch.Tensor:
        s = F.linear(x, m.gate).softmax(-1)
        return (torch.einsum("te,td,edf->tf", s, x, m.experts) - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"tp": Shard(0)},
        declared=_declared(shards),
        reference=one_device(Bag(**_ROUTED), loss),
    )


DETACHED = Family(
    name="scores gathered out of autograd's sight",
    about="a plain all_gather has no backward: the router gets no gradient",
    mesh={"tp": 2},
    variants={
        "by a function": RIGHT,
        "detached": Expect(
            gradients={"gate": Wrong(on="tp", traced=(Verdict.NO_GRADIENT,), measured=(Verdict.NO_GRADIENT,))}
        ),
    },
    job=_detached,
)

FAMILIES = (*handbook(2), *handbook(4), GQA, LATENT, DETACHED)
