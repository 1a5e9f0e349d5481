"""Random small programs on four gloo ranks, watched: what was traced of each tensor, and what its values are.

The ranks are forked once and serve any number of programs. A program is plain data, a list of instructions
that take earlier values by number; an instruction that does not fit (shapes, a redistribute that torch does
not have) is skipped, on all ranks alike.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

Instruction = tuple[str, int, int, int]
"""(what, first value, second value, a number that chooses among variants)."""

KINDS = (
    "add", "mul", "matmul", "sin", "view", "in_place", "mean", "from_local", "to_local", "redistribute",
    "all_reduce", "all_gather", "reduce_scatter", "relabel",
)  # fmt: skip

DIMS = ("a", "b")
RANKS = 4


@dataclass(frozen=True)
class Slot:
    """One tensor of a program on one rank.

    Attributes:
        what: the instruction it came from, or "grad of" a leaf.
        kinds: what was traced, by mesh dim.
        print: fingerprint of its local values.
    """

    what: str
    kinds: tuple[str, ...]
    print: tuple[float, ...]


class Ranks:
    """Four gloo ranks that run programs; forked from a clean server, for autograd survives no fork."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        store = tempfile.mktemp(prefix="placement-audit-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, program: list[Instruction]) -> list[list[Slot]]:
        """The slots of each rank, in program order."""
        for pipe in self._pipes:
            pipe.send(program)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(60), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, str):
                raise AssertionError(answer)
        return answers

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, store: str, pipe: Connection) -> None:
    import warnings

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=DIMS)
    while True:
        try:
            program = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(_run(program, mesh))
        except Exception as error:
            import traceback

            pipe.send(f"rank {rank}: {error!r}\n{traceback.format_exc()}")


def _run(program: list[Instruction], mesh: Any) -> list[Slot]:
    import torch
    from torch import nn

    from placement_audit.case import Case
    from placement_audit.dtensor_api import local_of, unwatched
    from placement_audit.engine.trace import Tracer

    at = mesh.get_coordinate()
    leaves = []
    for varies in ((), (0,), (1,), (0, 1)):
        generator = torch.Generator().manual_seed(sum((7 + 13 * d) * (at[d] + 1) for d in varies))
        leaves.append(torch.randn(4, 4, generator=generator).requires_grad_())
    slots: list[Slot] = []

    def note(what: str, x: Any) -> None:
        with unwatched():
            local = local_of(x).detach().double().reshape(-1)
            weights = torch.randn(
                local.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
            printed = (float(local.norm()), float(local @ weights))
            kinds = tuple(s.kind.value for s in tracer.ledger.vector(tracer.ledger.get(x)))
        slots.append(Slot(what, kinds, printed))

    def step() -> Any:
        values: list[Any] = list(leaves)
        for instruction in program:
            try:
                made = _do(instruction, values, mesh)
            except (RuntimeError, NotImplementedError, ValueError, AssertionError, IndexError):
                continue
            if made is not None and made.numel() and bool(made.isfinite().all()) is not None:
                values.append(made)
                note(instruction[0], made)
        loss = _loss(values, mesh)
        loss.backward()
        for i, leaf in enumerate(leaves):
            if leaf.grad is not None:
                note(f"grad of leaf {i}", leaf.grad)
        return loss

    case = Case(
        name="program",
        model=nn.Module(),
        mesh=mesh,
        batch_dims=(),
        inputs=(),
        step=step,
        device_type="cpu",
        backend="gloo",
    )
    tracer = Tracer(case)
    for leaf, varies in zip(leaves, ((), (0,), (1,), (0, 1)), strict=True):
        from placement_audit.states import INVARIANT, VARYING

        vector = tuple(VARYING if d in varies else INVARIANT for d in range(2))
        tracer.ledger.put(leaf, tracer.ledger.sid(vector, grad=False))
    tracer.run()
    return slots


def _do(instruction: Instruction, values: list[Any], mesh: Any) -> Any:
    """One instruction; None where it does not fit."""
    import torch
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    what, i, j, n = instruction
    x, y = values[i % len(values)], values[j % len(values)]
    both_plain = not isinstance(x, DTensor) and not isinstance(y, DTensor)
    both_dtensor = isinstance(x, DTensor) and isinstance(y, DTensor)
    choices = (Replicate(), Shard(0), Shard(1), Partial())
    placements = (choices[n % 4], choices[n // 4 % 4])
    if what in ("add", "mul"):
        if x.shape != y.shape or not (both_plain or both_dtensor):
            return None
        return x + y if what == "add" else x * y
    if what == "matmul":
        return x @ y if (both_plain or both_dtensor) and x.shape[1] == y.shape[0] else None
    if what == "sin":
        return x.sin()
    if isinstance(x, DTensor):
        if what == "to_local":
            return x.to_local()
        if what == "redistribute":
            return x.redistribute(placements=placements)
        return None
    if what == "view":
        return x.t() if n % 2 else x[: max(1, x.shape[0] // 2)]
    if what == "in_place":
        z = x.clone()
        z[:1].add_(y[:1]) if both_plain and y.shape[1] == x.shape[1] else z.mul_(2)
        return z
    if what == "mean":
        return x.mean() + torch.zeros(4, 4)
    if what == "from_local":
        return DTensor.from_local(x, mesh, placements)
    if what == "relabel":
        return DTensor.from_local(x, mesh[DIMS[n % 2]], [choices[n // 2 % 4]])
    group = (mesh, n % 2)
    if what == "all_reduce":
        return funcol.wait_tensor(funcol.all_reduce(x.detach(), "sum", group))
    if what == "all_gather":
        return funcol.wait_tensor(funcol.all_gather_tensor(x.detach().contiguous(), 0, group))
    if what == "reduce_scatter" and x.shape[0] % 2 == 0:
        return funcol.wait_tensor(funcol.reduce_scatter_tensor(x.detach().contiguous(), "sum", 0, group))
    return None


def _loss(values: list[Any], mesh: Any) -> Any:
    """All values in one number, each rank its own."""
    import torch
    from torch.distributed.tensor import DTensor

    total = torch.zeros(())
    for v in values:
        total = total + (v.full_tensor() if isinstance(v, DTensor) else v).sin().sum()
    return total
