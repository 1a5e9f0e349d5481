"""Reads saved reports, and puts a report where it was asked for."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from placement_audit import output
from placement_audit.errors import ReportError, UsageError
from placement_audit.formats import Target
from placement_audit.report.words import listed

if TYPE_CHECKING:
    from placement_audit.verdicts import Report


def read_report(path: str) -> Report:
    """A saved report; "-" reads standard input.

    Raises:
        ReportError: it cannot be read, or is none.
    """
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


def deliver(args: Namespace, report: Report) -> None:
    """Render the report in every format that was asked for, then write: files all or none, then standard output.

    Raises:
        UsageError: a file cannot be written.
    """
    from placement_audit.report import NO_TERMINAL, render
    from placement_audit.worktree import Worktree

    inside = Worktree.here().inside
    # A file has no width and no terminal.
    color = "always" if args.color == "always" else "never"
    wanted = _targets(args)
    texts = [
        render(report, t.format, width=NO_TERMINAL[0], color=color, inside=inside)
        if t.path
        else render(report, t.format, color=args.color, inside=inside)
        for t in wanted
    ]
    output.write_files([(t.path, text) for t, text in zip(wanted, texts, strict=True) if t.path])
    for t, text in zip(wanted, texts, strict=True):
        if not t.path and not (args.quiet and report.exit_status == 0 and t.format == "text"):
            # a terminal's text is in its own encoding, a document says that it is UTF-8
            output.write_stdout(text) if t.format == "text" else output.write_stdout_bytes(text.encode())


def check_output(args: Namespace) -> None:
    """Refuse what cannot be written before an audit is spent on it.

    Raises:
        UsageError: a file that cannot be written, or two reports for one place.
    """
    for t in _targets(args):
        if t.path:
            output.check_target(t.path)


def write(args: Namespace, text: str) -> None:
    """Put a text that is no report where it was asked for."""
    if args.output_file:
        output.write_files([(args.output_file, text)])
    else:
        output.write_stdout(text)


def _targets(args: Namespace) -> tuple[Target, ...]:
    """Each format with its file; --output-file is the file of the one that has none.

    Raises:
        UsageError: two reports for one place, or --output-file for none.
    """
    asked: list[Target] = getattr(args, "format", None) or [Target("text")]
    loose = [t.format for t in asked if t.path is None]
    if len(loose) > 1:
        what = "for --output-file" if args.output_file else "for standard output"
        raise UsageError(
            f"--format: {listed(loose)} are all {what}, which takes one; "
            f"give the others a file, such as --format {loose[1]}:FILE."
        )
    if args.output_file and not loose:
        raise UsageError(
            f"--output-file {args.output_file}: every --format has a file of its own; "
            "leave --output-file out, or add a --format without a file."
        )
    found = tuple(Target(t.format, t.path or args.output_file) for t in asked)
    places = [Path(t.path).resolve() for t in found if t.path]
    twice = next((p for p in places if places.count(p) > 1), None)
    if twice is not None:
        raise UsageError(f"--format: two reports for one file, {twice}; give each its own.")
    return found


def status(args: Namespace, report: Report) -> int:
    """The exit status, as --exit-zero wants it."""
    return 0 if args.exit_zero and report.exit_status == 1 else report.exit_status


def ended(text: str) -> str:
    """The text with a newline at its end."""
    return text if text.endswith("\n") else f"{text}\n"
