"""Whole audits on real gloo ranks: each fault is found, named and located by trace and numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from placement_audit import pipeline
from placement_audit.case import Case, Reference
from placement_audit.config import RankEnv, load
from placement_audit.dtensor_api import local_of
from placement_audit.engine.trace import Tracer
from placement_audit.judge import judge
from placement_audit.measure.fingerprint import BoundaryPrints, fingerprint
from placement_audit.measure.run import finish, prepare
from placement_audit.verdicts import Report, Verdict
from placement_audit.weigh import slots
from tests.gloo.ranks import on_ranks
from tests.gloo.test_measure import AVERAGE, bare_to_local, stock
from tests.trace.test_matrix import CELLS, Cell, Norm
from tests.trace.titan import CONFIGS, PR_2532, rewritten
from tests.trace.worlds import judgement, run_record

pytestmark = pytest.mark.gloo

FLOAT32 = ("--training.mixed_precision_param", "float32")
SHORT = ("--training.seq_len", "128")
NORM = "layers.0.ffn_norm.weight"


# --------------------------------------------------------------------------- faults


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def bias_before_a_sum() -> Generator[None]:
    """Every tp rank adds the whole bias to its term of a row-wise linear's output."""
    original = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out = original(self, x)
        if not isinstance(out, DTensor):
            return out + 0.1 if self.in_features == 768 else out
        if not out.placements[0].is_partial():
            return out
        return DTensor.from_local(out.to_local() + 0.1, out.device_mesh, [Partial()])

    with replaced(nn.Linear, "forward", forward):
        yield


@contextmanager
def loss_not_divided() -> Generator[None]:
    """On more than one rank the loss is no longer divided by the number of tokens."""
    from torchtitan.train import Trainer

    original = Trainer.forward_backward_step

    def step(self: Trainer, *, global_valid_tokens: Any, **kwargs: Any) -> torch.Tensor:
        dropped = self.parallel_dims.world_size > 1
        return original(self, global_valid_tokens=1.0 if dropped else global_valid_tokens, **kwargs)

    step.__signature__ = __import__("inspect").signature(original)  # type: ignore[attr-defined]
    with replaced(Trainer, "forward_backward_step", step):
        yield


@contextmanager
def one_rank_off_after_init() -> Generator[None]:
    """Rank 1's part of one norm weight is off by a hundredth."""
    from placement_audit.adapters import titan02_device

    original = titan02_device.materialise

    def materialise(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if dist.get_rank() == 1:
            with torch.no_grad():
                weight = dict(model.named_parameters())[NORM]
                local_of(weight.detach()).mul_(1.01)

    with replaced(titan02_device, "materialise", materialise):
        yield


@contextmanager
def local_optimizer() -> Generator[None]:
    """An optimizer that takes the local part of every gradient, complete or not."""
    from placement_audit.adapters import titan02_reference

    def updater(**_: Any) -> Callable[[nn.Module, str], None]:
        def update(model: nn.Module, which: str) -> None:
            with torch.no_grad():
                for p in model.parameters():
                    g = p.grad
                    if not isinstance(p, DTensor) or not isinstance(g, DTensor):
                        p.sub_(g, alpha=0.1)
                        continue
                    if not any(q.is_partial() for q in g.placements):
                        g = g.redistribute(placements=p.placements)
                    local_of(p).sub_(g.to_local(), alpha=0.1)

        return update

    with replaced(titan02_reference, "updater", updater):
        yield


WRONG_SHARD_DIM = (
    "sharded_local_tensor = x.to_local()",
    "sharded_local_tensor = x.to_local(\n"
    "                grad_placements=(x.placements[0], Shard(0)) if x.placements[1] == Shard(1) else None\n"
    "            )",
)
ONE_AVERAGE = (
    "grad_placements=self.grad_placements\n",
    'grad_placements=[Partial("avg" if x.shape == (2048, 256) else "sum")] * self.device_mesh.ndim\n',
)
NO_DATA_PARALLEL_SUM = ("grad_placements=self.grad_placements\n", "\n")
EXTRA_SUM = (
    "        non_dp_placements = tuple(",
    "        import torch.distributed._functional_collectives as funcol\n"
    "        if replicated_local_tensor.requires_grad and replicated_local_tensor.numel() == 256:\n"
    "            replicated_local_tensor.register_hook(\n"
    "                lambda g: funcol.wait_tensor(funcol.all_reduce(g, 'sum', dp_mesh))\n"
    "            )\n"
    "        non_dp_placements = tuple(",
)

FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": stock,
    "proposed fix": lambda: rewritten(PR_2532),
    "bare to_local": bare_to_local,
    "no data-parallel sum": lambda: rewritten(NO_DATA_PARALLEL_SUM),
    "average everywhere": lambda: rewritten(AVERAGE),
    "one average": lambda: rewritten(ONE_AVERAGE),
    "extra sum": lambda: rewritten(EXTRA_SUM),
    "bias before a sum": bias_before_a_sum,
    "loss not divided": loss_not_divided,
    "one rank off": one_rank_off_after_init,
    "wrong shard dim": lambda: rewritten(WRONG_SHARD_DIM),
}
READERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": stock,
    "local optimizer": local_optimizer,
}


