"""Gradients side by side in one tensor: what a forward took apart and handed on in different ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from placement_audit import Job
from tests.faults.family import (
    RIGHT,
    Bag,
    Expect,
    Family,
    R,
    draw,
    laid_out,
    lost,
    mine,
    mixed,
    on,
    one_device,
)
from tests.faults.functions import Copy, Reduce

T, D, H, LATENT, ROTARY = 6, 8, 8, 5, 3

Parts = Sequence[torch.Tensor]

# --------------------------------------------------------------------------- latent attention


_LATENT = {
    "norm": 1 + draw("norm", D),
    "down": draw("down", LATENT + ROTARY, D),
    "latent_norm": 1 + draw("latent_norm", LATENT),
    "up": draw("up", H, LATENT),
}
_FACTOR = 1 + draw("factor", LATENT + ROTARY)


def _by_split(x: torch.Tensor) -> Parts:
    return x.split([LATENT, ROTARY], -1)


def _by_slices(x: torch.Tensor) -> Parts:
    return x[:, :LATENT], x[..., LATENT:]


def _by_columns(x: torch.Tensor) -> Parts:
    """One by one, and together again."""
    columns = x.unbind(-1)
    return torch.stack(columns[:LATENT], -1), torch.stack(columns[LATENT:], -1)


def _transposed(x: torch.Tensor) -> Parts:
    """Cut along another tensor dim of other memory."""
    latent, rotary = x.t().contiguous().split([LATENT, ROTARY])
    return latent.t(), rotary.t()


_APART: dict[str, Callable[[torch.Tensor], Parts]] = {
    "split": _by_split,
    "slices": _by_slices,
    "columns": _by_columns,
    "transposed": _transposed,
}


def _head(latent: torch.Tensor, rotary: torch.Tensor, up: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Some heads: their keys are made of the latent part and, all alike, of the rotary one."""
    keys = torch.cat([F.linear(latent, up), rotary], -1)
    return F.linear(torch.tanh(keys), gain)


