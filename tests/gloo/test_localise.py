"""A wrong gradient is traced to its place: real torchtitan on real ranks, faults that a trace can and cannot see."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from placement_audit import pipeline
from placement_audit.config import RankEnv, load
from placement_audit.measurement import Departure
from placement_audit.verdicts import Report
from tests.gloo.ranks import on_ranks
from tests.gloo.test_audit import SHORT, loss_not_divided, replaced
from tests.gloo.test_measure import bare_to_local, stock
from tests.trace.titan import CONFIGS, PR_2532, rewritten

pytestmark = pytest.mark.gloo

HERE = "tests/gloo/test_localise.py"


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is half as much again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 1.5  # wrong


def parallel(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


BLOCK: list[Any] = [None]
"""The transformer block that is wrong, of the model that runs."""


@contextmanager
def in_layer(layer: str = "2") -> Generator[None]:
    from torchtitan.models.llama3.model.model import Transformer

    original = Transformer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        block = self.layers[layer]
        BLOCK[0] = getattr(block, "_checkpoint_wrapped_module", block)
        return original(self, *args, **kwargs)

    with replaced(Transformer, "forward", forward):
        yield


@contextmanager
def wrong_backward() -> Generator[None]:
    """One block of the parallel model scales a gradient wrongly."""
    from torchtitan.models.llama3.model.model import FeedForward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.silu(self.w1(x))
        if parallel(self) and self is BLOCK[0].feed_forward:
            gate = Scaled.apply(gate)
        return self.w2(gate * self.w3(x))

    with in_layer(), replaced(FeedForward, "forward", forward):
        yield


@contextmanager
def edited_linear(change: Callable[[torch.Tensor], torch.Tensor]) -> Generator[None]:
    """The wo of one block of the parallel model puts out something else."""
    original = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out = original(self, x)
        return change(out) if self is BLOCK[0].attention.wo else out

    with in_layer(), replaced(nn.Linear, "forward", forward):
        yield


def biased(out: torch.Tensor) -> torch.Tensor:
    if not isinstance(out, DTensor):
        return out
    local = out.to_local()
    local = local + 0.1  # wrong: on every rank, before the sum
    return DTensor.from_local(local, out.device_mesh, [Partial()])


@contextmanager
def edited_norm(change: Callable[[DTensor, nn.RMSNorm], torch.Tensor]) -> Generator[None]:
    """One block's ffn_norm in the parallel model is computed by ``change``."""
    original = nn.RMSNorm.forward

    def forward(self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        wrong = self is BLOCK[0].ffn_norm and isinstance(x, DTensor)
        return change(x, self) if wrong else original(self, x)

    with in_layer(), replaced(nn.RMSNorm, "forward", forward):
        yield


def local_mean(x: DTensor, norm: nn.RMSNorm) -> torch.Tensor:
    y = nn.functional.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    local = y.to_local()
    local = local * (1 + local.mean(1, keepdim=True) - local.mean(1, keepdim=True).detach())  # wrong
    return DTensor.from_local(local, y.device_mesh, y.placements)


def extra_all_reduce(x: DTensor, norm: nn.RMSNorm) -> torch.Tensor:
    y = nn.functional.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    local = y.to_local()
    group = y.device_mesh
    local.register_hook(lambda g: funcol.wait_tensor(funcol.all_reduce(g, "sum", group)))  # wrong
    return DTensor.from_local(local, y.device_mesh, y.placements)


def wrong_dim(x: DTensor, norm: nn.RMSNorm) -> torch.Tensor:
    """The ranks' parts of the sequence, put together in the wrong order."""
    y = nn.functional.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    local = y.to_local()
    whole = DTensor.from_local(local, y.device_mesh, [Shard(2)])  # wrong: it is Shard(1)
    flat = whole.redistribute(placements=[Shard(1)]).to_local()
    flat = flat.reshape(local.shape)
    return DTensor.from_local(flat, y.device_mesh, y.placements)


def divided(out: torch.Tensor) -> torch.Tensor:
    """Each rank adds its share of a bias: right forward, and a gradient that nobody sums."""
    bias = BLOCK[0].ffn_norm.weight
    if not isinstance(out, DTensor):
        return out + bias
    share = bias.to_local() / out.device_mesh.size()  # wrong
    return DTensor.from_local(out.to_local() + share, out.device_mesh, [Partial()])


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": stock,
    "wrong backward": wrong_backward,
    "bias before a sum": lambda: edited_linear(biased),
    "a share of a bias": lambda: edited_linear(divided),
    "local mean": lambda: edited_norm(local_mean),
    "extra all-reduce": lambda: edited_norm(extra_all_reduce),
    "wrong shard dim": lambda: edited_norm(wrong_dim),
    "bare to_local": bare_to_local,
    "proposed fix": lambda: rewritten(PR_2532),
    "loss not divided": loss_not_divided,
}


def audits(env: RankEnv, config: str, names: tuple[str, ...], *more: str) -> dict[str, Report]:
    out = {}
    for name in names:
        job = load(str(CONFIGS / config), overrides=[*SHORT, *more], device="cpu")
        with FAULTS[name]():
            out[name] = pipeline.run(job, pipeline.Options(rank_env=env, measure=True))
    return out


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """FSDP 2 x TP 2, all faults; what rank 0 says."""
    names = tuple(FAULTS)
    half = len(names) // 2
    launches = (on_ranks(4, audits, "fsdp_tp.toml", n, deadline=140) for n in (names[:half], names[half:]))
    return {name: report for ranks in launches for name, report in ranks[0].items()}


