"""``placement-audit diff``: two saved reports side by side."""

from __future__ import annotations

from argparse import Namespace

from placement_audit.commands import files
from placement_audit.commands.talk import Talk
from placement_audit.errors import UsageError


def run(args: Namespace, _talk: Talk) -> int:
    """Say what changed from one saved report to another; status 1 where anything did."""
    from placement_audit.report import drawn
    from placement_audit.report.compare import compare
    from placement_audit.report.compare_text import as_json, draw

    if args.before == args.after == "-":
        raise UsageError("diff: only one of the two reports can come from standard input.")
    if args.output_file:
        files.output.check_target(args.output_file)
    found = compare(files.read_report(args.before), files.read_report(args.after))
    if args.format == "json":
        text = as_json(found)
    else:
        color = "never" if args.output_file and args.color == "auto" else args.color
        text = drawn(lambda console: draw(found, console), color=color)
    if not (args.quiet and found.same and not args.output_file and args.format == "text"):
        files.write(args, text)
    return 0 if found.same else 1
