"""Audits: alone, on ranks of our own, or as one of torchrun's."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from placement_audit.commands import files, known
from placement_audit.commands.talk import Talk, Tell
from placement_audit.config import AuditConfig, RankEnv, load
from placement_audit.errors import UsageError

if TYPE_CHECKING:
    from placement_audit.launch import Ranks
    from placement_audit.verdicts import Report


def run(args: Namespace, talk: Talk, finish: Callable[[Report], int]) -> int:
    """Audit, alone, on ranks of our own or as one of torchrun's, and hand the report to ``finish``."""
    from placement_audit import pipeline

    if not args.verbose:
        # torch's C++ side logs by itself, with stack traces, what is told in one message here.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    rank_env = RankEnv.from_environ()
    measure = measures(args, rank_env)

    def audit(config: AuditConfig, env: RankEnv | None, tell: Tell) -> Report:
        options = pipeline.Options(verbose=args.verbose, rank_env=env, measure=measure, tell=tell)
        return pipeline.run(config, options)

    if rank_env is not None:
        return _run_rank(args, talk, rank_env, audit, finish)
    if args.log_dir and not measure:
        raise UsageError("--log-dir is for ranks: it needs --measure, or torchrun.")
    config = _config(args)
    if not measure:
        return finish(audit(config, None, talk.phase))
    from placement_audit.ranks import Manner, run_ranks

    manner = Manner(log_dir=args.log_dir, verbose=args.verbose, tell=talk.phase)
    return finish(run_ranks(config, audit, manner))


def fixes(args: Namespace) -> bool:
    """Whether edits are to be proven."""
    return getattr(args, "fix", False) or getattr(args, "fix_dry_run", False)


def measures(args: Namespace, rank_env: RankEnv | None) -> bool:
    """Whether to measure: as asked, else where ranks are there already, and where edits are to be proven."""
    return (rank_env is not None or fixes(args)) if args.measure is None else args.measure


def _run_rank(
    args: Namespace,
    talk: Talk,
    env: RankEnv,
    audit: Callable[[AuditConfig, RankEnv | None, Tell], Report],
    finish: Callable[[Report], int],
) -> NoReturn:
    """Be one of torchrun's ranks."""
    from placement_audit.config import DEFAULT_TIMEOUT
    from placement_audit.launch import run_rank
    from placement_audit.partial import PARTIAL

    def tell(name: str, seconds: float | None) -> None:
        PARTIAL.phase(name, seconds)
        if env.rank == 0:
            talk.phase(name, seconds)

    def work(ranks: Ranks) -> Report:
        if fixes(args):
            raise UsageError("--fix starts ranks of its own, again and again: run it without torchrun.")
        if args.log_dir:
            from placement_audit.ranks import open_evidence

            open_evidence(args.log_dir, env.rank)
        config = _config(args)
        ranks.timeout = config.timeout
        return audit(config, env, tell)

    run_rank(env, work, finish, say=talk.error, timeout=args.timeout or DEFAULT_TIMEOUT)


def _config(args: Namespace) -> AuditConfig:
    from placement_audit import suppress

    config = _loaded(args)
    suppress.check(config.suppress)
    known.load(args)
    return config


def _loaded(args: Namespace) -> AuditConfig:
    files.check_output(args)
    if getattr(args, "factory", None):
        from placement_audit.job import config_of

        return config_of(
            args.factory,
            arguments=args.overrides,
            world_size=args.world_size,
            timeout=args.timeout,
            device=args.device,
        )
    return load(
        args.config,
        module=args.module,
        overrides=args.overrides,
        world_size=args.world_size,
        timeout=args.timeout,
        device=args.device,
    )
