"""``placement-audit revert``: takes back what ``--fix`` or ``patch --apply`` edited."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from placement_audit import output
from placement_audit.commands.talk import Talk
from placement_audit.errors import UsageError


def run(args: Namespace, _talk: Talk) -> int:
    """Give each file the bytes that it had before our first edit; the first that cannot have them ends it."""
    from placement_audit.mend import files

    done = []
    try:
        for name in args.files:
            path = Path(name).resolve()
            if not path.is_file():
                raise UsageError(f"{name}: there is no such file.")
            kept = files.revert(path, force=args.force)
            done.append(f"reverted  {name}\n")
            if kept is not None:
                done.append(f"kept      what was edited after --fix or --apply: {kept}\n")
    finally:
        output.write_stdout("".join(done))
    return 0
