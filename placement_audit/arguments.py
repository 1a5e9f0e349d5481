"""The command line: what can be typed, and what it becomes. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from typing import NoReturn

from placement_audit.config import near_miss

ACTIONS = ("audit", "run", "explain", "rules", "report", "patch")

_TOP = """\
placement-audit [audit] --config FILE [options] [-- torchtitan overrides]
       placement-audit run FILE.py:FUNCTION [options] [-- arguments]
       placement-audit explain PARAMETER --config FILE [options] [-- torchtitan overrides]
       placement-audit explain RULE
       placement-audit rules
       placement-audit report SAVED.json [--format text|json] [--output-file FILE]
       placement-audit patch [--torchtitan DIR] [--check | --diff | --apply | --revert]
       torchrun --nproc-per-node N -m placement_audit --config FILE ...\
"""

_EPILOG = """\
exit status:
  0  clean
  1  findings (0 with --exit-zero)
  2  usage or configuration: an option, the job file, a degree that does not divide
  3  the audit did not complete (the model failed, a rank hung), or audited nothing

examples:
  placement-audit --config configs/fsdp_tp.toml
  placement-audit --config job.toml --format json --output-file audit.json -- --training.seq_len 4096
  placement-audit --module graph_trainer.llama3 --config graph_trainer_llama3_8b --world-size 64
  placement-audit --config job.toml --fix
  placement-audit run my_script.py:build --world-size 4 --measure -- hidden=64
  placement-audit explain layers.0.attention_norm.weight --config configs/tp.toml
"""


_PATCH_EPILOG = """\
exit status:
  0  --check: applied, in the form asked for; else: done, or nothing to do
  1  --check only: not applied, applied in the other form, or mended so that it is wrong
  2  usage, or refused: a file that is not understood, or should not be touched

examples:
  placement-audit patch
  placement-audit patch --torchtitan ../torchtitan --diff | git -C ../torchtitan apply
  placement-audit patch --torchtitan ../torchtitan --apply
"""


class _Parser(argparse.ArgumentParser):
    """Under torchrun a wrong option is told by rank 0 alone, not once a rank."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(0.5)  # torchrun kills the rest at the first exit: let rank 0 speak first
            raise SystemExit(2)
        name = self.prog.partition(" ")[0]
        self.exit(2, f"{name}: error: {message}\nTry '{self.prog} --help'.\n")


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, more than 0; got {text!r}")
    return value


def _add_output(parser: argparse.ArgumentParser, *, formats: bool = True) -> None:
    group = parser.add_argument_group("output")
    if formats:
        group.add_argument(
            "--format", choices=("text", "json"), default="text", help="of the report (default: text)"
        )
    group.add_argument("--output-file", metavar="FILE", help="write the report there, whole or not at all")
    if formats:
        group.add_argument(
            "--color", choices=("auto", "always", "never"), default="auto", help="(default: auto)"
        )
    group.add_argument(
        "--quiet", action="store_true", help="no progress; no text report when nothing is found"
    )
    group.add_argument(
        "--verbose", action="store_true", help="torchtitan's log, torch's warnings, tracebacks"
    )


def _add_running(parser: argparse.ArgumentParser, *, required: bool) -> None:
    group = parser.add_argument_group("job")
    group.add_argument(
        "--config",
        metavar="FILE",
        required=required,
        help="the torchtitan job file (TOML) that you train with; with --module, the job's name",
    )
    group.add_argument(
        "--module", metavar="M", help="torchtitan 0.3: the module whose config function --config names"
    )
    _add_world(group)
    group.add_argument(
        "overrides", nargs="*", metavar="-- OVERRIDES", help="torchtitan's own: -- --model.flavor 8B"
    )


def _add_world(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--world-size",
        metavar="N",
        type=_at_least_one,
        help="ranks to audit for (default: the job's degrees)",
    )
    group.add_argument(
        "--timeout",
        metavar="S",
        type=_seconds,
        help="seconds without progress that count as hung (default: 300)",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        help="auto (default): alone no values at all (meta); under torchrun CUDA where there is one",
    )
    group.add_argument(
        "--measure",
        action=argparse.BooleanOptionalAction,
        help="prove it with numbers, on real ranks against one device (default: under torchrun only); alone "
        "it starts CPU ranks by itself, as many as the job's degrees give",
    )
    group.add_argument(
        "--log-dir",
        metavar="DIR",
        help="keep there what each rank printed and how far it came (default: only where ranks failed, in a "
        "temporary folder)",
    )


