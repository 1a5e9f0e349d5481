"""Tensors that share memory: what is written through one is so for all, whatever each is taken for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from placement_audit.engine.pieces import Pieces
from placement_audit.states import INVARIANT, VARYING, ZERO
from placement_audit.verdicts import Verdict
from tests.faults.family import Bag
from tests.trace.megatron import ROWS, Copy, Reduce
from tests.trace.megatron import audit as audit_plain
from tests.trace.test_flow import Bench
from tests.trace.worlds import audit, fake_mesh, judgement, of_rule, verdicts

pytestmark = pytest.mark.trace

V, I, Z = VARYING, INVARIANT, ZERO  # noqa: E741


@pytest.fixture
def b() -> Bench:
    return Bench()


def alone(b: Bench, x: torch.Tensor, *states: Any) -> torch.Tensor:
    """Another tensor on the same memory, in a state of its own."""
    alias = x.view_as(x)
    b.ledger.put_alone(alias, b.ledger.sid(tuple(states), grad=False))
    return alias


def grads(b: Bench, *states: Any) -> torch.Tensor:
    x = torch.zeros(8, 6)
    b.ledger.put(x, b.ledger.sid(tuple(states), grad=True))
    return x


# ---- in states of their own


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: x.mul_(b.y),
        lambda b, x: torch._foreach_mul_([x], [b.y]),
        lambda b, x: torch._foreach_add_([x], [b.y]),
        lambda b, x: torch.add(x, b.y, out=x),
    ],
)
def test_an_in_place_op_reaches_every_alias(b: Bench, write: Callable[[Bench, torch.Tensor], Any]) -> None:
    alias = alone(b, b.w, V, I)
    with b.flow:
        write(b, b.w)
    assert b.of(b.w) == (I, V)
    assert b.of(alias) == (V, V), "what it was, and what came in"


def test_a_copy_over_the_whole_replaces_every_alias_and_a_copy_over_a_part_does_not(b: Bench) -> None:
    whole, part = alone(b, b.x, V, V), alone(b, b.y, V, V)
    with b.flow:
        b.x.copy_(b.w)
        b.y[:2].copy_(b.w[:2])
    assert b.of(whole) == (I, I)
    assert b.of(part) == (V, V)


def test_zeros_over_the_whole_reach_every_alias(b: Bench) -> None:
    one, other = alone(b, b.x, V, V), alone(b, b.w, V, V)
    with b.flow:
        b.x.zero_()
        torch._foreach_zero_([b.w])
    assert b.of(one) == b.of(other) == (Z, Z)


def test_a_collective_through_one_alias_is_a_collective_on_all(b: Bench) -> None:
    alias = alone(b, b.x, V, V)
    with b.flow:
        dist.all_reduce(b.x, group=b.mesh.get_group("dp"))
    assert b.of(b.x) == (I, I)
    assert b.of(alias) == (I, V), "each by its own state before"


def test_what_shares_no_memory_stays(b: Bench) -> None:
    low, high = b.w[:2], b.w[2:]
    b.ledger.put_alone(low, b.ledger.sid((V, I), grad=False))
    b.ledger.put_alone(high, b.ledger.sid((I, V), grad=False))
    with b.flow:
        low.mul_(b.y[:2])
    assert b.of(low) == (V, V)
    assert b.of(high) == (I, V)


def test_a_rank_s_own_piece_of_what_is_made_equal_still_differs(b: Bench) -> None:
    piece = b.w[:2]
    b.ledger.put_alone(piece, b.ledger.sid((V, I), grad=False))
    with b.flow:
        dist.all_reduce(b.w, group=b.mesh.get_group("dp"))
    assert b.of(piece) == (V, I)


# ---- many gradients in one buffer


def test_a_part_of_a_buffer_of_gradients_is_in_a_state_of_its_own(b: Bench) -> None:
    flat = grads(b, V, I)
    with b.flow:
        dist.all_reduce(flat[2:5], group=b.mesh.get_group("dp"))
    assert [b.of(flat[i])[0].kind for i in range(8)] == ["varying"] * 2 + ["invariant"] * 3 + ["varying"] * 3
    assert b.of(flat[2:4])[0].kind == "invariant"
    assert b.of(flat[1:3])[0].kind == b.of(flat)[0].kind == "varying"


def test_a_view_of_a_part_that_shares_its_storage_with_an_alias_is_read_by_its_bytes(b: Bench) -> None:
    flat = grads(b, V, I)
    alone(b, flat, V, V)
    with b.flow:
        dist.all_reduce(flat[:4], group=b.mesh.get_group("dp"))
        first, second = flat[:4].view(-1), flat[4:].view(-1)
    assert (b.of(first)[0].kind, b.of(second)[0].kind) == ("invariant", "varying")


def test_what_is_done_to_the_whole_is_done_to_each_part_by_its_own_state(b: Bench) -> None:
    flat = grads(b, V, I)
    group = b.mesh.get_group("dp")
    with b.flow:
        dist.all_reduce(flat[:4], group=group)
        dist.all_reduce(flat, group=group)
    assert [(s.kind, s.scale) for s in (b.of(flat[0])[0], b.of(flat[7])[0])] == [
        ("invariant", 2),
        ("invariant", 1),
    ]


def test_the_whole_overwritten_is_in_one_state_again(b: Bench) -> None:
    flat = grads(b, V, I)
    with b.flow:
        dist.all_reduce(flat[:4], group=b.mesh.get_group("dp"))
        flat.copy_(torch.cat([b.y, b.y]))
    assert b.of(flat[0]) == b.of(flat[7]) == (I, V)


def test_a_forward_s_value_is_taken_together(b: Bench) -> None:
    """Which rows are written may depend on the rank."""
    value = torch.cat([b.w, b.w])
    b.put(value, I, I)
    with b.flow:
        value[:4].copy_(b.y)
    assert b.of(value[4:]) == (I, V)


def test_every_other_column_is_no_run_of_bytes(b: Bench) -> None:
    flat = grads(b, V, I)
    with b.flow:
        dist.all_reduce(flat[:, ::2], group=b.mesh.get_group("dp"))
        flat[:4].mul_(b.y)
    assert b.of(flat[:, 1])[1] == V


def test_pieces_are_cut_joined_and_forgotten() -> None:
    pieces = Pieces()
    pieces.put(1, 0, 8, [(0, 8, 5)])
    pieces.put(1, 8, 12, [(8, 12, 5)])
    assert pieces.over(1, 0, 12, 0) == [(0, 12, 5)]
    pieces.put(1, 4, 6, [(4, 6, 7)])
    assert pieces.over(1, 0, 16, 0) == [(0, 4, 5), (4, 6, 7), (6, 12, 5), (12, 16, 0)]
    assert pieces.over(1, 5, 7, 0) == [(5, 6, 7), (6, 7, 5)]
    assert pieces.over(2, 0, 4, 9) == [(0, 4, 9)]
    pieces.forget(1)
    assert not pieces.of
    assert pieces.over(1, 0, 4, 3) == [(0, 4, 3)]


# ---- different shards added up


def shard(after: Callable[[Any, Any], None]) -> Any:
    mesh = fake_mesh(tp=2)
    w, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)

    def step() -> None:
        w(x).sum().backward()
        after(w.weight, mesh.get_group("tp"))

    return audit_plain(w, mesh, step, declared={"weight": {"tp": ROWS}})


def test_shards_that_were_added_up_are_named_at_the_call() -> None:
    report = shard(lambda p, group: dist.all_reduce(p.grad, group=group))
    assert verdicts(report, "weight") == {"tp": Verdict.WRONG_PLACEMENT}
    (finding,) = of_rule(report, "PA204")
    assert finding.path[0].role == "cause: adds up the gradients of different shards"
    assert "dist.all_reduce(p.grad, group=group)" in finding.path[0].call_site.code_line
    assert finding.next_step == 'reduce it over a group that does not span "tp"'
    assert judgement(report, "weight", "tp").factor is None


@pytest.mark.parametrize(
    "after",
    [
        lambda p, group: None,
        lambda p, group: p.grad.zero_(),
        lambda p, group: p.grad.fill_(1.0),
        # Of a copy, and put back as it was.
        lambda p, group: dist.all_reduce(p.grad.clone(), group=group),
        lambda p, group: [kept := p.grad.clone(), dist.all_reduce(p.grad, group=group), p.grad.copy_(kept)],
    ],
)
def test_a_shard_s_gradient_that_is_equal_for_another_reason_is_no_fault(after: Any) -> None:
    assert verdicts(shard(after), "weight") == {"tp": Verdict.OK}


def test_a_dtensor_s_shards_added_up_by_hand() -> None:
    mesh = fake_mesh(fsdp=2)
    w = nn.Linear(4, 4, bias=False)
    w.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)], src_data_rank=None))
    x = torch.randn(8, 4)

    def step(whole: bool) -> None:
        out = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        w.weight.grad = None
        w(out).full_tensor().sum().backward()
        if whole:  # each rank's own term of the whole gradient
            other = torch.randn(4, 4, requires_grad=True)
            F.linear(x, other).sum().backward()
            assert other.grad is not None
            w.weight.grad = DTensor.from_local(other.grad, mesh, [Replicate()], run_check=False)
        grad = w.weight.grad
        assert isinstance(grad, DTensor)
        dist.all_reduce(grad.to_local(), group=mesh.get_group())

    wrong = audit(w, mesh, lambda: step(whole=False))
    assert verdicts(wrong, "weight") == {"fsdp": Verdict.WRONG_PLACEMENT}
    right = audit(w, mesh, lambda: step(whole=True), inputs=(x,))
    assert verdicts(right, "weight") == {"fsdp": Verdict.OK}
    assert right.trace.boundaries[-1].param_fqn == right.trace.params[0].fqn, "the reduction was seen"


def test_a_reduction_in_a_buffer_is_the_parameter_s_whose_bytes_it_covers() -> None:
    mesh = fake_mesh(dp=2)
    w, x = nn.Linear(4, 4), torch.randn(8, 4)

    def step() -> None:
        flat = torch.zeros(20)
        w.weight.grad, w.bias.grad = flat[:16].view(4, 4), flat[16:]
        w(x).sum().backward()
        for part in (w.weight.grad, w.bias.grad, flat):
            dist.all_reduce(part, group=mesh.get_group("dp"))

    report = audit_plain(w, mesh, step, inputs=(x,), batch_dims=("dp",), declared={})
    assert [b.param_fqn for b in report.trace.boundaries] == ["weight", "bias", None]
    assert {j.verdict for j in report.judgements} == {Verdict.DOUBLE_REDUCTION}
    assert [f.path[0].call_site.code_line[:15] for f in of_rule(report, "PA202")] == ["dist.all_reduce"] * 2


def test_gradients_put_side_by_side_keep_their_states() -> None:
    """A bucket by hand: one sum over dp for a part and a complete gradient, which tp tells apart."""
    mesh = fake_mesh(dp=2, tp=2)
    model, x = Bag(gain=torch.ones(4), w=torch.randn(2, 4)), torch.randn(8, 4)

    def step() -> None:
        group = mesh.get_group("tp")
        Reduce.apply(F.linear(Copy.apply(x * model.gain, group), model.w).square().sum(), group).backward()
        grads = [p.grad for p in model.parameters()]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=mesh.get_group("dp"))
        for g, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(summed.view_as(g))

    report = audit_plain(model, mesh, step, inputs=(x,), batch_dims=("dp",), declared={"w": {"tp": ROWS}})
    assert verdicts(report, "gain") == {"dp": Verdict.OK, "tp": Verdict.OK}
    assert verdicts(report, "w") == {"dp": Verdict.OK, "tp": Verdict.OK}
