"""Runs a program made by chance (`tests/faults/chance.py`) on a mesh, and on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

from placement_audit import Job, Report, audit_factory
from placement_audit.config import RankEnv
from placement_audit.verdicts import GOOD, Verdict
from tests.faults.chance import D, Labels, Program
from tests.faults.family import Bag, P, R, laid_out, mine, on, one_device
from tests.faults.functions import Copy, Reduce, ReduceTwice, gathered, scattered
from tests.faults.truth import Truth, truth_of

B, T = 4, 8
BATCH = Shard(0)
MESHES = {2: ("tp",), 4: ("dp", "tp")}
"""By the ranks."""

SHAPED: dict[str, Any] = {"tanh": torch.tanh, "norm": lambda h: F.rms_norm(h, (D,))}
APPLY: dict[str, Any] = {"scale": torch.mul, "add": torch.add, "matmul": F.linear}


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return gathered(x.transpose(0, 1).contiguous(), group).transpose(0, 1).contiguous()


def _cut(x: torch.Tensor, group: Any) -> torch.Tensor:
    n, rank = dist.get_world_size(group), dist.get_group_rank(group, dist.get_rank())
    return x.chunk(n, 1)[rank].contiguous()


def _scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return scattered(x.transpose(0, 1), group).transpose(0, 1).contiguous()


def _boundary(forward: Any, backward: Any) -> Any:
    """An autograd function over a group, of what it does forward and what it does back."""

    def run(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return forward(x, group)

    def back(ctx: Any, g: torch.Tensor) -> Any:
        return backward(g, ctx.group), None

    members = {"forward": staticmethod(run), "backward": staticmethod(back)}
    return type("Boundary", (torch.autograd.Function,), members)


BOUNDARIES: dict[str, Any] = {
    "copy, sum back": Copy.apply,
    "sum, copy back": Reduce.apply,
    "sum, sum back": ReduceTwice.apply,
    "torch's sum": lambda x, group: dnn.all_reduce(x.contiguous(), group=group),
    "scatter, gather back": _boundary(_scattered, _gathered).apply,
    "gather, scatter back": _boundary(_gathered, _scattered).apply,
    "gather, cut back": _boundary(_gathered, _cut).apply,
    "cut, gather back": _boundary(_cut, _gathered).apply,
    "cut": _cut,
}


def job(seed: int, mesh: DeviceMesh) -> Job:
    """A program on a mesh of tp, or of dp and tp."""
    names = mesh.mesh_dim_names or ()
    program = Program(seed, names)
    dp, group = "dp" in names, mesh.get_group("tp")
    numbers = torch.Generator().manual_seed(~seed % 2**31)
    batches = [
        tuple(torch.randn(B, T, D, generator=numbers) for _ in range(2)) for _ in range(program.micro_batches)
    ]
    own = [tuple(mine(v, mesh, "dp") if dp else v for v in batch) for batch in batches]

    def placed(on_tp: Placement, on_dp: Placement = BATCH) -> tuple[Placement, ...]:
        return (on_dp, on_tp) if dp else (on_tp,)

    def part(v: torch.Tensor, at: Placement) -> torch.Tensor:
        return mine(v, mesh, "tp", at.dim).contiguous() if isinstance(at, Shard) else v

    values = program.values
    model = Bag(
        **{
            n: v.clone() if n in program.plain else laid_out(v, mesh, *placed(*reversed(program.laid[n])))
            for n, v in values.items()
        }
    )

    def param(name: str, labels: Labels, local: bool) -> torch.Tensor:
        p = getattr(model, name)
        if name in program.plain:
            return p
        p = p.redistribute(placements=placed(program.laid[name][1], R))
        return p.to_local(grad_placements=labels and labels[-mesh.ndim :]) if local else p

    def step() -> None:
        for i, (x, y) in enumerate(own, 1):
            loss = checkpoint(forward, x, y, use_reentrant=False) if program.again else forward(x, y)
            loss.backward()
            if program.early or i == len(own):
                reduce()

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h: Any = on(part(x, program.ops[0][1]), mesh, *placed(program.ops[0][1]))
        kept = h
        for kind, *said in program.ops[1:-1]:
            match kind:
                case "tanh" | "norm":
                    h = SHAPED[kind](h)
                case "keep":
                    kept = h
                case "join":
                    h = h + kept
                case "move":
                    h = h.redistribute(placements=placed(said[0]))
                case "take":
                    h = h.to_local(grad_placements=said[0] and placed(said[0]))
                case "label":
                    label = {} if said[1] is None else {"grad_placements": placed(said[1])}
                    h = on(h.contiguous(), mesh, *placed(said[0]), **label)
                case "cross":
                    h = BOUNDARIES[said[0]](h, group)
                case _:
                    h = APPLY[kind](h, param(*said, not isinstance(h, DTensor)))
        return _loss(h, y, *program.ops[-1][1:])

    def reduce() -> None:
        for name, mesh_dim in program.reduced:
            g = getattr(model, name).grad
            if g is not None:
                dist.all_reduce(g.to_local() if isinstance(g, DTensor) else g, group=mesh.get_group(mesh_dim))

    def _loss(h: Any, y: torch.Tensor, at: Placement, how: str) -> torch.Tensor:
        if isinstance(h, DTensor):
            h = h.redistribute(placements=placed(R if at == P else at))
            at = R if at == P else at
            terms = (h - on(part(y, at), mesh, *placed(at))).square().sum()
            if how == "whole":
                return terms.full_tensor()
            return terms.redistribute(placements=placed(R, P)).to_local()
        if at == P:
            h, at = Reduce.apply(h, group), R
        term = (h - part(y, at)).square().sum()
        if at == R:
            return term
        return Reduce.apply(term, group) if how == "whole" else dnn.all_reduce(term, group=group)

    def loss(m: Any) -> torch.Tensor:
        return sum((_one(m, x, y) for x, y in batches), torch.zeros(()))

    def _one(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = kept = x
        for kind, *said in program.ops:
            if kind == "keep":
                kept = h
            elif kind == "join":
                h = h + kept
            elif kind in SHAPED:
                h = SHAPED[kind](h)
            elif kind in APPLY:
                h = APPLY[kind](h, getattr(m, said[0]))
        return (h - y).square().sum()

    return Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=own,
        batch_placements={"dp": BATCH} if dp else None,
        reference=one_device(Bag(**values), loss),
    )


def mesh_of(ranks: int) -> DeviceMesh:
    """Of so many ranks, in the process group that is there."""
    names = MESHES[ranks]
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def reports(seeds: list[int], ranks: int) -> dict[int, Report | str]:
    """The traced report on each; what it raises where the program cannot run."""
    found: dict[int, Report | str] = {}
    for seed in seeds:
        try:
            found[seed] = audit_factory(lambda seed=seed: job(seed, mesh_of(ranks)), world_size=ranks)
        except Exception as error:
            found[seed] = repr(error)
    return found


def truths(_env: RankEnv, seeds: list[int]) -> dict[int, Truth | str]:
    """The numbers of each; what it raises where the program cannot run."""
    found: dict[int, Truth | str] = {}
    for seed in seeds:
        try:
            found[seed] = truth_of(job(seed, mesh_of(dist.get_world_size())), mesh_of(dist.get_world_size()))
        except Exception as error:
            found[seed] = repr(error)
    return found


def outcomes(truth: Truth, report: Report) -> dict[str, str]:
    """Parameter -> "right", "caught", "missed", "false alarm" or "not judged"."""
    found = {}
    for name in truth.errors:
        verdicts = {j.verdict for j in report.judgements if j.param_fqn == name}
        if verdicts <= set(GOOD):
            found[name] = "missed" if name in truth.wrong else "right"
        elif verdicts <= {*GOOD, Verdict.NOT_JUDGED}:
            found[name] = "not judged"
        else:
            found[name] = "caught" if name in truth.wrong else "false alarm"
    return found
