"""The runtime fix on real ranks, against one device: right wherever the release is, and cheaper."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from placement_audit import pipeline
from placement_audit.config import RankEnv, load
from placement_audit.tracing import Phase
from placement_audit.verdicts import Report, Verdict
from tests.gloo.ranks import ROOT, on_ranks
from tests.releases import Unreachable, release
from tests.trace.titan import CONFIGS

pytestmark = pytest.mark.gloo

RELEASED, REDUCED, DEFERRED = "released", "reduced", "deferred"
FORMS = (RELEASED, REDUCED, DEFERRED)
STYLES = ("N", "NLF", "NL", "whole input", "hidden shards")
TINY = 1e-5


@contextmanager
def fixed(form: str) -> Generator[None]:
    from placement_audit.fix import install, uninstall

    if form != RELEASED:
        install(deferred=form == DEFERRED)
    try:
        yield
    finally:
        uninstall()


def simple_fsdp() -> Any:
    """The installed torchtitan's module of that name."""
    try:
        return importlib.import_module("torchtitan.experiments.simple_fsdp.simple_fsdp")
    except ModuleNotFoundError:
        return importlib.import_module("torchtitan.experiments.graph_trainer.simple_fsdp")


# --------------------------------------------------------------------------- a norm, wrapped by torchtitan


@dataclass(frozen=True)
class Case:
    """One set-up of the norm.

    The style is the matrix's, and two more: the input whole on every tp rank, so that the gradient arrives complete
    (Replicate), and sharded on the hidden dim, so that it arrives as Shard. With ``half`` it is computed in bfloat16
    and reduced in float32; with ``stored`` the parameter is bfloat16, too.
    """

    form: str
    style: str
    mode: str = "fully_shard"
    compiled: bool = False
    recomputed: bool = False
    half: bool = False
    stored: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        return {"hybrid_shard": {"r": 2, "s": 2, "tp": 2}}.get(self.mode, {"dp": 2, "tp": 2})


@dataclass(frozen=True)
class Answer:
    """What a rank saw of the gradient, and the backward's collectives: (name, mesh dims, numel, dtype).

    The error is what is left of the difference to one device's after scaling; drift, the greatest between ranks.
    """

    placements: str
    scale: float
    error: float
    drift: float
    collectives: tuple[tuple[str, str, int, str], ...]
    failure: str = ""


class Norm(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.style = style
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(16, generator=generator))

    def forward(self, x: Any) -> torch.Tensor:
        w = self.weight
        if not isinstance(x, DTensor):
            return x * w if self.style == "hidden shards" else nn.functional.rms_norm(x, (16,), w)
        if self.style == "N":
            return nn.functional.rms_norm(x, (16,), w).to_local()
        if self.style == "whole input":
            whole = x.redistribute(placements=[Replicate()])
            return nn.functional.rms_norm(whole, (16,), w).redistribute(placements=[Shard(1)]).to_local()
        if self.style == "hidden shards":
            return (x.redistribute(placements=[Shard(2)]) * w).redistribute(placements=[Shard(1)]).to_local()
        label = {"grad_placements": [Partial()]} if self.style == "NLF" else {}
        return nn.functional.rms_norm(x.to_local(), (16,), w.to_local(**label))


