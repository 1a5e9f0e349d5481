"""A user's own step, so that it does what `Case.step` promises; the same for the reference and the optimizer."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from placement_audit.dtensor_api import clean_fqn, in_backward, local_of, unwatched
from placement_audit.dtensor_rules import with_cpu_attention
from placement_audit.engine.futures import answered
from placement_audit.engine.reducer import runnable
from placement_audit.errors import UsageError
from placement_audit.fsdp_api import dividing_locally

_LEARNING_RATE = 0.1
"""Of plain SGD; any will do, both models take the same."""


@contextmanager
def as_on_gpus() -> Generator[None]:
    """Run what runs on GPUs with NCCL on the fake process group and on a CPU as well, and so that it is seen."""
    with answered(), runnable(), with_cpu_attention(), dividing_locally():
        yield


class Step:
    """Runs forward and backward and returns the loss that was differentiated, not what was made for a log.

    A step may call ``backward()`` by itself, once or for each micro-batch, on a loss or on a multiple of it; what
    counts is what it was called on. One that calls none returns the loss, and it is called here.
    """

    def __init__(self, step: Callable[[], object], what: str, scale: float = 1.0) -> None:
        """See the class.

        Args:
            step: the user's.
            what: for messages: "step", or the reference's.
            scale: multiplies the loss before it is differentiated.
        """
        self._step = step
        self._what = what
        self._scale = scale
        self._roots: list[torch.Tensor] = []

    def __call__(self) -> torch.Tensor:
        """One step; gradients are left in ``.grad``."""
        self._roots = []
        with self._noted(), as_on_gpus(), torch.enable_grad():
            out = self._step()
            if not self._roots:
                self._differentiate(out)
        with unwatched():
            if all(isinstance(r, DTensor) for r in self._roots):
                return sum(self._roots[1:], self._roots[0])
            return sum((local_of(r) for r in self._roots[1:]), local_of(self._roots[0]))

    def scaled(self, scale: float) -> Step:
        """The same step with its loss multiplied by ``scale`` before it is differentiated."""
        return Step(self._step, self._what, scale)

    def _differentiate(self, out: object) -> None:
        if not isinstance(out, torch.Tensor):
            raise UsageError(
                f"{self._what} called no backward() and returned {type(out).__name__}. It must run forward and "
                "backward, or return the loss (a tensor of one element)."
            )
        if not out.requires_grad:
            raise UsageError(
                f"{self._what} called no backward(), and the tensor that it returned needs no gradient. It must "
                "run forward and backward, or return the loss as it is, not detached."
            )
        if out.numel() != 1:
            raise UsageError(
                f"{self._what} called no backward(), and what it returned is no loss: a tensor of shape "
                f"{tuple(out.shape)}, where one element was expected."
            )
        out.backward()

    @contextmanager
    def _noted(self) -> Generator[None]:
        """Keep what backward is called on, as it is then: a log may change it in place afterwards."""
        original = torch.autograd.backward

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if in_backward():  # a part of a forward that is taken again (reentrant checkpointing), no loss
                return original(tensors, grad_tensors, *args, **kwargs)
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            seeds = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or ())
            seeds += [None] * (len(roots) - len(seeds))
            with unwatched():
                for root, seed in zip(roots, seeds, strict=True):
                    value = root.detach() if seed is None else (root * seed).sum()
                    self._roots.append(value * self._scale)  # a tensor of its own
                if self._scale != 1:
                    seeds = [
                        torch.ones_like(r) * self._scale if s is None else s * self._scale
                        for r, s in zip(roots, seeds, strict=True)
                    ]
            if self._scale != 1:
                return original(roots, seeds, *args, **kwargs)
            return original(tensors, grad_tensors, *args, **kwargs)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original


def updater(
    model: nn.Module, optimizer: Any, theirs: Callable[[], tuple[nn.Module, Any] | None]
) -> Callable[[nn.Module, str], float | None]:
    """`Case.update` for a user's optimizer.

    Args:
        model: the parallel one, as the user has it.
        optimizer: `Job.optimizer`.
        theirs: the reference's model and its own optimizer, once it is made; None before.

    Raises:
        UsageError: it is no optimizer, nor a function of the model.
    """
    _check(optimizer)

    def update(of: nn.Module, which: str) -> float | None:
        reference = theirs()
        ours = reference is None or of is not reference[0]
        own = optimizer if ours or reference is None or reference[1] is None else reference[1]
        whose = model if ours else of
        if which == "sgd" or own is None:
            params = [p for p in whose.parameters() if p.grad is not None]
            torch.optim.SGD(params, lr=_LEARNING_RATE).step()
            return None
        if isinstance(own, torch.optim.Optimizer):
            names = _names(unwrapped(model if own is optimizer else whose))
            return _stepped(copy_of(own, names, unwrapped(whose)))
        return _stepped(own(whose))

    return update


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel, whose names begin with "module."."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _check(optimizer: Any) -> None:
    wanted = "expected a torch optimizer, or a function of the model"
    # Importing torch.distributed.optim compiles the optimizers of its own: who has one has imported it.
    sharding = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if sharding is not None and isinstance(optimizer, sharding.ZeroRedundancyOptimizer):
        raise UsageError(
            f"optimizer: {wanted} that steps whole parameters; ZeroRedundancyOptimizer cannot take one device's step. "
            f"Give the one that it shards: lambda model: {optimizer._optim_constructor.__name__}(model.parameters())."
        )
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return
    if not callable(optimizer):
        raise UsageError(f"optimizer: {wanted}; got {type(optimizer).__name__}.")
    try:
        inspect.signature(optimizer).bind(nn.Module())
    except TypeError as error:
        raise UsageError(f"optimizer: {wanted}, which is called with the model alone: {error}.") from None
    except ValueError:  # a builtin without a signature
        return


def _stepped(made: Any) -> float | None:
    """Step what a function of the model returned; a number is the norm that it clipped by."""
    if hasattr(made, "step"):
        made.step()
        return None
    if isinstance(made, torch.Tensor):
        return number_in(made.full_tensor() if isinstance(made, DTensor) else made)
    return float(made) if isinstance(made, int | float) else None


def number_in(x: torch.Tensor) -> float | None:
    """The number in a tensor of one element; None on the meta device, where it has none."""
    return None if x.is_meta else x.item()


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): clean_fqn(n) for n, p in model.named_parameters()}


def copy_of(optimizer: torch.optim.Optimizer, names: dict[int, str], model: nn.Module) -> Any:
    """The same optimizer without any state, over the parameters of ``model``.

    Args:
        optimizer: as the user made it; it stays as it is.
        names: FQN by id() of the parameters that it has.
        model: has parameters of the same names.

    Raises:
        UsageError: it has parameters that are not the model's.
    """
    params = {clean_fqn(n): p for n, p in model.named_parameters()}
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({k: _copied(v, names, model) for k, v in optimizer.__dict__.items()})
    twin.state = defaultdict(dict)
    groups = []
    for group in optimizer.param_groups:
        odd = [p for p in group["params"] if id(p) not in names]
        if odd:
            raise UsageError(
                f"optimizer: a parameter of shape {tuple(odd[0].shape)} is none of the model's. Make the optimizer "
                "from model.parameters(), after the model was parallelised."
            )
        groups.append({**group, "params": [params[names[id(p)]] for p in group["params"]]})
    twin.param_groups = groups
    return twin


def _copied(value: Any, names: dict[int, str], model: nn.Module) -> Any:
    """What an optimizer holds, the optimizers in it copied likewise: some only hand on (torchtitan's, Accelerate's)."""
    if isinstance(value, torch.optim.Optimizer):
        return copy_of(value, names, model)
    if isinstance(value, list) and any(isinstance(v, torch.optim.Optimizer) for v in value):
        return [_copied(v, names, model) for v in value]
    if type(value) is dict and any(isinstance(v, torch.optim.Optimizer) for v in value.values()):
        return {k: _copied(v, names, model) for k, v in value.items()}
    return value
