"""Collectives as code on plain tensors calls them: what each makes of the states of what it reads and writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placement_audit.model import State, StateKind
from tests.trace.test_flow import Bench, I, V

pytestmark = pytest.mark.trace

DP, TP = 0, 1


@pytest.fixture
def b() -> Bench:
    warnings.simplefilter("ignore")
    return Bench()


def group(b: Bench, dim: int) -> Any:
    return b.mesh.get_group(dim)


def grad(b: Bench, t: torch.Tensor, *kinds: StateKind) -> torch.Tensor:
    b.ledger.put(t, b.ledger.sid(tuple(State(k) for k in kinds), grad=True))
    return t


def both(b: Bench) -> torch.Tensor:
    """A tensor that varies over both mesh dims."""
    return b.x + b.y


def in_place(call: Callable[[Bench, torch.Tensor], Any]) -> Callable[[Bench], torch.Tensor]:
    def run(b: Bench) -> torch.Tensor:
        x = both(b)
        call(b, x)
        return x

    return run


def into(shape: tuple[int, ...], call: Callable[[Bench, torch.Tensor, torch.Tensor], Any]) -> Any:
    def run(b: Bench) -> torch.Tensor:
        out = torch.empty(shape)
        call(b, out, both(b))
        return out

    return run


def listed(n: int, call: Callable[[Bench, list[torch.Tensor], torch.Tensor], Any]) -> Any:
    def run(b: Bench) -> torch.Tensor:
        outs = [torch.empty(4, 6) for _ in range(n)]
        call(b, outs, both(b))
        return outs[-1]

    return run


CALLS: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("all_reduce", in_place(lambda b, x: dist.all_reduce(x, group=group(b, TP))), (V, I)),
    ("all_reduce", in_place(lambda b, x: dist.all_reduce(x, group=group(b, DP), async_op=True).wait()), (I, V)),
    ("all_reduce", in_place(lambda b, x: dist.all_reduce(x)), (I, I)),
    ("broadcast", in_place(lambda b, x: dist.broadcast(x, 0, group=group(b, TP))), (V, I)),
    ("reduce", in_place(lambda b, x: dist.reduce(x, 0, group=group(b, TP))), (V, V)),
    ("all_reduce", in_place(lambda b, x: dist.all_reduce_coalesced([x], group=group(b, TP))), (V, I)),
    ("all_gather", into((8, 6), lambda b, o, x: dist.all_gather_into_tensor(o, x, group=group(b, TP))), (V, I)),
    ("all_gather", listed(2, lambda b, o, x: dist.all_gather(o, x, group=group(b, TP))), (V, I)),
    ("reduce_scatter", into((2, 6), lambda b, o, x: dist.reduce_scatter_tensor(o, x, group=group(b, DP))), (V, V)),
    ("reduce_scatter", into((4, 6), lambda b, o, x: dist.reduce_scatter(o, [x, x], group=group(b, DP))), (V, V)),
    ("all_to_all", into((4, 6), lambda b, o, x: dist.all_to_all_single(o, x, group=group(b, DP))), (V, V)),
    ("scatter", into((4, 6), lambda b, o, x: dist.scatter(o, [x, x], group=group(b, TP))), (V, V)),
    ("gather", listed(2, lambda b, o, x: dist.gather(x, o, group=group(b, TP))), (V, V)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "expected"), CALLS)
def test_a_collective_reads_and_writes_what_it_is_given(
    b: Bench, name: str, call: Callable[[Bench], torch.Tensor], expected: tuple[Any, ...]
) -> None:
    assert b.run(lambda: call(b)) == expected
    assert [c[0] for c in b.calls] == [name]


@pytest.mark.parametrize(
    ("rows", "call"),
    [
        (2, lambda b, out: dist.reduce_scatter_tensor(out, b.w, group=group(b, DP))),
        (4, lambda b, out: dist.reduce_scatter(out, [b.w, b.w], group=group(b, DP))),
        (4, lambda b, out: dist.all_to_all_single(out, b.w, group=group(b, DP))),
        (4, lambda b, out: dist.scatter(out, [b.w, b.w], group=group(b, DP))),
        (4, lambda b, out: dist.gather(b.w, [out, torch.empty(4, 6)], group=group(b, DP))),
    ],
)
def test_what_was_equal_is_each_ranks_own_after_it_was_dealt_out(
    b: Bench, rows: int, call: Callable[[Bench, torch.Tensor], Any]
) -> None:
    out = torch.empty(rows, 6)
    with b.flow:
        call(b, out)
    assert b.of(out) == (V, I)
    assert b.of(b.w) == (I, I), "what was sent stays what it was"


def test_a_coalesced_call_keeps_its_tensors_apart(b: Bench) -> None:
    x, y = b.x.clone(), b.y.clone()
    with b.flow:
        x, y = b.x * 1, b.y * 1
        with dist._coalescing_manager(group=group(b, DP)):
            dist.all_reduce(x, group=group(b, DP))
            dist.all_reduce(y, group=group(b, DP))
        functional = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(
            [b.x, b.y], 2, group(b, TP).group_name
        )
    assert (b.of(x), b.of(y)) == ((I, I), (I, V))
    assert [b.of(o) for o in functional] == [(V, I), (I, I)]


def test_a_functional_collective_with_out_writes_there(b: Bench) -> None:
    out = torch.empty(2, 6)
    with b.flow:
        torch.ops._c10d_functional.reduce_scatter_tensor_out(b.y, "sum", 2, group(b, DP).group_name, out=out)
    assert b.of(out) == (V, V)
    assert b.of(b.y) == (I, V)


def test_objects_travel_as_bytes_and_confuse_nothing(b: Bench) -> None:
    found: list[Any] = [None] * 4
    with b.flow:
        dist.broadcast_object_list([{"step": 1}], 0)
        x = b.x + b.y
        try:
            dist.all_gather_object(found, {"a": 1})
        except Exception as error:  # the fake group fills nothing in, so that there is nothing to unpickle
            assert "pickle" in repr(error).lower() or "EOF" in repr(error)  # noqa: PT017
    assert b.of(x) == (V, V)
    assert {name for name, *_ in b.calls} == {"broadcast", "all_gather"}
    assert all(dims == (0, 1) for _, dims, _ in b.calls)


@pytest.mark.parametrize(("peer", "expected"), [(1, (I, V)), (2, (V, I)), (3, (V, V))])
def test_what_a_peer_sends_differs_along_the_mesh_dims_to_it(b: Bench, peer: int, expected: Any) -> None:
    out = torch.empty(4, 6)
    with b.flow:
        dist.send(b.w, peer)
        dist.recv(out, peer)
    assert b.of(out) == expected


def test_what_was_received_before_it_was_sent_is_known_in_the_end(b: Bench) -> None:
    out = torch.empty(4, 6)
    with b.flow:
        ops = [dist.P2POp(dist.irecv, out, 1), dist.P2POp(dist.isend, b.x, 1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    assert b.of(out) == (V, V)


@pytest.mark.parametrize(
    ("op", "scale"), [(dist.ReduceOp.SUM, 2), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MAX, 1)]
)
def test_the_reduce_op_of_a_raw_collective_is_read(b: Bench, op: Any, scale: int) -> None:
    g = grad(b, torch.randn(4), StateKind.INVARIANT, StateKind.INVARIANT)
    with b.flow:
        dist.all_reduce(g, op=op, group=group(b, TP))
    assert b.of(g) == (State(StateKind.INVARIANT), State(StateKind.INVARIANT, scale))
    assert b.calls == [("all_reduce", (TP,), (TP,) if scale == 2 else ())]


def test_one_ranks_term_of_a_gradient_broadcast_loses_the_others(b: Bench) -> None:
    g = grad(b, torch.randn(4), StateKind.INVARIANT, StateKind.VARYING)
    with b.flow:
        dist.broadcast(g, 0, group=group(b, TP))
    assert b.of(g) == (State(StateKind.INVARIANT), State(StateKind.LOST))


def test_a_sum_over_a_part_of_a_mesh_dim_still_varies() -> None:
    b = Bench(dp=1, tp=4)
    part = dist.new_group([0, 1])
    v = grad(b, torch.randn(4), StateKind.VARYING)
    i = grad(b, torch.randn(4), StateKind.INVARIANT)
    with b.flow:
        dist.all_reduce(v, group=part)
        dist.all_reduce(i, group=part)
    assert b.of(v) == (State(StateKind.VARYING),)
    assert b.of(i) == (State(StateKind.INVARIANT, 2),), "each of the two ranks of the part is counted"
    assert [c[1] for c in b.calls] == [None, None]


def test_a_group_made_by_hand_is_the_mesh_dim_of_its_ranks(b: Bench) -> None:
    dp = dist.new_group([0, 2])
    with b.flow:
        x = both(b)
        dist.all_reduce(x, group=dp)
    assert b.of(x) == (I, V)
