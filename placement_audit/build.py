"""Config -> `Case`: checks what is installed and hands over to the adapter of that torchtitan."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from placement_audit.adapters.environment import check_versions, versions
from placement_audit.config import AuditConfig, RankEnv

if TYPE_CHECKING:
    from placement_audit.case import Case

__all__ = ["build", "versions"]


def build(
    config: AuditConfig, *, rank_env: RankEnv | None = None, fake_rank: int = 0, float32: bool = False
) -> Case:
    """Build the job that a configuration describes.

    Args:
        config: see `placement_audit.config.load`.
        rank_env: this process's place under torchrun; None to play one rank of a fake world.
        fake_rank: the rank to play, without ``rank_env``.
        float32: compute in float32 whatever the job's mixed precision is, to be measured.

    Returns:
        The parallelised model on its mesh, and its step.

    Raises:
        BuildError: something is missing, unsupported, or the job cannot be built as configured.
        ConfigError: torchtitan refuses the job.
        IncompleteError: the model failed while it was built.
    """
    if config.factory is not None:
        from placement_audit.adapters import factory

        return factory.build(config, rank_env=rank_env, fake_rank=fake_rank, measured=float32)
    from placement_audit.adapters.titan02_job import make_importable

    make_importable(config.job_path)
    version = check_versions(registered=config.module is not None)
    # Before torch is imported: its C++ side warns on stderr about everyday things.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if config.module is not None:
        from placement_audit.adapters import titan03

        return titan03.build(config, version=version, rank_env=rank_env, fake_rank=fake_rank, float32=float32)
    from placement_audit.adapters import titan02

    return titan02.build(config, version=version, rank_env=rank_env, fake_rank=fake_rank, float32=float32)
