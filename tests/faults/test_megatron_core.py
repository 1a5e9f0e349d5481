"""Megatron-Core's GPT with tensor and sequence parallelism: plain tensors, raw collectives, gradients in buffers.

megatron-core is no dependency: skipped without. It is made for GPUs; what of it only asks for one is answered here.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from placement_audit import Job, Report, audit_factory
from placement_audit.verdicts import Verdict
from tests.gloo.ranks import apart

core = pytest.importorskip("megatron.core", reason="not installed. To audit its GPT: megatron-core>=0.16")

pytestmark = pytest.mark.trace

TP, DP, VOCAB, LENGTH, BATCH = 2, 2, 64, 16, 2


class _Norm(nn.LayerNorm):
    """As its own, fused one: it has none for CPUs that takes part in sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_more: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for p in self.parameters():
            p.sequence_parallel = config.sequence_parallel


class _NoTracker:
    """Of the random states of GPUs; there is no dropout here."""

    def fork(self, *_args: Any) -> Any:
        return contextlib.nullcontext()


def _on_a_cpu() -> None:
    from megatron.core.transformer import torch_norm

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch_norm.WrappedTorchNorm.__new__ = lambda _cls, *args, **kwargs: _Norm(*args, **kwargs)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("megatron.") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *_args, **_kwargs: _NoTracker()


def _job(finalized: bool, sequence_parallel: bool) -> Job:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    _on_a_cpu()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()  # of the rank that was played before
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=TP,
        sequence_parallel=sequence_parallel,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(qk_layernorm=True)
    model = GPTModel(config, spec, VOCAB, LENGTH, share_embeddings_and_output_weights=False)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)

    tokens = torch.arange(BATCH * DP * LENGTH).view(BATCH * DP, LENGTH).mul(7) % VOCAB
    rows = tokens.chunk(DP)[parallel_state.get_data_parallel_rank()]
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def step() -> None:
        wrapped.zero_grad_buffer()
        wrapped(rows, positions, mask, labels=rows.roll(-1, 1)).mean().backward()
        if finalized:
            finalize_model_grads([wrapped])
        else:
            wrapped.finish_grad_sync()  # data parallel alone
        for p in model.parameters():
            p.grad = p.main_grad

    return Job(
        model=model,
        step=step,
        mesh=init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp")),
        inputs=(rows,),
        batch_placements={"dp": Shard(0)},
        declared={
            name: {"tp": Shard(p.partition_dim)}
            for name, p in model.named_parameters()
            if getattr(p, "tensor_model_parallel", False)
        },
    )


def _report(finalized: bool, sequence_parallel: bool) -> Report:
    return audit_factory(lambda: _job(finalized, sequence_parallel), world_size=DP * TP)


def _wrong(report: Report) -> set[str]:
    """Parameters whose gradient misses a sum over tp, without the layer's number; nothing else may be wrong."""
    wrong = [j for j in report.judgements if j.verdict is not Verdict.OK]
    assert {(j.verdict, j.mesh_dim) for j in wrong} <= {(Verdict.LOST_REDUCTION, "tp")}
    return {j.param_fqn.removeprefix("decoder.").partition("layers.")[2][2:] or j.param_fqn for j in wrong}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_is_right(sequence_parallel: bool) -> None:
    report = apart(_report, True, sequence_parallel)
    assert _wrong(report) == set()
    assert report.exit_status == 0
    assert {j.param_fqn.rpartition(".")[0] for j in report.judgements} >= {
        "embedding.word_embeddings",
        "decoder.layers.1.self_attention.linear_qkv",
        "decoder.final_layernorm",
        "output_layer",
    }


def test_without_the_sums_that_it_makes_in_the_end_each_weight_that_lacks_one_is_told() -> None:
    heads = {f"self_attention.{n}_layernorm.{p}" for n in "qk" for p in ("weight", "bias")}
    assert _wrong(apart(_report, False, False)) == heads
    rows = {f"{n}_layernorm.{p}" for n in ("input", "pre_mlp") for p in ("weight", "bias")}
    biases = {"self_attention.linear_proj.bias", "mlp.linear_fc2.bias"}
    last = {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    assert _wrong(apart(_report, False, True)) == heads | rows | biases | last
