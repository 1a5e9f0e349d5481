"""Models too large for the machine: measured as the same architecture made smaller."""

from __future__ import annotations

import copy
import dataclasses
import resource
from typing import Any

import pytest

from placement_audit import pipeline
from placement_audit.adapters import titan02_checks, titan02_device, titan02_job, titan02_step
from placement_audit.adapters.degrees import Degrees
from placement_audit.adapters.environment import check_versions
from placement_audit.adapters.titan02_twin import Shapes, Twin, shapes_of, twin
from placement_audit.config import RankEnv, load
from placement_audit.errors import NotMeasurable
from placement_audit.report import render
from placement_audit.verdicts import Report
from tests.gloo.ranks import on_ranks
from tests.trace.titan import CONFIGS

pytestmark = pytest.mark.gloo

GIB = 2**30
MESHES = {
    "tp 2": Degrees(dp_shard=1, tp=2),
    "fsdp 2 x tp 2": Degrees(dp_shard=2, tp=2),
    "fsdp 7": Degrees(dp_shard=7),
    "fsdp 3 x tp 4": Degrees(dp_shard=3, tp=4),
    "hsdp 2 x 2 x cp 2": Degrees(dp_replicate=2, dp_shard=2, cp=2),
    "cp 3": Degrees(dp_shard=1, cp=3),
    "fsdp 2 x tp 8": Degrees(dp_shard=2, tp=8),
    "fsdp 128 x tp 8": Degrees(dp_shard=128, tp=8),
}
SMALL_405B = (
    "the same architecture with 2 of 126 layers, dim 1024 of 16384, vocabulary 1024 of 128256, "
    "multiple_of 256 of 4096, seq_len 64 of 6144, local_batch_size 2 of 16"
)


def parsed(flavor: str, *overrides: str) -> tuple[Any, Any, Any]:
    """The job, its train spec and the flavor's args."""
    flags = ["--model.flavor", flavor, "--training.seq_len", "6144", *overrides]
    titan02_device.claim_device("cpu")
    job = titan02_job.parse(load(str(CONFIGS / "fsdp_tp.toml"), overrides=flags), version=check_versions())
    return (job, *titan02_checks.model_of(job))


def made(job: Any, spec: Any, args: Any, degrees: Degrees, gib: float, ranks: int = 0) -> Twin:
    return twin(
        job,
        args,
        degrees,
        shapes=lambda a: shapes_of(job, spec, a),
        budget_bytes=int(gib * GIB),
        local_ranks=ranks or min(degrees.world_size, 8),
    )


def uneven(own: Shapes, smaller: Shapes, degrees: Degrees) -> list[str]:
    """What the mesh divides in the one and not in the other."""
    fsdp = degrees.dp_shard * degrees.cp
    return [
        f"{fqn} {smaller[fqn]} by {by}"
        for fqn in smaller
        for d, size in enumerate(own[fqn])
        for by in (degrees.tp, fsdp, degrees.tp * fsdp)
        if size % by == 0 and smaller[fqn][d] % by
    ]


# --------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("flavor", ["8B", "70B", "405B"])
@pytest.mark.parametrize("gib", [2.0, 12.0])
def test_smaller_and_as_evenly_divided(flavor: str, mesh: str, gib: float) -> None:
    degrees = MESHES[mesh]
    job, spec, args = parsed(flavor, "--training.local_batch_size", "16")
    if mesh == "fsdp 128 x tp 8":  # shards as small as these take large heads
        gib = 400
    before = copy.deepcopy(args)
    small = made(job, spec, args, degrees, gib)
    assert args == before == spec.model_args[flavor]
    assert (job.training.seq_len, job.training.local_batch_size) == (6144, 16)
    assert small.args.n_layers == 2
    assert (small.args.n_heads, small.args.n_kv_heads) == (args.n_heads, args.n_kv_heads)
    assert small.args.dim % (2 * args.n_heads) == 0  # rotary embeddings take pairs
    assert small.args.vocab_size % (128 * degrees.tp) == 0
    assert small.args.dim < args.dim or mesh == "fsdp 128 x tp 8"
    assert small.training["local_batch_size"] == 2
    assert 64 <= small.training["seq_len"] <= 128
    assert uneven(shapes_of(job, spec, args), shapes_of(job, spec, small.args), degrees) == []
    for key, value in small.training.items():
        setattr(job.training, key, value)
    titan02_checks.check_sizes(job, degrees, small.args)
    assert made(job, spec, small.args, degrees, gib) == Twin(args=small.args)  # it does fit


