"""``placement-audit audit`` and ``run``."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from placement_audit.commands import files, known, running
from placement_audit.commands.talk import Talk

if TYPE_CHECKING:
    from placement_audit.verdicts import Report


def run(args: Namespace, talk: Talk) -> int:
    """Audit a job, mend it where asked, write the report."""

    def finish(report: Report) -> int:
        report = _with_edits(args, talk, known.marked(args, report))
        report = known.marked(args, report)  # --fix has audited anew
        files.deliver(args, report)
        return files.status(args, report)

    return running.run(args, talk, finish)


def _with_edits(args: Namespace, talk: Talk, report: Report) -> Report:
    """The report with the edits that would mend its findings; with --fix, with those that did."""
    if args.overlaid or not any(f.remedy is not None for f in report.findings):
        return report
    from placement_audit.mend.attach import attach

    job_file = args.config if args.action == "audit" else args.factory.rpartition(":")[0]
    folders = [Path.cwd(), *(Path(p) for p in sys.path if p), Path(job_file).resolve().parent]
    report, planned = attach(report, folders)
    if not running.fixes(args):
        return report
    from placement_audit.prove import Terms, audit_again, mend
    from placement_audit.ranks import stoppable

    terms = Terms(
        audit=audit_again(args, measure=running.measures(args, None)),
        write=args.fix and not args.fix_dry_run,
        force=args.force,
        traced_only=args.measure is False,
        tell=talk.phase,
    )
    with stoppable():
        return mend(report, planned, terms)
