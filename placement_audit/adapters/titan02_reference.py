"""torchtitan 0.2.x: the same job on one device, and one optimizer step on either model.

The reference is torchtitan's own model, not parallelised, in float32, and its step is the same
`Trainer.forward_backward_step` on the batch of each data-parallel rank in turn. The gradients add up, and so
do the losses: in 0.2.2 each is a sum over its tokens, divided by the count over all ranks; in 0.2.0 and 0.2.1
each is a mean over its own tokens, and a job that averages gradients has them smaller by the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from placement_audit.adapters import titan02_step
from placement_audit.case import Reference
from placement_audit.errors import NotMeasurable
from placement_audit.userstep import number_in

SGD_LR = 0.1
"""Of the plain SGD step. Any number will do: the change is linear in it, and compared with its like."""


def in_float32(job: Any) -> bool:
    """Ask for float32 everywhere, so that numbers can be compared to 1e-5; False where the job did already."""
    keys = ("dtype", "mixed_precision_param", "mixed_precision_reduce")
    other = [key for key in keys if getattr(job.training, key) != "float32"]
    for key in other:
        setattr(job.training, key, "float32")
    return bool(other)


def reference(
    *, job: Any, spec: Any, args: Any, dims: Any, device: torch.device, seed: int, batch_ranks: int
) -> Reference:
    """Make the job on one device. No collective: it may be made on one rank alone.

    Args:
        job: torchtitan's JobConfig.
        spec: the model's train spec.
        args: the model's args, updated from the job.
        dims: torchtitan's ParallelDims of the job, for model converters.
        device: where to put it.
        seed: of all batches.
        batch_ranks: ranks with different batches.

    Raises:
        NotMeasurable: the job cannot run on one device here.
    """
    _check(job, args)
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.tools import utils

    with torch.device("meta"), utils.set_default_dtype(torch.float32):
        model = spec.model_cls(args)
    build_model_converters(job, dims).convert(model)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    model.train()
    trainer = titan02_step.trainer_of(job, spec, args, _one_device(), None, model, device)
    trainer.maybe_enable_amp = contextlib.nullcontext()

    def step() -> torch.Tensor:
        total = torch.zeros((), device=device)
        for rank in range(batch_ranks):
            tokens, labels = titan02_step.batch_of(job, args, device, seed=seed, rank=rank, ranks=batch_ranks)
            total += titan02_step.run_step(trainer, tokens, labels, batch_ranks).detach()
        return total

    return Reference(model=model, step=step)


def updater(*, job: Any, spec: Any, dims: Any, model: nn.Module) -> Callable[[nn.Module, str], float | None]:
    """Make `placement_audit.case.Case.update`.

    Args:
        job: torchtitan's JobConfig.
        spec: the model's train spec.
        dims: torchtitan's ParallelDims of the job.
        model: the parallel one; any other that is updated is taken to be on one device.
    """
    import torchtitan.train
    from torchtitan.distributed import utils

    def update(updated: nn.Module, which: str) -> float | None:
        dims_here = dims if updated is model else _one_device()
        norm = None
        # Optimizers that step in backward are done before clipping begins.
        if not job.optimizer.early_step_in_backward:
            clipped_by = utils.clip_grad_norm_(
                list(updated.parameters()),
                job.training.max_norm,
                **_known(utils.clip_grad_norm_, foreach=True, pp_mesh=None, ep_enabled=dims_here.ep_enabled),
            )
            norm = number_in(clipped_by)
        if which == "sgd":
            torch.optim.SGD([p for p in updated.parameters() if p.requires_grad], lr=SGD_LR).step()
        else:
            # Made after backward, an optimizer that steps in backward would do nothing.
            config = dataclasses.replace(job.optimizer, early_step_in_backward=False)
            # The Trainers of 0.2.0 and 0.2.1 have a manager of replicas, and hand it over, too.
            more = (None,) if "ft_manager" in torchtitan.train.Trainer.__annotations__ else ()
            called(
                "build_optimizers_fn", spec.build_optimizers_fn, [updated], config, dims_here, *more
            ).step()
        return norm

    return update


def _check(job: Any, args: Any) -> None:
    """Refuse what has no like on one device.

    Raises:
        NotMeasurable: with the option that is the reason.
    """
    # 0.2.2 has attn_type, 0.2.0 and 0.2.1 have use_flex_attn.
    attention = getattr(args, "attn_type", "flex" if getattr(args, "use_flex_attn", False) else "sdpa")
    if attention in ("flex", "varlen"):
        raise NotMeasurable(
            f"not measured: the model's attention is {attention!r}, and a reference for it is still to come."
        )
    if job.parallelism.context_parallel_degree > 1:
        raise NotMeasurable(
            f"not measured: context_parallel_degree is {job.parallelism.context_parallel_degree}, and a "
            "reference for context parallelism is still to come."
        )


def _one_device() -> Any:
    from torchtitan.distributed import ParallelDims

    dims: Any = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    # Optimizers with hooks ask for meshes (MoE load balancing, to add up over ranks); here there are none,
    # and building one would wait for the other ranks.
    dims.get_optional_mesh = lambda *_: None
    return dims


def called(what: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call a function of the job's by position, as the Trainer does.

    Raises:
        RuntimeError: it does not take what the Trainer gives it; ``what`` names it.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*given)
    except TypeError as error:
        raise RuntimeError(f"{what}{signature} is called with {len(given)} arguments: {error}") from None
    return function(*given)


def _known(function: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    """Those keyword arguments that this release's function takes."""
    return {k: v for k, v in kwargs.items() if k in inspect.signature(function).parameters}
