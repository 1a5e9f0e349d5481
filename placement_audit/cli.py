"""Arguments -> actions -> exit status. The only room that prints, and with `launch` the only one that exits.

Heavy imports are inside the actions: --help, --version, rules, explain RULE and report import no torch.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import placement_audit
from placement_audit import arguments, output
from placement_audit.config import AuditConfig, RankEnv, load
from placement_audit.errors import AuditError, IncompleteError, ReportError, UsageError

if TYPE_CHECKING:
    from placement_audit.launch import Ranks
    from placement_audit.verdicts import Report

Tell = Callable[[str, float | None], None]

_WORDS = {
    "import": "importing torch and torchtitan",
    "build": "building the model",
    "weights": "giving it weights",
    "trace": "tracing one step",
    "measure": "measuring",
    "judge": "judging",
}


class _Talk:
    """Standard error: progress lines and messages."""

    def __init__(self, *, progress: bool, verbose: bool) -> None:
        self._progress = progress
        self._verbose = verbose
        self._in_line = False

    def phase(self, name: str, seconds: float | None) -> None:
        """One line a phase, with its seconds."""
        if not self._progress:
            return
        sys.stderr.write(f"{_WORDS.get(name, name)} ... " if seconds is None else f"{seconds:.1f} s\n")
        sys.stderr.flush()
        self._in_line = seconds is None

    def error(self, message: str, details: str = "") -> None:
        """A message of one or more lines; details only where asked for."""
        start = "\n" if self._in_line else ""
        self._in_line = False
        more = f"\n{details.rstrip()}" if details and self._verbose else ""
        sys.stderr.write(f"{start}placement-audit: error: {message}{more}\n")
        sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: without the program's name; None for this process's own.

    Returns:
        The exit status.
    """
    try:
        args = arguments.parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    except KeyboardInterrupt:
        return 130
    verbose = getattr(args, "verbose", False)
    quiet = getattr(args, "quiet", False)
    talk = _Talk(progress=sys.stderr.isatty() and not quiet, verbose=verbose)
    try:
        return _ACTIONS[args.action](args, talk)
    except AuditError as error:
        details = getattr(error, "details", "") or "".join(traceback.format_exception(error))
        talk.error(error.message, details)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # A traceback is for us; the user is told whose fault it is.
        talk.error(
            f"placement-audit itself failed: {type(error).__name__}: {error}. Please report it with the "
            "traceback "
            "that --verbose shows.",
            "".join(traceback.format_exception(error)),
        )
        return IncompleteError.exit_status


# --------------------------------------------------------------------------- actions


def _version(_args: Namespace, _talk: _Talk) -> int:
    from placement_audit.build import versions

    output.write_stdout(
        f"placement-audit {placement_audit.__version__}\n"
        + "".join(f"{name} {v}\n" for name, v in versions())
    )
    return 0


def _rules(_args: Namespace, _talk: _Talk) -> int:
    from placement_audit.rules import rules_table

    output.write_stdout(_ended(rules_table()))
    return 0


def _report(args: Namespace, _talk: _Talk) -> int:
    _check_output(args)
    report = _read_report(args.saved)
    _write(args, _rendered(args, report), report.exit_status)
    return _status(args, report)


def _audit(args: Namespace, talk: _Talk) -> int:
    def finish(report: Report) -> int:
        _write(args, _rendered(args, report), report.exit_status)
        return _status(args, report)

    return _run(args, talk, finish)


def _explain(args: Namespace, talk: _Talk) -> int:
    from placement_audit.rules import UnknownRuleError, get_rule, rule_text

    def finish(report: Report) -> int:
        from placement_audit.report.way import explain_param

        _write(args, _ended(explain_param(report, args.what)), 1)
        return 0

    if args.config and args.report:
        raise UsageError("explain takes --config or --report, not both.")
    if args.report:
        _check_output(args)
        return finish(_read_report(args.report))
    if args.config:
        return _run(args, talk, finish)
    try:
        text = rule_text(get_rule(args.what))
    except UnknownRuleError as error:
        raise UsageError(
            f"{error} To explain a parameter, say of which job: --config FILE, or --report SAVED.json."
        ) from error
    _check_output(args)
    _write(args, _ended(text), 1)
    return 0


_ACTIONS: dict[str, Callable[[Namespace, _Talk], int]] = {
    "audit": _audit,
    "explain": _explain,
    "report": _report,
    "rules": _rules,
    "version": _version,
}


# --------------------------------------------------------------------------- running and writing


def _run(args: Namespace, talk: _Talk, finish: Callable[[Report], int]) -> int:
    """Audit, alone, on ranks of our own or as one of torchrun's, and hand the report to ``finish``."""
    from placement_audit import pipeline

    if not args.verbose:
        # torch's C++ side logs by itself, with stack traces, what is told in one message here.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    rank_env = RankEnv.from_environ()
    measure = rank_env is not None if args.measure is None else args.measure

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


def _run_rank(
    args: Namespace,
    talk: _Talk,
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
        if args.log_dir:
            from placement_audit.ranks import open_evidence

            open_evidence(args.log_dir, env.rank)
        config = _config(args)
        ranks.timeout = config.timeout
        return audit(config, env, tell)

    run_rank(env, work, finish, say=talk.error, timeout=args.timeout or DEFAULT_TIMEOUT)


def _config(args: Namespace) -> AuditConfig:
    _check_output(args)
    return load(
        args.config,
        overrides=args.overrides,
        world_size=args.world_size,
        timeout=args.timeout,
        device=args.device,
    )


def _read_report(path: str) -> Report:
    from placement_audit.report.json_io import loads

    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise ReportError(
            f"{path}: no such file. Save a report with --format json --output-file FILE."
        ) from None
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror or error}.") from None
    try:
        return loads(data)
    except ReportError as error:
        raise ReportError(f"{path}: {error.message}") from error


def _rendered(args: Namespace, report: Report) -> str:
    from placement_audit.report import NO_TERMINAL, render

    if args.output_file:
        # A file has no width and no terminal.
        color = "always" if args.color == "always" else "never"
        return render(report, args.format, width=NO_TERMINAL[0], color=color)
    return render(report, args.format, color=args.color)


def _check_output(args: Namespace) -> None:
    if args.output_file:
        output.check_target(args.output_file)


def _write(args: Namespace, text: str, status: int) -> None:
    if args.output_file:
        output.write_file(args.output_file, text)
    elif not (args.quiet and status == 0 and args.format == "text"):
        output.write_stdout(text)


def _status(args: Namespace, report: Report) -> int:
    return 0 if args.exit_zero and report.exit_status == 1 else report.exit_status


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"
