"""Measured evidence on real gloo ranks: stock torchtitan is right, and each fault shows in its own number."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from placement_audit.build import build
from placement_audit.case import Case
from placement_audit.config import RankEnv, load
from placement_audit.dtensor_api import local_of
from placement_audit.engine.world import World
from placement_audit.errors import NotMeasurable
from placement_audit.measure.fingerprint import LARGEST, BoundaryPrints, fingerprint, spreads
from placement_audit.measure.run import finish, prepare
from placement_audit.measure.weights import parameters
from placement_audit.measurement import Measurement, ParamMeasure
from tests.gloo.ranks import RanksFailed, on_ranks
from tests.trace.titan import CONFIGS, OTHER_HALF, PR_2532, rewritten
from tests.trace.worlds import fake_mesh

pytestmark = pytest.mark.gloo

RANKS = {"tp.toml": 2, "fsdp_tp.toml": 4, "hsdp_tp.toml": 8}
SHORT = ("--training.seq_len", "128")
AVERAGE = ("self.grad_placements\n", '[Partial("avg")] * self.device_mesh.ndim\n')
NORM = "layers.0.ffn_norm.weight"
WQ = "layers.1.attention.wq.weight"


# --------------------------------------------------------------------------- on the ranks


def case_of(env: RankEnv, config: str, *overrides: str) -> Case:
    job = load(str(CONFIGS / config), overrides=[*SHORT, *overrides], device="cpu")
    return build(job, rank_env=env, float32=True)


def measured(case: Case) -> Measurement:
    prepared = prepare(case, seed=7)
    return finish(prepared, case, loss=case.step())


@contextmanager
def stock() -> Iterator[None]:
    yield


@contextmanager
def bare_to_local() -> Iterator[None]:
    """A user's norm that leaves DTensor and comes back without saying what the gradient is."""
    original = torch.nn.RMSNorm.forward

    def forward(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not isinstance(weight, DTensor) or not isinstance(x, DTensor):
            return original(self, x)
        y = torch.nn.functional.rms_norm(x.to_local(), self.normalized_shape, weight.to_local(), self.eps)
        return DTensor.from_local(y, x.device_mesh, x.placements)

    torch.nn.RMSNorm.forward = forward
    try:
        yield
    finally:
        torch.nn.RMSNorm.forward = original


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": stock,
    "fix alone": lambda: rewritten(PR_2532),
    "both halves": lambda: rewritten(PR_2532, OTHER_HALF),
    "bare to_local": bare_to_local,
    "average": lambda: rewritten(AVERAGE),
}


def faults(env: RankEnv, config: str, names: tuple[str, ...]) -> dict[str, Measurement]:
    out = {}
    for name in names:
        with FAULTS[name]():
            out[name] = measured(case_of(env, config))
    return out


def perturbed(env: RankEnv, config: str, faulty: dict[str, int]) -> Measurement:
    """One rank's part of a parameter is off by a hundredth after init: FQN -> rank."""
    case = case_of(env, config)
    for fqn, rank in faulty.items():
        if env.rank == rank:
            with torch.no_grad():
                local_of(parameters(case.model)[fqn].detach()).mul_(1.01)
    return measured(case)


def unclipped(env: RankEnv, config: str) -> Measurement:
    """Clipping that reports the right norm and leaves the norm weights as they were (torch 2.10 does)."""
    case = case_of(env, config)

    def update(model: torch.nn.Module, which: str) -> float | None:
        norms = [p for n, p in model.named_parameters() if "norm" in n and model is case.model]
        before = [local_of(p.grad).clone() for p in norms]
        total = case.update(model, which)
        with torch.no_grad():
            for p, g in zip(norms, before, strict=True):
                local_of(p.detach()).sub_(g - local_of(p.grad), alpha=0.1)
        return total

    return measured(dataclasses.replace(case, update=update))


def wrong_parts(env: RankEnv) -> list[str]:
    """FQNs whose parts do not make up the whole that was drawn."""
    prepared = prepare(case_of(env, "hsdp_tp.toml"), seed=7)
    params, drawn = prepared.params, prepared.weights
    kinds = {type(placement).__name__ for p in params.values() for placement in p.placements}
    assert kinds == {"Replicate", "Shard", "_StridedShard"}
    with torch.no_grad():
        return [n for n, p in params.items() if not p.full_tensor().equal(drawn.full(n, p))]