def test_whatever_fits_is_left_alone() -> None:
    for flavor, gib in (("debugmodel", 12), ("405B", 100_000)):
        job, spec, args = parsed(flavor)
        whole = made(job, spec, args, MESHES["fsdp 2 x tp 2"], gib)
        assert whole.args is args
        assert (whole.training, whole.words, whole.notes) == ({}, "", ())


def test_what_it_takes_grows_with_the_copies() -> None:
    """8B: 30 GiB for each copy in float32. 7 copies on one device and 7 over the ranks of a replica, one
    gathered on each tensor-parallel group; the whole tensors that are compared come on top, 2 GiB each."""
    job, spec, args = parsed("8B", "--training.seq_len", "64")
    for mesh, copies in (("fsdp 2 x tp 2", 7 + 7 + 2), ("hsdp 2 x 2 x cp 2", 7 + 2 * 7 + 8)):
        assert made(job, spec, args, MESHES[mesh], 0.95 * copies * 30).words
        assert not made(job, spec, args, MESHES[mesh], 1.2 * copies * 30).words


def test_the_words() -> None:
    job, spec, args = parsed("405B", "--training.local_batch_size", "16")
    small = made(job, spec, args, Degrees(dp_shard=1, tp=8), 100)
    assert small.words == SMALL_405B
    (note,) = small.notes
    assert note.startswith("measuring simple_fsdp.llama3 405B itself takes about ")
    assert note.endswith(f"the ranks ran {SMALL_405B}; the verdicts are on its parameters.")
    assert "where 100.0 GiB" in note


def test_less_memory_smaller_heads() -> None:
    job, spec, args = parsed("405B")
    dims = [made(job, spec, args, MESHES["fsdp 2 x tp 8"], gib).args.dim for gib in (100, 2, 0.5)]
    assert dims == sorted(dims, reverse=True)
    assert dims[0] == 1024
    assert dims[-1] < 512


def test_too_large_all_the_same() -> None:
    job, spec, args = parsed("8B")
    with pytest.raises(
        NotMeasurable, match=r"8B takes about [\d,.]+ GiB .* and 0\.\d GiB made as small .*; 0\.0"
    ):
        made(job, spec, args, MESHES["tp 2"], 0.001)


def test_args_without_sizes() -> None:
    @dataclasses.dataclass
    class Args:
        vocab_size: int = 128
        width: int = 4096

    job, _, _ = parsed("8B")
    job.training.seq_len = 64
    with pytest.raises(NotMeasurable, match=r"to be measured; 1\.0 GiB"):
        twin(
            job,
            Args(),
            MESHES["tp 2"],
            shapes=lambda a: {"w": (a.width, 2**20)},
            budget_bytes=GIB,
            local_ranks=2,
        )


# --------------------------------------------------------------------------- real ranks


def audit(env: RankEnv) -> tuple[Report, int, set[tuple[int, ...]]]:
    # Each rank sees other free memory, and all must build the same model.
    titan02_device._available_memory = lambda: (64 if env.rank == 0 else 1) * GIB
    batches, batch_of = set(), titan02_step.batch_of

    def seen(*args: Any, **kwargs: Any) -> Any:
        tokens, labels = batch_of(*args, **kwargs)
        batches.add(tuple(tokens.shape))
        return tokens, labels

    titan02_step.batch_of = seen
    job = load(str(CONFIGS / "fsdp_tp.toml"), overrides=["--model.flavor", "8B"], device="cpu")
    report = pipeline.run(job, pipeline.Options(rank_env=env, measure=True))
    return report, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, batches


def test_an_8b_on_four_ranks() -> None:
    answers = on_ranks(4, audit)
    report = answers[0][0]
    m = report.measurement
    assert m is not None
    assert all(peak < GIB for _, peak, _ in answers)
    assert all(batches == {(2, 64)} for _, _, batches in answers)
    assert report.exit_status == 0
    assert [f for f in report.findings if f.severity == "error"] == []
    assert len(m.params) == 3 + 2 * 9
    errors = [p.grad_error for p in m.params]
    assert all(e is not None and e <= 1e-5 for e in errors)
    assert m.model == (
        "the same architecture with 2 of 32 layers, dim 256 of 4096, vocabulary 256 of 128256, "
        "multiple_of 256 of 1024, seq_len 64 of 512"
    )
    text = " ".join(render(report, "text", width=120).split())
    assert text.count(m.model) == 2  # with the numbers, and as a note
    assert "measuring simple_fsdp.llama3 8B itself takes about" in text
