"""The Python API on the fake process group: verdicts, the context manager, and every misuse told in one message."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import placement_audit
from placement_audit import AuditError, Job, audit, audit_factory, cli, render, watch
from placement_audit.report.way import explain_param
from placement_audit.verdicts import Outcome, Report, Verdict
from tests.faults.family import Bag, draw, laid_out, mine, on
from tests.faults.functions import Copy, Reduce
from tests.trace.worlds import fake_mesh, of_rule, verdicts

pytestmark = pytest.mark.trace

D, H, T = 6, 8, 4


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def ffn() -> nn.Module:
    return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))


def parallel_ffn(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(ffn(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def normed(mesh: DeviceMesh, label: Any = None) -> tuple[Bag, Callable[[], torch.Tensor]]:
    """A norm weight on sequence-sharded activations, leaving DTensor by hand."""
    model = Bag(norm=laid_out(1 + draw("norm", D), mesh, Replicate()))
    x = draw("x", T, D)

    def step() -> torch.Tensor:
        rows = on(x, mesh, Replicate()).redistribute(placements=[Shard(0)]).to_local()
        out = F.rms_norm(rows, (D,), model.norm.to_local(grad_placements=label))
        return on(out, mesh, Shard(0)).full_tensor().square().mean()

    return model, step


# --------------------------------------------------------------------------- what it says


def test_a_right_model_is_clean_and_the_mesh_is_found() -> None:
    model = parallel_ffn(fake_mesh(tp=2))
    report = audit(lambda: model(draw("x", T, D)).square().mean(), model)
    assert report.outcome is Outcome.CLEAN
    assert report.exit_status == 0
    assert [
        v for fqn in ("0.weight", "0.bias", "2.weight", "2.bias") for v in verdicts(report, fqn).values()
    ] == ([Verdict.OK] * 4)
    assert report.trace.run.model == "Sequential"


@pytest.mark.parametrize(("label", "rule"), [(None, "PA201"), ([Partial()], None)])
def test_a_lost_reduction_is_found_at_its_line(label: Any, rule: str | None) -> None:
    model, step = normed(fake_mesh(tp=2), label)
    report = audit(step, model, name="one norm")
    assert report.exit_status == (0 if rule is None else 1)
    if rule:
        (finding,) = of_rule(report, rule)
        assert finding.path[0].call_site.code_line == (
            "out = F.rms_norm(rows, (D,), model.norm.to_local(grad_placements=label))"
        )
    text = render(report, width=200)
    assert "one norm" in text
    assert ("PA201 lost-reduction" in text) is (rule is not None)
    assert placement_audit.render(report, "json").startswith("{")


def test_a_step_may_call_backward_by_itself_and_for_each_micro_batch() -> None:
    model, loss = normed(fake_mesh(tp=2))

    def step() -> None:
        for _ in range(2):
            (loss() / 2).backward()

    assert verdicts(audit(step, model), "norm") == {"tp": Verdict.LOST_REDUCTION}


def test_the_batch_is_what_the_forward_gets_or_what_is_said() -> None:
    mesh = fake_mesh(dp=2)
    model, x = ffn(), draw("x", T, D)
    step = lambda: model(x).square().mean()  # noqa: E731
    reports = [
        audit(step, model, mesh=mesh, batch_placements={"dp": Shard(0)}),
        audit(step, model, mesh=mesh, batch_placements=[Shard(0)], inputs={"tokens": [x]}),
    ]
    for report in reports:
        assert report.trace.batch_dims == ("dp",)
        assert verdicts(report, "0.weight") == {"dp": Verdict.LOST_REDUCTION}
    assert audit(step, model, mesh=mesh).exit_status == 0, "equal batches need no sum"


def test_gradients_weights_and_optimizer_are_left_as_they_were() -> None:
    model = parallel_ffn(fake_mesh(tp=2))
    model(draw("x", T, D)).sum().backward()
    before = {n: (p.grad, p.grad.to_local().clone()) for n, p in model.named_parameters()}
    audit(lambda: model(draw("y", T, D)).square().mean(), model)
    for n, p in model.named_parameters():
        assert p.grad is before[n][0]
        assert torch.equal(p.grad.to_local(), before[n][1])


def test_a_sub_mesh_stands_for_the_whole() -> None:
    mesh = fake_mesh(dp=2, tp=2)
    model = parallel_ffn(mesh["tp"])
    report = audit(lambda: model(draw("x", T, D)).square().mean(), model, mesh=mesh["tp"])
    assert report.trace.mesh.dim_names == ("dp", "tp")


def test_declared_shards_need_no_sum_and_undeclared_ones_do() -> None:
    mesh = fake_mesh(tp=2)
    group, x = mesh.get_group("tp"), draw("x", T, D)
    model = Bag(w1=draw("w1", H // 2, D), w2=draw("w2", D, H // 2))

    def step() -> torch.Tensor:
        return Reduce.apply(F.linear(F.linear(Copy.apply(x, group), model.w1).relu(), model.w2), group).mean()

    shards = {"w1": {"tp": Shard(0)}, "w2": [Shard(-1)]}
    report = audit(step, model, mesh=mesh, declared=shards)
    assert verdicts(report, "w1") == verdicts(report, "w2") == {"tp": Verdict.OK}
    assert [str(p.layout) for p in report.trace.params] == ["tp=Shard(0)", "tp=Shard(1)"]
    assert audit(step, model, mesh=mesh, declared={"w*": {"tp": Shard(0)}}).exit_status == 0


def test_a_mesh_whose_dims_have_no_names_gets_some() -> None:
    fake_mesh(tp=2)
    mesh = init_device_mesh("cpu", (2,))
    model = parallel_ffn(mesh)
    report = audit(lambda: model(draw("x", T, D)).square().mean(), model)
    assert report.trace.mesh.dim_names == ("dim0",)
    assert verdicts(report, "2.bias") == {"dim0": Verdict.OK}

    plain, x = Bag(w=draw("w", H, D)), draw("x", T, D)
    step = lambda: F.linear(x, plain.w).square().mean()  # noqa: E731
    batch = audit(step, plain, mesh=mesh, batch_placements=[Shard(0)], inputs=(x,))
    assert verdicts(batch, "w") == {"dim0": Verdict.LOST_REDUCTION}
    for shard in ({"dim0": Shard(0)}, [Shard(0)]):
        declared = audit(step, plain, mesh=mesh, declared={"w": shard})
        assert [str(p.layout) for p in declared.trace.params] == ["dim0=Shard(0)"]


def test_a_shard_on_a_part_of_a_mesh_dim_is_none_that_all_ranks_have() -> None:
    mesh = fake_mesh(dp=4)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = Bag(w=laid_out(draw("w", H, D), other["inner"], Shard(0)))

    def step() -> torch.Tensor:
        rows = model.w.to_local()
        total = rows.detach().clone()
        dist.all_reduce(total)  # of what is equal on all ranks this would be no sum to make
        return (rows * total).sum()

    report = audit(step, model, mesh=mesh)
    assert of_rule(report, "PA105") == []


@pytest.mark.parametrize("at", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("how", ["audit", "watch"])
def test_attention_on_dtensors_runs_on_the_cpu(at: Any, how: str) -> None:
    """Torch has a sharding rule for the GPU's fused attention, none for the CPU's."""
    mesh = fake_mesh(tp=2)
    model = Bag(**{n: laid_out(draw(n, 2, 4, T, D), mesh, at) for n in "qkv"})

    def step() -> torch.Tensor:
        out = F.scaled_dot_product_attention(model.q, model.k, model.v, is_causal=True)
        assert out.placements == (at,)
        return out.square().sum()

    if how == "audit":
        report = audit(step, model)
    else:
        with watch(model) as seen:
            step().backward()
        report = seen.report()
    assert [verdicts(report, n) for n in "qkv"] == [{"tp": Verdict.OK}] * 3
    assert not report.findings
    other = laid_out(draw("other", 2, 4, T + 1, D), mesh, at)
    with pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
        F.scaled_dot_product_attention(other, other, other, is_causal=True)  # as it was


# --------------------------------------------------------------------------- several ranks played


def by_rank() -> Job:
    """Each rank uses its own rows of what all have."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, x = Bag(w=draw("w", D)), draw("x", T, D)
    return Job(model=model, mesh=mesh, step=lambda: (mine(x, mesh, "tp") * model.w).sum())