def audits(env: RankEnv, config: str, names: tuple[str, ...]) -> dict[str, Report]:
    out = {}
    for name in names:
        job = load(str(CONFIGS / config), overrides=[*SHORT, *FLOAT32], device="cpu")
        with (FAULTS | READERS)[name]():
            out[name] = pipeline.run(job, pipeline.Options(rank_env=env, measure=True))
    return out


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """FSDP 2 x TP 2, all faults in one launch; what rank 0 says."""
    of_ranks = on_ranks(4, audits, "fsdp_tp.toml", tuple(FAULTS))
    for others in of_ranks[1:]:
        for name, report in others.items():
            assert report.judgements == of_ranks[0][name].judgements, name
    return of_ranks[0]


def errors(report: Report) -> set[str]:
    return {f.rule_id for f in report.findings if f.severity == "error"}


def wrong(report: Report) -> set[tuple[str, str]]:
    return {
        (j.mesh_dim, j.verdict.value)
        for j in report.judgements
        if j.verdict not in (Verdict.OK, Verdict.DEFERRED)
    }


def norms(report: Report) -> set[str]:
    return {p.fqn for p in report.trace.params if "norm" in p.fqn}


def cause_lines(report: Report, rule: str) -> set[str]:
    return {f.path[0].call_site.code_line for f in report.findings if f.rule_id == rule}


def test_traced_and_measured_never_contradict_each_other(reports: dict[str, Report]) -> None:
    assert {name for name, r in reports.items() if "PA901" in errors(r) or r.exit_status == 3} == set()
    for name, report in reports.items():
        assert report.measurement is not None
        compared, _, contradicted = slots(report.trace, report.measurement)
        assert compared > 2000, name
        assert contradicted == 0 or name == "one rank off", name


def test_the_stock_job_is_clean(reports: dict[str, Report]) -> None:
    report = reports["stock"]
    assert (report.exit_status, errors(report), wrong(report)) == (0, set(), set())
    assert {len(j.evidence) for j in report.judgements} == {2}
    assert report.measurement is not None
    assert max(p.grad_error for p in report.measurement.params if p.grad_error is not None) < 1e-5
    assert max(p.step_error for p in report.measurement.params if p.step_error is not None) < 1e-6


def test_an_average_of_what_is_divided_already_is_found_out(reports: dict[str, Report]) -> None:
    """torchtitan 0.2.2 divides the loss by the global number of tokens: the ranks' parts are to be summed."""
    report = reports["average everywhere"]
    scales = {n: str(r.measurement.grad_scale) for n, r in reports.items() if r.measurement}
    assert (scales["stock"], scales["average everywhere"]) == ("1", "1/2")
    assert (errors(report), wrong(report)) == ({"PA209"}, set())


def test_the_proposed_fix(reports: dict[str, Report]) -> None:
    report = reports["proposed fix"]
    assert (errors(report), wrong(report)) == ({"PA202"}, {("tp", "double reduction")})
    assert {f.param_fqn for f in report.findings if f.rule_id == "PA202"} == norms(report)
    measured = judgement(report, NORM, "tp").evidence[1].statement
    assert "relative error 1 (" in measured
    assert "norm ratio 2" in measured


