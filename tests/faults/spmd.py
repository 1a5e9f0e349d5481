"""What spmd_types says of a variant: its type checker around the variant's forward, in one process.

spmd_types (0.3 and later) gives each plain tensor a type on each mesh dim: R (equal on all ranks, its gradient is
left to be summed), I (equal, and so is its gradient), V (varying), P (a term of a sum). It checks them op by op in the
forward, and the loss as it enters ``backward()``. That is all that its guide, docs/local_spmd_types.md, asks for
("Basics": "backward not needed"); sums over gradients it leaves to whoever makes them. But raw collectives are
checked wherever they are called, so each variant is checked once more to the end of its step, with its gradients
typed as well.

The programs are annotated as that guide tells its users, by one rule for all of them, from what a `Job` declares:

- the batch is I, and V where a rank takes its own piece of it (`mine`, which is ``convert(R -> S)``);
- a plain parameter is V where it is declared sharded. Elsewhere it is R on mesh dims along which the batch varies
  ("Data/context parallelism"); on others R or I ("Module versus wrapper responsibility" calls it a convention of the
  codebase). So each family is checked under both, and the one under which its right variants draw fewer type errors
  stands for all of its variants; I where they draw as many;
- a parameter that is a DTensor has its types from spmd_types itself, by placement and gradient placement, once it
  leaves through ``to_local``; one that leaves without a gradient placement is R or I by the same rule ("FSDP on DTensor
  parameters");
- the autograd functions of functions.py have the rules that docs/rules.md and the guide's table of Megatron's functions
  give them, a raw all-gather in the forward is ``spmd_types.all_gather``;
- a loss that varies along with the batch is one term of a sum (V to P), as the message on such a loss says;
- where gradients are typed, too: each has the type that the guide's table of gradients gives for its parameter's, and
  must not be a term of a sum any more when the step is over.

Both modes are run. "permissive" passes over what has no type; an error there is one about the program, and counts. An
error that "strict" alone raises is a type that the checker lost or cannot be given: the variant does not run.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import rules
from spmd_types.checker import typecheck
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, handle_torch_function

from placement_audit import Job
from placement_audit.engine.reducer import make_runnable
from tests.faults import functions
from tests.faults.family import Family
from tests.trace.worlds import fake_mesh

Mode = Literal["permissive", "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the checker says of a variant.

    Attributes:
        verdict: "right", "wrong" for a type error, or "does not run".
        why: its error, in one line; "" where there is none.
    """

    verdict: str
    why: str = ""


def checked(family: Family, *, gradients: bool = False) -> dict[str, Said]:
    """What is said of each variant, under the convention that fits the right ones best.

    Args:
        family: its variants are checked, all under one convention.
        gradients: go on after backward, with the gradients typed.
    """
    answers = [{v: said(family, v, kind, gradients) for v in family.variants} for kind in (spmd.I, spmd.R)]
    right = [v for v, e in family.variants.items() if e.right]
    return min(answers, key=lambda answer: sum(answer[v].verdict == "wrong" for v in right))


def said(family: Family, variant: str, kind: Any, gradients: bool) -> Said:
    """What is said of one variant; ``kind`` is what a replicated parameter is where the batch does not vary."""
    about = error(family, variant, kind, gradients, "permissive")
    if about is not None:
        return Said(verdict="wrong" if is_type_error(about) else "does not run", why=told(about))
    lacking = error(family, variant, kind, gradients, "strict")
    if lacking is None:
        return Said(verdict="right")
    return Said(verdict="does not run", why=f"{told(lacking)} (strict; permissive raises nothing)")


def is_type_error(e: Exception) -> bool:
    """Whether it speaks about the program, not about what the checker does not support."""
    return isinstance(e, spmd.SpmdTypeError) and "not yet implemented" not in str(e)


