"""``placement-audit patch``."""

from __future__ import annotations

from argparse import Namespace

from placement_audit import output
from placement_audit.commands.talk import Talk


def run(args: Namespace, _talk: Talk) -> int:
    """Look at the torchtitan on disk, mend it, or take the mend back."""
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