def test_a_bare_to_local_in_a_norm(reports: dict[str, Report]) -> None:
    report = reports["bare to_local"]
    assert (errors(report), wrong(report)) == ({"PA201"}, {("tp", "lost reduction")})
    assert {f.param_fqn for f in report.findings if f.rule_id == "PA201"} == norms(report)
    assert cause_lines(report, "PA201") == {
        "y = torch.nn.functional.rms_norm(x.to_local(), self.normalized_shape, weight.to_local(), self.eps)"
    }
    assert "replicas differ by" in judgement(report, NORM, "tp").evidence[1].statement


def test_a_data_parallel_sum_that_is_missing(reports: dict[str, Report]) -> None:
    report = reports["no data-parallel sum"]
    assert (errors(report), wrong(report)) == ({"PA201"}, {("fsdp", "lost reduction")})
    assert len({f.param_fqn for f in report.findings if f.rule_id == "PA201"}) == 57
    assert cause_lines(report, "PA201") == {"replicated_local_tensor = replicated_dtensor.to_local("}


def test_one_parameter_averaged_among_sums(reports: dict[str, Report]) -> None:
    report = reports["one average"]
    assert (errors(report), wrong(report)) == ({"PA203"}, {("fsdp", "wrong scale")})
    found = {f.param_fqn for f in report.findings if f.rule_id == "PA203"}
    assert found == {"tok_embeddings.weight", "output.weight"}
    assert "norm ratio 0.5" in judgement(report, "output.weight", "fsdp").evidence[1].statement


def test_a_sum_too_many(reports: dict[str, Report]) -> None:
    report = reports["extra sum"]
    assert (errors(report), wrong(report)) == ({"PA202"}, {("fsdp", "double reduction")})
    assert {f.param_fqn for f in report.findings if f.rule_id == "PA202"} == norms(report)


def test_a_bias_added_before_a_sum_is_told_once_the_numbers_are_off(reports: dict[str, Report]) -> None:
    report = reports["bias before a sum"]
    assert errors(report) == {"PA107", "PA207", "PA208"}
    counted = [f for f in report.findings if f.rule_id == "PA107"]
    said = 'the number 0.1 is added to each "tp" rank\'s term of a sum, and counted 2 times'
    assert {f.message for f in counted} == {said}
    assert {f.module_fqn.rpartition(".")[2] for f in counted} == {"wo", "w2"}
    assert {v for _, v in wrong(report)} == {"wrong gradient"}


def test_a_loss_that_is_not_divided(reports: dict[str, Report]) -> None:
    report = reports["loss not divided"]
    assert errors(report) == {"PA207", "PA208"}
    assert report.exit_status == 1


def test_one_rank_s_weight_that_differs_after_init(reports: dict[str, Report]) -> None:
    report = reports["one rank off"]
    found = [f for f in report.findings if f.severity == "error"]
    assert {(f.rule_id, f.param_fqn, f.mesh_dim) for f in found} == {("PA205", NORM, "tp")}


def test_a_gradient_labelled_as_a_shard_of_another_tensor_dim(reports: dict[str, Report]) -> None:
    report = reports["wrong shard dim"]
    rowwise = {p.fqn for p in report.trace.params if p.layout and str(p.layout.on("tp")) == "Shard(1)"}
    assert {f.param_fqn for f in report.findings if f.rule_id == "PA104"} == rowwise
    assert {f.param_fqn for f in report.findings if f.rule_id == "PA204"} == rowwise
    assert ("tp", "wrong placement") in wrong(report)
    assert cause_lines(report, "PA104") == {"sharded_local_tensor = x.to_local()"}


# --------------------------------------------------------------------------- readers


@pytest.fixture(scope="module")
def tp_alone() -> dict[str, Report]:
    """TP 2: the norms' gradients are left to their readers."""
    return on_ranks(2, audits, "tp.toml", tuple(READERS))[0]