def told(e: Exception) -> str:
    """Its first sentence; a type error's needs no class."""
    first = str(e.args[0] if e.args else "").strip().split("\n")[0].split(". ")[0]
    return first if isinstance(e, spmd.SpmdTypeError) else f"{type(e).__name__}: {first}"


def error(family: Family, variant: str, kind: Any, gradients: bool, mode: Mode) -> Exception | None:
    """What is raised in a variant's step, played by rank 0 of a fake world; None where it is found in order."""
    mesh = fake_mesh(**family.mesh)
    try:
        job = family.job(mesh, variant)
        if isinstance(job.model, DistributedDataParallel):
            make_runnable(job.model)  # its reducer, of which the fake group knows nothing
        with warnings.catch_warnings(), spmd.set_current_mesh(mesh), replaced(family, mesh):
            warnings.simplefilter("ignore")
            annotate(job, kind)
            # Ours is entered last, so that it comes first.
            with typecheck(mode, local=True), ByHand(job, kind, gradients) as by_hand:
                loss = job.step()
                if isinstance(loss, torch.Tensor):
                    loss.backward()
                by_hand.check_gradients()
    except ForwardDone:
        return None
    except Exception as e:
        return e
    finally:
        dist.destroy_process_group()
    return None


# --------------------------------------------------------------------------- what a user writes by hand


def annotate(job: Job, kind: Any) -> None:
    """Types of the plain parameters, and of the batch."""
    varies = set(job.batch_placements or {})
    mesh_dims = spmd.current_mesh_names() or {}
    for name, p in job.model.named_parameters():
        if not isinstance(p, DTensor):
            shards = (job.declared or {}).get(name, {})
            types = {m: spmd.V if m in shards else spmd.R if m in varies else kind for m in mesh_dims}
            spmd.assert_type(p, types)
    for x in tensors_in((job.inputs, job.step), set()):
        if not isinstance(x, (nn.Parameter, DTensor)):
            spmd.assert_type(x, dict.fromkeys(mesh_dims, spmd.I))


def tensors_in(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, and in what functions hold from where they were made."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, tuple):
        for item in thing:
            yield from tensors_in(item, seen)
    elif closure := getattr(thing, "__closure__", None):
        for cell in closure:
            yield from tensors_in(cell.cell_contents, seen)


class ForwardDone(BaseException):
    """The loss has come to backward() and was found in order."""


class ByHand(TorchFunctionMode):
    """Types of the loss, of gradients, and of what leaves a parameter by a bare ``to_local()``.

    All else goes on to the checker.
    """

    def __init__(self, job: Job, kind: Any, gradients: bool) -> None:
        super().__init__()
        self.params = list(job.model.parameters())
        self.kind = kind
        self.gradients = gradients
        self.varies = set(job.batch_placements or {})
        self.came_to_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            self.check_loss(args[0])
            self.came_to_backward = True
            if not self.gradients:
                raise ForwardDone
            with spmd.no_typecheck():
                handle_torch_function(func, (), *args, **(kwargs or {}))
            self.type_gradients()
            return None
        out = handle_torch_function(func, (), *args, **(kwargs or {}))
        if getattr(getattr(func, "__self__", None), "__name__", "") == "_ToTorchTensor":
            self.type_local(out, *args)
        return out

    def check_loss(self, loss: torch.Tensor) -> None:
        """Have a stand-in checked whose backward leads nowhere: one is enough."""
        if isinstance(loss, DTensor):
            return
        with spmd.no_typecheck():
            stand_in = loss.detach().clone().requires_grad_()
        if spmd.has_local_type(loss):
            for m in self.varies:
                if spmd.maybe_get_axis_local_type(loss, m) is spmd.V:
                    spmd.assert_type(loss, {m: spmd.P})
            spmd.assert_type(stand_in, spmd.get_local_type(loss))
        handle_torch_function(torch.Tensor.backward, (), stand_in)

    def type_local(self, local: torch.Tensor, whole: Any, grad_placements: Any = None) -> None:
        """A replicated parameter's local part may be R, and its gradient's is P then; spmd_types says I."""
        parameter = isinstance(whole, nn.Parameter)
        if grad_placements is not None or not (parameter or any(whole is p.grad for p in self.params)):
            return
        for m, placement in zip(whole.device_mesh.mesh_dim_names, whole.placements, strict=True):
            kind = spmd.R if m in self.varies else self.kind
            if placement.is_replicate() and kind is spmd.R:
                spmd.mutate_type(local, m, src=spmd.I, dst=spmd.R if parameter else spmd.P)

    def type_gradients(self) -> None:
        """As their parameters' types say; those in a buffer may have the buffer's so far."""
        for p, grad in self.plain_gradients():
            for axis, kind in spmd.get_local_type(p).items():
                now = spmd.maybe_get_axis_local_type(grad, axis)
                if now is None:
                    spmd.assert_type(grad, {axis: kind.backward_type()})
                else:
                    spmd.mutate_type(grad, axis, src=now, dst=kind.backward_type())

    def check_gradients(self) -> None:
        """None is a term of a sum when the step is over."""
        if not self.came_to_backward:
            raise RuntimeError("the step never came to backward()")
        for p, grad in self.plain_gradients():
            for axis, kind in spmd.get_local_type(p).items():
                if kind is spmd.R:
                    spmd.assert_type(grad, {axis: spmd.R})

    def plain_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(p, p.grad) for p in self.params if p.grad is not None and not isinstance(p, DTensor)]


