"""What of a user's step can be measured, and what is said of the rest: on real ranks, nothing is guessed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from placement_audit import AuditError, Job, Report, audit
from tests.faults import experts
from tests.faults.family import Bag, draw
from tests.faults.functions import Copy, Reduce
from tests.gloo.ranks import on_ranks
from tests.trace.worlds import verdicts

pytestmark = pytest.mark.gloo

D, H, T = 6, 8, 4


class Ffn(nn.Module):
    """Its norm computes in float32, whatever it is given, as those of Hugging Face's models do."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(D, H, dtype=dtype)
        self.down = nn.Linear(H, D, dtype=dtype)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(draw(name, *p.shape, scale=0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.rms_norm(self.up(x).float(), (H,)).to(x.dtype))


def note_of(report: Report) -> str:
    (note,) = [n for n in report.trace.run.notes if n.startswith("not measured")] or [""]
    return note


# --------------------------------------------------------------------------- dtypes


def _of_dtype(_env: Any, dtype: torch.dtype, theirs: torch.dtype, lost: bool) -> Report:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = mesh.get_local_rank("dp")
    model, whole = Ffn(dtype), Ffn(theirs)
    x = draw("x", 2 * T, D, scale=1)

    def step() -> None:
        model(x.chunk(2)[rank].to(dtype)).square().sum().backward()
        for name, p in model.named_parameters():
            if not (lost and name == "up.bias"):
                dist.all_reduce(p.grad)

    return audit(
        step,
        model,
        mesh=mesh,
        batch_placements={"dp": Shard(0)},
        reference=lambda: (whole, lambda: whole(x.to(theirs)).square().sum()),
    )


@pytest.mark.parametrize(
    ("dtype", "theirs"),
    [(torch.float32, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.float64)],
)
def test_what_is_no_coarser_than_float32_is_measured_as_that(dtype: torch.dtype, theirs: torch.dtype) -> None:
    for report in on_ranks(2, _of_dtype, dtype, theirs, False):
        assert report.measurement is not None
        assert report.measurement.tolerance == 1e-5
        assert all(p.grad_error < 1e-6 and p.step_error < 1e-6 for p in report.measurement.params)
        assert report.exit_status == 0


def test_a_fault_is_found_in_float64() -> None:
    report = on_ranks(2, _of_dtype, torch.float64, torch.float64, True)[0]
    assert {f.param_fqn for f in report.findings if f.rule_id == "PA201"} == {"up.bias"}
    assert verdicts(report, "up.weight")["dp"] == "ok"


def test_a_coarser_model_on_one_device_is_no_truth() -> None:
    report = on_ranks(2, _of_dtype, torch.float64, torch.float32, False)[0]
    assert report.measurement is None
    assert note_of(report).startswith(
        "not measured: the model on one device has coarser parameters than the job: up.weight (torch.float32)"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_coarser_than_float32_are_not_measured(dtype: torch.dtype) -> None:
    for report in on_ranks(2, _of_dtype, dtype, dtype, False):
        assert report.measurement is None
        name = str(dtype).removeprefix("torch.")
        assert note_of(report).startswith(
            f"not measured: the step computes or reduces in {name}, whose rounding"
        )
        assert report.exit_status == 0


# --------------------------------------------------------------------------- what is reduced in another dtype


def _by_fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def _by_ddp(model: nn.Module, mesh: Any) -> nn.Module:
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group())
    wrapped.register_comm_hook(mesh.get_group(), default_hooks.fp16_compress_hook)
    return wrapped


def _reduced_coarsely(_env: Any, wrap: Callable[..., nn.Module]) -> Report:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    whole, x = Ffn(), draw("x", 2 * T, D, scale=1)
    model = wrap(Ffn(), mesh)
    own = x.chunk(2)[mesh.get_local_rank("dp")]
    return audit(
        lambda: model(own).square().mean(),
        model,
        mesh=mesh,
        batch_placements={"dp": Shard(0)},
        reference=lambda: (whole, lambda: whole(x).square().mean()),
    )


@pytest.mark.parametrize(("wrap", "dtype"), [(_by_fsdp, "bfloat16"), (_by_ddp, "float16")])
def test_a_reduction_in_a_coarse_dtype_is_no_wrong_gradient(
    wrap: Callable[..., nn.Module], dtype: str
) -> None:
    for report in on_ranks(2, _reduced_coarsely, wrap):
        assert report.exit_status == 0, report.findings
        assert f"computes or reduces in {dtype}" in note_of(report)
        assert {c.dtype for c in report.trace.collectives if c.phase == "backward"} == {dtype}


def _builtin(_env: Any, kind: Any) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DistributedDataParallel(Ffn(), process_group=mesh.get_group())
    model._register_builtin_comm_hook(kind)
    own = draw("x", 2 * T, D).chunk(2)[mesh.get_local_rank("dp")]
    try:
        report = audit(
            lambda: model(own).square().mean(), model, mesh=mesh, batch_placements={"dp": Shard(0)}
        )
    except AuditError as error:
        return str(error)
    return str(verdicts(report, "up.weight")["dp"])


def test_what_a_builtin_hook_does_out_of_sight_is_refused() -> None:
    kinds = dist.BuiltinCommHookType
    assert on_ranks(2, _builtin, kinds.ALLREDUCE) == ["ok"] * 2
    for said in on_ranks(2, _builtin, kinds.FP16_COMPRESS):
        assert said.startswith(
            "DistributedDataParallel has torch's built-in communication hook FP16_COMPRESS, in C++, which cannot "
            "be followed here."
        )
        assert said.endswith("default_hooks.fp16_compress_hook.")


# --------------------------------------------------------------------------- steps that are no two alike


def _another_each_time(_env: Any, how: str) -> Report:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = mesh.get_local_rank("dp")
    model, whole, x = Ffn(), Ffn(), draw("x", 2 * T, D, scale=1)
    batches, kept = iter(range(100)), [torch.zeros_like(p) for p in model.parameters()]

    def step() -> None:
        own = x.chunk(2)[rank]
        if how == "a loader":
            own = own.roll(next(batches), -1)
        if how in ("zeroed", "no number"):
            torch._foreach_zero_(kept)
        loss = model(own).square().sum()
        (loss * (math.nan if how == "no number" else 1)).backward()
        for p, main in zip(model.parameters(), kept, strict=True):
            dist.all_reduce(p.grad)
            p.grad = main.add_(p.grad)

    return audit(
        step,
        model,
        mesh=mesh,
        batch_placements={"dp": Shard(0)},
        reference=lambda: (whole, lambda: whole(x).square().sum()),
    )


def test_a_step_that_cannot_be_taken_twice_is_not_measured() -> None:
    report = on_ranks(2, _another_each_time, "zeroed")[0]
    assert report.measurement is not None
    assert report.exit_status == 0
    for how in ("a loader", "a buffer"):
        for report in on_ranks(2, _another_each_time, how):
            assert report.measurement is None
            assert report.exit_status == 0, report.findings
            assert note_of(report).startswith(
                "not measured: taken twice with the same weights, the step leaves other gradients (off by "
            )


def test_gradients_that_are_no_numbers_are_wrong_not_others_each_time() -> None:
    report = on_ranks(2, _another_each_time, "no number")[0]
    assert report.measurement is not None
    assert {(j.verdict, j.reason) for j in report.judgements} == {
        ("wrong gradient", "the gradient is no finite number")
    }
    assert not any(f.rule_id == "PA901" for f in report.findings)


# --------------------------------------------------------------------------- sums and averages


def _mostly_undivided(_env: Any) -> Report:
    job = experts.divided(init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp")), first=4.0, last=1.0)
    return _audited(job)


def _audited(job: Job) -> Report:
    arguments = {f.name: getattr(job, f.name) for f in fields(job)}
    return audit(arguments.pop("step"), arguments.pop("model"), **arguments)


def test_numbers_say_whether_the_many_or_the_few_have_the_right_scale() -> None:
    """By themselves placements cannot: what most parameters have counts."""
    for report in on_ranks(4, _mostly_undivided):
        wrong = {j.param_fqn for j in report.judgements if j.verdict != "ok"}
        assert wrong == {"second.weight", "last.weight"}
        assert not any(f.rule_id == "PA901" for f in report.findings)


def _on_a_part(_env: Any, factor: float) -> Report:
    """Experts shared out over halves of dp, and sharded over the other halves: meshes that dp knows nothing of."""
    dp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    job = experts.job(dp, other["ep"], other["efsdp"], dp, factor)
    return _audited(job)


@pytest.mark.parametrize("factor", [4.0, 2.0])
def test_experts_on_a_part_of_a_mesh_dim_are_judged_by_numbers(factor: float) -> None:
    for report in on_ranks(4, _on_a_part, factor):
        assert {j.param_fqn for j in report.judgements if j.verdict != "ok"} == (
            set() if factor == 4 else {"experts.w"}
        )
        assert not any(f.rule_id == "PA901" for f in report.findings), "a rank's own expert varies over dp"


# --------------------------------------------------------------------------- meshes without names


def _unnamed(_env: Any, how: str) -> Report:
    mesh = init_device_mesh("cpu", (2,))
    rank, x = mesh.get_local_rank(), draw("x", T, D, scale=1)
    whole, model = Ffn(), Ffn()
    model.up.weight = nn.Parameter(whole.up.weight.detach().chunk(2)[rank].clone())
    model.up.bias = nn.Parameter(whole.up.bias.detach().chunk(2)[rank].clone())
    model.down.weight = nn.Parameter(whole.down.weight.detach().chunk(2, 1)[rank].clone())
    if how == "apart":
        model.down.bias.data += 0.1 * rank

    def step() -> torch.Tensor:
        h = F.linear(x, model.up.weight, model.up.bias).tanh()
        out = Reduce.apply(F.linear(h, model.down.weight), mesh.get_group())
        bias = Copy.apply(model.down.bias, mesh.get_group()) if how == "twice" else model.down.bias
        return (out + bias).square().mean()

    return audit(
        step,
        model,
        mesh=mesh,
        declared={"up.*": [Shard(0)], "down.weight": {"dim0": Shard(1)}},
        reference=lambda: (whole, lambda: whole.down(whole.up(x).tanh()).square().mean()),
    )


@pytest.mark.parametrize(
    ("how", "verdict"), [("right", "ok"), ("twice", "double reduction"), ("apart", "ranks disagree")]
)
def test_a_mesh_without_names_is_measured(how: str, verdict: str) -> None:
    for report in on_ranks(2, _unnamed, how):
        assert report.measurement is not None
        wrong = {p.fqn for p in report.measurement.params if p.grad_error > 1e-6}
        assert wrong == {"right": set(), "twice": {"down.bias"}}.get(how, wrong)
        assert verdicts(report, "down.bias") == {"dim0": verdict}


# --------------------------------------------------------------------------- attention on DTensors


def _attention(_env: Any) -> Report:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = Bag(**{n: draw(n, 2, 4, T, D) for n in "qkv"})
    model = Bag(**{n: distribute_tensor(p.detach(), mesh, [Shard(1)]) for n, p in whole.named_parameters()})
    loss = lambda m: F.scaled_dot_product_attention(m.q, m.k, m.v, is_causal=True).square().sum()  # noqa: E731
    return audit(lambda: loss(model).full_tensor(), model, reference=lambda: (whole, lambda: loss(whole)))


def test_attention_on_dtensors_is_that_of_one_device() -> None:
    for report in on_ranks(2, _attention):
        assert report.exit_status == 0
        assert report.measurement is not None
        assert all(p.grad_error < 1e-6 for p in report.measurement.params)
