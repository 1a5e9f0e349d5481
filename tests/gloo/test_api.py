"""The Python API on real ranks: proven with numbers, and nothing of the user's changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from placement_audit import AuditError, Report, audit
from placement_audit.config import RankEnv
from placement_audit.verdicts import Severity, Verdict
from tests.faults.family import Bag, draw, mine
from tests.faults.functions import Copy, Reduce
from tests.gloo.ranks import on_ranks
from tests.trace.worlds import of_rule, verdicts

pytestmark = pytest.mark.gloo

D, H, T = 6, 8, 4


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))


def loss_of(m: nn.Module) -> torch.Tensor:
    return (m(draw("x", T, D, scale=1)) - draw("y", T, D)).square().mean()


def errors(report: Report) -> list[str]:
    return [f.rule_id for f in report.findings if f.severity is Severity.ERROR]


# --------------------------------------------------------------------------- sharded against unsharded, one by one


def ffn(_env: RankEnv) -> dict[str, tuple[float, float]]:
    """The column-then-row FFN: FQN -> (our relative error, the audit's)."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(made(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    whole = made()
    out = loss_of(model), loss_of(whole)
    assert torch.allclose(*out, rtol=1e-6)
    for o in out:
        o.backward()
    reference = dict(whole.named_parameters())
    ours = {}
    for name, p in model.named_parameters():
        g, r = p.grad.full_tensor(), reference[name].grad
        ours[name] = ((g - r).norm() / r.norm()).item()
    again = made()
    report = audit(lambda: loss_of(model), model, reference=lambda: (again, lambda: loss_of(again)))
    assert report.measurement is not None
    assert report.exit_status == 0
    theirs = {p.fqn: p.grad_error for p in report.measurement.params}
    return {name: (ours[name], theirs[name]) for name in ours}


def test_the_ffn_sharded_against_unsharded() -> None:
    for table in on_ranks(2, ffn):
        assert set(table) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert all(max(both) < 1e-6 for both in table.values()), table


def as_ranks(weights: dict[str, torch.Tensor], n: int) -> dict[str, torch.Tensor]:
    """Gradients of the FFN on ``n`` ranks in one process: each rank's part, and the sums written out."""
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    parts = [
        {
            "0.weight": weights["0.weight"].chunk(n)[r].clone().requires_grad_(),
            "0.bias": weights["0.bias"].chunk(n)[r].clone().requires_grad_(),
            "2.weight": weights["2.weight"].chunk(n, 1)[r].clone().requires_grad_(),
        }
        for r in range(n)
    ]
    bias = weights["2.bias"].clone().requires_grad_()
    terms = [F.linear(F.gelu(F.linear(x, p["0.weight"], p["0.bias"])), p["2.weight"]) for p in parts]
    (sum(terms) + bias - y).square().mean().backward()
    out = {
        name: torch.cat([p[name].grad for p in parts], 1 if name == "2.weight" else 0)
        for name in ("0.weight", "0.bias", "2.weight")
    }
    return {**out, "2.bias": bias.grad}


@pytest.mark.parametrize("n", [2, 4])
def test_the_ffn_in_one_process(n: int) -> None:
    whole = made()
    loss_of(whole).backward()
    reference = dict(whole.named_parameters())
    for name, g in as_ranks({k: v.detach() for k, v in reference.items()}, n).items():
        torch.testing.assert_close(g, reference[name].grad, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------- what is left behind


def untouched(_env: RankEnv) -> dict[str, bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(made(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model).backward()
    optimizer.step()
    before = [(p.grad, p.to_local().clone(), p.grad.to_local().clone()) for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].to_local().clone() for p in model.parameters()]
    theirs = made()
    report = audit(
        lambda: loss_of(model),
        model,
        optimizer=optimizer,
        reference=lambda: (theirs, lambda: loss_of(theirs)),
    )
    after = [(p.grad, p.to_local(), p.grad.to_local()) for p in model.parameters()]
    return {
        "clean": report.exit_status == 0,
        "gradients": all(
            a[0] is b[0] and torch.equal(a[2], b[2]) for a, b in zip(after, before, strict=True)
        ),
        "weights": all(torch.equal(a[1], b[1]) for a, b in zip(after, before, strict=True)),
        "optimizer": all(
            torch.equal(optimizer.state[p]["exp_avg"].to_local(), m)
            for p, m in zip(model.parameters(), moments, strict=True)
        ),
    }


def test_weights_gradients_and_the_optimizer_are_left_as_they_were() -> None:
    for rank in on_ranks(2, untouched):
        assert all(rank.values()), rank


# --------------------------------------------------------------------------- replicas, with and without a reference


def replicas(env: RankEnv, apart: bool, names: tuple[str, ...] | None) -> Report:
    """Plain weights, replicated by declaration; no reference to compare with."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
    group = mesh.get_group()
    w2 = draw("w2", D, H) + (0.1 if apart and env.rank else 0)
    model = Bag(w1=draw("w1", H, D).chunk(2)[env.rank], w2=w2)
    x = draw("x", T, D)

    def step() -> torch.Tensor:
        h = F.linear(Copy.apply(x, group), model.w1)
        return F.linear(Reduce.apply(F.pad(h, (0, H // 2)), group), model.w2).square().mean()

    return audit(step, model, mesh=mesh, declared={"w1": [Shard(0)]})


@pytest.mark.parametrize("names", [("tp",), None])
@pytest.mark.parametrize("apart", [False, True])
def test_replicas_that_differ_at_the_start_are_found_without_a_reference(
    apart: bool, names: tuple[str, ...] | None
) -> None:
    report = on_ranks(2, replicas, apart, names)[0]
    assert report.measurement is None
    (tp,) = names or ("dim0",)
    assert verdicts(report, "w2") == {tp: Verdict.RANKS_DISAGREE if apart else Verdict.OK}
    assert verdicts(report, "w1") == {tp: Verdict.OK}, "a shard may differ"
    assert errors(report) == (["PA205"] if apart else [])
    assert all("0.1" not in f.message or "differed by" in f.message for f in of_rule(report, "PA205"))


# --------------------------------------------------------------------------- wrappers


class Handing(torch.optim.Optimizer):
    """Hands on to others, as torchtitan's container and Accelerate's wrapper do."""

    def __init__(self, model: nn.Module) -> None:
        first, *rest = model.parameters()
        self.optimizers = [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]
        super().__init__(list(model.parameters()), {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def stepped(_env: RankEnv, what: str) -> tuple[Report, list[int]]:
    """The report, and how many states each inner optimizer of the user's has afterwards."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    theirs = made()
    model: Any = DistributedDataParallel(made())
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = Handing(model) if what == "handing on" else adam

    def step() -> torch.Tensor:
        rows = mine(x, mesh, "dp").requires_grad_(what == "checkpointed")
        out = checkpoint(model, rows, use_reentrant=True) if what == "checkpointed" else model(rows)
        return (out - mine(y, mesh, "dp")).square().mean()

    report = audit(
        step,
        model,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        optimizer=optimizer,
        reference=lambda: (theirs, lambda: loss_of(theirs)),
    )
    return report, [len(o.state) for o in getattr(optimizer, "optimizers", [optimizer])]


@pytest.mark.parametrize("what", ["its own", "handing on", "checkpointed"])
def test_an_optimizer_of_the_wrapped_model_s_parameters_is_measured(what: str) -> None:
    for report, states in on_ranks(2, stepped, what):
        assert report.measurement is not None, report.trace.run.notes
        assert report.exit_status == 0, [f.message for f in report.findings]
        assert all(p.step_error < 1e-6 for p in report.measurement.params)
        assert any(p.step_error > 0 for p in report.measurement.params), "it stepped"
        assert not any(states), "and left the user's own as it was"


def wrapped(_env: RankEnv, what: str) -> Report:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x, y = draw("x", T, D, scale=1), draw("y", T, D)
    model, theirs = made(), made()
    if what == "ddp":
        model = DistributedDataParallel(model)
    else:
        dtype = torch.bfloat16 if what == "fsdp in bfloat16" else torch.float32
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        model.set_force_sum_reduction_for_comms(True)

    def step() -> torch.Tensor:
        return (model(mine(x, mesh, "dp")) - mine(y, mesh, "dp")).square().mean()

    return audit(
        step,
        model,
        mesh=mesh,
        inputs=(x, y),
        batch_placements={"dp": Shard(0)},
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        reference=lambda: (theirs, lambda: loss_of(theirs)),
    )


@pytest.mark.parametrize("what", ["ddp", "fsdp"])
def test_averages_over_data_parallel_ranks_are_right(what: str) -> None:
    report = on_ranks(2, wrapped, what)[0]
    assert report.exit_status == 0, [f.message for f in report.findings]
    assert report.measurement is not None
    assert str(report.measurement.grad_scale) == "1/2", "of the sum of two means"
    assert {j.param_fqn for j in report.judgements} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_what_computes_in_bfloat16_is_not_measured_and_says_so() -> None:
    report = on_ranks(2, wrapped, "fsdp in bfloat16")[0]
    assert report.measurement is None
    assert any("the step computes or reduces in bfloat16" in n for n in report.trace.run.notes)
    assert report.exit_status == 0


def of_the_same_memory(_env: RankEnv) -> Report:
    """The model and the reference's are made from the same tensors, as plain replicated weights easily are."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    w = torch.arange(4.0)
    model, theirs = nn.ParameterDict({"w": w}), nn.ParameterDict({"w": w})
    report = audit(
        lambda: (model["w"] ** 2).sum(),
        model,
        mesh=mesh,
        reference=lambda: (theirs, lambda: (theirs["w"] ** 2).sum()),
    )
    assert w.tolist() == [0, 1, 2, 3], "left as it was"
    return report


def test_a_reference_of_the_same_memory_is_no_fault() -> None:
    report = on_ranks(2, of_the_same_memory)[0]
    assert report.measurement is not None
    assert (report.exit_status, [f.observed for f in report.findings]) == (0, [])


# --------------------------------------------------------------------------- misuse


def misused(_env: RankEnv, how: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, theirs = parallelize_module(made(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), made()
    arguments: dict[str, Any] = {"reference": lambda: (theirs, lambda: loss_of(theirs))}
    if how == "no pair":
        arguments["reference"] = lambda: theirs
    elif how == "no loss":
        arguments["reference"] = lambda: (theirs, lambda: None)
    elif how == "another optimizer":
        arguments["optimizer"] = torch.optim.SGD(theirs.parameters(), lr=0.1)
    elif how == "other parameters":
        arguments["reference"] = lambda: (nn.Linear(2, 2), lambda: None)
    elif how == "itself":
        model = made()
        arguments |= {"reference": lambda: (model, lambda: loss_of(model)), "mesh": mesh}
    try:
        report = audit(lambda: loss_of(model), model, **arguments)
    except AuditError as error:
        return error.message
    return " ".join(report.trace.run.notes)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no pair", "reference returned Sequential; expected (model, step) or (model, step, optimizer)"),
        ("no loss", "the reference's step called no backward() and returned NoneType."),
        ("another optimizer", "optimizer: a parameter of shape (8, 6) is none of the model's."),
        ("other parameters", "the model on one device has other parameters than the parallel one"),
        ("itself", "the reference's model has the job's own parameters (0.weight, 0.bias, 2.weight, 2.bias)"),
    ],
)
def test_misuse_is_told_on_every_rank(how: str, message: str) -> None:
    for told in on_ranks(2, misused, how):
        assert message in told


# --------------------------------------------------------------------------- a step that fails


def _failing(_env: RankEnv, traced: bool) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Bag(w=draw("w", 3))
    reference = None if traced else lambda: (Bag(w=draw("w", 3)), lambda: draw("w", 3).sum())
    try:
        audit(lambda: draw("z", 3) @ draw("z", 2), model, mesh=mesh, reference=reference)
    except AuditError as error:
        return error.message
    return "went well"


@pytest.mark.parametrize("traced", [False, True], ids=["measured", "traced"])
def test_a_step_that_fails_on_real_ranks(traced: bool) -> None:
    for message in on_ranks(2, _failing, traced):
        assert message.startswith("Bag failed in forward: RuntimeError: "), message
