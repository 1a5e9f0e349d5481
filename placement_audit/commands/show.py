"""``placement-audit report``, ``rules`` and ``--version``: no job, no torch."""

from __future__ import annotations

from argparse import Namespace

import placement_audit
from placement_audit import output
from placement_audit.commands import files, known
from placement_audit.commands.talk import Talk


def version(_args: Namespace, _talk: Talk) -> int:
    """Versions of everything that matters."""
    from placement_audit.build import versions

    output.write_stdout(
        f"placement-audit {placement_audit.__version__}\n"
        + "".join(f"{name} {v}\n" for name, v in versions())
    )
    return 0


def rules(_args: Namespace, _talk: Talk) -> int:
    """List the rules."""
    from placement_audit.rules import rules_table

    output.write_stdout(files.ended(rules_table()))
    return 0


def saved(args: Namespace, _talk: Talk) -> int:
    """Render a saved report again; exit as the audit did."""
    files.check_output(args)
    known.load(args)
    report = known.marked(args, files.read_report(args.saved))
    files.deliver(args, report)
    return files.status(args, report)
