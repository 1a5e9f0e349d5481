"""Which part of the whole a rank holds: told by labels and shapes, never by values; and sketches that add up."""

from __future__ import annotations

import pytest
import torch

from placement_audit.engine.world import World
from placement_audit.measure.parts import Part, Reader, Unknown
from placement_audit.measure.sketch import added, error, sketch
from placement_audit.model import StateKind
from tests.trace.worlds import fake_mesh

pytestmark = pytest.mark.trace

V, I = StateKind.VARYING, StateKind.INVARIANT  # noqa: E741


def test_sketches_of_shards_and_of_terms_add_up() -> None:
    x = torch.randn(6, 10, 8, generator=torch.Generator().manual_seed(1))
    whole = sketch(x, (0, 0, 0))
    rows = [sketch(part, (0, start, 0)) for start, part in ((0, x[:, :7]), (7, x[:, 7:]))]
    terms = [sketch(x - 3.0, (0, 0, 0)), sketch(torch.full_like(x, 3.0), (0, 0, 0))]
    norm = x.norm().item()
    assert error(added(rows), whole, norm) < 1e-6
    assert error(added(terms), whole, norm) < 1e-5
    # Parts in each other's places are another tensor.
    swapped = [sketch(x[:, 7:], (0, 0, 0)), sketch(x[:, :7], (0, 3, 0))]
    assert error(added(swapped), whole, norm) > 0.3


@pytest.mark.parametrize("seed", range(5))
def test_a_sketch_tells_the_size_of_a_difference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, d = (torch.randn(4, 33, 65, generator=generator) for _ in range(2))
    off = 1e-3 * d
    found = error(sketch(x + off, (0, 0, 0)), sketch(x, (0, 0, 0)), x.norm().item())
    assert 0.2 < found / (off.norm() / x.norm()).item() < 5


def test_a_long_tensor_dim_begins_as_a_short_one_does() -> None:
    x = torch.ones(5000)
    parts = [sketch(x[:4100], (0,)), sketch(x[4100:], (4100,))]
    assert error(added(parts), sketch(x, (0,)), x.norm().item()) < 1e-5


def test_far_parts_in_each_other_s_places_are_another_tensor() -> None:
    x = torch.randn(8192, generator=torch.Generator().manual_seed(1))
    swapped = torch.cat([x[4096:], x[:4096]])
    assert error(sketch(swapped, (0,)), sketch(x, (0,)), x.norm().item()) > 0.3


def reader() -> Reader:
    return Reader(World(fake_mesh(fsdp=2, tp=2)), ("fsdp",))


def adds(found: Part | Unknown) -> tuple[bool, ...]:
    assert isinstance(found, Part)
    return found.adds


def test_the_shape_says_that_tp_shards_the_sequence_and_the_batch_tensor_dim_0() -> None:
    x = torch.ones(2, 4, 8)
    assert adds(reader().read(x, (V, V), (4, 8, 8))) == (True, True)
    # An all-reduce made it equal on all ranks; it is still a shard, and a wrong one.
    assert adds(reader().read(x, (V, I), (4, 8, 8))) == (True, True)


def test_in_its_full_shape_what_all_ranks_hold_is_read_on_each() -> None:
    x = torch.ones(2, 8, 8)
    value = reader().read(x, (V, I), (4, 8, 8))
    assert adds(value) == (True, False)
    assert isinstance(value, Part)
    assert adds(reader().read(x, (V, I), (4, 8, 8), value)) == (True, False)
    # Each rank's term of the gradient of what all of them hold.
    assert adds(reader().read(x, (V, V), (4, 8, 8), value)) == (True, True)
    for kind in (StateKind.MIXED, StateKind.AMBIGUOUS, StateKind.LOST):
        assert isinstance(reader().read(x, (V, kind), (4, 8, 8), value), Unknown)


@pytest.mark.parametrize(
    ("kinds", "shape"),
    [
        ((V, V), (4, 4, 8)),  # full, and different on the tp ranks: terms, or a fault
        ((V, StateKind.MIXED), (4, 4, 8)),
        ((V, V), (8, 4, 8)),  # batch and tp in one tensor dim: no contiguous part
        ((V, V), (4, 8, 16)),  # two tensor dims, one mesh dim
        ((V, V), (4, 12, 8)),
        ((V, V), (4, 4)),
    ],
)
def test_what_can_t_be_told_is_not_compared(kinds: tuple[StateKind, ...], shape: tuple[int, ...]) -> None:
    assert isinstance(reader().read(torch.ones(2, 4, 8), kinds, shape), Unknown)


def test_two_mesh_dims_of_one_size_that_could_both_be_it() -> None:
    world = World(fake_mesh(a=2, b=2))
    assert isinstance(Reader(world, ()).read(torch.ones(2, 4), (V, I), (2, 8)), Unknown)
