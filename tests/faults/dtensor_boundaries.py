"""Labels where DTensor meets plain tensors: to_local, from_local, local_map."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import local_map

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
    doubled,
    draw,
    laid_out,
    lost,
    mine,
    mixed,
    on,
    one_device,
)  # fmt: skip

T, D, H, E = 8, 6, 8, 4


# --------------------------------------------------------------------------- a norm weight, gathered and re-wrapped


def _rewrapped(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", 4, T, D), draw("y", 4, T, H)
    norm, w = 1 + draw("norm", D), draw("w", H, D)
    model = Bag(norm=laid_out(norm, mesh, Shard(0), R), w=laid_out(w, mesh, Shard(1), Shard(0)))
    dp, tp = mesh["dp"], mesh["tp"]

    def whole(p: Any) -> Any:
        along_dp, along_tp = p.placements
        summed = P if along_tp.is_replicate() else along_tp
        out = p.to_local(grad_placements=None if variant == "as released" else (along_dp, summed))
        out = on(out, dp, along_dp).redistribute(placements=[R]).to_local(grad_placements=[P])
        more = {"grad_placements": [summed]} if variant == "both ends" else {}
        return on(out, tp, along_tp, **more)

    def step() -> torch.Tensor:
        rows, wanted = mine(x, mesh, "dp"), mine(y, mesh, "dp")
        h = on(mine(rows, mesh, "tp", 1), tp, Shard(1))
        h = F.rms_norm(h, (D,), whole(model.norm)).redistribute(placements=[R])
        out = F.linear(h, whole(model.w))
        wanted = on(wanted, tp, R).redistribute(placements=out.placements)
        return (out - wanted).square().sum().full_tensor() / y.numel()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(F.rms_norm(x, (D,), m.norm), m.w) - y).square().sum() / y.numel()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        reference=one_device(Bag(norm=norm, w=w), loss),
    )


REWRAPPED = Family(
    name="norm weight re-wrapped",
    about="Partial is declared at to_local alone; the from_local after it sums already",
    mesh={"dp": 2, "tp": 2},
    variants={"as released": RIGHT, "both ends": RIGHT, "one end": Expect(gradients=doubled("norm"))},
    job=_rewrapped,
)


# --------------------------------------------------------------------------- a replicated router


def _router(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"up": draw("up", D, D), "gate": draw("gate", E, D), "experts": draw("experts", E, D, D)}
    model = Bag(**{n: laid_out(v, mesh, R) for n, v in values.items()})

    def mixed(h: torch.Tensor, s: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.einsum("te,td,edf->tf", s, h, w)

    def step() -> torch.Tensor:
        h = F.linear(on(x, mesh, R), model.up)
        scores = F.linear(h, model.gate).sigmoid()
        local = scores.to_local(grad_placements=None if variant == "bare to_local" else [P])
        parts = (h.to_local(grad_placements=[P]), local, model.experts.to_local(grad_placements=[P]))
        tokens = [mine(parts[0], mesh, "tp"), mine(parts[1], mesh, "tp"), parts[2]]
        out = on(mixed(*tokens), mesh, Shard(0)).full_tensor()
        return (out - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        h = F.linear(x, m.up)
        return (mixed(h, F.linear(h, m.gate).sigmoid(), m.experts) - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


ROUTER = Family(
    name="replicated router",
    about="scores leave DTensor through a bare to_local, and each rank uses its own tokens' alone",
    mesh={"tp": 2},
    variants={
        "declared": RIGHT,
        # What is above the router gets a gradient that is part right, part lost.
        "bare to_local": Expect(gradients={**lost("gate"), **mixed("up")}),
    },
    job=_router,
)


# --------------------------------------------------------------------------- experts in local_map


def _experts(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"up": draw("up", D, D), "w1": draw("w1", D, H), "w2": draw("w2", H, D)}
    model = Bag(
        up=laid_out(values["up"], mesh, R),
        w1=laid_out(values["w1"], mesh, Shard(1)),
        w2=laid_out(values["w2"], mesh, Shard(0)),
    )

    def body(h: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return (h @ w1).relu() @ w2

    shards = ([Shard(1)], [Shard(0)])

    def step() -> torch.Tensor:
        h = F.linear(on(x, mesh, R), model.up).tanh()
        run = local_map(
            body,
            out_placements=([P],),
            in_placements=([R], *shards),
            in_grad_placements=([P], *shards) if variant == "declared" else None,
            device_mesh=mesh,
        )
        return (run(h, model.w1, model.w2).full_tensor() - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        return (body(F.linear(x, m.up).tanh(), m.w1, m.w2) - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


EXPERTS = Family(
    name="experts in local_map",
    about="without in_grad_placements a Replicate input's gradient counts as whole, and it is one term",
    mesh={"tp": 2},
    variants={"declared": RIGHT, "not declared": Expect(gradients=lost("up"))},
    job=_experts,
)


# --------------------------------------------------------------------------- used alike on all ranks


def _alike(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, E)
    values = {"gate": draw("gate", E, D), "bias": draw("bias", E)}
    model = Bag(**{n: laid_out(v, mesh, R) for n, v in values.items()})

    def step() -> torch.Tensor:
        label = [P] if variant == "overdone" else None
        gate, bias = (p.to_local(grad_placements=label) for p in (model.gate, model.bias))
        return (F.linear(x, gate, bias).softmax(-1) - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(x, m.gate, m.bias).softmax(-1) - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


ALIKE = Family(
    name="used alike on all ranks",
    about="a bare to_local whose gradient is complete already; Partial() would sum it once more",
    mesh={"tp": 2},
    variants={"bare to_local": RIGHT, "overdone": Expect(gradients=doubled("gate", "bias"))},
    job=_alike,
)


# --------------------------------------------------------------------------- out of DTensor and back


def _round_trip(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    w1, w2 = draw("w1", H, D), draw("w2", D, H)
    model = Bag(w1=laid_out(w1, mesh, Shard(0)), w2=laid_out(w2, mesh, Shard(1)))
    labels = {"Replicate": [R], "Partial": [P]}

    def step() -> torch.Tensor:
        z = F.linear(F.linear(on(x, mesh, R), model.w1).relu(), model.w2)
        term = z.to_local(grad_placements=labels[variant])
        out = on(term, mesh, P).full_tensor()
        return (out - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(F.linear(x, m.w1).relu(), m.w2) - y).square().mean()

    return Job(
        model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(w1=w1, w2=w2), loss)
    )


ROUND_TRIP = Family(
    name="a term out and back",
    about="the gradient of a term of a sum is the sum's, complete; Partial() makes it n times as large",
    mesh={"tp": 2},
    variants={"Replicate": RIGHT, "Partial": Expect(gradients=doubled("w1", "w2"))},
    job=_round_trip,
)


# --------------------------------------------------------------------------- replicas that are none


def _replicas(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, H)
    norm, w = 1 + draw("norm", D), draw("w", H, D)
    local = norm + 0.1 * mesh.get_local_rank("tp") if variant == "seeded by rank" else norm.clone()
    model = Bag(norm=torch.nn.Parameter(on(local, mesh, R)), w=laid_out(w, mesh, Shard(0)))

    def step() -> torch.Tensor:
        out = F.linear(F.rms_norm(on(x, mesh, R), (D,), model.norm), model.w)
        return (out - on(y, mesh, R).redistribute(placements=out.placements)).square().mean().full_tensor()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(F.rms_norm(x, (D,), m.norm), m.w) - y).square().mean()

    return Job(
        model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(norm=norm, w=w), loss)
    )


REPLICAS = Family(
    name="replicas differ at the start",
    about="a parameter labelled Replicate was initialised from each rank's own seed",
    mesh={"tp": 2},
    variants={
        "same seed": RIGHT,
        "seeded by rank": Expect(
            gradients={
                "norm": Wrong(on="tp", measured=(Verdict.RANKS_DISAGREE,)),
                "w": Wrong(on="tp", measured=(Verdict.NOT_JUDGED,)),
            },
            forward=True,
        ),
    },
    job=_replicas,
)


# --------------------------------------------------------------------------- transposed on its way


def _layouts(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, H)
    values = {"a": draw("a", H, D), "b": draw("b", D, H)}
    model = Bag(**{n: laid_out(v, mesh, R) for n, v in values.items()})

    def step() -> torch.Tensor:
        a, b = (p.to_local(grad_placements=[P]) for p in (model.a, model.b))
        rows = mine(x, mesh, "tp")
        out = rows @ (a.t() * 1.0).contiguous() + rows @ b
        return (out - mine(y, mesh, "tp")).square().sum() / y.numel()

    def loss(m: Any) -> torch.Tensor:
        return (x @ m.a.t() + x @ m.b - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"tp": Shard(0)},
        reference=one_device(Bag(**values), loss),
    )


LAYOUTS = Family(
    name="two layouts of one gradient",
    about="one gradient arrives transposed; whether .grad is left Partial depends on torch's version",
    mesh={"tp": 2},
    variants={"as it is": RIGHT},
    job=_layouts,
)

FAMILIES = (REWRAPPED, ROUTER, EXPERTS, ALIKE, ROUND_TRIP, REPLICAS, LAYOUTS)
