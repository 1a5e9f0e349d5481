"""What is found in a job before any rank of --measure starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement_audit.config import load
from placement_audit.errors import AuditError, BuildError, ConfigError, UsageError
from placement_audit.preflight import check

pytestmark = pytest.mark.trace

CONFIGS = Path(__file__).parents[2] / "configs"
SHARD = "--parallelism.data_parallel_shard_degree"


def checked(config: str, *overrides: str, world_size: int | None = None) -> int:
    return check(load(str(CONFIGS / config), overrides=overrides, world_size=world_size, device="cpu"))


@pytest.mark.parametrize(
    ("config", "overrides", "world_size", "ranks"),
    [
        ("tp.toml", (), None, 2),
        ("hsdp_tp.toml", (), None, 8),
        ("fsdp_tp.toml", (SHARD, "-1"), None, 4),
        ("fsdp_tp.toml", (SHARD, "-1"), 8, 8),
    ],
)
def test_as_many_ranks_as_the_mesh_has(config, overrides, world_size, ranks):
    assert checked(config, *overrides, world_size=world_size) == ranks


@pytest.mark.parametrize(
    ("overrides", "world_size", "error", "message"),
    [
        ((), 3, BuildError, "the world size asked for is 3, but the job's degrees give 2"),
        (
            (SHARD, "64"),
            None,
            UsageError,
            "--measure would start 128 processes on this machine; 64 are the most",
        ),
        (("--training.seq_len", "7"), None, BuildError, "training.seq_len = 7 does not divide"),
        (("--model.flavour", "x"), None, ConfigError, "has no such option"),
        (("--model.converters", "no_such"), None, BuildError, "torchtitan has no converter 'no_such'"),
    ],
)
def test_what_is_wrong_is_found(overrides, world_size, error, message):
    with pytest.raises(AuditError, match=message) as caught:
        checked("tp.toml", *overrides, world_size=world_size)
    assert type(caught.value) is error
    assert caught.value.exit_status == 2


def test_the_jobs_own_code_is_left_to_the_ranks(tmp_path, monkeypatch):
    # It may register the model that the job names, and it may not run before the forks.
    (tmp_path / "own_code.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(tmp_path)
    names = ("--experimental.custom_import", "own_code", "--model.name", "of_my_own")
    assert checked("tp.toml", *names) == 2
