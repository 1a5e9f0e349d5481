"""torchtitan 0.3.0's graph_trainer, traced and measured: stock is right, the proposed fix is not."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from placement_audit.report.json_io import loads
from placement_audit.verdicts import Report, Verdict
from tests.releases import Unreachable
from tests.trace.titan03 import OTHER_HALF, PR_2532, WRAPPER, Job, command, reports, titan03
from tests.trace.worlds import judgement, of_rule

pytestmark = pytest.mark.trace

CONFIG = "configs/titan03_fsdp_tp.toml"
DEEPSEEK = ("graph_trainer.deepseek_v3", "graph_trainer_deepseek_v3_debugmodel")
QWEN = ("graph_trainer.qwen3", "graph_trainer_qwen3_debugmodel")


def degrees(**of: int) -> list[str]:
    """Overrides; a mesh dim that is not named has one rank."""
    keys = {
        "dp_replicate": "data_parallel_replicate",
        "dp_shard": "data_parallel_shard",
        "tp": "tensor_parallel",
        "ep": "expert_parallel",
    }
    words = ["--training.disable_cuda_graphs"]
    for name, key in keys.items():
        words += [f"--parallelism.{key}_degree", str(of.get(name, 1))]
    return words


SHORT = ("--training.local_batch_size", "2", "--training.seq_len", "64")
"""For jobs whose values are computed: quicker, and the same placements."""

STOCK: tuple[Job, ...] = (
    ("fsdp-tp", None, CONFIG, ()),
    ("hsdp-tp", None, CONFIG, degrees(dp_replicate=2, dp_shard=2, tp=2)),
    ("tp", None, CONFIG, degrees(tp=2)),
    ("ddp-tp", None, CONFIG, degrees(dp_replicate=2, tp=2)),
    ("wide", None, CONFIG, degrees(dp_shard=16, tp=8)),
    ("8b", "graph_trainer.llama3", "graph_trainer_llama3_8b", degrees(dp_shard=8, tp=8)),
    ("qwen3", *QWEN, degrees(dp_shard=2, tp=2)),
    ("deepseek", *DEEPSEEK, [*degrees(dp_shard=2, tp=2), *SHORT]),
    ("deepseek-ep", *DEEPSEEK, [*degrees(dp_shard=2, tp=2, ep=2), *SHORT]),
    (
        "fsdp2",
        "llama3",
        "llama3_debugmodel",
        [*degrees(dp_shard=2, tp=2), *SHORT, "--parallelism.spmd_backend", "partial_dtensor"],
    ),
)

PARAMETERS = {"8b": 227, "qwen3": 75, "deepseek": 83, "deepseek-ep": 83}
"""Of the models other than the debug llama, which has 45."""


def environment(folder: Path, *edits: tuple[str, str], with_needs: bool = True) -> dict[str, str]:
    try:
        return titan03(folder, *edits, with_needs=with_needs)
    except Unreachable as why:
        pytest.skip(str(why))


def audited(tmp: Path, jobs: tuple[Job, ...], *edits: tuple[str, str]) -> dict[str, Report]:
    return dict(reports(environment(tmp / "titan", *edits), tmp, jobs))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return audited(tmp_path_factory.mktemp("stock"), STOCK)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(tmp_path_factory.mktemp("env"))


def norms(report: Report) -> set[str]:
    return {p.fqn for p in report.trace.params if "norm" in p.fqn}


def site_of(edit: str, env_folder: Path) -> int:
    """The line that an edit begins at."""
    text = (env_folder / WRAPPER).read_text(encoding="utf-8")
    return text[: text.index(edit)].count("\n") + 1


@pytest.mark.parametrize("name", [name for name, *_ in STOCK])
def test_stock_is_right(stock: dict[str, Report], name: str) -> None:
    report = stock[name]
    assert [f for f in report.findings if f.rule_id != "PA501"] == []
    assert report.exit_status == 0
    assert {j.verdict for j in report.judgements} == {Verdict.OK}
    assert len({j.param_fqn for j in report.judgements}) == PARAMETERS.get(name, 45)
    assert {j.mesh_dim for j in report.judgements} == set(report.trace.mesh.dim_names)
    assert report.trace.readers


def test_meshes_and_batches_are_the_jobs(stock: dict[str, Report]) -> None:
    seen = {n: (r.trace.mesh.dim_names, r.trace.mesh.shape, r.trace.batch_dims) for n, r in stock.items()}
    assert seen["hsdp-tp"] == (("dp_replicate", "fsdp", "tp"), (2, 2, 2), ("dp_replicate", "fsdp"))
    assert seen["tp"] == (("tp",), (2,), ())
    assert seen["wide"] == (("fsdp", "tp"), (16, 8), ("fsdp",))
    assert {r.trace.run.device_type for n, r in stock.items() if not n.startswith(("deepseek", "fsdp2"))} == {
        "meta"
    }


def test_tp_alone_sums_the_norms_gradients(stock: dict[str, Report]) -> None:
    """Other than in 0.2: SimpleFSDP wraps the model though its mesh has one rank, and its from_local reduces."""
    report = stock["tp"]
    assert {str(judgement(report, fqn, "tp").observed) for fqn in norms(report)} == {"Replicate()"}


def test_the_proposed_fix_alone_doubles(tmp_path: Path) -> None:
    jobs: tuple[Job, ...] = (
        ("fsdp-tp", None, CONFIG, ()),
        ("tp", None, CONFIG, degrees(tp=4)),
        ("qwen3", *QWEN, degrees(dp_shard=2, tp=2)),
    )
    done = audited(tmp_path, jobs, PR_2532)
    line = site_of(PR_2532[1], tmp_path / "titan")
    for name, factor in (("fsdp-tp", 2), ("tp", 4)):
        report = done[name]
        found = of_rule(report, "PA202")
        assert {f.param_fqn for f in found} == norms(report)
        assert [f.rule_id for f in report.findings if f.severity != "note"] == ["PA202"] * 13
        assert {f.mesh_dim for f in found} == {"tp"}
        assert {(f.path[0].call_site.line, f.path[0].kind) for f in found} == {(line, "to_local")}
        assert {judgement(report, fqn, "tp").factor for fqn in norms(report)} == {Fraction(factor)}
        assert report.exit_status == 1
    assert {f.param_fqn for f in of_rule(done["qwen3"], "PA202")} == norms(done["qwen3"])


def test_given_to_both_ends_it_is_right_and_deferred(tmp_path: Path) -> None:
    report = audited(tmp_path, (("fsdp-tp", None, CONFIG, ()),), PR_2532, OTHER_HALF)["fsdp-tp"]
    assert report.findings == ()
    assert {j.param_fqn for j in report.judgements if j.verdict is Verdict.DEFERRED} == norms(report)
    assert {j.verdict for j in report.judgements} == {Verdict.OK, Verdict.DEFERRED}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (["--config", CONFIG, "--", *SHORT], 45),
        # experts multiply in bfloat16 unless told otherwise: numbers would not agree to 1e-5
        (["--module", DEEPSEEK[0], "--config", DEEPSEEK[1], "--", *degrees(tp=2), *SHORT], 83),
    ],
    ids=["llama3", "deepseek"],
)
def test_ranks_measure_it_right(
    env: dict[str, str], tmp_path: Path, words: list[str], parameters: int
) -> None:
    saved = tmp_path / "report.json"
    done = command(env, "--measure", "--format", "json", "--output-file", str(saved), *words)
    assert done.returncode == 0, done.stderr
    report = loads(saved.read_bytes())
    assert report.measurement is not None
    assert len(report.measurement.params) == parameters
    assert max(p.grad_error for p in report.measurement.params) < 1e-5
    assert max(p.sgd_error for p in report.measurement.params) < 1e-5
    assert report.measurement.loss_error < 1e-6
    assert {j.verdict for j in report.judgements} == {Verdict.OK}
    assert of_rule(report, "PA901") == []


@pytest.mark.gloo
def test_ranks_measure_the_doubled_gradient(tmp_path: Path) -> None:
    env, saved = environment(tmp_path / "titan", PR_2532), tmp_path / "report.json"
    saving = ("--format", "json", "--output-file", str(saved))
    done = command(env, "--config", CONFIG, "--measure", *saving, "--", *SHORT)
    assert done.returncode == 1, done.stderr
    report = loads(saved.read_bytes())
    assert report.measurement is not None
    off = {p.fqn: p.grad_ratio for p in report.measurement.params if not p.grad_error < 1e-5}
    assert set(off) == norms(report)
    assert all(ratio == pytest.approx(2.0, abs=1e-4) for ratio in off.values())
    assert {f.rule_id for f in report.findings if f.severity == "error"} == {"PA202"}


# --------------------------------------------------------------------------- a user's optimizer

OWN = """
import dataclasses
import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.experiments.graph_trainer.llama3.config_registry import graph_trainer_llama3_debugmodel