def not_put_back(env: RankEnv) -> list[str]:
    """FQNs whose value or gradient `finish` changed."""
    case = case_of(env, "fsdp_tp.toml")
    prepared = prepare(case, seed=7)
    loss = case.step()
    before = {n: (local_of(p.detach()).clone(), local_of(p.grad).clone()) for n, p in prepared.params.items()}
    finish(prepared, case, loss=loss)
    return [
        n
        for n, p in prepared.params.items()
        if not (local_of(p.detach()).equal(before[n][0]) and local_of(p.grad).equal(before[n][1]))
    ]


def missing(env: RankEnv, ranks: tuple[int, ...]) -> Measurement:
    """Some ranks have no gradient of one parameter."""
    case = case_of(env, "tp.toml")
    prepared = prepare(case, seed=7)
    loss = case.step()
    if env.rank in ranks:
        prepared.params[WQ].grad = None
    return finish(prepared, case, loss=loss)


def ignored_labels(env: RankEnv) -> tuple[int, int]:
    case = case_of(env, "fsdp_tp.toml")
    labels = case.inputs[1]
    return int((labels == -100).sum()), labels.numel()


def boundary_spreads(env: RankEnv) -> Measurement:
    """Rank 3 of FSDP 2 x TP 2 has another value at boundary 1, and another gradient that arrives."""
    case = case_of(env, "fsdp_tp.toml")
    prepared = prepare(case, seed=7)
    x = torch.arange(1.0, 1001.0)
    other = x * (1.01 if env.rank == 3 else 1)
    prints = [
        BoundaryPrints(index=0, value=fingerprint(x), arrived=None, left=None),
        BoundaryPrints(index=1, value=fingerprint(other), arrived=fingerprint(other), left=fingerprint(x)),
    ]
    return finish(prepared, case, loss=case.step(), boundaries=prints)


def not_measurable(env: RankEnv, fault: str) -> str:
    case = case_of(env, "tp.toml", *(("--model.flavor", "debugmodel_flex_attn") if fault == "flex" else ()))
    if fault == "raises":

        def reference() -> Any:
            raise RuntimeError("no room")

        case = dataclasses.replace(case, reference=reference)
    try:
        prepare(case, seed=7)
    except NotMeasurable as error:
        return error.message
    return "measured"


def fail(env: RankEnv, how: str) -> int:
    if how == "raise" and env.rank == 1:
        raise ValueError("on purpose")
    if how == "die" and env.rank == 1:
        import os

        os._exit(9)
    if how != "nothing":
        dist.barrier()
    return env.rank


# --------------------------------------------------------------------------- here


@functools.cache
def run(config: str) -> dict[str, Measurement]:
    """All faults of a config in one launch; every rank measured the same."""
    names = {"tp.toml": ("stock", "bare to_local"), "fsdp_tp.toml": tuple(FAULTS)}.get(config, ("stock",))
    ranks = on_ranks(RANKS[config], faults, config, names)
    for other in ranks[1:]:
        assert {n: m.params for n, m in other.items()} == {n: m.params for n, m in ranks[0].items()}
    return ranks[0]


def param(m: Measurement, fqn: str) -> ParamMeasure:
    return next(p for p in m.params if p.fqn == fqn)


def norms(m: Measurement) -> list[ParamMeasure]:
    return [p for p in m.params if "norm" in p.fqn]


def others(m: Measurement) -> list[ParamMeasure]:
    return [p for p in m.params if "norm" not in p.fqn]


def worst(params: list[ParamMeasure] | tuple[ParamMeasure, ...], name: str) -> float:
    values = [getattr(p, name) for p in params]
    assert None not in values
    return max(values)