class Collectives(TorchDispatchMode):
    """Which ran, over which mesh dims."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, int, str]] = []
        self._names = {}
        for i, name in enumerate(mesh.mesh_dim_names or ()):
            self._names[tuple(dist.get_process_group_ranks(mesh.get_group(i)))] = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = func._opname
        if func.namespace == "_c10d_functional" and name.startswith(("all_", "reduce_")):
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            dims = self._names.get(tuple(dist.get_process_group_ranks(group)), "joint")
            short = name.removesuffix("_into_tensor").removesuffix("_tensor")
            self.seen.append((short, dims, args[0].numel(), str(args[0].dtype).removeprefix("torch.")))
        return func(*args, **(kwargs or {}))


def run_case(case: Case, mesh: DeviceMesh) -> Answer:
    wrapper = simple_fsdp()
    generator = torch.Generator().manual_seed(1)
    whole_x, whole_g = (torch.randn(4, 8, 16, generator=generator) for _ in range(2))
    one = Norm(case.style)
    (one(whole_x) * whole_g).sum().backward()
    truth = one.weight.grad

    model = Norm(case.style)
    tp, dp = mesh["tp"], mesh[tuple(n for n in mesh.mesh_dim_names or () if n != "tp")]
    initial = model.weight.detach().to(torch.bfloat16 if case.stored else torch.float32)
    model.weight = nn.Parameter(distribute_tensor(initial, tp, [Replicate()]))
    policy = wrapper.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.half else None
    torch._dynamo.reset()
    with fixed(case.form):
        model = wrapper.data_parallel(model, dp, case.mode, mp_policy=policy)
        weight = dict(model.named_parameters())["weight"]
        batch, batches = mesh.get_rank() // 2, mesh.size() // 2
        rows = slice(4 // batches * batch, 4 // batches * (batch + 1))
        dtype = torch.bfloat16 if case.half else torch.float32
        x, g = (
            distribute_tensor(t[rows].to(dtype), tp, [Shard(1)], src_data_rank=None)
            for t in (whole_x, whole_g)
        )
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if case.compiled else model
        y = checkpoint(run, x, use_reentrant=False) if case.recomputed else run(x)
        loss = (y * g.to_local()).sum()
        try:
            with Collectives(mesh) as seen:
                loss.backward()
        except RuntimeError as error:
            return Answer("", 0.0, 0.0, 0.0, (), str(error))
    assert isinstance(weight.grad, DTensor)
    full = weight.grad.full_tensor()
    low, high = full.clone(), full.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    scale = float((full * truth).sum() / truth.square().sum())
    return Answer(
        str(weight.grad.placements),
        scale,
        float((full / scale - truth).norm() / truth.norm()),
        float((high - low).abs().max()),
        tuple(seen.seen),
    )


MODES = ("fully_shard", "replicate")
CASES = [
    *(Case(f, s, m) for f in FORMS for s in STYLES for m in MODES),
    *(Case(f, s, m, compiled=True) for f in FORMS for s in ("N", "hidden shards") for m in MODES),
    *(Case(f, s, recomputed=True) for f in FORMS for s in STYLES if s != "NL"),
    *(Case(f, "N", m, half=True, stored=b) for f in FORMS for m in MODES for b in (False, True)),
]  # fmt: skip
HYBRID = [Case(f, s, "hybrid_shard") for f in FORMS for s in STYLES if s != "NL"]


def run_cases(env: RankEnv, cases: list[Case]) -> dict[Case, Answer]:
    sizes = cases[0].mesh
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {case: run_case(case, mesh) for case in cases}


@pytest.fixture(scope="module")
def answers() -> dict[Case, Answer]:
    """All cases on four ranks; the ranks agree on everything."""
    of_ranks = on_ranks(4, run_cases, CASES, deadline=280)
    for others in of_ranks[1:]:
        assert {c: a.collectives for c, a in others.items()} == {
            c: a.collectives for c, a in of_ranks[0].items()
        }
    return of_ranks[0]


@pytest.fixture(scope="module")
def hybrid() -> dict[Case, Answer]:
    return on_ranks(8, run_cases, HYBRID, deadline=280)[0]


def right(answer: Answer) -> bool:
    return not answer.failure and abs(answer.scale - 1) < TINY and answer.error < TINY and answer.drift < TINY


def sent(answer: Answer) -> int:
    """Bytes that a rank's collectives carry."""
    sizes = {"float32": 4, "bfloat16": 2}
    return sum(sizes[dtype] * numel for *_, numel, dtype in answer.collectives)


def pairs(answers: dict[Case, Answer], form: str) -> list[tuple[Case, Answer, Answer]]:
    """(case, as released, in the form)."""
    return [(c, answers[replace(c, form=RELEASED)], a) for c, a in answers.items() if c.form == form]


@pytest.mark.parametrize("form", [REDUCED, DEFERRED])
def test_it_is_right_wherever_the_release_is(form: str, answers: dict[Case, Answer]) -> None:
    compared = [(c, right(old), right(new)) for c, old, new in pairs(answers, form) if not c.half]
    assert [c for c, old, new in compared if old and not new] == []
    assert {c.style for c, old, _ in compared if not old} == {"NL"}, "the release is wrong there alone"


@pytest.mark.parametrize("form", [REDUCED, DEFERRED])
def test_it_is_right_on_a_hybrid_mesh(form: str, hybrid: dict[Case, Answer]) -> None:
    assert [c for c, a in hybrid.items() if not right(a)] == []
    n = Case(form, "N", "hybrid_shard")
    tail = () if form == DEFERRED else (("all_reduce", "tp", 8, "float32"),)
    assert hybrid[n].collectives == (
        ("all_reduce", "r", 16, "float32"),
        ("reduce_scatter", "s", 16, "float32"),
        *tail,
    )


def test_a_module_that_loses_the_reduction_is_as_wrong_as_before(answers: dict[Case, Answer]) -> None:
    """The label that arrives is false; nothing that comes after it can know. An audit finds it either way."""
    for case, old, new in pairs(answers, REDUCED):
        if case.style == "NL":
            assert new.collectives == old.collectives
            assert (new.scale, new.error, new.drift) == pytest.approx((old.scale, old.error, old.drift))