def _latent(mesh: DeviceMesh, variant: str) -> Job:
    x, y, group, n = draw("x", T, D, scale=1), draw("y", T, D), mesh.get_group("tp"), mesh["tp"].size()
    values = {**_LATENT, "out": draw("out", n * D, H // n + ROTARY)}
    model = Bag(**values | {name: mine(values[name], mesh, "tp") for name in ("up", "out")})
    apart = next((f for name, f in _APART.items() if name in variant), _by_split)
    if "gathered" in variant:
        model.down = laid_out(values["down"], mesh["tp"], Shard(0))

    def step() -> torch.Tensor:
        h = F.rms_norm(x, (D,), model.norm)
        if "gathered" in variant:
            latent, rotary = apart(
                F.linear(on(h, mesh["tp"], R), model.down).redistribute(placements=[R]).to_local()
            )
        else:
            latent, rotary = apart(F.linear(h, model.down))
        for _ in range(2 if "rotary part summed twice" in variant else "rotary part not" not in variant):
            rotary = Copy.apply(rotary, group)
        kv = torch.cat([latent, rotary], -1)
        if "factor" in variant:
            kv = (kv * _FACTOR).to(torch.float64).to(torch.float32)
        latent, rotary = apart(kv)
        latent = F.rms_norm(latent, (LATENT,), model.latent_norm)
        if "latent part not" not in variant:
            latent = Copy.apply(latent, group)
        return (Reduce.apply(_head(latent, rotary, model.up, model.out), group) - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        kv = F.linear(F.rms_norm(x, (D,), m.norm), m.down)
        latent, rotary = _by_split(kv * _FACTOR if "factor" in variant else kv)
        latent = F.rms_norm(latent, (LATENT,), m.latent_norm)
        ups, outs = m.up.chunk(n), m.out.chunk(n)
        heads = torch.stack([_head(latent, rotary, *weights) for weights in zip(ups, outs, strict=True)])
        return (heads.sum(0) - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        declared={"up": {"tp": Shard(0)}, "out": {"tp": Shard(0)}},
        reference=one_device(Bag(**values), loss),
    )


_SHARED = ("norm", "down")

LATENTS = Family(
    name="latent attention",
    about="a latent and a rotary part come of one projection; each is summed where tp begins, or not",
    mesh={"tp": 2},
    variants={
        "split": RIGHT,
        "slices": RIGHT,
        "columns": RIGHT,
        "transposed": RIGHT,
        "split, behind a factor": RIGHT,
        "slices, behind a factor": RIGHT,
        "split, rotary part not summed": Expect(gradients=mixed(*_SHARED)),
        "slices, rotary part not summed": Expect(gradients=mixed(*_SHARED)),
        "transposed, rotary part not summed": Expect(gradients=mixed(*_SHARED)),
        "gathered, split": RIGHT,
        "gathered, split, rotary part not summed": Expect(gradients=mixed(*_SHARED)),
        "split, behind a factor, rotary part not summed": Expect(gradients=mixed(*_SHARED)),
        "split, rotary part summed twice": Expect(gradients=mixed(*_SHARED)),
        "split, latent part not summed": Expect(gradients=mixed(*_SHARED) | lost("latent_norm")),
    },
    job=_latent,
)

# --------------------------------------------------------------------------- joined, and cut by the rank


_HALVES = {"left": draw("left", D, D // 2), "right": draw("right", D, D // 2)}


def _halves(mesh: DeviceMesh, variant: str) -> Job:
    x, y, tp, group = draw("x", T, D, scale=1), draw("y", T, D), mesh["tp"], mesh.get_group("tp")
    model = Bag(**_HALVES)

    def own(h: torch.Tensor) -> torch.Tensor:
        """This rank's columns; its gradient has zeros where the other ranks have theirs."""
        width, at = D // tp.size(), tp.get_local_rank()
        if "sliced" in variant:
            return h[:, at * width : (at + 1) * width]
        return (
            torch.stack(h.unbind(-1)[at * width :][:width], -1)
            if "columns" in variant
            else mine(h, tp, "tp", 1)
        )

    def step() -> torch.Tensor:
        h = torch.cat([x @ model.left, x @ model.right], -1)
        h = h if "without f" in variant else Copy.apply(h, group)
        part = (own(h).tanh() - own(y)).square().sum() / y.numel()
        return Reduce.apply(part, group)

    def loss(m: Any) -> torch.Tensor:
        return (torch.cat([x @ m.left, x @ m.right], -1).tanh() - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**_HALVES), loss))


HALVES = Family(
    name="joined and cut by the rank",
    about="a rank takes its columns of what was joined: the parts that it leaves alone are other ranks' to fill",
    mesh={"tp": 2},
    variants={
        "chunk": RIGHT,
        "sliced": RIGHT,
        "columns": RIGHT,
        "chunk, without f": Expect(gradients=lost("left", "right")),
        "sliced, without f": Expect(gradients=lost("left", "right")),
        "columns, without f": Expect(gradients=lost("left", "right")),
    },
    job=_halves,
)

# --------------------------------------------------------------------------- weights fused into one


_FUSED = {
    "norm": 1 + draw("norm", D),
    "gate_up": draw("gate_up", 2 * H, D),
    "down_proj": draw("down_proj", D, H),
}


def _gated(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(rows, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def _fused(mesh: DeviceMesh, variant: str) -> Job:
    x, y, tp, group = draw("x", T, D, scale=1), draw("y", T, D), mesh["tp"], mesh.get_group("tp")
    strided = _StridedShard(0, split_factor=2)  # this rank's part of each of the two
    model = Bag(
        norm=_FUSED["norm"],
        gate_up=laid_out(_FUSED["gate_up"], tp, strided),
        down_proj=laid_out(_FUSED["down_proj"], tp, Shard(1)),
    )

    def step() -> torch.Tensor:
        rows = F.rms_norm(x, (D,), model.norm)
        rows = rows if "without f" in variant else Copy.apply(rows, group)
        out = _gated(rows, model.gate_up.to_local(), model.down_proj.to_local())
        return (Reduce.apply(out, group) - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        return (_gated(F.rms_norm(x, (D,), m.norm), m.gate_up, m.down_proj) - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**_FUSED), loss))


FUSED = Family(
    name="fused projection",
    about="a gate and an up projection lie in one weight, of which each rank has a part of both",
    mesh={"tp": 2},
    variants={"as it is": RIGHT, "without f": Expect(gradients=lost("norm"))},
    job=_fused,
)

# --------------------------------------------------------------------------- local shards within FSDP2


class _Ffn(nn.Module):
    """A norm and two weights over tp, read as local tensors; FSDP2 may gather them over dp."""

    def __init__(self, mesh: DeviceMesh, *, f: bool) -> None:
        super().__init__()
        self.group, self.f = mesh.get_group("tp"), f
        tp = mesh["tp"]
        self.norm = laid_out(_FUSED["norm"], tp, R)
        self.up = laid_out(_FUSED["gate_up"], tp, Shard(0))
        self.down = laid_out(_FUSED["gate_up"].t().contiguous(), tp, Shard(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.rms_norm(x, (D,), self.norm.to_local())
        rows = Copy.apply(rows, self.group) if self.f else rows
        return Reduce.apply(
            F.linear(F.linear(rows, self.up.to_local()).tanh(), self.down.to_local()), self.group
        )


def _gathered(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", 2 * D, D, scale=1), draw("y", 2 * D, D)
    model = fully_shard(_Ffn(mesh, f="without f" not in variant), mesh=mesh["dp"])
    whole = Bag(norm=_FUSED["norm"], up=_FUSED["gate_up"], down=_FUSED["gate_up"].t().contiguous())

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(F.linear(F.rms_norm(x, (D,), m.norm), m.up).tanh(), m.down) - y).square().mean()

    def step() -> None:
        rows, wanted = (mine(v, mesh, "dp").chunk(2 if "batches" in variant else 1) for v in (x, y))
        for a, b in zip(rows, wanted, strict=True):
            ((model(a) - b).square().mean() / len(rows)).backward()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        reference=one_device(whole, loss),
    )


GATHERED = Family(
    name="local shards within FSDP2",
    about="what FSDP2 gathers over dp is still a shard over tp, and nothing in the step says so but its label",
    mesh={"dp": 2, "tp": 2},
    variants={
        "as it is": RIGHT,
        "two batches": RIGHT,
        "without f": Expect(gradients=lost("norm")),
        "two batches, without f": Expect(gradients=lost("norm")),
    },
    job=_gathered,
)

# --------------------------------------------------------------------------- summed in a hook


_PER_HEAD = {"w": draw("w", H, D), "head_norm": 1 + draw("head_norm", H // 4)}


def _hooked(mesh: DeviceMesh, variant: str) -> Job:
    x, y, group = draw("x", T, D, scale=1), draw("y", T, H), mesh.get_group("tp")
    model = Bag(**_PER_HEAD | {"w": mine(_PER_HEAD["w"], mesh, "tp")})
    batches = 1 if "one batch" in variant else 2
    last = False

    def hook(p: torch.Tensor) -> None:
        if last or "at the last" not in variant:
            dist.all_reduce(p.grad, group=group)

    def after(rows: torch.Tensor, w: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        heads = F.linear(rows, w).unflatten(-1, (-1, H // 4))
        return F.rms_norm(heads, (H // 4,), norm).flatten(-2)

    def step() -> None:
        nonlocal last
        handle = model.head_norm.register_post_accumulate_grad_hook(hook)
        rows = list(zip(x.chunk(batches), y.chunk(batches), strict=True))
        for i, (a, b) in enumerate(rows):
            last = i == batches - 1
            out = after(a, model.w, model.head_norm)
            part = (out - mine(b, mesh, "tp", 1)).square().sum() / y.numel()
            Reduce.apply(part, group).backward()
        handle.remove()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        declared={"w": {"tp": Shard(0)}},
        reference=one_device(Bag(**_PER_HEAD), lambda m: (after(x, m.w, m.head_norm) - y).square().mean()),
    )


HOOKED = Family(
    name="summed in a hook",
    about="a norm of each head sees this rank's heads; a hook sums its gradient, of all micro-batches so far",
    mesh={"tp": 2},
    variants={
        "one batch": RIGHT,
        "two batches, at the last": RIGHT,
        "two batches, each time": Expect(gradients=mixed("head_norm")),
    },
    job=_hooked,
)

FAMILIES = (LATENTS, HALVES, FUSED, GATHERED, HOOKED)