@pytest.mark.parametrize("config", RANKS)
def test_stock_is_right(config: str) -> None:
    m = run(config)["stock"]
    assert (m.ranks, m.backend, m.device_type, m.dtype) == (RANKS[config], "gloo", "cpu", "float32")
    assert (m.tolerance, m.step_tolerance) == (1e-5, pytest.approx(1e-6))
    assert len(m.params) == 57
    assert all(p.grad_present and p.reference_present for p in m.params)
    assert worst(m.params, "grad_error") < m.tolerance
    assert worst(m.params, "sgd_error") < m.tolerance
    assert worst(m.params, "step_error") < 1e-6
    assert m.loss_error < 1e-6
    assert m.grad_scale == 1
    assert [p.grad_ratio for p in m.params] == [pytest.approx(1, abs=1e-6)] * 57
    assert m.grad_norm == pytest.approx(m.reference_grad_norm, rel=1e-4)
    assert {s for p in m.params for s in (*p.grad_spread, *p.init_spread)} <= {0.0, None}


def test_only_replicas_are_compared() -> None:
    m = run("hsdp_tp.toml")["stock"]
    assert param(m, NORM).grad_spread == (0.0, None, 0.0)
    assert param(m, "layers.0.attention.wq.weight").init_spread == (0.0, None, None)


def test_tp_alone_leaves_an_incomplete_local_part() -> None:
    """Reduced, the gradient is right; read as it is stored it is not. The embedding's is stored whole."""
    m = run("tp.toml")["stock"]
    assert all(0.1 < p.local_error < 1.1 for p in norms(m))
    assert param(m, "tok_embeddings.weight").local_error is None
    assert param(m, "output.weight").local_error < 1e-5
    assert param(m, NORM).grad_spread == (None,), "a Partial gradient may differ"


def test_the_proposed_fix_alone_doubles() -> None:
    m = run("fsdp_tp.toml")["fix alone"]
    assert [p.grad_ratio for p in norms(m)] == [pytest.approx(2, abs=1e-5)] * 13
    assert [p.grad_error for p in norms(m)] == [pytest.approx(1, abs=1e-5)] * 13
    assert worst(others(m), "grad_error") < m.tolerance
    assert m.loss_error < 1e-6, "the forward is right"


def test_both_halves_are_right() -> None:
    m = run("fsdp_tp.toml")["both halves"]
    assert worst(m.params, "grad_error") < m.tolerance
    assert worst(m.params, "sgd_error") < m.tolerance
    assert all(p.local_error > 0.1 for p in norms(m))


@pytest.mark.parametrize("config", ["tp.toml", "fsdp_tp.toml"])
def test_a_bare_to_local_loses_a_part(config: str) -> None:
    m = run(config)["bare to_local"]
    assert all(0.1 < p.grad_ratio < 0.99 for p in norms(m)[:-1])
    assert all(p.grad_error > 0.1 for p in norms(m)[:-1])
    assert all(p.grad_spread[-1] > 0.1 for p in norms(m)[:-1]), "tp is the last mesh dim"
    assert m.loss_error < 1e-6


def test_an_average_is_found_out() -> None:
    m = run("fsdp_tp.toml")["average"]
    assert m.grad_scale == Fraction(1, 2)
    assert worst(m.params, "grad_error") < m.tolerance
    assert worst(m.params, "sgd_error") < m.tolerance
    assert [p.grad_ratio for p in m.params] == [pytest.approx(0.5, abs=1e-6)] * 57


@pytest.mark.parametrize(
    ("config", "faulty", "dims"),
    [
        ("fsdp_tp.toml", {NORM: 1}, {NORM: (None, True)}),
        ("hsdp_tp.toml", {WQ: 4, NORM: 0}, {WQ: (True, None, None), NORM: (True, None, True)}),
    ],
    ids=["fsdp_tp", "hsdp_tp"],
)
def test_one_ranks_weight_differs(
    config: str, faulty: dict[str, int], dims: dict[str, tuple[bool | None, ...]]
) -> None:
    m = on_ranks(RANKS[config], perturbed, config, faulty)[0]
    for fqn, along in dims.items():
        assert tuple(None if s is None else 1e-3 < s < 0.1 for s in param(m, fqn).init_spread) == along
    assert {s for p in m.params if p.fqn not in faulty for s in p.init_spread} <= {0.0, None}
    assert worst(m.params, "grad_error") > m.tolerance
    stock = run(config)["stock"]
    assert m.reference_loss == pytest.approx(stock.reference_loss, rel=1e-7), "the reference is unspoiled"