def test_the_gradient_is_placed_as_the_parameter_is(answers: dict[Case, Answer]) -> None:
    own = {"fully_shard": "(Shard(dim=0), Replicate())", "replicate": "(Replicate(), Replicate())"}
    assert {(c.mode, a.placements) for c, a in answers.items() if c.form == REDUCED} == set(own.items())
    late = {c.style for c, a in answers.items() if c.form == DEFERRED and "Partial(sum)" in a.placements}
    assert late == {"N", "NLF"}, "Partial where it arrives so, and only there"


@pytest.mark.parametrize(("style", "compiled"), [("N", False), ("NLF", False), ("N", True)])
def test_one_sum_on_the_shard_after_the_reduce_scatter(
    style: str, compiled: bool, answers: dict[Case, Answer]
) -> None:
    case = Case(REDUCED, style, compiled=compiled)
    scatter = ("reduce_scatter", "dp", 16, "float32")
    assert answers[replace(case, form=RELEASED)].collectives == (("all_reduce", "tp", 16, "float32"), scatter)
    assert answers[case].collectives == (scatter, ("all_reduce", "tp", 8, "float32"))
    assert answers[replace(case, form=DEFERRED)].collectives == (scatter,)


@pytest.mark.parametrize("compiled", [False, True])
def test_without_shards_both_sums_are_one(compiled: bool, answers: dict[Case, Answer]) -> None:
    case = Case(REDUCED, "N", "replicate", compiled=compiled)
    assert answers[case].collectives == (("all_reduce", "joint", 16, "float32"),)
    assert answers[replace(case, form=DEFERRED)].collectives == (("all_reduce", "dp", 16, "float32"),)


@pytest.mark.parametrize("stored", [False, True])
def test_the_sums_are_made_in_the_reduce_dtype(stored: bool, answers: dict[Case, Answer]) -> None:
    case = Case(REDUCED, "N", half=True, stored=stored)
    scatter = ("reduce_scatter", "dp", 16, "float32")
    assert answers[replace(case, form=RELEASED)].collectives == (
        ("all_reduce", "tp", 16, "bfloat16"),
        scatter,
    )
    assert answers[case].collectives == (scatter, ("all_reduce", "tp", 8, "float32"))
    assert answers[replace(case, form=DEFERRED)].collectives == (scatter,)
    for c, old, new in pairs(answers, REDUCED):
        if c.half:
            assert max(old.error, new.error) < 1e-2


@pytest.mark.parametrize("form", [REDUCED, DEFERRED])
def test_it_never_costs_more(form: str, answers: dict[Case, Answer], hybrid: dict[Case, Answer]) -> None:
    for case, old, new in pairs(answers | hybrid, form):
        assert len(new.collectives) <= len(old.collectives), case
        assert sent(new) <= sent(old), case
    arrives_whole = [c for c in answers if c.style in ("whole input", "hidden shards")]
    for case in arrives_whole:
        assert answers[case].collectives == answers[replace(case, form=RELEASED)].collectives


# --------------------------------------------------------------------------- checkpoints


