"""Arguments -> actions -> exit status. With `placement_audit.commands` the only room that prints."""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence

from placement_audit import arguments
from placement_audit.commands import audit, baseline, completion, diff, explain, init, patch, revert, show
from placement_audit.commands.talk import Talk
from placement_audit.errors import AuditError, IncompleteError

_ACTIONS: dict[str, Callable[[Namespace, Talk], int]] = {
    "audit": audit.run,
    "run": audit.run,
    "explain": explain.run,
    "report": show.saved,
    "rules": show.rules,
    "patch": patch.run,
    "revert": revert.run,
    "baseline": baseline.run,
    "diff": diff.run,
    "init": init.run,
    "completion": completion.run,
    "version": show.version,
}


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
    talk = Talk(progress=sys.stderr.isatty() and not quiet, verbose=verbose)
    try:
        args.overlaid = _belong()
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


def _belong() -> bool:
    """Where another placement-audit started this one: see the files as it wants, and end with it.

    Returns:
        Whether this process sees edited copies of files.
    """
    from placement_audit import overlay

    parent = os.environ.pop(overlay.PARENT, None)
    if parent is not None:
        overlay.end_with(int(parent))
    return overlay.install()
