"""torchtitan 0.3: the same job on one device, and one optimizer step on either model.

As in `titan02_reference`. The config is parsed anew for one rank: degrees go into the model's config, and choose
its code (how tokens get to experts, say).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from placement_audit.adapters import titan03_eager, titan03_step
from placement_audit.adapters.titan02_reference import SGD_LR, called
from placement_audit.case import Reference
from placement_audit.errors import NotMeasurable
from placement_audit.userstep import number_in


def reference(
    *,
    parse: Callable[[], Any],
    build_model: Callable[[Any], Any],
    job: Any,
    device: torch.device,
    seed: int,
    batch_ranks: int,
) -> Reference:
    """Make the job on one device. No collective: it may be made on one rank alone.

    Args:
        parse: makes the job's config, eager and in float32.
        build_model: makes its model, not parallelised, on the meta device.
        job: the config of the parallel job.
        device: where to put it.
        seed: of all batches.
        batch_ranks: ranks with different batches.

    Raises:
        NotMeasurable: the job cannot run on one device here.
    """
    if job.parallelism.context_parallel_degree > 1:
        raise NotMeasurable(
            f"not measured: context_parallel_degree is {job.parallelism.context_parallel_degree}, and a "
            "reference for context parallelism is still to come."
        )
    cfg = parse()
    for key in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "expert_parallel"):
        setattr(cfg.parallelism, f"{key}_degree", 1)
    model = build_model(cfg)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    model.train()
    titan03_eager.experts_in_float32(model)
    trainer = titan03_step.trainer_of(cfg, _one_device(cfg), model, device)

    def step() -> torch.Tensor:
        total = torch.zeros((), device=device)
        for rank in range(batch_ranks):
            # The parallel job's shape of a batch, which its degrees decide.
            inputs = titan03_step.batch(job, device, seed=seed, rank=rank, ranks=batch_ranks)
            total += titan03_step.run_step(trainer, inputs, batch_ranks).detach()
        return total

    return Reference(model=model, step=step)


def updater(*, job: Any, dims: Any, model: nn.Module) -> Callable[[nn.Module, str], float | None]:
    """Make `placement_audit.case.Case.update`.

    Args:
        job: torchtitan's Trainer.Config.
        dims: torchtitan's ParallelDims of the job.
        model: the parallel one; any other that is updated is taken to be on one device.
    """
    from torchtitan.distributed import utils

    def update(updated: nn.Module, which: str) -> float | None:
        dims_here = dims if updated is model else _one_device(job)
        norm = number_in(
            utils.clip_grad_norm_(
                list(updated.parameters()),
                job.training.max_norm,
                foreach=True,
                ep_enabled=dims_here.ep_enabled,
            )
        )
        if which == "sgd":
            torch.optim.SGD([p for p in updated.parameters() if p.requires_grad], lr=SGD_LR).step()
        else:
            optimizers = job.optimizer.build(model_parts=[updated])
            hook = job.model_spec.post_optimizer_build_fn
            if hook is not None:
                called("post_optimizer_build_fn", hook, optimizers, [updated], dims_here)
            optimizers.step()
        return norm

    return update


def _one_device(cfg: Any) -> Any:
    from torchtitan.distributed import ParallelDims

    dims: Any = ParallelDims(
        dp_replicate=1,
        dp_shard=1,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=1,
        spmd_backend=cfg.parallelism.spmd_backend,
    )
    # As in `titan02_reference`: building a mesh would wait for the other ranks.
    dims.get_optional_mesh = lambda *_, **__: None
    return dims