def checkpoints(env: RankEnv, folder: str) -> dict[str, Any]:
    """Save in each form, load in the other, and compare with what was there."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    out: dict[str, Any] = {}

    def made(form: str) -> nn.Module:
        model = Norm("N")
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Replicate()]))
        with fixed(form):
            return simple_fsdp().data_parallel(model, mesh["dp"], "fully_shard")

    for old, new in ((RELEASED, REDUCED), (REDUCED, RELEASED), (RELEASED, DEFERRED)):
        saved = get_model_state_dict(made(old))
        dcp.save(saved, checkpoint_id=f"{folder}/{old}-{new}")
        other = made(new)
        with torch.no_grad():
            other._parameters["weight"].zero_()
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=f"{folder}/{old}-{new}")
        set_model_state_dict(other, state)
        loaded = get_model_state_dict(other)
        out[f"{old}-{new}"] = (
            {k: str(v.placements) for k, v in saved.items()},
            {k: str(v.placements) for k, v in loaded.items()},
            all(torch.equal(loaded[k].full_tensor(), v.full_tensor()) for k, v in saved.items()),
            float(loaded["weight"].full_tensor().norm()),
        )
    return out


def test_checkpoints_are_what_they_were(tmp_path: Path) -> None:
    same = {"weight": "(Shard(dim=0), Replicate())"}
    for saved, loaded, equal, norm in on_ranks(4, checkpoints, str(tmp_path))[0].values():
        assert (saved, loaded, equal) == (same, same, True)
        assert norm > 1


# --------------------------------------------------------------------------- torchtitan's own models


def audits(env: RankEnv, config: str, overrides: tuple[str, ...]) -> Report:
    """One whole audit of a job that installs the fix by itself."""
    from placement_audit.fix import uninstall

    sys.modules.pop("placement_audit.fix.auto", None)
    job = load(str(CONFIGS / config), overrides=["--training.seq_len", "128", *overrides], device="cpu")
    try:
        return pipeline.run(job, pipeline.Options(rank_env=env, measure=True))
    finally:
        uninstall()


DDP = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1")


@pytest.mark.parametrize("overrides", [(), DDP], ids=["FSDP", "DDP"])
def test_a_fixed_job_is_clean_and_proven(overrides: tuple[str, ...]) -> None:
    report = on_ranks(4, audits, "fsdp_tp_fixed.toml", overrides, deadline=280)[0]
    assert (report.findings, report.exit_status) == ((), 0)
    assert {j.verdict for j in report.judgements} == {Verdict.OK}
    assert {len(j.evidence) for j in report.judgements} == {2}
    assert report.measurement is not None
    assert len(report.measurement.params) == 57
    assert max(p.grad_error for p in report.measurement.params if p.grad_error is not None) < 1e-5
    assert max(p.step_error for p in report.measurement.params if p.step_error is not None) < 1e-5
    backward = [c for c in report.trace.collectives if c.phase is Phase.BACKWARD]
    reduced = [c for c in backward if c.name == "all_reduce" and "tp" in c.mesh_dims]
    assert len(reduced) == 13
    assert {(c.mesh_dims, c.numel) for c in reduced} == {
        (("dp_replicate", "tp"), 256) if overrides else (("tp",), 128)
    }


def moe(env: RankEnv) -> dict[tuple[int, str], tuple[str, float]]:
    """deepseek_v3's gradients, fixed against released: placements and difference, by EP degree and parameter."""
    from placement_audit.build import build

    def grads(form: str, expert_parallel: int) -> dict[str, DTensor]:
        overrides = ["--model.name", "simple_fsdp.deepseek_v3", "--training.seq_len", "64"]
        overrides += ["--activation_checkpoint.mode", "none"]
        overrides += ["--parallelism.expert_parallel_degree", str(expert_parallel)]
        with fixed(form):
            job = load(str(CONFIGS / "fsdp_tp.toml"), overrides=overrides, device="cpu")
            case = build(job, rank_env=env, float32=True)
            case.step()
        return {n: p.grad for n, p in case.model.named_parameters() if isinstance(p.grad, DTensor)}

    out = {}
    for expert_parallel in (1, 2):
        old, new = grads(RELEASED, expert_parallel), grads(REDUCED, expert_parallel)
        assert old.keys() == new.keys()
        for name, g in old.items():
            same = new[name].placements == g.placements and new[name].device_mesh == g.device_mesh
            whole, other = g.full_tensor(), new[name].full_tensor()
            error = float((other - whole).norm() / whole.norm().clamp_min(1e-20))
            out[expert_parallel, name] = (str(g.placements) if same else "", error)
    return out


def test_mixture_of_experts() -> None:
    compared = on_ranks(4, moe, deadline=280)[0]
    assert {n for n, (placements, error) in compared.items() if not placements or error > TINY} == set()
    assert {degree for degree, _ in compared} == {1, 2}
    assert "(Shard(dim=0), Replicate())" in {placements for placements, _ in compared.values()}


# --------------------------------------------------------------------------- other releases

ELSEWHERE = [
    *(Case(f, "N", m) for f in FORMS for m in ("fully_shard", "replicate")),
    Case(REDUCED, "hidden shards"),
    Case(REDUCED, "N", compiled=True),
]
RUN = r"""
import json
import sys
from dataclasses import astuple

from tests.gloo.ranks import on_ranks
from tests.gloo.test_fix import ELSEWHERE, run_cases

if __name__ == "__main__":
    import torchtitan
    answers = on_ranks(4, run_cases, ELSEWHERE)[0]
    print("\n" + json.dumps([torchtitan.__file__, [astuple(answers[c]) for c in ELSEWHERE]]))
"""


@pytest.mark.parametrize("version", ["0.2.0", "0.2.1"])
def test_older_releases(version: str, tmp_path: Path) -> None:
    """Right as theirs is, which averages over data-parallel ranks; 0.2.0 recomputes each gather in backward."""
    try:
        release(version, tmp_path / "site")
    except Unreachable as reason:
        pytest.skip(str(reason))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, str(tmp_path / "run.py")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    where, rows = json.loads(done.stdout.splitlines()[-1])
    assert where.startswith(str(tmp_path))
    found = dict(zip(ELSEWHERE, [Answer(*row) for row in rows], strict=True))
    for case, answer in found.items():
        assert right(replace(answer, scale=2 * answer.scale)), (case, answer)
    late = (("reduce_scatter", "dp", 16, "float32"), ("all_reduce", "tp", 8, "float32"))
    for compiled in (False, True):
        assert tuple(map(tuple, found[Case(REDUCED, "N", compiled=compiled)].collectives)) == late
    assert len(found[Case(REDUCED, "N", "replicate")].collectives) == 1
