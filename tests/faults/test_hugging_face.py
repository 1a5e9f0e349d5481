"""Hugging Face's models under the TP plans that they ship with. transformers is no dependency: skipped without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from placement_audit import Job, Report, audit_factory
from tests.gloo.ranks import apart

transformers = pytest.importorskip(
    "transformers", "5.24", reason="not installed. To audit its models: transformers>=5.24"
)

pytestmark = pytest.mark.trace

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_MODELS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen3Config": {"head_dim": 8},
    "Qwen3MoeConfig": {"head_dim": 8, "num_experts": 4, **_EXPERTS},
    "DeepseekV2Config": {
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        **_LATENT,
        **_EXPERTS,
    },
}


def _report(name: str, batches: int) -> Report:
    """Of a model on 2 ranks, its batch taken in so many parts."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    def build() -> Job:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        config = getattr(transformers, name)(**_SMALL, **_MODELS[name], attn_implementation="eager")
        model = transformers.AutoModelForCausalLM.from_config(config)
        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
        apply_tensor_parallelism(model, mesh, plan)
        tokens = torch.randint(0, 64, (4, 12))

        def step() -> None:
            for part in tokens.chunk(batches):
                (model(input_ids=part, labels=part, use_cache=False).loss / batches).backward()

        return Job(model=model, step=step, mesh=mesh)

    return audit_factory(build, world_size=2)


@pytest.mark.parametrize("name", _MODELS)
def test_its_plan_is_right(name: str) -> None:
    report = apart(_report, name, 1)
    assert report.findings == ()
    assert {str(j.verdict) for j in report.judgements} == {"ok"}


def test_norms_of_heads_are_summed_once_too_often_over_micro_batches() -> None:
    """The plan's hook all-reduces ``.grad``, of which the micro-batches before have been summed already."""
    report = apart(_report, "Qwen3Config", 2)
    wrong = {j.param_fqn.rsplit(".", 2)[1] for j in report.judgements if str(j.verdict) != "ok"}
    assert wrong == {"q_norm", "k_norm"}
    assert {f.rule_id for f in report.findings} == {"PA203"}
    assert {step.call_site.code_line for f in report.findings for step in f.path[:1]} == {
        "dist.all_reduce(param.grad, group=mesh.get_group())"
    }
