"""One audit for pytest, in a process of its own: pytest's never gets a process group. No torch, no pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from placement_audit.config import near_miss
from placement_audit.errors import AuditError, IncompleteError, UsageError
from placement_audit.overlay import PARENT
from placement_audit.report.blocks import finding_block, note_block
from placement_audit.report.fold import Block, fold_findings
from placement_audit.report.json_io import loads
from placement_audit.verdicts import Report, Severity

KEYWORDS = {
    "config": "the path of a job file, from pytest's root folder",
    "nproc": "a whole number of ranks, 1 or more",
    "device": '"auto", "cpu" or "cuda"',
    "world_size": "a whole number of ranks, 1 or more",
    "overrides": "a list of torchtitan's own options, each word a string",
    "timeout": "a number of seconds, more than 0",
}
"""What the marker takes, and what each must be."""

DEVICES = ("auto", "cpu", "cuda")

WIDTH = 110

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""torchrun's variables: where pytest itself runs under it, the audit is none of its ranks."""

_ENDING = 15.0
"""Seconds that a stopped audit has to end its ranks."""

_COUNT = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to audit.

    Attributes:
        config: the job file, from ``folder`` or absolute.
        nproc: ranks to measure on; None for a trace, which needs none.
        device: "cpu", "cuda", or "auto": CUDA where there are as many GPUs as ranks, else the CPU.
        world_size: ranks to trace for; None to follow from the job.
        overrides: torchtitan's own options.
        timeout: seconds without progress; None for the job's own.
    """

    config: str
    nproc: int | None = None
    device: str = "auto"
    world_size: int | None = None
    overrides: tuple[str, ...] = ()
    timeout: float | None = None


def request_of(args: Sequence[object], keywords: Mapping[str, Any]) -> Request:
    """The request that a marker makes.

    Raises:
        UsageError: an argument is unknown, missing or of the wrong kind; the message names it and what there is.
    """
    known = f"It takes {', '.join(KEYWORDS)}."
    if args:
        raise UsageError(f"takes keywords only, got {args[0]!r}: say config={args[0]!r}. {known}")
    for name, value in keywords.items():
        if name not in KEYWORDS:
            raise UsageError(f"unknown keyword {name!r}.{near_miss(name, KEYWORDS)} {known}")
        if not _fits(name, value):
            raise UsageError(f"{name}: expected {KEYWORDS[name]}; got {value!r}.")
    if "config" not in keywords:
        raise UsageError(f"config is missing: {KEYWORDS['config']}. {known}")
    if "nproc" in keywords and "world_size" in keywords:
        raise UsageError(
            "nproc is the number of ranks that run, world_size of those that are traced: give one."
        )
    values = {**keywords, "config": os.fspath(keywords["config"])}
    if "overrides" in values:
        values["overrides"] = tuple(values["overrides"])
    return Request(**values)


def _fits(name: str, value: object) -> bool:
    match name:
        case "config":
            return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))
        case "nproc" | "world_size":
            return type(value) is int and value >= 1
        case "device":
            return value in DEVICES
        case "overrides":
            return isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value)
        case _:
            return type(value) in (int, float) and 0 < value < float("inf")  # type: ignore[operator]


def gpus() -> int:
    """GPUs that an audit would see, as torch counts them; in a process of its own, for its import is heavy."""
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else 0


def command_of(request: Request, *, cuda: bool, out: str) -> list[str]:
    """The command that audits.

    Args:
        request: what.
        cuda: whether its ranks run on GPUs, under torchrun; else they are gloo ranks on the CPU.
        out: file for the report.
    """
    ranks = request.nproc
    words = ["-m", "placement_audit", "--config", request.config, "--format", "json", "--output-file", out]
    if ranks is None:
        words.append("--no-measure")
        if request.world_size is not None:
            words += ["--world-size", str(request.world_size)]
    elif cuda:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = [*launcher, *words, "--measure", "--device", "cuda"]
    else:
        words += ["--measure", "--world-size", str(ranks), "--device", "cpu"]
    if request.timeout is not None:
        words += ["--timeout", str(request.timeout)]
    return [sys.executable, *words, "--", *request.overrides]


def audit(request: Request, folder: Path, *, cuda: bool = False) -> Report:
    """Run one audit and read its report.

    Args:
        request: what.
        folder: where a user would type it.
        cuda: see `command_of`.

    Raises:
        AuditError: there is no report; the message is the audit's own.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    if not cuda:
        environ[PARENT] = str(
            os.getpid()
        )  # ends with this process, however that ends; torchrun sees to its own
    with tempfile.TemporaryDirectory(prefix="placement-audit-") as place:
        out, said = Path(place) / "report.json", Path(place) / "stderr"
        with said.open("w+b") as errors:  # a file: a rank left behind would keep a pipe open
            status = _run(command_of(request, cuda=cuda, out=str(out)), folder, environ, errors)
        if out.is_file():
            return loads(out.read_bytes())
        raise _failure(status, said.read_text(encoding="utf-8", errors="replace"))


def _run(command: Sequence[str], folder: Path, environ: dict[str, str], errors: IO[bytes]) -> int:
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
    )
    try:
        return process.wait()
    except BaseException:  # Ctrl-C, a timeout of pytest: let the audit end its ranks first
        process.terminate()
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def _failure(status: int, said: str) -> AuditError:
    """What the audit said, without what torchrun says of it."""
    message = said.partition("placement-audit: error: ")[2] or said
    message = re.split(r"^(?:[EWI]\d{4} |Traceback )", message, maxsplit=1, flags=re.M)[0].strip()
    return IncompleteError(
        message or f"the audit ended with status {status} and said nothing of use:\n{said[-2000:]}"
    )


# --------------------------------------------------------------------------- what of a report concerns a rule


def blocks(
    report: Report, *severities: Severity, rule_id: str | None = None, suppressed: bool = False
) -> str:
    """The findings of these severities as the text report shows them; "" where there are none.

    Args:
        report: the audit's.
        severities: which findings.
        rule_id: of one rule only.
        suppressed: those that do not count, in place of those that do.
    """
    asked = tuple(
        f
        for f in report.findings
        if f.severity in severities
        and rule_id in (None, f.rule_id)
        and (f.suppressed is not None) == suppressed
    )
    found = fold_findings(replace(report, findings=asked))
    return "\n".join("\n".join(_lines(block, report)) for block in found)


def _lines(block: Block, report: Report) -> Iterator[str]:
    first = block.first
    if first.severity is Severity.NOTE:
        yield from note_block(block, WIDTH)
    else:
        edit = next((e for e in report.edits if first.fingerprint in e.fingerprints), None)
        yield from (line.plain for line in finding_block(block, report.trace, WIDTH, edit))
    mark = first.suppressed
    if mark is not None:
        until = f" until {mark.until}" if mark.until is not None else ""
        yield f"suppressed in {mark.where}{until}: {mark.reason}"
