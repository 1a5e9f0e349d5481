"""``placement-audit completion``: what a shell reads to complete our commands."""

from __future__ import annotations

import argparse
from argparse import Namespace

from placement_audit import output
from placement_audit.commands.talk import Talk
from placement_audit.formats import FORMATS


def run(args: Namespace, _talk: Talk) -> int:
    """Print the script for one shell."""
    import shtab

    from placement_audit import arguments

    root = arguments.whole()
    # What follows `--` is not ours to complete, and where it stood the commands would not be completed.
    root._actions[:] = [action for action in root._actions if action.dest != "overrides"]
    _name_files(root, shtab.FILE, shtab.DIRECTORY)
    output.write_stdout(shtab.complete(root, shell=args.shell).rstrip() + "\n")
    return 0


def _name_files(parser: argparse.ArgumentParser, file: object, folder: object) -> None:
    """Let shells complete names of files where those are wanted, and the formats of a report."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                _name_files(sub, file, folder)
        elif action.metavar == "DIR":
            action.complete = folder  # type: ignore[attr-defined]
        elif action.metavar == "FORMAT[:FILE]":
            action.choices = FORMATS  # the parser that is completed parses nothing
        elif isinstance(action.metavar, str) and (
            action.metavar == "FILE" or action.metavar.endswith(".json")
        ):
            action.complete = file  # type: ignore[attr-defined]
