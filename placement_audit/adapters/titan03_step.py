"""torchtitan 0.3: one training step without the Trainer's constructor.

As in `titan02_step`: the job's own `forward_backward_step`, of the Trainer class that its config belongs to, on an
object with the attributes that the step reads.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from placement_audit.adapters.titan02_step import batch_of, ignored_labels

_BATCH, _SEQ_LEN = 2, 128
"""The most that one batch has where values are computed: more tokens take longer and show nothing else."""


def batch_shape(cfg: Any, device: torch.device) -> tuple[int, int]:
    """Sequences in a batch and tokens in a sequence: the job's on the meta device, fewer elsewhere."""
    batch, seq_len = cfg.training.local_batch_size, cfg.training.seq_len
    if device.type == "meta":
        return batch, seq_len
    # A multiple of what sequence and context parallelism divide it by, the latter in flex attention's blocks.
    p = cfg.parallelism
    unit = (
        2
        * p.tensor_parallel_degree
        * p.context_parallel_degree
        * (128 if p.context_parallel_degree > 1 else 1)
    )
    return min(batch, _BATCH), min(seq_len, -(-_SEQ_LEN // unit) * unit)


def batch(
    cfg: Any, device: torch.device, *, seed: int, rank: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One random batch.

    Args:
        cfg: torchtitan's Trainer.Config.
        device: of the batch.
        seed: of all batches.
        rank: which of the different batches.
        ranks: how many there are.

    Returns:
        Tokens, labels and positions, each [sequences, tokens], int64; without values on meta. The first sequence
        is packed: its second document begins somewhere else on each rank.
    """
    size, seq_len = batch_shape(cfg, device)
    job = SimpleNamespace(training=SimpleNamespace(local_batch_size=size, seq_len=seq_len))
    tokens, labels = batch_of(job, cfg.model_spec.model, device, seed=seed, rank=rank, ranks=ranks)
    positions = torch.arange(seq_len).repeat(size, 1)
    if device.type == "meta":
        return tokens, labels, torch.empty_like(positions, device=device)
    second = seq_len * (rank + 1) // (ranks + 1)
    positions[0, second:] -= second
    return tokens, labels, positions.to(device)


def run_step(trainer: Any, inputs: tuple[torch.Tensor, ...], batch_ranks: int) -> torch.Tensor:
    """The Trainer's own forward and backward on one batch.

    Args:
        trainer: from `trainer_of`.
        inputs: from `batch`.
        batch_ranks: ranks with different batches.
    """
    tokens, labels, positions = inputs
    # The loss is a sum over this number, the count over all data-parallel ranks.
    counted = labels.numel() * batch_ranks - sum(
        ignored_labels(r, batch_ranks, labels.numel()) for r in range(batch_ranks)
    )
    return trainer.forward_backward_step(
        input_dict={"input": tokens, "positions": positions},
        labels=labels,
        global_valid_tokens=torch.tensor(counted, device=tokens.device),
    )


def step_of(trainer: Any, inputs: tuple[torch.Tensor, ...], batch_ranks: int) -> Callable[[], object]:
    """`run_step`, to be called without arguments."""
    return lambda: run_step(trainer, inputs, batch_ranks)


def trainer_of(cfg: Any, dims: Any, model: Any, device: torch.device) -> Any:
    """A Trainer with what `forward_backward_step` reads, made without its constructor.

    Args:
        cfg: torchtitan's Trainer.Config, updated to be eager.
        dims: torchtitan's ParallelDims.
        model: parallelised, or not.
        device: of the batch.
    """
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.distributed import utils

    # Private name of torchtitan 0.3.0: the class that a config class is nested in.
    trainer: Any = object.__new__(type(cfg)._owner)
    trainer.config = cfg
    trainer.parallel_dims = dims
    trainer.device = device
    trainer.model_config = cfg.model_spec.model
    trainer.model_parts = [model]
    trainer.step = trainer.ntokens_seen = 0
    trainer.gradient_accumulation_steps = 1
    trainer.train_context = utils.get_spmd_context(parallel_dims=dims)
    trainer.fwd_bwd_fn = trainer._forward_backward_body  # without CUDA graphs
    trainer.loss_fn = cfg.loss.build(compile_config=cfg.compile)
    if isinstance(trainer.loss_fn, ChunkedLossWrapper):
        trainer.loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    return trainer