def _add_mending(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mending")
    group.add_argument(
        "--fix",
        action="store_true",
        help="apply the edits that are marked safe, audit again, keep only what that proves; measures unless "
        "--no-measure",
    )
    group.add_argument(
        "--fix-dry-run", action="store_true", help="prove them as --fix does, on copies; write nothing"
    )
    group.add_argument(
        "--force",
        action="store_true",
        help="with --fix: edit files, too, that have edits not committed (a backup is kept)",
    )


def _add_patch(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    for name, text in (
        ("check", "say how it stands (default)"),
        ("diff", "print the edit; git apply takes it, in the folder that holds the package"),
        ("apply", "make the edit; a backup stays beside the file, in .placement-audit"),
        ("revert", "put back the very bytes that --apply found"),
    ):
        what.add_argument(
            f"--{name}", dest="do", action="store_const", const=name, default="check", help=text
        )
    parser.add_argument(
        "--torchtitan",
        metavar="DIR",
        default="installed",
        help="a checkout, a site-packages or the package itself (default: installed, the one of this environment)",
    )
    parser.add_argument(
        "--deferred", action="store_true", help="leave the tensor-parallel sum to whoever reads .grad"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="although the file is edited, unknown, read-only or mended in another way; what --revert would lose is "
        "kept",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--format", choices=("text", "json"), default="text", help="(default: text)")
    group.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="(default: auto)")
    group.add_argument("--verbose", action="store_true", help="tracebacks")


def _parser(action: str, *, top: bool) -> argparse.ArgumentParser:
    common = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
    if action == "audit":
        parser = _Parser(
            prog="placement-audit" if top else "placement-audit audit",
            usage=_TOP,
            description="Audits the gradient placements of a torchtitan job: for every parameter and mesh\n"
            "dim, which placement its gradient should have, which it has, and where they part.",
            epilog=_EPILOG,
            **common,
        )
        _add_running(parser, required=True)
        _add_output(parser)
        _add_mending(parser)
        policy = parser.add_argument_group("policy")
        policy.add_argument("--exit-zero", action="store_true", help="exit status 0 in place of 1")
        parser.add_argument(
            "--version", action="store_true", help="versions of everything that matters, and exit"
        )
        return parser
    if action == "run":
        parser = _Parser(
            prog="placement-audit run",
            description="Audits a program of your own: FUNCTION makes its model, step and mesh, and returns a\n"
            "placement_audit.Job or a dict of its fields. The process group is there when it is called.",
            **common,
        )
        parser.add_argument("factory", metavar="FILE.py:FUNCTION", help="or package.module:FUNCTION")
        group = parser.add_argument_group("job")
        _add_world(group)
        group.add_argument(
            "overrides", nargs="*", metavar="-- ARGUMENTS", help="FUNCTION's own: -- 4 hidden=64"
        )
        _add_output(parser)
        _add_mending(parser)
        policy = parser.add_argument_group("policy")
        policy.add_argument("--exit-zero", action="store_true", help="exit status 0 in place of 1")
        return parser
    if action == "explain":
        parser = _Parser(
            prog="placement-audit explain",
            description="Explains one rule (PA201, lost-reduction), or the way of one parameter's gradient.",
            **common,
        )
        parser.add_argument(
            "what", metavar="PARAMETER|RULE", help="a parameter's FQN, or a rule's id or name"
        )
        _add_running(parser, required=False)
        parser.add_argument(
            "--report", metavar="SAVED.json", help="take the trace from a saved report, not a job"
        )
        _add_output(parser, formats=False)
        return parser
    if action == "rules":
        return _Parser(prog="placement-audit rules", description="Lists the rules.", **common)
    if action == "patch":
        parser = _Parser(
            prog="placement-audit patch",
            description="Mends SimpleFSDP in a torchtitan on disk: the tensor-parallel sum of a replicated weight's\n"
            "gradient comes after the data-parallel one, in its dtype; kept classes no longer mix up two\n"
            "models.",
            epilog=_PATCH_EPILOG,
            **common,
        )
        _add_patch(parser)
        return parser
    parser = _Parser(
        prog="placement-audit report",
        description="Renders a saved JSON report again, without torch; exits as the audit did.",
        **common,
    )
    parser.add_argument(
        "saved", metavar="SAVED.json", help="written by --format json; - reads standard input"
    )
    _add_output(parser)
    parser.add_argument("--exit-zero", action="store_true", help="exit status 0 in place of 1")
    return parser


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
