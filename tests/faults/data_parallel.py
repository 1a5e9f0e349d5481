"""Sums and averages over ranks that have different data."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Shard
from torch.nn.parallel import DistributedDataParallel

from placement_audit import Job
from tests.faults.family import (
    RIGHT,
    Bag,
    Expect,
    Family,
    P,
    R,
    doubled,
    draw,
    laid_out,
    lost,
    mine,
    off,
    on,
    one_device,
    unevenly,
)  # fmt: skip
from tests.faults.functions import Copy, Reduce, ReduceTwice

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


# --------------------------------------------------------------------------- the same, on a DTensor's local part


def _local_part(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", N, T, D, scale=1), draw("y", N, T, H)
    w = draw("w", H, D)
    model = Bag(w=laid_out(w, mesh, R))
    group = mesh.get_group("dp")

    def by_hand(grad: Any) -> None:
        match variant:
            case "without autograd":
                with torch.no_grad():
                    dist.all_reduce(grad.to_local(), group=group)
            case "as torch keeps it":
                dist.all_reduce(grad._local_tensor, group=group)
            case "through .data":
                dist.all_reduce(grad.data.to_local().data, group=group)
            case "through a view":
                dist.all_reduce(grad.to_local().view(-1), group=group)
            case "copied back":
                own = grad.to_local().clone()
                dist.all_reduce(own, group=group)
                grad.to_local().copy_(own)
            case "an average":
                dist.all_reduce(grad.to_local(), group=group)
                grad.to_local().div_(mesh.size())
            case "divided first":
                torch._foreach_div_([grad.to_local()], mesh.size())
                dist.all_reduce(grad.to_local(), group=group)
            case "a copy of it":
                dist.all_reduce(grad.to_local().clone(), group=group)
            case "summed twice":
                dist.all_reduce(grad.to_local(), group=group)
                dist.all_reduce(grad.to_local(), group=group)
            case "never":
                grad.to_local().mul_(1.0)
            case _:
                dist.all_reduce(grad.to_local(), group=group)

    def step() -> None:
        weight = model.w.to_local(grad_placements=[P] if variant == "declared, too" else None)
        out = F.linear(mine(x, mesh, "dp"), weight) - mine(y, mesh, "dp")
        mean = variant in ("an average", "divided first")
        (out.square().mean() if mean else out.square().sum() / y.numel()).backward()
        by_hand(model.w.grad)

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


LOCAL_PART = Family(
    name="a DTensor's gradient summed by hand",
    about="a bare to_local leaves each rank its own term, and the job reduces the local part of .grad in place",
    mesh={"dp": 2},
    variants={
        "as it is": RIGHT,
        "without autograd": RIGHT,
        "as torch keeps it": RIGHT,
        "through .data": RIGHT,
        "through a view": RIGHT,
        "copied back": RIGHT,
        "an average": RIGHT,
        "divided first": RIGHT,
        "never": Expect(gradients=lost("w", on="dp")),
        "a copy of it": Expect(gradients=lost("w", on="dp")),
        "summed twice": Expect(gradients=doubled("w", on="dp")),
        # Whoever reads it sums it once more, for its label says so.
        "declared, too": Expect(gradients=doubled("w", on="dp")),
    },
    job=_local_part,
)


# --------------------------------------------------------------------------- gradients in one flat buffer


def flat_grads(model: nn.Module) -> torch.Tensor:
    """One buffer of zeros that backward adds all gradients up in."""
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    start = 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    return flat


def _buffer(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", N, T, D, scale=1), draw("y", N, T, H)
    values = {"w": draw("w", H, D), "bias": draw("bias", H), "gain": 1 + draw("gain", H)}
    model = Bag(**values)
    group = mesh.get_group("dp")

    def loss_of(m: Any, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        off = (F.linear(rows, m.w, m.bias) * m.gain - wanted).square()
        return off.mean() if variant == "averaged one by one" else off.sum() / y.numel()

    def step() -> None:
        flat = flat_grads(model)
        loss_of(model, mine(x, mesh, "dp"), mine(y, mesh, "dp")).backward()
        cut = model.w.numel()
        match variant:
            case "whole":
                dist.all_reduce(flat, group=group)
            case "bucket by bucket":
                dist.all_reduce(flat[:cut], group=group)
                dist.all_reduce(flat[cut:], group=group)
            case "one by one":
                for p in model.parameters():
                    dist.all_reduce(p.grad, group=group)
            case "averaged one by one":
                dist.all_reduce(flat, group=group)
                for p in model.parameters():
                    p.grad.div_(mesh.size())
            case "last bucket forgotten":
                dist.all_reduce(flat[:cut], group=group)
            case "one forgotten":
                dist.all_reduce(model.w.grad, group=group)
                dist.all_reduce(model.gain.grad, group=group)
            case "buckets overlap":
                dist.all_reduce(flat[: cut + model.bias.numel()], group=group)
                dist.all_reduce(flat[cut:], group=group)

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        reference=one_device(Bag(**values), lambda m: loss_of(m, x, y)),
    )


BUFFER = Family(
    name="gradients in one flat buffer",
    about="buckets of it are reduced one by one, and one may be forgotten or be in two of them",
    mesh={"dp": 2},
    variants={
        "whole": RIGHT,
        "bucket by bucket": RIGHT,
        "one by one": RIGHT,
        "averaged one by one": RIGHT,
        "last bucket forgotten": Expect(gradients=lost("bias", "gain", on="dp")),
        "one forgotten": Expect(gradients=lost("bias", on="dp")),
        "buckets overlap": Expect(gradients=doubled("bias", on="dp")),
    },
    job=_buffer,
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


# --------------------------------------------------------------------------- the same within FSDP2


class _Normed(nn.Module):
    """A norm weight, replicated over tp, on rows that tp has split; a column-parallel weight after it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.tp = mesh["tp"]
        self.norm = laid_out(1 + draw("norm", D), self.tp, R)
        self.w = laid_out(draw("w", H, D), self.tp, Shard(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = on(mine(x, self.tp, "tp", 1), self.tp, Shard(1))
        return F.linear(F.rms_norm(rows, (D,), self.norm).redistribute(placements=[R]), self.w)


def _coarse_within(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", N, T, D), draw("y", N, T, H)
    model = _Normed(mesh)
    dtype = torch.bfloat16 if variant == "in bfloat16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    def step() -> torch.Tensor:
        out = model(mine(x, mesh, "dp"))
        wanted = on(mine(y, mesh, "dp").to(dtype), mesh["tp"], R).redistribute(placements=out.placements)
        return (out - wanted).square().mean().full_tensor()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        reduce_dtype=torch.float32,
    )


COARSE_WITHIN = Family(
    name="summed over tp in bfloat16 by FSDP2",
    about="the policy's reduce dtype is that of its own reduction; the one over tp runs in the parameters' dtype",
    mesh={"dp": 2, "tp": 2},
    variants={"in float32": RIGHT, "in bfloat16": Expect(rules=("PA501",))},
    job=_coarse_within,
    measured=False,
)


# --------------------------------------------------------------------------- torch's own reducer


class _Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(draw("w", H, D))
        self.bias = nn.Parameter(draw("bias", H))
        self.gain = nn.Parameter(1 + draw("gain", H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w, self.bias) * self.gain


def _summed(group, bucket):  # torch looks at annotations
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _averaged_later(group, bucket, times=1):
    """As hooks that compress do: what comes back is written where the gradients are, once it is there."""
    buffer, sent = bucket.buffer(), bucket.buffer().clone()

    def written(future):
        buffer.copy_(future.value()[0])
        for _ in range(times):
            buffer.div_(group.size())
        return buffer

    return dist.all_reduce(sent, group=group, async_op=True).get_future().then(written)


def _divided_twice(group, bucket):
    return _averaged_later(group, bucket, times=2)


def _gathered(group, bucket):
    parts = [torch.empty_like(bucket.buffer()) for _ in range(group.size())]
    work = dist.all_gather(parts, bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: torch.stack(future.value()).mean(0))


def _left_alone(_group, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_HOOKS = {
    "sum hook": _summed,
    "average hook": default_hooks.allreduce_hook,
    "hook that writes later": _averaged_later,
    "hook that divides twice": _divided_twice,
    "hook that gathers": _gathered,
    "hook without a reduction": _left_alone,
}


def _reducer(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", 2 * N, T, D, scale=1), draw("y", 2 * N, T, H)
    group = mesh.get_group("dp")
    more = {
        "gradient_as_bucket_view": "views" in variant,
        "bucket_cap_mb": 1e-4 if "many buckets" in variant else None,
    }
    composed = "composed" in variant  # as torchtitan does it
    model: Any = (
        replicate(_Affine(), device_mesh=mesh, **more)
        if composed
        else DistributedDataParallel(_Affine(), process_group=group, **more)
    )
    hook = next((h for name, h in _HOOKS.items() if name in variant), None)
    if hook is not None:
        model.register_comm_hook(group, hook)

    def loss_of(m: Any, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        off = (m(rows) - wanted).square()
        return off.sum() / y.numel() if "global mean" in variant else off.mean()

    def step() -> None:
        own = list(zip(mine(x, mesh, "dp").chunk(4), mine(y, mesh, "dp").chunk(4), strict=True))
        weight = 1 if "global mean" in variant else 1 / 4
        for i, batch in enumerate(own):
            last = i == len(own) - 1
            apart = not (last or "each time" in variant) or "never" in variant
            if composed:
                model.set_requires_gradient_sync(not apart)
            with model.no_sync() if apart and not composed else nullcontext():
                (loss_of(model, *batch) * weight).backward()
        if "again" in variant:
            for p in model.parameters():
                p.grad.div_(mesh.size())

    whole = _Affine()
    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        reference=lambda: (whole, lambda: loss_of(whole, x, y)),
    )


_ALL = ("w", "bias", "gain")
_OFF = unevenly(*_ALL)

REDUCER = Family(
    name="DistributedDataParallel",
    about="its reducer averages, over micro-batches and views of buckets alike, unless a hook makes it something else",
    mesh={"dp": 2},
    variants={
        "own mean, averaged": RIGHT,
        "own mean, averaged each time": RIGHT,
        "own mean, averaged in views": RIGHT,
        "own mean, averaged each time in views": RIGHT,
        "own mean, averaged each time in many buckets": RIGHT,
        "own mean, average hook": RIGHT,
        "own mean, average hook each time": RIGHT,
        "own mean, hook that writes later": RIGHT,
        "own mean, hook that writes later, in many buckets": RIGHT,
        "own mean, hook that divides twice": Expect(scale=0.5, gradients=_OFF),
        "own mean, hook that gathers": RIGHT,
        "own mean, composed": RIGHT,
        "own mean, composed, each time": RIGHT,
        "own mean, composed, never synchronised": Expect(gradients=lost(*_ALL, on="dp")),
        "global mean, sum hook": RIGHT,
        "global mean, averaged": Expect(scale=0.5, rules=("PA209",)),
        "own mean, averaged, and again by hand": Expect(scale=0.5, gradients=_OFF),
        "global mean, sum hook each time": Expect(gradients=_OFF),
        "own mean, never synchronised": Expect(gradients=lost(*_ALL, on="dp")),
        "own mean, hook without a reduction": Expect(gradients=lost(*_ALL, on="dp")),
    },
    job=_reducer,
)


# --------------------------------------------------------------------------- a lost sum within FSDP2


class _Within(nn.Module):
    """As `_Normed`, with a second norm that sees whole rows; DTensor is left by hand."""

    def __init__(self, mesh: DeviceMesh, label: Any) -> None:
        super().__init__()
        self.tp, self.label = mesh["tp"], label
        self.whole = laid_out(1 + draw("whole", D), self.tp, R)
        self.w = laid_out(draw("w", H, D), self.tp, Shard(0))
        self.norm = laid_out(1 + draw("norm", D), self.tp, R)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = mine(
            F.rms_norm(on(x, self.tp, R), (D,), self.whole).to_local(grad_placements=[P]), self.tp, "tp", 1
        )
        rows = F.rms_norm(rows, (D,), self.norm.to_local(grad_placements=self.label))
        return F.linear(on(rows, self.tp, Shard(1)).redistribute(placements=[R]), self.w).full_tensor()


class _Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(1 + draw("whole", D))
        self.w = nn.Parameter(draw("w", H, D))
        self.norm = nn.Parameter(1 + draw("norm", D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.rms_norm(F.rms_norm(x, (D,), self.whole), (D,), self.norm), self.w)


def _within(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", N, T, D), draw("y", N, T, H)
    model = _Within(mesh, [P] if "declared" in variant else None)
    dtype = torch.float64 if "float64" in variant else None
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))

    def step() -> None:
        batches = list(zip(mine(x, mesh, "dp").chunk(2), mine(y, mesh, "dp").chunk(2), strict=True))
        for i, (rows, wanted) in enumerate(batches):
            model.set_requires_gradient_sync(i == len(batches) - 1 or "each time" in variant)
            ((model(rows) - wanted).square().mean() / 2).backward()

    def update(m: nn.Module) -> torch.optim.Optimizer:
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        return torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True)

    whole = _Whole()
    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        optimizer=update if "declared" in variant else None,  # clipping would spread a fault
        reference=lambda: (whole, lambda: (whole(x) - y).square().mean()),
    )


WITHIN = Family(
    name="a norm within FSDP2",
    about="FSDP2 packs gradients of different parameters into one buffer, among them one that tp has not summed",
    mesh={"dp": 2, "tp": 2},
    variants={
        "declared": RIGHT,
        "declared, each time": RIGHT,
        "declared, reduced in float64": RIGHT,
        "bare": Expect(gradients=lost("norm")),
        "bare, each time": Expect(gradients=lost("norm")),
        "bare, reduced in float64": Expect(gradients=lost("norm")),
    },
    job=_within,
)

# --------------------------------------------------------------------------- one factor that hides in another


def _both(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", N, D, scale=1), draw("y", N, H)
    values = {"up": draw("up", H, D), "down": draw("down", H, H)}
    if "bias" in variant:
        values["bias"] = draw("bias", H)
    cut = {"up": 0, "down": 1}
    model = Bag(**{k: mine(v, mesh, "tp", cut[k]) if k in cut else v for k, v in values.items()})
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    leave = ReduceTwice if "twice" in variant else Reduce

    def step() -> None:
        h = F.linear(Copy.apply(mine(x, mesh, "dp"), tp), model.up).relu()
        out = leave.apply(F.linear(h, model.down), tp)
        out = out + model.bias if "bias" in variant else out
        loss = (out - mine(y, mesh, "dp")).square()
        (Reduce.apply(loss.sum() / y.numel(), dp) if "whole" in variant else loss.mean()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp)
            if "averaged" in variant:
                p.grad.div_(mesh["dp"].size())

    def loss(m: Any) -> torch.Tensor:
        out = F.linear(F.linear(x, m.up).relu(), m.down)
        return ((out + m.bias if "bias" in variant else out) - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        declared={"up": {"tp": Shard(0)}, "down": {"tp": Shard(1)}},
        reference=one_device(Bag(**values), loss),
    )


BOTH = Family(
    name="tp and dp at once",
    about="g's backward doubles what an average over dp halves: all gradients are what a sum over dp would make them",
    mesh={"dp": 2, "tp": 2},
    variants={
        "averaged": RIGHT,
        "averaged, with bias": RIGHT,
        "averaged, g twice": Expect(gradients=doubled("up", "down")),
        "averaged, g twice, with bias": Expect(gradients=doubled("up", "down")),
        "whole loss": RIGHT,
        "whole loss, with bias": RIGHT,
        "whole loss, g twice": Expect(gradients=doubled("up", "down")),
        "whole loss, g twice, with bias": Expect(gradients=doubled("up", "down")),
        "summed": Expect(scale=2.0, rules=("PA209",)),
        "summed, with bias": Expect(scale=2.0, rules=("PA209",)),
    },
    job=_both,
)

FAMILIES = (BY_HAND, LOCAL_PART, BUFFER, LABELLED, TOKENS, COARSE, COARSE_WITHIN, REDUCER, WITHIN, BOTH)