def test_the_readers_of_partial_gradients_are_named(tp_alone: dict[str, Report]) -> None:
    report = tp_alone["stock"]
    assert (report.exit_status, errors(report)) == (0, set())
    assert report.measurement is not None
    readers = {r.through: r for r in report.measurement.readers}
    assert {"aten._foreach_norm", "aten._foreach_mul_", "aten._fused_adamw_"} <= set(readers)
    assert {frozenset(r.params) for r in readers.values()} == {frozenset(norms(report))}
    assert {r.whole for r in readers.values()} == {True}
    assert readers["aten._foreach_norm"].user_site.path == "torchtitan/distributed/utils.py"


def test_a_reader_that_takes_the_local_part(tp_alone: dict[str, Report]) -> None:
    report = tp_alone["local optimizer"]
    found = [f for f in report.findings if f.severity == "error"]
    assert {(f.rule_id, f.mesh_dim) for f in found} == {("PA402", "tp")}
    assert {f.param_fqn for f in found} == norms(report)
    assert {(f.path[0].role, f.path[0].call_site.code_line) for f in found} == {
        ("reads one rank's term of it", "local_of(p).sub_(g.to_local(), alpha=0.1)")
    }


# --------------------------------------------------------------------------- the matrix


class OneDeviceNorm(nn.Module):
    """The norm of the matrix, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))


def cells(env: RankEnv, names: tuple[str, ...]) -> dict[str, Report]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    return {str(c): cell_report(c, mesh) for c in CELLS if str(c) in names}


def cell_report(cell: Cell, mesh: Any) -> Report:
    generator = torch.Generator().manual_seed(1)
    whole_x, whole_g = (torch.randn(4, 8, 16, generator=generator) for _ in range(2))
    dp, _ = mesh.get_coordinate()
    x, g = (t[2 * dp : 2 * dp + 2].contiguous() for t in (whole_x, whole_g))
    model = Norm(mesh, cell.variant, cell.style)

    def step() -> torch.Tensor:
        rows, factors = (
            DTensor.from_local(t, mesh["tp"], [Replicate()]).redistribute(placements=[Shard(1)])
            for t in (x, g)
        )
        loss = (model(rows) * factors.to_local()).sum()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("tp"))
        return total

    def reference() -> Reference:
        one = OneDeviceNorm()

        def whole_step() -> torch.Tensor:
            loss = (nn.functional.rms_norm(whole_x, (16,), one.weight) * whole_g).sum()
            loss.backward()
            return loss

        return Reference(model=one, step=whole_step)

    def update(m: nn.Module, which: str) -> None:
        torch.optim.SGD(m.parameters(), lr=0.1).step()

    case = Case(
        name=str(cell),
        model=model,
        mesh=mesh,
        batch_dims=("fsdp",),
        inputs=(x, g),
        step=step,
        device_type="cpu",
        backend="gloo",
        reference=reference,
        update=update,
    )
    prepared = prepare(case, seed=3)
    tracer = Tracer(case, fingerprint=fingerprint)
    loss = tracer.run()
    prints = [
        BoundaryPrints(index=i, value=v, arrived=a, left=left) for i, v, a, left in tracer.fingerprints()
    ]
    measurement = finish(prepared, case, loss=loss, boundaries=prints)
    return judge(tracer.freeze(run_record(case)), measurement)


@pytest.fixture(scope="module")
def matrix() -> dict[str, Report]:
    return on_ranks(4, cells, tuple(map(str, CELLS)))[0]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_fifteen_cells_measured_as_traced(cell: Cell, matrix: dict[str, Report]) -> None:
    report = matrix[str(cell)]
    on_fsdp, on_tp = judgement(report, "weight", "fsdp"), judgement(report, "weight", "tp")
    assert (on_fsdp.verdict, on_tp.verdict, on_tp.factor) == (cell.fsdp, cell.tp, cell.factor)
    assert "PA901" not in errors(report)
    assert report.measurement is not None
    (numbers,) = report.measurement.params
    good = {Verdict.OK, Verdict.DEFERRED} >= {cell.fsdp, cell.tp}
    assert numbers.grad_error is not None
    assert (numbers.grad_error < 1e-5 and report.measurement.grad_scale == 1) is good
    assert slots(report.trace, report.measurement)[2] == 0
