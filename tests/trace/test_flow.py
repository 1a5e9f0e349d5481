"""The flow op by op: what each kind of op makes of its inputs' states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from placement_audit.engine.flow import Flow
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.world import World
from placement_audit.states import INVARIANT, VARYING, ZERO
from tests.trace.worlds import fake_mesh

pytestmark = pytest.mark.trace

V, I, Z = VARYING, INVARIANT, ZERO  # noqa: E741


class Bench:
    """A flow on (dp 2, tp 2) with two plain tensors: ``x`` varies over dp, ``y`` over tp."""

    def __init__(self, dp: int = 2, tp: int = 2) -> None:
        self.mesh: DeviceMesh = fake_mesh(dp=dp, tp=tp)
        self.world = World(self.mesh)
        self.ledger = Ledger(self.world.dims, keep_alive=True)
        self.calls: list[tuple[str, tuple[int, ...] | None, tuple[int, ...]]] = []
        self.flow = Flow(
            self.ledger,
            self.world,
            on_collective=lambda call, dims, sent, equal: self.calls.append((call.name, dims, equal)),
            on_use=lambda *_: None,
        )
        self.x, self.y, self.w = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6)
        if dp > 1 and tp > 1:
            self.put(self.x, V, I)
            self.put(self.y, I, V)
            self.put(self.w, I, I)

    def put(self, t: torch.Tensor, *states: Any) -> None:
        self.ledger.put(t, self.ledger.sid(tuple(states), grad=False))

    def of(self, t: torch.Tensor) -> tuple[Any, ...]:
        return self.ledger.vector(self.ledger.get(t))

    def run(self, op: Callable[[], torch.Tensor]) -> tuple[Any, ...]:
        with self.flow:
            out = op()
        return self.of(out)


@pytest.fixture
def b() -> Bench:
    return Bench()


def test_a_result_varies_where_any_input_does(b: Bench) -> None:
    assert b.run(lambda: b.x + b.y) == (V, V)
    assert b.run(lambda: b.x * b.w) == (V, I)
    assert b.run(lambda: torch.cat([b.w, b.y])) == (I, V)
    assert b.run(lambda: torch.where(b.x > 0, b.w, b.w)) == (V, I)


def test_shapes_are_no_values(b: Bench) -> None:
    assert b.run(lambda: torch.ones_like(b.x)) == (I, I)
    assert b.run(lambda: b.x.new_empty(3)) == (I, I)
    assert b.run(lambda: torch.zeros_like(b.x)) == (Z, Z)
    assert b.run(lambda: torch.arange(3)) == (I, I)


def test_a_view_shares_its_state_and_an_in_place_op_spreads(b: Bench) -> None:
    assert b.run(lambda: b.x.view(-1)[:3]) == (V, I)
    base = torch.zeros(4, 6)
    b.put(base, I, I)
    with b.flow:
        base[:2].add_(b.y[:2])
    assert b.of(base) == (I, V)


def test_copying_over_the_whole_replaces_and_over_a_part_joins(b: Bench) -> None:
    whole, part = torch.empty(4, 6), torch.empty(8, 6)
    b.put(whole, V, V)
    b.put(part, V, I)
    with b.flow:
        whole.copy_(b.w)
        part[:4].copy_(b.y)
    assert b.of(whole) == (I, I)
    assert b.of(part) == (V, V)


def test_a_view_that_had_to_copy_has_its_source_s_state(b: Bench) -> None:
    """`to`, `reshape` and `contiguous` are views by schema and copies at need."""
    with torch.inference_mode():
        assert b.run(lambda: torch.ops.aten.to.dtype(b.x, torch.float64)) == (V, I)
        assert b.run(lambda: torch.ops.aten.reshape.default(b.x.t(), [24])) == (V, I)
    assert b.ledger.assumed == 0


def test_a_tensor_can_differ_from_its_storage_and_so_can_its_views(b: Bench) -> None:
    alias = b.w.view_as(b.w)
    b.ledger.put_alone(alias, b.ledger.sid((V, V), grad=False))
    assert b.run(lambda: alias[:2]) == (V, V)
    assert b.run(lambda: alias.t() * 1) == (V, V)
    assert b.of(b.w) == (I, I)


@pytest.mark.parametrize(
    ("name", "call", "expected"),
    [
        ("all_reduce", lambda b: funcol.all_reduce(b.x + b.y, "sum", (b.mesh, 0)), (I, V)),
        ("all_reduce", lambda b: funcol.all_reduce(b.x + b.y, "max", (b.mesh, 1)), (V, I)),
        ("all_gather", lambda b: funcol.all_gather_tensor(b.x + b.y, 0, (b.mesh, 1)), (V, I)),
        ("reduce_scatter", lambda b: funcol.reduce_scatter_tensor(b.w, "sum", 0, (b.mesh, 0)), (V, I)),
        ("all_to_all", lambda b: funcol.all_to_all_single(b.w, None, None, (b.mesh, 1)), (I, V)),
        ("broadcast", lambda b: funcol.broadcast(b.x, 0, (b.mesh, 0)), (I, I)),
    ],
)
def test_collectives_clear_or_set_their_mesh_dim(
    b: Bench, name: str, call: Callable[[Bench], torch.Tensor], expected: tuple[Any, ...]
) -> None:
    assert b.run(lambda: funcol.wait_tensor(call(b))) == expected
    assert [c[0] for c in b.calls] == [name]


def test_a_collective_over_the_whole_world_spans_both_mesh_dims(b: Bench) -> None:
    flat = b.mesh["dp", "tp"]._flatten("all")
    assert b.run(lambda: funcol.wait_tensor(funcol.all_reduce(b.x + b.y, "sum", flat))) == (I, I)
    assert b.calls == [("all_reduce", (0, 1), ())]


def test_in_place_collectives_rewrite_their_tensors(b: Bench) -> None:
    import torch.distributed as dist

    gathered = torch.empty(8, 6)
    with b.flow:
        dist.all_reduce(b.x, group=b.mesh.get_group(0))
        dist.all_gather_into_tensor(gathered, b.y, group=b.mesh.get_group(1))
    assert b.of(b.x) == (I, I)
    assert b.of(gathered) == (I, I)
    assert [c[:2] for c in b.calls] == [("all_reduce", (0,)), ("all_gather", (1,))]


def test_a_sum_of_what_is_equal_is_told(b: Bench) -> None:
    b.run(lambda: funcol.wait_tensor(funcol.all_reduce(b.x, "sum", (b.mesh, 1))))
    assert b.calls == [("all_reduce", (1,), (1,))]


def test_a_dtensor_varies_where_its_placement_is_not_replicate(b: Bench) -> None:
    tp = b.mesh["tp"]
    with b.flow:
        s = DTensor.from_local(b.w, tp, [Shard(0)])
        r = DTensor.from_local(b.w, tp, [Replicate()])
        product = r @ s.t()
        summed = s.t() @ s
    assert summed.placements == (Partial(),)
    assert b.of(product) == (I, V)
    assert b.of(summed) == (I, V)
    assert b.of(r + r) == (I, I)


def test_a_dtensor_on_a_part_of_the_mesh_keeps_what_is_known_of_the_rest(b: Bench) -> None:
    tp = b.mesh["tp"]
    with b.flow:
        out = DTensor.from_local(b.x, tp, [Shard(0)]).redistribute(placements=[Replicate()])
    assert b.of(out) == (V, I)


def test_a_group_that_is_no_mesh_dim_is_not_taken_for_one(b: Bench) -> None:
    assert b.world.dims_of_ranks((0, 3)) is None
    assert b.world.dims_of_ranks((0, 1)) == (1,)
    assert b.world.dims_of_ranks((0, 2)) == (0,)
    assert b.world.dims_of_ranks((0, 1, 2)) is None


def test_a_new_storage_does_not_inherit_what_a_dead_one_was() -> None:
    """torch makes storages where no op is seen (FSDP2's buffers), at addresses where others lived before."""
    ledger = Ledger(("tp",), keep_alive=False)
    varying = ledger.sid((VARYING,), grad=False)
    for _ in range(200):
        ledger.put(torch.empty(64), varying)
    assert {ledger.get(torch.empty(64)) for _ in range(200)} == {ledger.invariant}
