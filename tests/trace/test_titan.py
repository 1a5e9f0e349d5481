"""torchtitan's own simple_fsdp.llama3, traced in one process: stock is right, the proposed fix is not."""

from __future__ import annotations

from fractions import Fraction

import pytest

from placement_audit.tracing import Phase
from placement_audit.verdicts import Report, Verdict
from tests.trace.titan import OTHER_HALF, PR_2532, report_on, rewritten
from tests.trace.worlds import judgement, of_rule

pytestmark = pytest.mark.trace

FLOAT32 = ("--training.mixed_precision_param", "float32")
TP8 = ("--parallelism.tensor_parallel_degree", "8")


def norms(report: Report) -> set[str]:
    return {p.fqn for p in report.trace.params if "norm" in p.fqn}


@pytest.mark.parametrize(
    ("config", "overrides", "params"),
    [
        ("fsdp_tp.toml", (), 57),
        ("fsdp_tp.toml", FLOAT32, 57),
        ("fsdp_tp.toml", ("--activation_checkpoint.mode", "full"), 57),
        ("fsdp_tp.toml", ("--activation_checkpoint.mode", "selective"), 57),
        (
            "fsdp_tp.toml",
            (
                "--activation_checkpoint.mode",
                "selective",
                "--activation_checkpoint.selective_ac_option",
                "op",
            ),
            57,
        ),
        ("fsdp_tp.toml", ("--parallelism.disable_loss_parallel",), 57),
        ("fsdp_tp.toml", ("--model.flavor", "8B"), 291),
        ("hsdp_tp.toml", (), 57),
        ("hsdp_tp.toml", FLOAT32, 57),
        ("hsdp_tp.toml", ("--model.flavor", "8B", "--activation_checkpoint.mode", "full"), 291),
        ("hsdp_tp.toml", ("--parallelism.data_parallel_shard_degree", "1"), 57),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_stock_is_right(config: str, overrides: tuple[str, ...], params: int) -> None:
    report = report_on(config, *overrides)
    assert [f for f in report.findings if f.rule_id != "PA501"] == []
    assert report.exit_status == 0
    assert {j.verdict for j in report.judgements} == {Verdict.OK}
    assert len({j.param_fqn for j in report.judgements}) == params
    assert {j.mesh_dim for j in report.judgements} == set(report.trace.mesh.dim_names)
    assert report.trace.readers


SHORT = ("--training.seq_len=64", "--activation_checkpoint.mode=none")


def test_attention_on_dtensors_runs_on_the_cpu() -> None:
    """qwen3's heads are DTensors in attention, for which torch has a sharding rule on GPUs alone."""
    report = report_on("fsdp_tp.toml", "--model.name=qwen3", *SHORT)
    assert (report.exit_status, {j.verdict for j in report.judgements}) == (0, {Verdict.OK})
    assert len(report.trace.params) == 91


def test_a_router_s_local_gradient_spoils_what_is_before_it() -> None:
    """torchtitan issue 2387: under TP the router's output leaves DTensor without a word on its gradient.

    Up to 0.2.2; what comes after the last router is right.
    """
    report = report_on("fsdp_tp.toml", "--model.name=simple_fsdp.deepseek_v3", *SHORT, device="cpu")
    wrong = {(j.param_fqn, j.mesh_dim) for j in report.judgements if j.verdict is not Verdict.OK}
    right = {p.fqn for p in report.trace.params} - {fqn for fqn, _ in wrong}
    experts = {f"layers.5.moe.experts.w{i}" for i in (1, 2, 3)}
    shared = {f"layers.5.moe.shared_experts.w{i}.weight" for i in (1, 2, 3)}
    assert right == experts | shared | {"norm.weight", "output.weight"}
    assert {d for _, d in wrong} == {"tp"}
    (place,) = {f.path[0].call_site.code_line for f in of_rule(report, "PA201")}
    assert ".to_local()" in place


def test_data_parallel_replicas_alone_are_averaged_by_their_reducer() -> None:
    """torchtitan's plain models have DistributedDataParallel inside, by `replicate`, on plain tensors."""
    report = report_on(
        "fsdp_tp.toml",
        "--model.name=llama3",
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=1",
        "--parallelism.tensor_parallel_degree=1",
    )
    assert report.exit_status == 0
    assert {(j.mesh_dim, j.verdict, j.factor) for j in report.judgements} == {
        ("dp_replicate", Verdict.OK, Fraction(1, 2))
    }
    assert {(c.name, c.reduce_op) for c in report.trace.collectives if c.phase == "backward"} == {
        ("all_reduce", "avg")
    }


@pytest.mark.parametrize("overrides", [(), ("--parallelism.disable_loss_parallel",), TP8], ids=" ".join)
def test_tp_alone_leaves_the_norms_to_their_readers(overrides: tuple[str, ...]) -> None:
    report = report_on("tp.toml", *overrides)
    assert [f for f in report.findings if f.severity != "note"] == []
    assert report.exit_status == 0
    assert {j.param_fqn for j in report.judgements if j.verdict is Verdict.DEFERRED} == norms(report)
    assert {j.verdict for j in report.judgements if j.param_fqn not in norms(report)} == {Verdict.OK}
    assert report.trace.readers


def test_tp_alone_embedding_gradient_is_replicate_and_said_so() -> None:
    j = judgement(report_on("tp.toml"), "tok_embeddings.weight", "tp")
    assert (str(j.placement), str(j.observed), j.verdict) == ("Shard(0)", "Replicate()", Verdict.OK)
    assert j.reason == "complete on every rank, although the parameter is a shard"


@pytest.mark.parametrize(("tp", "factor"), [("2", 2), ("8", 8)])
def test_the_proposed_fix_alone_doubles(tp: str, factor: int) -> None:
    with rewritten(PR_2532) as line:
        report = report_on("fsdp_tp.toml", "--parallelism.tensor_parallel_degree", tp)
    found = of_rule(report, "PA202")
    assert {f.param_fqn for f in found} == norms(report)
    assert len(found) == 13
    assert [f.rule_id for f in report.findings if f.severity != "note"] == ["PA202"] * 13
    assert {f.mesh_dim for f in found} == {"tp"}
    assert {(f.path[0].call_site.line, f.path[0].kind) for f in found} == {(line, "to_local")}
    assert {judgement(report, fqn, "tp").factor for fqn in norms(report)} == {Fraction(factor)}
    assert report.exit_status == 1


def test_the_finding_names_who_reduced_already() -> None:
    with rewritten(PR_2532):
        report = report_on("fsdp_tp.toml")
    partners = {(s.kind, s.call_site.function) for f in of_rule(report, "PA202") for s in f.path[1:]}
    assert partners == {("from_local", "replicate_compute")}


@pytest.mark.parametrize("config", ["fsdp_tp.toml", "hsdp_tp.toml"])
def test_given_to_both_ends_it_is_right_and_deferred(config: str) -> None:
    with rewritten(PR_2532, OTHER_HALF):
        report = report_on(config)
    assert report.findings == ()
    assert {j.param_fqn for j in report.judgements if j.verdict is Verdict.DEFERRED} == norms(report)
    assert {j.verdict for j in report.judgements} == {Verdict.OK, Verdict.DEFERRED}


def test_the_other_half_alone_loses_the_reduction() -> None:
    with rewritten(OTHER_HALF) as line:
        report = report_on("fsdp_tp.toml")
    found = of_rule(report, "PA201")
    assert {f.param_fqn for f in found} == norms(report)
    assert {f.path[0].call_site.line for f in found} == {line}


def test_a_data_parallel_average_is_no_fault_but_one_that_differs_is() -> None:
    average = ("self.grad_placements\n", '[Partial("avg")] * self.device_mesh.ndim\n')
    with rewritten(average):
        report = report_on("fsdp_tp.toml", *FLOAT32)
    assert report.findings == ()
    assert {j.factor for j in report.judgements if j.mesh_dim == "fsdp"} == {Fraction(1, 2)}
    one = (
        "grad_placements=self.grad_placements\n",
        'grad_placements=[Partial("avg" if x.numel() == 256 * 2048 else "sum")] * self.device_mesh.ndim\n',
    )
    with rewritten(one):
        report = report_on("fsdp_tp.toml", *FLOAT32)
    wrong = {f.param_fqn for f in report.findings if f.severity == "error"}
    assert wrong == {
        p.fqn for p in report.trace.params if p.tensor.global_shape in ((256, 2048), (2048, 256))
    }
    assert {f.rule_id for f in report.findings} == {"PA203"}


def test_the_second_forward_is_no_backward() -> None:
    """Activation checkpointing gathers again: its all-gathers are told apart from backward's."""
    report = report_on("fsdp_tp.toml", "--activation_checkpoint.mode", "full")
    gathers = [c for c in report.trace.collectives if c.name == "all_gather" and c.mesh_dims == ("fsdp",)]
    assert {c.phase for c in gathers} == {Phase.FORWARD, Phase.RECOMPUTE}
    assert sum(c.phase is Phase.FORWARD for c in gathers) == 57
    assert sum(c.phase is Phase.RECOMPUTE for c in gathers) == 54, "every weight of the six layers, 9 each"


def test_the_tp_sum_of_norm_gradients_ignores_the_reduce_dtype() -> None:
    """pytorch#190626: bfloat16 parameters, float32 reduce dtype, and the sum over tp runs in bfloat16."""
    report = report_on("hsdp_tp.toml")
    found = of_rule(report, "PA501")
    assert {f.param_fqn for f in found} == norms(report)
    assert {(f.mesh_dim, f.path[0].call_site.line, f.path[0].kind) for f in found} == {
        ("tp", 214, "from_local")
    }
    assert {f.observed for f in found} == {"all_reduce(sum) of 256 elements in bfloat16"}
    assert of_rule(report_on("hsdp_tp.toml", *FLOAT32), "PA501") == []
