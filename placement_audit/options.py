"""Groups of options that commands share. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math

from placement_audit.formats import FORMATS, Target, parse_target


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


def _target(text: str) -> Target:
    try:
        return parse_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_output(parser: argparse.ArgumentParser, *, formats: bool = True) -> None:
    """Where and how the report is written."""
    group = parser.add_argument_group("output")
    if formats:
        group.add_argument(
            "--format",
            metavar="FORMAT[:FILE]",
            type=_target,
            action="append",
            help=f"{', '.join(FORMATS)} (default: text); may be given several times, all but one with a file",
        )
    group.add_argument(
        "--output-file",
        metavar="FILE",
        help="write the report there, whole or not at all" + (": the one without a file" if formats else ""),
    )
    if formats:
        group.add_argument(
            "--color", choices=("auto", "always", "never"), default="auto", help="(default: auto)"
        )
    add_talk(group)


def add_talk(group: argparse._ArgumentGroup) -> None:
    """How much is said."""
    group.add_argument(
        "--quiet", action="store_true", help="no progress; no text report when nothing is found"
    )
    group.add_argument(
        "--verbose", action="store_true", help="torchtitan's log, torch's warnings, tracebacks"
    )


def add_plain_output(parser: argparse.ArgumentParser) -> None:
    """Of what is no report: text or JSON."""
    group = parser.add_argument_group("output")
    group.add_argument("--format", choices=("text", "json"), default="text", help="(default: text)")
    group.add_argument("--output-file", metavar="FILE", help="write it there, whole or not at all")
    group.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="(default: auto)")
    group.add_argument("--quiet", action="store_true", help="no text when nothing differs")
    group.add_argument("--verbose", action="store_true", help="tracebacks")


def add_policy(parser: argparse.ArgumentParser) -> None:
    """What counts."""
    group = parser.add_argument_group("policy")
    group.add_argument(
        "--baseline", metavar="FILE", help="count only what is not in it; placement-audit baseline writes it"
    )
    group.add_argument("--exit-zero", action="store_true", help="exit status 0 in place of 1")


def add_running(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Which torchtitan job."""
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
    add_world(group)
    group.add_argument(
        "overrides", nargs="*", metavar="-- OVERRIDES", help="torchtitan's own: -- --model.flavor 8B"
    )


def add_world(group: argparse._ArgumentGroup) -> None:
    """For how many ranks, and how."""
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


def add_mending(parser: argparse.ArgumentParser) -> None:
    """What to do with edits."""
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


def add_patch(parser: argparse.ArgumentParser) -> None:
    """Of ``placement-audit patch``."""
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
