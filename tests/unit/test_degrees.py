"""World size from degrees: arithmetic, and the words for what does not fit."""

from __future__ import annotations

import pytest

from placement_audit.adapters.degrees import Degrees, resolve
from placement_audit.errors import BuildError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("degrees", "asked", "launched", "dp_shard", "world"),
    [
        (Degrees(dp_shard=1, tp=2), None, None, 1, 2),
        (Degrees(dp_shard=128, tp=8), None, None, 128, 1024),
        (Degrees(dp_replicate=2, dp_shard=2, tp=2), 8, None, 2, 8),
        (Degrees(dp_shard=2, tp=2), None, 4, 2, 4),
        (Degrees(dp_shard=2, tp=2), 4, 4, 2, 4),
        (Degrees(tp=2), 64, None, 32, 64),
        (Degrees(tp=2), None, 4, 2, 4),
        (Degrees(tp=2, cp=2, dp_replicate=2), 8, None, 1, 8),
        (Degrees(dp_shard=2, tp=2, ep=4), None, None, 2, 4),
    ],
)
def test_world_size(degrees, asked, launched, dp_shard, world):
    resolved, notes = resolve(degrees, asked=asked, launched=launched)
    assert (resolved.dp_shard, resolved.world_size) == (dp_shard, world)
    assert notes == ()


def test_minus_one_alone_takes_two_ranks_and_says_so():
    resolved, notes = resolve(Degrees(dp_shard=-1, tp=2))
    assert (resolved.dp_shard, resolved.world_size) == (2, 4)
    assert notes == (
        "data_parallel_shard_degree is -1: audited with 2 ranks on that mesh dim; --world-size N overrides.",
    )


@pytest.mark.parametrize(
    ("degrees", "asked", "launched", "words"),
    [
        (
            Degrees(tp=4),
            6,
            None,
            "the world size asked for is 6, which the other degrees do not divide: tensor_parallel_degree "
            "4 = 4, and 6 = 1 x 4 + 2. Take a multiple of 4.",
        ),
        (Degrees(tp=4), None, 2, "torchrun started 2 processes, which the other degrees do not divide"),
        (
            Degrees(dp_shard=2, tp=2),
            6,
            None,
            "but the job's degrees give 4: data_parallel_shard_degree 2 x tensor_parallel_degree 2. Take 4",
        ),
        (Degrees(dp_shard=1, tp=2), None, 4, "torchrun started 4 processes, but the job's degrees give 2"),
        (
            Degrees(dp_shard=2, tp=2),
            8,
            4,
            "world size 8 was asked for (--world-size or placement_audit.world_size), but torchrun started 4",
        ),
        (Degrees(tp=0), None, None, "parallelism.tensor_parallel_degree: expected 1 or more; got 0."),
        (Degrees(dp_shard=0), None, None, "data_parallel_shard_degree: expected 1 or more or -1; got 0."),
        (Degrees(dp_shard=-2), None, None, "expected 1 or more or -1; got -2."),
        (Degrees(pp=2), None, None, "pipeline parallelism is not supported yet"),
    ],
)
def test_what_does_not_fit(degrees, asked, launched, words):
    with pytest.raises(BuildError) as caught:
        resolve(degrees, asked=asked, launched=launched)
    assert words in caught.value.message
    assert caught.value.exit_status == 2


def test_ranks_of_one_tp_group_read_the_same_batch():
    degrees = Degrees(dp_replicate=2, dp_shard=2, tp=2)
    assert [degrees.batch_rank(r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    degrees = Degrees(dp_shard=2, cp=2, tp=2)
    assert [degrees.batch_rank(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
