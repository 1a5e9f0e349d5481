"""The command line: what can be typed, and what it becomes. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from placement_audit import options, usage
from placement_audit.config import near_miss


class _Parser(argparse.ArgumentParser):
    """Under torchrun a wrong option is told by rank 0 alone, not once a rank."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(0.5)  # torchrun kills the rest at the first exit: let rank 0 speak first
            raise SystemExit(2)
        name = self.prog.partition(" ")[0]
        self.exit(2, f"{name}: error: {message}\nTry '{self.prog} --help'.\n")


def _audit(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Audits the gradient placements of a torchtitan job: for every parameter and mesh\n"
        "dim, which placement its gradient should have, which it has, and where they part."
    )
    parser.epilog = usage.EPILOG
    options.add_running(parser, required=True)
    options.add_output(parser)
    options.add_mending(parser)
    options.add_policy(parser)
    parser.add_argument(
        "--version", action="store_true", help="versions of everything that matters, and exit"
    )


def _run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Audits a program of your own: FUNCTION makes its model, step and mesh, and returns a\n"
        "placement_audit.Job or a dict of its fields. The process group is there when it is called."
    )
    parser.add_argument("factory", metavar="FILE.py:FUNCTION", help="or package.module:FUNCTION")
    group = parser.add_argument_group("job")
    options.add_world(group)
    group.add_argument("overrides", nargs="*", metavar="-- ARGUMENTS", help="FUNCTION's own: -- 4 hidden=64")
    options.add_output(parser)
    options.add_mending(parser)
    options.add_policy(parser)


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.description = "Explains one rule (PA201, lost-reduction), or the way of one parameter's gradient."
    parser.add_argument("what", metavar="PARAMETER|RULE", help="a parameter's FQN, or a rule's id or name")
    options.add_running(parser, required=False)
    parser.add_argument(
        "--run",
        metavar="FILE.py:FUNCTION",
        dest="factory",
        help="a program of your own, as for `placement-audit run`, not a torchtitan job",
    )
    parser.add_argument(
        "--report", metavar="SAVED.json", help="take the trace from a saved report, not a job"
    )
    options.add_output(parser, formats=False)


def _rules(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the rules."


def _patch(parser: argparse.ArgumentParser) -> None:
    parser.description = usage.PATCH
    parser.epilog = usage.PATCH_EPILOG
    options.add_patch(parser)


def _revert(parser: argparse.ArgumentParser) -> None:
    parser.description = "Puts back the very bytes that files had before --fix or patch --apply edited them."
    parser.epilog = usage.REVERT_EPILOG
    parser.add_argument("files", metavar="FILE", nargs="+", help="as the report of --fix names them")
    parser.add_argument(
        "--force", action="store_true", help="although edited since; those edits are kept aside"
    )
    parser.add_argument("--verbose", action="store_true", help="tracebacks")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.description = "Renders a saved JSON report again, without torch; exits as the audit did."
    parser.add_argument(
        "saved", metavar="SAVED.json", help="written by --format json; - reads standard input"
    )
    options.add_output(parser)
    options.add_policy(parser)


def _baseline(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes what is found now to a file of known findings, one line each. An audit with --baseline FILE\n"
        "fails on what is new only, and tells what is gone."
    )
    parser.epilog = usage.BASELINE_EPILOG
    parser.add_argument(
        "--write", metavar="FILE", required=True, help="the baseline; one that is there is replaced"
    )
    options.add_running(parser, required=False)
    parser.add_argument("--report", metavar="SAVED.json", help="of a saved report, not a job")
    options.add_talk(parser.add_argument_group("output"))
    parser.set_defaults(output_file=None)


def _diff(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sets two saved reports side by side, such as before and after an upgrade of torch: which verdicts,\n"
        "placements, dtypes, collectives, bytes and findings changed. Versions alone are no difference."
    )
    parser.epilog = usage.DIFF_EPILOG
    parser.add_argument(
        "before", metavar="BEFORE.json", help="written by --format json; - reads standard input"
    )
    parser.add_argument("after", metavar="AFTER.json", help="likewise")
    options.add_plain_output(parser)


def _init(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows a GitHub workflow, a pytest file and a table of ours for your repository, and writes them\n"
        "once you say so. What is there is never overwritten."
    )
    parser.epilog = usage.INIT_EPILOG
    parser.add_argument("--dir", metavar="DIR", default=".", help="the repository's root (default: .)")
    parser.add_argument(
        "--config", metavar="FILE", help="the torchtitan job file to audit (default: the only one in DIR)"
    )
    parser.add_argument("--yes", action="store_true", help="write, without asking")
    parser.add_argument("--verbose", action="store_true", help="tracebacks")


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prints a script that lets a shell complete our commands and options."
    parser.epilog = usage.COMPLETION_EPILOG
    parser.add_argument("shell", choices=("bash", "fish", "zsh"))


_FILL: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "audit": _audit,
    "run": _run,
    "explain": _explain,
    "rules": _rules,
    "report": _report,
    "patch": _patch,
    "revert": _revert,
    "baseline": _baseline,
    "diff": _diff,
    "init": _init,
    "completion": _completion,
}

ACTIONS = tuple(_FILL)


def _parser(action: str, *, top: bool) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="placement-audit" if top else f"placement-audit {action}",
        usage=usage.TOP if action == "audit" else None,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _FILL[action](parser)
    return parser


def whole() -> argparse.ArgumentParser:
    """All commands as one parser, which nothing is parsed with: for shell completion."""
    root = _parser("audit", top=True)
    root.usage = None
    commands = root.add_subparsers()
    for action, fill in _FILL.items():
        parser = commands.add_parser(action, help=usage.COMMANDS[action])
        fill(parser)
        parser.description = usage.COMMANDS[action]
    return root


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    Args:
        argv: without the program's name.

    Returns:
        The options; ``action`` is one of `ACTIONS`, ``overrides`` what followed ``--``.

    Raises:
        SystemExit: --help (0), or a usage error (2), told on stderr.
    """
    words = list(argv)
    overrides: list[str] | None = None
    if "--" in words:
        at = words.index("--")
        words, overrides = words[:at], words[at + 1 :]
    top = not (words and words[0] in ACTIONS)
    action = "audit" if top else words.pop(0)
    parser = _parser(action, top=top)
    if top and words and not words[0].startswith("-"):
        parser.error(
            f"unknown action {words[0]!r}.{near_miss(words[0], ACTIONS)} Actions: {', '.join(ACTIONS)}."
        )
    if "--version" in words:
        return argparse.Namespace(action="version")
    args = parser.parse_args(words)
    if getattr(args, "overrides", None):
        parser.error(f"unexpected {args.overrides[0]!r}; torchtitan overrides go after --.")
    if overrides is not None and not hasattr(args, "overrides"):
        parser.error(f"{action} takes no torchtitan overrides.")
    if getattr(args, "force", False) and action in ("audit", "run") and not (args.fix or args.fix_dry_run):
        parser.error("--force is for --fix and --fix-dry-run.")
    args.action = action
    args.overrides = tuple(overrides or ())
    return args
