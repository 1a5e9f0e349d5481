"""torchtitan 0.2.x: one training step without the Trainer's constructor.

The constructor wants a GPU, a tokenizer and a dataset. `forward_backward_step` wants about ten attributes,
and holds all that decides gradients: attention masks, context-parallel sharding of the inputs, loss
parallel, autocast, the loss's normalisation. So it runs on a Trainer made without its constructor.

Where there are values, each data-parallel rank ignores another number of its labels, as real batches do:
equal numbers hide faults of the loss's normalisation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from placement_audit.adapters.titan02_kernels import kernels_on

_IGNORE_INDEX = -100
"""torch's own default, which torchtitan's losses use in every release of 0.2.x."""


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
    batch_rank: int,
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
        seed: of all batches.
        batch_rank: which of the different batches this rank reads.
        batch_ranks: ranks with different batches.

    Returns:
        The step, and its inputs: tokens and labels, each [local_batch_size, seq_len], int64.
    """
    trainer = trainer_of(job, spec, args, dims, mesh, model, device)
    tokens, labels = batch_of(job, args, device, seed=seed, rank=batch_rank, ranks=batch_ranks)
    return lambda: run_step(trainer, tokens, labels, batch_ranks), (tokens, labels)


def run_step(trainer: Any, tokens: torch.Tensor, labels: torch.Tensor, batch_ranks: int) -> torch.Tensor:
    """The Trainer's own forward and backward on one batch.

    Args:
        trainer: from `trainer_of`.
        tokens: [local_batch_size, seq_len], int64.
        labels: likewise.
        batch_ranks: ranks with different batches.
    """
    kwargs: dict[str, Any] = {}
    if "global_valid_tokens" in inspect.signature(trainer.forward_backward_step).parameters:
        # 0.2.2: the loss is a sum over this number, the count over all data-parallel ranks.
        ignored = sum(ignored_labels(r, batch_ranks, labels.numel()) for r in range(batch_ranks))
        kwargs["global_valid_tokens"] = float(labels.numel() * batch_ranks - ignored)
    with kernels_on(tokens.device):
        return trainer.forward_backward_step(input_dict={"input": tokens}, labels=labels, **kwargs)


def batch_of(
    job: Any, args: Any, device: torch.device, *, seed: int, rank: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One random batch: tokens and labels, each [local_batch_size, seq_len], int64; without values on meta.

    Args:
        job: torchtitan's JobConfig.
        args: the model's args.
        device: of the batch.
        seed: of all batches.
        rank: which of the different batches.
        ranks: how many there are.
    """
    shape = (job.training.local_batch_size, job.training.seq_len)
    if device.type == "meta":
        tokens, labels = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
        return tokens, labels
    generator = torch.Generator().manual_seed(seed + rank)
    tokens, labels = (torch.randint(args.vocab_size, shape, generator=generator) for _ in range(2))
    ignored = torch.randperm(labels.numel(), generator=generator)[
        : ignored_labels(rank, ranks, labels.numel())
    ]
    labels.view(-1)[ignored] = _IGNORE_INDEX
    return tokens.to(device), labels.to(device)


def ignored_labels(rank: int, ranks: int, numel: int) -> int:
    """Labels to ignore in one batch of ``numel`` labels: another number on each rank, less than half."""
    return numel * (rank + 1) // (2 * ranks + 2)


def grad_scale(batch_ranks: int) -> Fraction:
    """What the gradient should be, over the gradient of the sum of the ranks' losses.

    0.2.2 divides each rank's loss by the tokens of all ranks: its parts are to be summed. Before that each rank
    took the mean over its own tokens, and FSDP averages.
    """
    import torchtitan.train

    parameters = inspect.signature(torchtitan.train.Trainer.forward_backward_step).parameters
    return Fraction(1) if "global_valid_tokens" in parameters else Fraction(1, batch_ranks)


def trainer_of(
    job: Any, spec: Any, args: Any, dims: Any, mesh: DeviceMesh | None, model: nn.Module, device: torch.device
) -> Any:
    """A Trainer with what `forward_backward_step` reads, made without its constructor.

    Args:
        job: torchtitan's JobConfig.
        spec: the model's train spec.
        args: the model's args.
        dims: torchtitan's ParallelDims.
        mesh: the world mesh; None on one device.
        model: parallelised, or not.
        device: of the batch.
    """
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