def test_a_factory_shows_what_one_rank_cannot_see() -> None:
    report = audit_factory(by_rank, world_size=2)
    assert verdicts(report, "w") == {"tp": Verdict.LOST_REDUCTION}
    assert report.trace.other_ranks == (1,)
    fake_mesh(tp=2)
    job = by_rank()
    alone = audit(job.step, job.model, mesh=job.mesh)
    assert verdicts(alone, "w") == {"tp": Verdict.OK}
    assert any("offset taken from the rank" in b for b in alone.blind_spots), "and it says so"
    assert not any("offset taken from the rank" in b for b in report.blind_spots)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("how", ["a group", "a mesh"])
def test_a_factory_may_ask_for_any_backend(backend: str, how: str) -> None:
    """Of a fake world there is none but the fake one; a job for GPUs asks for theirs, and for gloo's beside them."""

    def build() -> Job:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        if how == "a group":
            group = dist.new_group([0, 1], backend=backend)
        else:
            other = init_device_mesh("cpu", (2,), mesh_dim_names=("x",), backend_override={"x": backend})
            group = other.get_group()
        model, x = Bag(w=draw("w", D)), draw("x", T, D)

        def step() -> None:
            (x * model.w).sum().backward()
            dist.all_reduce(model.w.grad, group=group)

        return Job(model=model, mesh=mesh, step=step, inputs=(x,), batch_placements={"dp": Shard(0)})

    report = audit_factory(build)
    assert verdicts(report, "w") == {"dp": Verdict.OK}
    assert [c.mesh_dims for c in report.trace.collectives] == [("dp",)]


