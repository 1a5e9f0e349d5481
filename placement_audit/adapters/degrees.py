"""Parallelism degrees -> world size: arithmetic only, no torch.

The world is the product of the degrees. torchtitan lets one of them, data_parallel_shard_degree, be -1:
"the ranks that are left". Alone there are no ranks to be left, so the smallest world with two of them is
taken and said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement_audit.errors import BuildError

_KEYS = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}

_CHOSEN = "data_parallel_shard_degree is -1: audited with 2 ranks on that mesh dim; --world-size N overrides."


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """torchtitan's `[parallelism]` degrees, all in ranks; ``dp_shard`` may be -1 until resolved."""

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        """Ranks; ep and etp borrow ranks of the others and add none."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def batch_size(self) -> int:
        """Ranks with different batches."""
        return self.dp_replicate * self.dp_shard

    def batch_rank(self, rank: int) -> int:
        """Which of the different batches a rank reads.

        Ranks count through pp, dp_replicate, dp_shard, cp, tp, the last one fastest.
        """
        return rank // (self.cp * self.tp) % self.batch_size


def _product(degrees: Degrees, *, shard: bool) -> str:
    """The world's factors with their keys, those of 1 left out."""
    names = [n for n in ("dp_replicate", "dp_shard", "cp", "tp", "pp") if shard or n != "dp_shard"]
    parts = [f"{_KEYS[n]} {getattr(degrees, n)}" for n in names if getattr(degrees, n) != 1]
    return " x ".join(parts) or "1 (every degree is 1)"


def resolve(
    degrees: Degrees, *, asked: int | None = None, launched: int | None = None
) -> tuple[Degrees, tuple[str, ...]]:
    """Fill in dp_shard and check the world size.

    Args:
        degrees: as the job has them.
        asked: world size from --world-size or our table.
        launched: processes that torchrun started.

    Returns:
        The degrees with dp_shard >= 1, and notes for the report.

    Raises:
        BuildError: a degree is out of range, or the numbers do not fit together.
    """
    for name, key in _KEYS.items():
        value = getattr(degrees, name)
        if value < 1 and not (name == "dp_shard" and value == -1):
            extra = " or -1" if name == "dp_shard" else ""
            raise BuildError(f"parallelism.{key}: expected 1 or more{extra}; got {value}.")
    if degrees.pp > 1:
        raise BuildError(
            f"parallelism.pipeline_parallel_degree is {degrees.pp}: pipeline parallelism is not supported "
            "yet. "
            "Audit the job without it: -- --parallelism.pipeline_parallel_degree 1."
        )
    if launched is not None and asked is not None and asked != launched:
        raise BuildError(
            f"world size {asked} was asked for (--world-size or placement_audit.world_size), but torchrun "
            "started "
            f"{launched} processes. Drop the one, or start torchrun with {asked}."
        )
    world = launched if launched is not None else asked
    source = "torchrun started" if launched is not None else "the world size asked for is"
    unit = " processes" if launched is not None else ""
    rest = replace(degrees, dp_shard=1).world_size
    if degrees.dp_shard == -1:
        if world is None:
            return replace(degrees, dp_shard=2), (_CHOSEN,)
        if world % rest:
            raise BuildError(
                f"{source} {world}{unit}, which the other degrees do not divide: "
                f"{_product(degrees, shard=False)} "
                f"= {rest}, and {world} = {world // rest} x {rest} + {world % rest}. Take a multiple of "
                f"{rest}."
            )
        return replace(degrees, dp_shard=world // rest), ()
    if world is not None and world != degrees.world_size:
        raise BuildError(
            f"{source} {world}{unit}, but the job's degrees give {degrees.world_size}: "
            f"{_product(degrees, shard=True)}. Take {degrees.world_size}, or change a degree, such as "
            "-- --parallelism.data_parallel_shard_degree -1 (the ranks that are left)."
        )
    return degrees, ()
