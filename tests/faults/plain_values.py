"""Plain values that one device would not have: what is done to a rank's term of a sum before it is summed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from placement_audit import Job
from placement_audit.verdicts import Verdict
from tests.faults.family import (
    RIGHT,
    Bag,
    Expect,
    Family,
    Wrong,
    draw,
    laid_out,
    mine,
    off,
    on,
    one_device,
)  # fmt: skip
from tests.faults.functions import Copy, Reduce

T, D, H = 8, 6, 8
ALL = ("up", "down", "bias")


# --------------------------------------------------------------------------- a row-parallel linear on plain tensors


def _term(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"up": draw("up", H, D), "down": draw("down", D, H), "bias": draw("bias", D, scale=1)}
    group, n = mesh.get_group("tp"), mesh.size()
    own = {"up": mine(values["up"], mesh, "tp", 0), "down": mine(values["down"], mesh, "tp", 1)}
    model = Bag(**own, bias=values["bias"])

    def step() -> torch.Tensor:
        h = F.linear(Copy.apply(x, group), model.up).relu()
        bias = model.bias if variant == "bias in the linear" else None
        if variant == "bias on the first rank, its gradient summed":
            bias = Copy.apply(model.bias, group)
            if mesh.get_local_rank() != 0:
                bias = 0 * bias
        term = F.linear(h, model.down, bias)
        if variant == "bias added in place":
            term += model.bias
        if variant == "residual inside":
            term = term + x
        if variant == "residual divided":
            term = term + x / n
        if variant == "bias divided, not differentiated":
            term = term + (model.bias + (model.bias / n - model.bias).detach())
        if variant == "bias divided":
            term = 3.0 * (term + model.bias / n) / 3.0
        if variant == "gelu inside":
            term = F.gelu(term)
        out = Reduce.apply(term, group)
        if variant == "gelu after":
            out = F.gelu(out)
        if "bias" not in variant or variant == "bias after":
            out = out + model.bias
        if variant == "residual after":
            out = out + x
        return (out - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        out = F.linear(F.linear(x, m.up).relu(), m.down)
        if "gelu" in variant:
            out = F.gelu(out)
        if "residual" in variant:
            out = out + x
        return (out + m.bias - y).square().mean()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        declared={"up": {"tp": Shard(0)}, "down": {"tp": Shard(1)}},
        reference=one_device(Bag(**values), loss),
    )


_COUNTED = Expect(gradients=off(*ALL), forward=True, rules=("PA107",))

TERM = Family(
    name="a term of a sum in plain tensors",
    about="what is added to each rank's term, or done to it, before the ranks are summed",
    mesh={"tp": 2},
    variants={
        "bias after": RIGHT,
        "residual after": RIGHT,
        "residual divided": RIGHT,
        "gelu after": RIGHT,
        "bias divided, not differentiated": RIGHT,
        "bias on the first rank, its gradient summed": RIGHT,
        "bias in the linear": _COUNTED,
        "bias added in place": _COUNTED,
        "residual inside": _COUNTED,
        "gelu inside": Expect(gradients=off(*ALL), forward=True, rules=("PA108",)),
        "bias divided": Expect(
            gradients={"bias": Wrong(on="tp", traced=(Verdict.WRONG_SCALE,), measured=(Verdict.WRONG_SCALE,))}
        ),
    },
    job=_term,
)


# --------------------------------------------------------------------------- labels on what plain ops made


def _label(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"up": draw("up", H, D), "down": draw("down", D, H)}
    model = Bag(
        up=laid_out(values["up"], mesh, Shard(0)),
        down=laid_out(values["down"], mesh, Shard(1)),
    )

    def step() -> torch.Tensor:
        h = F.linear(x, model.up.to_local()).relu()
        h = h.view(2, T // 2, -1).transpose(0, 1).reshape(T, -1)
        term = F.linear(h, model.down.to_local())
        if variant == "a term, scattered":
            whole = on(term, mesh, Partial()).redistribute(placements=[Shard(0)])
        elif variant == "a term, said to be a part":
            half = term.chunk(mesh.size())[0]
            whole = DTensor.from_local(half, mesh, [Shard(0)], run_check=False)
        else:
            whole = on(term, mesh, Partial())
        return (whole.full_tensor() - y).square().mean()

    def loss(m: Any) -> torch.Tensor:
        h = F.linear(x, m.up).relu()
        h = h.view(2, T // 2, -1).transpose(0, 1).reshape(T, -1)
        return (F.linear(h, m.down) - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


LABEL = Family(
    name="labels on what plain ops made",
    about="from_local calls a term of a sum a part, and it is never summed",
    mesh={"tp": 2},
    variants={
        "a term": RIGHT,
        "a term, scattered": RIGHT,
        "a term, said to be a part": Expect(gradients=off("up", "down"), forward=True, rules=("PA109",)),
    },
    job=_label,
)

# --------------------------------------------------------------------------- a mean over rows that do not divide


def _rows(mesh: DeviceMesh, variant: str) -> Job:
    rows = 8 if variant.startswith("even") else 7
    x = draw("x", rows, D, scale=1)
    values = {"w": draw("w", rows, D)}
    model = Bag(w=laid_out(values["w"], mesh, Shard(0)))
    group, n = mesh.get_group("tp"), mesh.size()

    def step() -> torch.Tensor:
        own = (model.w.to_local() * laid_out(x, mesh, Shard(0)).detach().to_local()).square()
        if variant.endswith("mean of means"):
            return Reduce.apply(own.mean() / n, group)
        return Reduce.apply(own.sum() / x.numel(), group)

    def loss(m: Any) -> torch.Tensor:
        return (m.w * x).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x,), reference=one_device(Bag(**values), loss))


ROWS = Family(
    name="a mean over rows on several ranks",
    about="the mean of the ranks' means is the mean only where all have as many rows",
    mesh={"tp": 2},
    variants={
        "even, mean of means": RIGHT,
        "uneven, sum over all": RIGHT,
        "uneven, mean of means": Expect(gradients=off("w"), forward=True, rules=("PA110",)),
    },
    job=_rows,
)

FAMILIES = (TERM, LABEL, ROWS)