def test_a_call_of_what_torch_has_deprecated_is_the_users() -> None:
    """Torch's wrapper around it is of typing_extensions, in no folder of torch."""
    mesh = fake_mesh(tp=2)
    model, x = Bag(w=draw("w", D)), draw("x", T, D)

    def step() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_gather_into_tensor(torch.empty(2 * T, D), x)
        return (x * model.w).sum()

    (gathered,) = audit(step, model, mesh=mesh).trace.collectives
    assert gathered.call_site is not None
    assert gathered.call_site.path.endswith("test_api.py"), gathered.call_site.path


# --------------------------------------------------------------------------- watching a training loop


def test_watch_sees_the_step_of_a_training_loop() -> None:
    model, loss = normed(fake_mesh(tp=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model) as seen:
        loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    with watch(model) as again:
        loss().backward()
        optimizer.step()
    assert (
        verdicts(seen.report(), "norm") == verdicts(again.report(), "norm") == {"tp": Verdict.LOST_REDUCTION}
    )


def test_watch_lets_the_loops_own_error_through_and_takes_its_hands_off() -> None:
    model, loss = normed(fake_mesh(tp=2))
    with pytest.raises(ZeroDivisionError), watch(model):
        raise ZeroDivisionError
    assert DTensor.to_local.__qualname__ == "DTensor.to_local"
    loss().backward()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m, loss: _open_report(m), "watch: the with block is not over; ask for the report after it."),
        (
            lambda m, loss: _watched(m, lambda: None),
            "watch: no parameter got a gradient; run forward and backward",
        ),
        (lambda m, loss: (loss().backward(), _watched(m, loss)), "there are gradients already"),
    ],
    ids=["too early", "no backward", "gradients from before"],
)
def test_watch_misused(use: Callable[..., object], message: str) -> None:
    model, loss = normed(fake_mesh(tp=2))
    with pytest.raises(AuditError) as told:
        use(model, loss)
    assert message in told.value.message
    assert told.value.exit_status == 2


def _open_report(model: nn.Module) -> None:
    with watch(model) as seen:
        seen.report()


def _watched(model: nn.Module, step: Callable[[], object]) -> Report:
    with watch(model) as seen:
        step()
    return seen.report()


# --------------------------------------------------------------------------- what a hook sees