def departures(report: Report) -> tuple[Departure, ...]:
    assert report.measurement is not None
    return report.measurement.departures


def place(function: Callable[..., Any], text: str = "# wrong") -> tuple[str, str]:
    """File and line of code."""
    lines = [line.strip() for line in inspect.getsource(function).splitlines()]
    return HERE, next(line for line in lines if text in line)


def places(d: Departure) -> list[tuple[str, str]]:
    return [(s.call_site.path, s.call_site.code_line) for s in d.steps]


def cause(report: Report, rule: str) -> set[tuple[str, str]]:
    """What the rule's findings name first."""
    sites = [f.path[0].call_site for f in report.findings if f.rule_id == rule]
    return {(s.path, s.code_line) for s in sites}


def told(report: Report, rule: str) -> str:
    return next(f for f in report.findings if f.rule_id == rule).evidence[-1].statement


def nothing_departs(report: Report) -> None:
    m = report.measurement
    assert m is not None
    assert (report.exit_status, m.departures) == (0, ())
    # 6 layers of 13 modules, the embedding, the last norm, the head and the whole model.
    assert len(m.activations) == 82
    assert {a.why_not for a in m.activations} == {""}
    errors = [e for a in m.activations for e in (a.value_error, a.grad_error)]
    assert max(errors) < 3e-6  # type: ignore[type-var]
    # A comparison of a tensor with itself would be exact.
    assert sum(e > 1e-9 for e in errors) > 150  # type: ignore[operator]


@pytest.mark.parametrize(
    ("ranks", "config", "more"),
    [
        (2, "tp.toml", ("--activation_checkpoint.mode", "none")),
        (2, "tp.toml", ("--activation_checkpoint.mode", "full", "--parallelism.disable_loss_parallel")),
        (8, "hsdp_tp.toml", ("--activation_checkpoint.mode", "full")),
    ],
)
def test_nothing_departs_in_a_stock_job(ranks: int, config: str, more: tuple[str, ...]) -> None:
    nothing_departs(on_ranks(ranks, audits, config, ("stock",), *more)[0]["stock"])


def test_nothing_departs_in_the_stock_job_of_four_ranks(reports: dict[str, Report]) -> None:
    nothing_departs(reports["stock"])


@pytest.mark.parametrize(
    ("name", "direction", "what", "where"),
    [
        ("wrong backward", "backward", "the output of layers.2.feed_forward.w1", place(Scaled.backward)),
        ("bias before a sum", "forward", "the output of layers.2.attention.wo", place(biased)),
        ("local mean", "backward", "the output of layers.2.attention.wo", place(local_mean)),
        ("extra all-reduce", "backward", "the output of layers.2.attention.wo", place(extra_all_reduce)),
        ("wrong shard dim", "forward", "the output of layers.2.ffn_norm", place(wrong_dim)),
    ],
)
def test_a_fault_that_only_numbers_show_is_named_by_its_line(
    name: str, direction: str, what: str, where: tuple[str, str], reports: dict[str, Report]
) -> None:
    found = {(d.direction, d.what): d for d in departures(reports[name])}
    d = found[direction, what]
    assert d.error > 1e-3
    assert d.right
    assert max(c.error for c in d.right) < 1e-5
    assert places(d)[0] == where
    assert cause(reports[name], "PA207") == {where}
    assert f"{d.what} is off by" in told(reports[name], "PA207")


def test_only_the_first_departure_is_one(reports: dict[str, Report]) -> None:
    """All gradients before it are wrong too, and follow from it."""
    assert [d.what for d in departures(reports["wrong backward"])] == [
        "the output of layers.2.feed_forward.w1"
    ]
    assert [d.what for d in departures(reports["bias before a sum"])] == [
        "the output of layers.2.attention.wo"
    ]


def test_a_share_of_a_bias_that_nobody_sums(reports: dict[str, Report]) -> None:
    (d,) = departures(reports["a share of a bias"])
    assert (d.direction, d.param_fqn) == ("backward", "layers.2.ffn_norm.weight")
    assert place(divided) in places(d)


def test_a_loss_that_is_not_divided(reports: dict[str, Report]) -> None:
    (d,) = departures(reports["loss not divided"])
    assert (d.direction, d.what) == ("forward", "the loss")
    assert ("torchtitan/train.py", "loss = loss_sum / global_valid_tokens") in places(d)
    assert cause(reports["loss not divided"], "PA208") == cause(reports["loss not divided"], "PA207")


@pytest.mark.parametrize(("name", "rule"), [("bare to_local", "PA201"), ("proposed fix", "PA202")])
def test_trace_and_numbers_name_the_same_place(name: str, rule: str, reports: dict[str, Report]) -> None:
    """Every activation's gradient is right; the norms' own depart on their own."""
    report = reports[name]
    norms = {f.param_fqn for f in report.findings if f.rule_id == rule}
    assert {d.param_fqn for d in departures(report)} == norms
    assert len(norms) == 13
    assert told(report, rule).endswith("the trace names a place in between")