# --------------------------------------------------------------------------- what it has instead


@contextmanager
def replaced(family: Family, mesh: DeviceMesh) -> Iterator[None]:
    """Typed twins stand for what cuts and gathers by hand, and the autograd functions have rules."""
    theirs = vars(sys.modules[family.job.__module__])
    twins = {n: f for n, f in {"mine": mine, "gathered": gathered}.items() if n in theirs}
    with mock.patch.dict(theirs, twins), ExitStack() as stack:
        for cls, rule in typing_rules(mesh).items():
            cls.spmd_typecheck = staticmethod(rule)
            stack.callback(delattr, cls, "spmd_typecheck")
        yield


def mine(x: torch.Tensor, mesh: DeviceMesh, mesh_dim: str, tensor_dim: int = 0) -> torch.Tensor:
    return spmd.convert(x, mesh.get_group(mesh_dim), src=spmd.R, dst=spmd.S(tensor_dim))


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return spmd.all_gather(x, group, src=spmd.S(0), dst=spmd.R)


def typing_rules(mesh: DeviceMesh) -> dict[Any, Callable[..., Any]]:
    """Of the functions in functions.py; one that runs over several mesh dims has its rule on each."""

    def over(change: Callable[[Any, str], Any]) -> Callable[..., Any]:
        def rule(*, x: Any, group: Any) -> Any:
            ranks = set(dist.get_process_group_ranks(group))
            for m in mesh.mesh_dim_names or ():
                if ranks.issuperset(dist.get_process_group_ranks(mesh.get_group(m))):
                    x = change(x, m)
            return x

        return rule

    def term(x: Any, m: str) -> Any:
        return spmd.P if spmd.maybe_get_axis_local_type(x, m) is spmd.P else spmd.V

    return {
        functions.Copy: over(lambda x, m: rules.convert(x, m, src=spmd.I, dst=spmd.R)),
        functions.Reduce: over(lambda x, m: rules.all_reduce(x, m, src=term(x, m), dst=spmd.I)),
        functions.ReduceTwice: over(lambda x, m: rules.all_reduce(x, m, src=term(x, m), dst=spmd.R)),
        functions.Gather: over(lambda x, m: rules.all_gather(x, m, src=spmd.S(0), dst=spmd.R)),
        functions.Scatter: over(lambda x, m: rules.reduce_scatter(x, m, src=term(x, m), dst=spmd.S(0))),
    }