def test_what_a_hook_on_a_gradient_sees_is_in_explain(capsys: pytest.CaptureFixture[str]) -> None:
    """The thread's recipe (pytorch/torchtitan issue 2217): print the placements of a norm weight's gradient."""
    mesh = fake_mesh(dp=2, tp=2)
    model = Bag(norm=laid_out(1 + draw("norm", H), mesh, Shard(0), Replicate()))
    x = draw("x", T, H)
    seen: list[str] = []

    def hooked(t: torch.Tensor) -> torch.Tensor:
        t.register_hook(lambda g: seen.append(f"{g.placements}" if isinstance(g, DTensor) else "plain"))
        return t

    def step() -> torch.Tensor:
        dp, tp = mesh["dp"], mesh["tp"]
        local = model.norm.to_local()
        whole = hooked(on(local, dp, Shard(0)).redistribute(placements=[Replicate()])).to_local(
            grad_placements=[Partial()]
        )
        weight = hooked(on(whole, tp, Replicate()))
        rows = on(x.chunk(2)[0], tp, Shard(0))
        return F.rms_norm(rows, (H,), weight).square().sum().full_tensor()

    report = audit(step, model, mesh=mesh, inputs=x, batch_placements={"dp": Shard(0)})
    assert seen == ["(Partial(sum),)", "(Partial(sum),)"]
    way = explain_param(report, "norm")
    backward = way[way.index("backward") :]
    # What the hook saw on the weight on tp, then on the gathered weight on dp.
    assert backward.index("tp P(sum)") < backward.index("dp P(sum)")
    assert verdicts(report, "norm") == {"dp": Verdict.OK, "tp": Verdict.OK}


# --------------------------------------------------------------------------- misuse


def _case(**changes: Any) -> Callable[[], object]:
    def call() -> object:
        mesh = fake_mesh(tp=2)
        model = Bag(w=draw("w", D, D), b=draw("b", D))
        x = draw("x", T, D)
        arguments: dict[str, Any] = {
            "step": lambda: F.linear(x, model.w, model.b).square().mean(),
            "model": model,
            "mesh": mesh,
        }
        arguments |= {k: v(mesh) if k == "mesh" and callable(v) else v for k, v in changes.items()}
        return audit(arguments.pop("step"), arguments.pop("model"), **arguments)

    return call


def _fsdp1() -> Report:
    mesh = fake_mesh(dp=2)
    model = FullyShardedDataParallel(ffn(), device_id=torch.device("cpu"))
    return audit(lambda: model(draw("x", T, D)).square().mean(), model, mesh=mesh)


def _sharded_optimizer() -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts optimizers, which torch has deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer
    mesh, model = fake_mesh(dp=2), ffn()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    return audit(lambda: model(draw("x", T, D)).square().mean(), model, mesh=mesh, optimizer=optimizer)


MISUSES: dict[str, tuple[Callable[[], object], str, int]] = {
    "no mesh": (_case(mesh=None), "mesh: none was given, and no parameter is a DTensor", 2),
    "no mesh at all": (_case(mesh=3), "mesh: expected a DeviceMesh, got int.", 2),
    "no model": (_case(model=3), "model: expected a torch.nn.Module, got int.", 2),
    "nothing to train": (_case(model=nn.ReLU()), "audited nothing: ReLU has no trainable parameter.", 3),
    "step is no function": (_case(step=3), "step: expected a function, got int.", 2),
    "step wants arguments": (_case(step=lambda batch: batch), "step is called without arguments", 2),
    "step runs no backward": (
        _case(step=lambda: None),
        "step called no backward() and returned NoneType.",
        2,
    ),
    "a detached loss": (
        _case(step=lambda: torch.zeros(())),
        "the tensor that it returned needs no gradient",
        2,
    ),
    "no loss": (
        _case(step=lambda: draw("z", 3).requires_grad_() * 2),
        "is no loss: a tensor of shape (3,)",
        2,
    ),
    "unknown mesh dim": (
        _case(declared={"w": {"pt": Shard(0)}}),
        "declared: w: 'pt' is no mesh dim. Mesh dims: tp.",
        2,
    ),
    "unknown batch dim": (
        _case(batch_placements={"dp": Shard(0)}),
        "batch_placements: 'dp' is no mesh dim. Mesh dims: tp.",
        2,
    ),
    "unknown parameter": (
        _case(declared={"ww": {"tp": Shard(0)}}),
        "declared: the model has no parameter 'ww'. Did you mean 'w'?",
        2,
    ),
    "no placement": (
        _case(declared={"w": {"tp": 0}}),
        "tp: expected a placement such as Shard(0), got 0.",
        2,
    ),
    "Partial value": (_case(declared={"w": {"tp": Partial()}}), "is no placement of a value", 2),
    "too many tensor dims": (_case(declared={"w": {"tp": Shard(2)}}), "but it has 2 tensor dims.", 2),
    "too few placements": (
        _case(declared={"w": []}),
        "expected a dict by mesh dim, or one placement for each of tp; got [].",
        2,
    ),
    "a batch that nobody saw": (
        _case(batch_placements={"tp": Shard(0)}),
        "but the forward of Bag was not called with a tensor",
        2,
    ),
    "a model of FSDP1": (
        lambda: _fsdp1(),
        "model: it holds FullyShardedDataParallel (FSDP1), whose flat parameters have no placements to judge.",
        2,
    ),
    "an optimizer that is sharded": (
        lambda: _sharded_optimizer(),
        "Give the one that it shards: lambda model: Adam(model.parameters()).",
        2,
    ),
    "a model that fails": (_case(step=lambda: draw("z", 3) @ draw("z", 2)), "failed in forward", 3),
}


