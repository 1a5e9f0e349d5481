"""``placement-audit explain``."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from placement_audit.commands import files, running
from placement_audit.commands.talk import Talk
from placement_audit.errors import UsageError

if TYPE_CHECKING:
    from placement_audit.verdicts import Report


def run(args: Namespace, talk: Talk) -> int:
    """Explain a rule, or a parameter of a job or of a saved report."""
    from placement_audit.rules import UnknownRuleError, get_rule, rule_text

    def finish(report: Report) -> int:
        from placement_audit.report.way import explain_param

        files.write(args, files.ended(explain_param(report, args.what)))
        return 0

    if sum(bool(x) for x in (args.config, args.factory, args.report)) > 1:
        raise UsageError("explain takes one of --config, --run and --report.")
    if args.report:
        files.check_output(args)
        return finish(files.read_report(args.report))
    if args.config or args.factory:
        return running.run(args, talk, finish)
    try:
        text = rule_text(get_rule(args.what))
    except UnknownRuleError as error:
        raise UsageError(
            f"{error} To explain a parameter, say of which job: --config FILE, "
            "--run FILE.py:FUNCTION or --report SAVED.json."
        ) from error
    files.check_output(args)
    files.write(args, files.ended(text))
    return 0
