"""torchtitan 0.2.x: one training step without the Trainer's constructor.

The constructor wants a GPU, a tokenizer and a dataset. `forward_backward_step` wants about ten attributes,
and holds all that decides gradients: attention masks, context-parallel sharding of the inputs, loss
parallel, autocast, the loss's normalisation. So it runs on a Trainer made without its constructor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def step_of(
    *,
    job: Any,
    spec: Any,
    args: Any,
    dims: Any,
    mesh: DeviceMesh,
    model: nn.Module,
    device: torch.device,
    seed: int,
    batch_ranks: int,
) -> tuple[Callable[[], object], tuple[torch.Tensor, ...]]:
    """Make the step and its random batch.

    Args:
        job: torchtitan's JobConfig.
        spec: the model's train spec.
        args: the model's args.
        dims: torchtitan's ParallelDims, meshes built.
        mesh: the world mesh (0.2.0 reads it from the Trainer).
        model: parallelised.
        device: of the batch.
        seed: of the batch; equal on the ranks that read the same batch.
        batch_ranks: ranks with different batches.

    Returns:
        The step, and its inputs: tokens and labels, each [local_batch_size, seq_len], int64.
    """
    trainer = _trainer(job, spec, args, dims, mesh, model, device)
    shape = (job.training.local_batch_size, job.training.seq_len)
    if device.type == "meta":
        tokens, labels = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    else:
        generator = torch.Generator().manual_seed(seed)
        tokens, labels = (
            torch.randint(args.vocab_size, shape, generator=generator).to(device) for _ in range(2)
        )
    kwargs: dict[str, Any] = {}
    if "global_valid_tokens" in inspect.signature(trainer.forward_backward_step).parameters:
        # 0.2.2: the loss is a sum over this number, the count over all data-parallel ranks.
        kwargs["global_valid_tokens"] = float(shape[0] * shape[1] * batch_ranks)

    def step() -> object:
        return trainer.forward_backward_step(input_dict={"input": tokens}, labels=labels, **kwargs)

    return step, (tokens, labels)


def _trainer(
    job: Any, spec: Any, args: Any, dims: Any, mesh: DeviceMesh, model: nn.Module, device: torch.device
) -> Any:
    import torchtitan.train
    from torchtitan.distributed import utils

    # Any: some attributes are those of another release of 0.2.x.
    trainer: Any = object.__new__(torchtitan.train.Trainer)
    trainer.job_config = job
    trainer.parallel_dims = dims
    trainer.world_mesh = mesh
    trainer.device = device
    trainer.train_spec = spec
    trainer.model_args = args
    trainer.model_parts = [model]
    # Attention masks of packed documents ask for the end-of-document token; random tokens have none.
    trainer.tokenizer = SimpleNamespace(eos_id=0)
    trainer.gradient_accumulation_steps = 1
    trainer.loss_fn = spec.build_loss_fn(job, parallel_dims=dims)
    loss_parallel = dims.tp_enabled and not job.parallelism.disable_loss_parallel
    context_args = (loss_parallel, False)  # 0.2.0 has a second one, compiled autograd
    wanted = len(inspect.signature(utils.get_train_context).parameters)
    trainer.train_context = utils.get_train_context(*context_args[:wanted])
    trainer.maybe_enable_amp = utils.maybe_enable_amp(
        dims, job.training.mixed_precision_param, "cpu" if device.type == "meta" else device.type
    )
    return trainer