@pytest.mark.parametrize(("call", "message", "status"), MISUSES.values(), ids=MISUSES)
def test_misuse_is_told_in_one_message(call: Callable[[], object], message: str, status: int) -> None:
    with pytest.raises(AuditError) as told:
        call()
    assert message in told.value.message
    assert told.value.exit_status == status


def test_a_dtensor_is_not_declared() -> None:
    model = parallel_ffn(fake_mesh(tp=2))
    with pytest.raises(AuditError, match=r"declared: 0.weight is a DTensor, whose placements"):
        audit(lambda: None, model, declared={"0.weight": {"tp": Shard(0)}})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (3, "returned an int; expected a placement_audit.Job, (model, step, mesh), or a dict"),
        ((1, 2, 3, 4), "returned a tuple; expected"),
        (None, "returned None; expected"),
        ({"model": 1, "steps": 2}, "unknown key 'steps'. Did you mean 'step'?"),
        ({"model": 1}, "returned a dict without 'step'."),
    ],
)
def test_a_factory_that_makes_no_job(made: object, message: str) -> None:
    with pytest.raises(AuditError) as told:
        audit_factory(lambda: made)
    assert message in told.value.message


def test_a_step_that_fails_is_the_job_s_own_failure() -> None:
    """Also where the step runs first, before it is traced: several ranks are played."""

    def build() -> Job:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return Job(model=Bag(w=draw("w", 3)), step=lambda: draw("z", 3) @ draw("z", 2), mesh=mesh)

    with pytest.raises(AuditError) as told:
        audit_factory(build, world_size=2)
    assert told.value.message.startswith("Bag failed in forward: RuntimeError: ")
    assert told.value.exit_status == 3


def test_a_factory_may_return_model_step_and_mesh() -> None:
    def build() -> tuple[Any, Any, Any]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        return model, lambda: model(x).sum().backward(), mesh

    report = audit_factory(build, world_size=4)
    assert report.trace.mesh.shape == (4,)
    assert {(j.param_fqn, j.verdict) for j in report.judgements} == {("weight", "ok"), ("bias", "ok")}


def test_a_parameter_of_a_program_of_one_s_own_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "explained_program.py"
    program.write_text(
        "import torch\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "def build(width):\n"
        '    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))\n'
        "    model = torch.nn.Linear(width, 3)\n"
        "    return model, lambda: model(torch.ones(2, width)).sum().backward(), mesh\n"
    )
    asked = ["explain", "weight", "--run", f"{program}:build", "--world-size", "4", "--", "5"]
    assert cli.main(asked) == 0
    said = capsys.readouterr().out
    assert "shape       3 x 5, float32" in said
    assert "mesh        tp 4 (4 ranks)" in said
    assert "verdict     tp ok: complete" in said


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, placement_audit; placement_audit.Job; assert 'torch' not in sys.modules;"
        "placement_audit.audit; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        placement_audit.nothing  # noqa: B018
