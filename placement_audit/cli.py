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

_OVERLAID = False
"""Whether this process sees edited copies of files (`placement_audit.overlay`)."""

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
        _belong()
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


def _belong() -> None:
    """Where another placement-audit started this one: see the files as it wants, and end with it."""
    global _OVERLAID
    from placement_audit import overlay

    parent = os.environ.pop(overlay.PARENT, None)
    if parent is not None:
        overlay.end_with(int(parent))
    _OVERLAID = overlay.install()


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
        report = _with_edits(args, talk, report)
        _write(args, _rendered(args, report), report.exit_status)
        return _status(args, report)

    return _run(args, talk, finish)


def _with_edits(args: Namespace, talk: _Talk, report: Report) -> Report:
    """The report with the edits that would mend its findings; with --fix, with those that did."""
    if _OVERLAID or not any(f.remedy is not None for f in report.findings):
        return report
    from placement_audit.mend.attach import attach

    job_file = args.config if args.action == "audit" else args.factory.rpartition(":")[0]
    folders = [Path.cwd(), *(Path(p) for p in sys.path if p), Path(job_file).resolve().parent]
    report, planned = attach(report, folders)
    if not _fixes(args):
        return report
    from placement_audit.prove import Terms, audit_again, mend
    from placement_audit.ranks import stoppable

    terms = Terms(
        audit=audit_again(args, measure=_measure(args, None)),
        write=args.fix and not args.fix_dry_run,
        force=args.force,
        traced_only=args.measure is False,
        tell=talk.phase,
    )
    with stoppable():
        return mend(report, planned, terms)


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


def _patch(args: Namespace, _talk: _Talk) -> int:
    from placement_audit.mend import command, show
    from placement_audit.report import drawn

    asked = command.Asked(
        action=command.Action(args.do),
        torchtitan=args.torchtitan,
        form=command.Form.DEFERRED if args.deferred else command.Form.REDUCED,
        force=args.force,
    )
    done = command.run(asked)
    if args.format == "json":
        output.write_stdout(show.as_json(done))
    elif asked.action is command.Action.DIFF:
        output.write_stdout_bytes(done.diff)
    else:
        output.write_stdout(drawn(lambda console: show.draw(done, console), color=args.color))
    return done.exit_status


_ACTIONS: dict[str, Callable[[Namespace, _Talk], int]] = {
    "audit": _audit,
    "run": _audit,
    "explain": _explain,
    "report": _report,
    "rules": _rules,
    "patch": _patch,
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
    measure = _measure(args, rank_env)

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


def _fixes(args: Namespace) -> bool:
    return getattr(args, "fix", False) or getattr(args, "fix_dry_run", False)


def _measure(args: Namespace, rank_env: RankEnv | None) -> bool:
    """Whether to measure: as asked, else where ranks are there already, and where edits are to be proven."""
    return (rank_env is not None or _fixes(args)) if args.measure is None else args.measure


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
        if _fixes(args):
            raise UsageError("--fix starts ranks of its own, again and again: run it without torchrun.")
        if args.log_dir:
            from placement_audit.ranks import open_evidence

            open_evidence(args.log_dir, env.rank)
        config = _config(args)
        ranks.timeout = config.timeout
        return audit(config, env, tell)

    run_rank(env, work, finish, say=talk.error, timeout=args.timeout or DEFAULT_TIMEOUT)


def _config(args: Namespace) -> AuditConfig:
    _check_output(args)
    if args.action == "run":
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