class Own(OptimizersContainer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.model_parts[0].parameters():
            g = p.grad.to_local()
            p.to_local().sub_(g @ g.T @ g if g.dim() == 2 else g)

def job():
    made = graph_trainer_llama3_debugmodel()
    made.optimizer = Own.Config(param_groups=made.optimizer.param_groups)
    return made

def hooked():
    made = graph_trainer_llama3_debugmodel()
    made.model_spec = dataclasses.replace(made.model_spec, post_optimizer_build_fn=HOOK)
    return made

def clips_by_its_own_norm(optimizers, parts, dims):
    def hook(*_):
        grads = [p.grad.to_local() for p in parts[0].parameters()]
        total = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for g in grads:
            g.mul_((0.01 / total).clamp(max=1.0))
    optimizers.register_step_pre_hook(hook)
"""


def own_job(tmp: Path, name: str, hook: str = "clips_by_its_own_norm") -> Report:
    env = environment(tmp / "titan")
    (tmp / "own_jobs.py").write_text(OWN.replace("HOOK", hook))
    env["PYTHONPATH"] = f"{tmp}:{env['PYTHONPATH']}"
    return dict(reports(env, tmp, [("own", "own_jobs", name, degrees(dp_shard=2, tp=2))]))["own"]


def test_a_users_optimizer_on_shards_is_told(tmp_path: Path) -> None:
    report = own_job(tmp_path, "job")
    assert report.trace.readers
    found = of_rule(report, "PA404")
    assert {f.param_fqn for f in found} == {
        p.fqn for p in report.trace.params if len(p.tensor.global_shape) == 2
    }
    assert {f.path[0].call_site.code_line for f in found} == {
        "p.to_local().sub_(g @ g.T @ g if g.dim() == 2 else g)"
    }
    assert {j.verdict for j in report.judgements} == {Verdict.OK}


def test_a_users_hook_with_a_norm_of_this_ranks_own_is_told(tmp_path: Path) -> None:
    report = own_job(tmp_path, "hooked")
    assert report.trace.readers
    found = of_rule(report, "PA403")
    assert {(f.param_fqn, f.mesh_dim) for f in found} == {(fqn, "tp") for fqn in norms(report)}
    assert {f.path[0].call_site.code_line for f in found} == {"g.mul_((0.01 / total).clamp(max=1.0))"}
    assert report.exit_status == 1


def test_a_hook_that_cannot_be_called_is_told_in_a_note(tmp_path: Path) -> None:
    report = own_job(tmp_path, "hooked", "lambda optimizers: None")
    assert not report.trace.readers
    (note,) = [n for n in report.trace.run.notes if "was not followed" in n]
    assert "post_optimizer_build_fn(optimizers) is called with 3 arguments" in note
    assert {j.verdict for j in report.judgements} == {Verdict.OK}


# --------------------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--module", "lama3", "--config", "llama3_debugmodel"],
            "module 'lama3': there is no such module. Did you mean 'llama3'?",
        ),
        (
            ["--module", "graph_trainer.llama3", "--config", "graph_trainer_llama3_debugmodl"],
            "has no such function. Did you mean 'graph_trainer_llama3_debugmodel'?",
        ),
        (
            ["--module", "qwen3_5", "--config", "qwen3_5_debugmodel"],
            "torchtitan.models.qwen3_5.config_registry cannot be imported: ModuleNotFoundError: No module named 'fla'",
        ),
        (
            ["--module", "llama3", "--config", "llama3_debugmodel"],
            "-- --parallelism.spmd_backend partial_dtensor",
        ),
        (
            ["--config", CONFIG, "--", "--training.seq_length", "64"],
            "Unrecognized options: --training.seq_length",
        ),
        (["--config", CONFIG, "--", "--module", "llama3"], "--module after --: the job is named before it"),
        (["--config", CONFIG, "--", *degrees(tp=3)], "tensor_parallel_degree (3) must divide n_heads (16)"),
        (
            [
                "--config",
                CONFIG,
                "--",
                "--parallelism.pipeline_parallel_degree",
                "2",
                "--training.disable_cuda_graphs",
            ],
            "pipeline parallelism is not supported yet",
        ),
        (
            [
                *("--module", "llama3", "--config", "llama3_debugmodel_varlen_attn", "--"),
                *("--parallelism.spmd_backend", "partial_dtensor"),
            ],
            "its attention is varlen",
        ),
        (
            ["--config", "configs/fsdp_tp.toml"],
            "a TOML job file is torchtitan 0.2's, and torchtitan 0.3.0 is installed",
        ),
    ],
    ids=lambda v: " ".join(v[:4]) if isinstance(v, list) else None,
)
def test_a_wrong_job_is_told_in_one_message(env: dict[str, str], words: list[str], told: str) -> None:
    done = command(env, *words)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_missing_packages_are_named_together(tmp_path: Path) -> None:
    done = command(environment(tmp_path, with_needs=False), "--config", CONFIG)
    assert done.returncode == 2
    assert done.stderr == (
        "placement-audit: error: torchtitan 0.3.0 needs spmd_types and torch_checkpointing, not installed in this "
        "environment. pip install spmd_types==0.2.3 torch_checkpointing\n"
    )
