"""``placement-audit baseline``: writes what is found to a file of known findings."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from placement_audit import output
from placement_audit.commands import files, known, running
from placement_audit.commands.talk import Talk
from placement_audit.errors import IncompleteError, UsageError

if TYPE_CHECKING:
    from placement_audit.verdicts import Report


def run(args: Namespace, talk: Talk) -> int:
    """Write what is found to a file of known findings."""
    from placement_audit import baseline
    from placement_audit.report.words import listed, plural

    if bool(args.config) == bool(args.report):
        raise UsageError("baseline takes either --config FILE or --report SAVED.json.")
    output.check_target(args.write)
    if Path(args.write).is_file() and Path(args.write).stat().st_size:
        known.read(args.write)  # a file of another kind is not to be lost

    def finish(report: Report) -> int:
        if report.exit_status == IncompleteError.exit_status:
            raise IncompleteError(
                f"{args.write} was not written: the audit is incomplete, so what is known is not known. See "
                "placement-audit report or audit for the reason."
            )
        found = baseline.known_in(report)
        output.write_file(args.write, baseline.dumps(found))
        if not args.quiet:
            kinds = [f"{n:,} of {rule}" for rule, n in Counter(k.rule for k in found).items()]
            of = f": {listed(kinds)}" if kinds else ""
            output.write_stdout(f"{args.write}: {plural(len(found), 'finding')}{of}\n")
        return 0

    if args.report:
        return finish(files.read_report(args.report))
    return running.run(args, talk, finish)
