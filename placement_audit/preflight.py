"""What can be known of a job before any rank starts: is it right, and how many ranks does its mesh have?"""

from __future__ import annotations

from placement_audit.config import AuditConfig
from placement_audit.errors import UsageError

MOST = 64
"""Ranks on one machine; more are a mistake, such as measuring a cluster's job as it is."""


def check(config: AuditConfig) -> int:
    """Import what every rank needs, and check the job without building it.

    The job's own code (experimental.custom_import) is left to the ranks: it may ask which rank it is, or run
    tensor operations, after which a fork is not safe.

    Args:
        config: the job, for CPU ranks.

    Returns:
        The ranks to start.

    Raises:
        BuildError, ConfigError: something is missing, or the job is wrong.
        UsageError: the job needs more ranks than one machine should run.
    """
    if config.factory is not None:
        return _not_too_many(_made_by_function(config))
    from placement_audit.adapters.environment import check_versions
    from placement_audit.adapters.titan02_job import make_importable

    make_importable(config.job_path)
    version = check_versions(registered=config.module is not None)
    if config.module is not None:
        return _not_too_many(_registered(config, version))
    from placement_audit.adapters import titan02_checks, titan02_device, titan02_job
    from placement_audit.adapters.degrees import resolve
    from placement_audit.pipeline import quiet

    titan02_device.claim_device("cpu")
    with quiet():
        job = titan02_job.parse(config, version=version)
        degrees, _ = resolve(titan02_checks.degrees_of(job), asked=config.world_size)
        if not job.experimental.custom_import:
            _, args = titan02_checks.model_of(job)
            titan02_checks.check_sizes(job, degrees, args)
            titan02_checks.check_converters(job)
        # What each rank would import by itself.
        import torchtitan.train  # noqa: F401

        from placement_audit import judge  # noqa: F401
        from placement_audit.adapters import titan02  # noqa: F401
        from placement_audit.engine import trace  # noqa: F401
    return _not_too_many(degrees.world_size)


def _made_by_function(config: AuditConfig) -> int:
    """As `check`, for a user's own function; its file is left to the ranks, like all of the job's own code."""
    from placement_audit import judge  # noqa: F401
    from placement_audit.adapters import factory
    from placement_audit.engine import trace  # noqa: F401

    return config.world_size or factory.DEFAULT_WORLD_SIZE


def _registered(config: AuditConfig, version: str) -> int:
    """As `check`, for a job of torchtitan 0.3; its config functions are the job's own code, and run here."""
    from placement_audit import judge  # noqa: F401
    from placement_audit.adapters import titan03
    from placement_audit.engine import trace  # noqa: F401
    from placement_audit.pipeline import quiet

    with quiet():
        return titan03.world_size(config, version=version)


def _not_too_many(ranks: int) -> int:
    if ranks > MOST:
        raise UsageError(
            f"--measure would start {ranks} processes on this machine; {MOST} are the most. "
            "Measure a smaller mesh of the same kind, such as -- --parallelism.data_parallel_shard_degree 2, "
            "or start the ranks on your machines with torchrun."
        )
    return ranks