def test_gradients_left_unclipped_show_in_sgd() -> None:
    m = on_ranks(4, unclipped, "fsdp_tp.toml")[0]
    assert worst(m.params, "grad_error") < m.tolerance
    assert all(p.sgd_error > 1 for p in norms(m))
    assert worst(others(m), "sgd_error") < m.tolerance
    assert m.grad_norm == pytest.approx(m.reference_grad_norm, rel=1e-4)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["on all ranks", "on one rank"])
def test_a_missing_gradient_is_told_and_nobody_waits(ranks: tuple[int, ...]) -> None:
    m = on_ranks(2, missing, ranks)[0]
    p = param(m, WQ)
    assert (p.grad_present, p.reference_present) == (False, True)
    assert (p.grad_error, p.local_error, p.grad_spread) == (None, None, (None,))
    assert (p.step_error, p.sgd_error) == (None, None)
    rest = [q for q in m.params if q.fqn != WQ]
    assert worst(rest, "grad_error") < m.tolerance
    # An update would wait for ever where the ranks have gradients of different parameters.
    assert {q.sgd_error is None for q in rest} == {len(ranks) == 1}


def test_the_ranks_parts_make_up_the_whole() -> None:
    assert on_ranks(8, wrong_parts) == [[]] * 8


def test_values_and_gradients_are_put_back() -> None:
    assert on_ranks(4, not_put_back) == [[]] * 4


def test_each_batch_ignores_another_number_of_labels() -> None:
    ranks = on_ranks(4, ignored_labels)
    assert ranks == [(42, 256), (42, 256), (85, 256), (85, 256)]


def test_boundaries_are_compared_along_each_mesh_dim() -> None:
    m = on_ranks(4, boundary_spreads)[0]
    same, other = m.boundaries
    assert (same.value_spread, same.arrived_spread, same.left_spread) == ((0.0, 0.0), (), ())
    assert all(1e-3 < s < 0.1 for s in (*other.value_spread, *other.arrived_spread))
    assert other.left_spread == (0.0, 0.0)


@pytest.mark.parametrize(("fault", "words"), [("flex", "attention is 'flex'"), ("raises", "no room")])
def test_what_cannot_be_measured_says_why_on_every_rank(fault: str, words: str) -> None:
    messages = on_ranks(2, not_measurable, fault)
    assert len(set(messages)) == 1
    assert messages[0].startswith("not measured: ")
    assert words in messages[0]


def spread(x: torch.Tensor, y: torch.Tensor) -> float:
    return spreads([fingerprint(x), fingerprint(y)], World(fake_mesh(tp=2)))[0]


def test_equal_tensors_have_equal_fingerprints() -> None:
    x = torch.randn(1000)
    assert spread(x, x.clone()) == 0.0
    assert spread(torch.zeros(10), torch.zeros(10)) == 0.0
    for odd in (torch.empty(0), torch.arange(5), x.bfloat16(), torch.view_as_complex(x.view(-1, 2)), x > 0):
        assert spread(odd, odd.clone()) == 0.0


@pytest.mark.parametrize("size", [1000, 1 << 19])
def test_a_fingerprint_sees_what_the_norm_does_not(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    assert 0.1 < spread(x, x.flip(0)) < 5
    assert 0.1 < spread(x, -x) < 10
    assert 0.1 < spread(x, x.roll(1 << 18)) < 5, "blocks in another order"
    assert 1e-5 < spread(x, x + 1e-3 * x.flip(0)) < 1e-2


def test_what_is_not_finite_is_as_far_apart_as_can_be() -> None:
    assert spread(torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])) == LARGEST
    assert spread(torch.ones(3), torch.tensor([1.0, float("inf"), 1.0])) == LARGEST


# --------------------------------------------------------------------------- the launcher itself


def test_ranks_answer_in_order() -> None:
    assert on_ranks(4, fail, "nothing") == [0, 1, 2, 3]


@pytest.mark.parametrize(("how", "words"), [("raise", "on purpose"), ("die", "rank 1: died without a word")])
def test_a_failed_rank_is_named(how: str, words: str) -> None:
    with pytest.raises(RanksFailed, match=words):
        on_ranks(2, fail, how)


def test_a_hung_rank_is_killed_at_the_deadline() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0: no answer"):
        on_ranks(2, hang, deadline=5.0)
    assert time.monotonic() - start < 20


def hang(env: RankEnv) -> None:
    time.sleep(600)
