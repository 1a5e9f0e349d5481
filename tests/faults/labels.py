"""Labels of gradients that are false, or only unlike their parameters', and sums of what was complete.

All were found by random programs set against their numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

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
    on,
    one_device,
)
from tests.faults.functions import Copy, Reduce

T = D = 8  # square, so that a part has the shape of another

# --------------------------------------------------------------------------- a shard that is no parameter's


def _redistributed(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"norm": 1 + draw("norm", D), "w": draw("w", D, D)}
    laid = {"replicated": (R, R), "other dim": (Shard(0), Shard(1))}[variant]
    model = Bag(**{n: laid_out(v, mesh, p) for (n, v), p in zip(values.items(), laid, strict=True)})

    def step() -> None:
        # By columns: the product with the norm, and with rows of w, leaves their gradients shards.
        columns = on(x, mesh, R).redistribute(placements=[Shard(1)]) * model.norm
        out = columns.redistribute(placements=[R]) + model.w.redistribute(placements=[Shard(0)])
        (out - on(y, mesh, R)).square().mean().full_tensor().backward()

    def loss(m: Any) -> torch.Tensor:
        return (x * m.norm + m.w - y).square().mean()

    update = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=(x, y),
        optimizer=update,
        reference=one_device(Bag(**values), loss, update),
    )


REDISTRIBUTED = Family(
    name="a gradient that is a shard of a replicated weight",
    about="DTensor's ops leave it so, and its optimizers redistribute it",
    mesh={"tp": 2},
    variants={"replicated": RIGHT, "other dim": RIGHT},
    job=_redistributed,
)


# --------------------------------------------------------------------------- a label that cannot fit


def _misfit(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"up": draw("up", D, D), "norm": 1 + draw("norm", D), "after": 1 + draw("after", D)}
    laid = {"up": Shard(0), "norm": Shard(0), "after": R}
    model = Bag(**{n: laid_out(v, mesh, laid[n]) for n, v in values.items()})
    label = P if variant == "terms" else Shard(1)

    def step() -> None:
        h = F.linear(on(x, mesh, R), model.up).to_local(grad_placements=[label])
        h = on(h * model.norm.to_local(), mesh, Shard(1)).redistribute(placements=[R])
        ((h * model.after) - on(y, mesh, R)).square().mean().full_tensor().backward()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(x, m.up) * m.norm * m.after - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


_MISREAD = Wrong(on="tp", traced=(Verdict.WRONG_PLACEMENT,), measured=(Verdict.WRONG_PLACEMENT,))

MISFIT = Family(
    name="an activation's gradient under a label that cannot fit",
    about="parts of columns are read as terms of a sum; only what lies before is wrong",
    mesh={"tp": 2},
    variants={
        "as it is": RIGHT,
        "terms": Expect(gradients={"up": _MISREAD}),
    },
    job=_misfit,
)


# --------------------------------------------------------------------------- a sum of what is complete


def _complete(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"norm": 1 + draw("norm", D), "w": draw("w", D, D)}
    sharded = variant == "parts"
    model = Bag(norm=values["norm"], w=laid_out(values["w"], mesh, Shard(0) if sharded else R))

    def step() -> None:
        h = Copy.apply(x * model.norm, mesh.get_group())
        h = on(F.linear(h, model.w.to_local()), mesh, Shard(1) if sharded else R)
        (h.full_tensor() - y).square().mean().backward()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(x * m.norm, m.w) - y).square().mean()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


COMPLETE = Family(
    name="a backward that sums what is complete",
    about="f before a column-parallel weight sums terms; before a replicated one, equal gradients",
    mesh={"tp": 2},
    variants={"parts": RIGHT, "whole": Expect(gradients=doubled("norm"))},
    job=_complete,
)

# --------------------------------------------------------------------------- a term that is labelled whole


def _term(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"norm": 1 + draw("norm", D), "up": draw("up", D, D), "down": draw("down", D, D)}
    laid = {"norm": R, "up": Shard(0), "down": Shard(1)}
    model = Bag(**{n: laid_out(v, mesh, laid[n]) for n, v in values.items()})
    label = P if variant == "declared" else None

    def step() -> None:
        hidden = F.linear(on(x, mesh, R) * model.norm, model.up).tanh()
        out = F.linear(hidden, model.down).redistribute(placements=[R])
        out = out.to_local(grad_placements=None if label is None else [label])
        loss = (mine(out, mesh, "tp") - mine(y, mesh, "tp")).square().sum()
        Reduce.apply(loss, mesh.get_group()).backward()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(F.linear(x * m.norm, m.up).tanh(), m.down) - y).square().sum()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


TERM = Family(
    name="each rank its rows of a value that was whole",
    about="the gradient is one rank's term, and a row-parallel weight before it needs them all",
    mesh={"tp": 2},
    variants={"declared": RIGHT, "not declared": Expect(gradients=lost("norm", "up", "down"))},
    job=_term,
)


# --------------------------------------------------------------------------- a loss that is read as it is


def _local_loss(mesh: DeviceMesh, variant: str) -> Job:
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    values = {"w": draw("w", D, D)}
    model = Bag(w=laid_out(values["w"], mesh, R))
    rows = Shard(0)

    def step() -> None:
        out = F.linear(on(mine(x, mesh, "dp"), mesh, rows), model.w)
        loss = (out - on(mine(y, mesh, "dp"), mesh, rows)).square().sum().to_local()  # one rank's term
        (loss * 4 / 4 if variant == "scaled" else loss).backward()

    def loss(m: Any) -> torch.Tensor:
        return (F.linear(x, m.w) - y).square().sum()

    own = (mine(x, mesh, "dp"), mine(y, mesh, "dp"))
    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=own,
        batch_placements={"dp": rows},
        reference=one_device(Bag(**values), loss),
    )


LOCAL_LOSS = Family(
    name="backward from a rank's own term of the loss",
    about="autograd begins with the same number on all ranks: Replicate is true of it",
    mesh={"dp": 2},
    variants={"as it is": RIGHT, "scaled": RIGHT},
    job=_local_loss,
)

# --------------------------------------------------------------------------- each its part of a whole


def _own_part(mesh: DeviceMesh, variant: str) -> Job:
    n, rank = mesh.size(), mesh.get_local_rank()
    x, y = draw("x", n, D, scale=1), draw("y", n, D)
    values = {"norm": 1 + draw("norm", D)} | ({"scale": 1 + draw("scale", D)} if variant == "read" else {})
    model = Bag(**{name: laid_out(v, mesh, R) for name, v in values.items()})
    parts = Shard(1) if variant == "of columns" else Shard(0)
    row = n - 1 - rank if variant == "another's" else rank

    def step() -> None:
        whole = (on(x, mesh, R) * model.norm).redistribute(placements=[parts]).full_tensor()
        if variant == "read":
            whole = (whole * model.scale.to_local(grad_placements=[P])).tanh() / 2
        if variant == "summed up":
            whole = whole.cumsum(0)
        match variant:
            case "a row":
                part = whole[row][None]
            case "sliced":
                part = whole[row : row + 1]
            case _:
                part = whole.chunk(n)[row]
        loss = (part - y.chunk(n)[row]).square().sum()
        Reduce.apply(loss, mesh.get_group()).backward()

    def loss(m: Any) -> torch.Tensor:
        h = x * m.norm
        h = (h * m.scale).tanh() / 2 if variant == "read" else h.cumsum(0) if variant == "summed up" else h
        return (h - y).square().sum()

    return Job(model=model, step=step, mesh=mesh, inputs=(x, y), reference=one_device(Bag(**values), loss))


OWN_PART = Family(
    name="each rank its own part of what was gathered",
    about="the gradient is zero but in that part: to keep no more of it loses nothing, where it is the same part",
    mesh={"tp": 2},
    variants={
        "chunked": RIGHT,
        "sliced": RIGHT,
        "a row": RIGHT,
        "read": RIGHT,
        "of columns": Expect(gradients=lost("norm")),
        "another's": Expect(gradients=lost("norm")),
        "summed up": Expect(gradients=lost("norm")),
    },
    job=_own_part,
)

FAMILIES = (REDISTRIBUTED, MISFIT, COMPLETE, TERM, LOCAL_LOSS, OWN_PART)
