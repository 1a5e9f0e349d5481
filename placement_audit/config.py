"""Job file -> `AuditConfig`: the user's torchtitan TOML, our table taken out of it and checked.

torchtitan 0.2.x refuses a file with a table that it does not know, so `[placement_audit]` never
reaches it: the file is read here, once, and the rest is handed on as a dict. A job of torchtitan 0.3 is Python
code, and our table names it. No torch, no torchtitan.
"""

from __future__ import annotations

import hashlib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from placement_audit.errors import ConfigError, UsageError
from placement_audit.policy import Suppress, check_suppress
from placement_audit.toml_words import near_miss, toml_text, toml_type

TABLE = "placement_audit"
"""Name of our table in a job file."""

DEFAULT_TIMEOUT = 300.0
"""Seconds without progress after which a rank counts as hung."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `[placement_audit]` table. Keys and types are the contract; `_EXPECTED` says them in words."""

    job: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    module: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    config: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    overrides: tuple[str, ...] = ()
    world_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] = DEFAULT_TIMEOUT
    device: Literal["auto", "cpu", "cuda"] = "auto"
    suppress: tuple[Suppress, ...] = ()


_EXPECTED = {
    "job": "the path of a torchtitan job file, as a string",
    "module": "what torchtitan 0.3 takes as --module, as a string",
    "config": "what torchtitan 0.3 takes as --config, the name of a config function, as a string",
    "overrides": "an array of torchtitan's own options, each word a string",
    "world_size": "a whole number, 1 or more",
    "timeout": "a number of seconds, more than 0",
    "device": '"auto", "cpu" or "cuda"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """This process's place among processes that a launcher (torchrun) started.

    Attributes:
        rank: 0-based, over all machines.
        local_rank: 0-based, on this machine.
        world_size: processes, over all machines.
    """

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> RankEnv | None:
        """Read torchrun's variables; None where this process was started alone.

        Raises:
            UsageError: a variable is no number, or the numbers contradict each other.
        """
        environ = os.environ if environ is None else environ
        # All four: a lone RANK is left behind by many schedulers and says nothing about a launcher.
        if not all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            return None
        numbers: dict[str, int] = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            text = environ.get(name, "0")
            if not (text.isascii() and text.isdigit()):
                raise UsageError(
                    f"environment variable {name}: expected a whole number, as torchrun sets it; got "
                    f"{text!r}."
                )
            numbers[name] = int(text)
        if numbers["RANK"] >= numbers["WORLD_SIZE"]:
            raise UsageError(
                f"environment variable RANK is {numbers['RANK']}, but WORLD_SIZE is {numbers['WORLD_SIZE']}: "
                "ranks go from 0 to WORLD_SIZE - 1. Start with torchrun, or unset both to audit in one "
                "process."
            )
        return cls(rank=numbers["RANK"], local_rank=numbers["LOCAL_RANK"], world_size=numbers["WORLD_SIZE"])


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """What to audit, and how.

    Attributes:
        path: as given.
        sha256: of the file's bytes; where the job sits in a file of its own, of both files' bytes in turn; ""
            without a file.
        job: the torchtitan part; empty where `module` names the job.
        job_path: the file that `job` came from; equals `path` unless the table names another. Without a file, a
            name that stands for one in the working directory.
        module: torchtitan 0.3's --module, whose `config_registry` has the job; None for a TOML job.
        config_name: its --config, the function in there that makes the job; None for a TOML job.
        factory: FILE.py:FUNCTION or package.module:FUNCTION that makes the job; None for a torchtitan job.
        overrides: torchtitan overrides, or the factory's arguments: our table's, then what followed ``--``.
        world_size: ranks asked for; None to follow from the job.
        timeout: seconds without progress after which a rank counts as hung.
        device: "auto", "cpu" or "cuda".
        suppress: findings that are not to count.
    """

    path: str
    sha256: str
    job: dict[str, Any]
    job_path: str
    module: str | None = None
    config_name: str | None = None
    factory: str | None = None
    overrides: tuple[str, ...] = ()
    world_size: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    device: str = "auto"
    suppress: tuple[Suppress, ...] = ()


def _read(path: str, what: str) -> tuple[dict[str, Any], bytes]:
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. {what} must be a torchtitan job file (TOML).") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory. {what} must be a torchtitan job file (TOML).") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None
    try:
        return tomllib.loads(data.decode()), data
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); a job file is TOML.") from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
        raise ConfigError(f"{path}: broken TOML: {reason[:1].lower()}{reason[1:]}.") from None


def _check_table(path: str, raw: object, text: str) -> _Table:
    """Check every key, so that all mistakes are told at once."""
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: {TABLE}: expected a table ([{TABLE}]), got {toml_text(raw)} ({toml_type(raw)})."
        )
    fields = {f.name: f.type for f in msgspec.structs.fields(_Table)}
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in fields:
            hint = near_miss(key, fields) or f" Known keys: {', '.join(sorted(fields))}."
            problems.append(f"{TABLE}.{key}: unknown key.{hint}")
            continue
        if key == "suppress":
            values[key], wrong = check_suppress(path, value, text)
            problems += [f"{TABLE}.{problem}" for problem in wrong]
            continue
        try:
            values[key] = msgspec.convert(value, fields[key])
            if isinstance(value, float) and not math.isfinite(value):
                raise msgspec.ValidationError
        except msgspec.ValidationError:
            problems.append(
                f"{TABLE}.{key}: expected {_EXPECTED[key]}; got {toml_text(value)} ({toml_type(value)})."
            )
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return _Table(**values)


def _check_registered(path: str, table: _Table, top: Mapping[str, object]) -> None:
    """A job of torchtitan 0.3's config registry takes two names, and no job file."""
    names = {"module": table.module, "config": table.config}
    given = [key for key, value in names.items() if value is not None]
    if not given:
        return
    if len(given) == 1:
        other = next(key for key in names if key not in given)
        raise ConfigError(
            f"{path}: {TABLE}.{given[0]} needs {TABLE}.{other} beside it: torchtitan 0.3 finds a job by both, "
            "as its --module and --config."
        )
    others = [f"{TABLE}.job"] if table.job is not None else [f"[{name}]" for name in sorted(top)]
    if others:
        raise ConfigError(
            f"{path}: {TABLE}.module and {TABLE}.config name a job of torchtitan 0.3's config registry, but "
            f"this file has {', '.join(others)} too, a TOML job of torchtitan 0.2. Keep one of them."
        )


def load(
    path: str,
    *,
    module: str | None = None,
    overrides: Iterable[str] = (),
    world_size: int | None = None,
    timeout: float | None = None,
    device: str | None = None,
) -> AuditConfig:
    """Read a job file; what the command line gives beats what the file says.

    Args:
        path: a torchtitan job file, perhaps with our table, or a file with our table alone that names a job;
            with ``module``, the name of a config function instead.
        module: torchtitan 0.3's --module; None for a job that a file names.
        overrides: torchtitan overrides.
        world_size: from the command line; None where not given.
        timeout: from the command line, in seconds; None where not given.
        device: from the command line; None where not given.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: the file is missing, unreadable or broken, or our table is wrong.
    """
    if module is not None:
        return AuditConfig(
            path=f"--module {module} --config {path}",
            sha256="",
            job={},
            job_path=path,
            module=module,
            config_name=path,
            overrides=tuple(overrides),
            world_size=world_size,
            timeout=DEFAULT_TIMEOUT if timeout is None else timeout,
            device=device or "auto",
        )
    top, data = _read(path, "--config")
    digest = hashlib.sha256(data)
    table = _check_table(path, top.pop(TABLE, {}), data.decode())
    job, job_path = top, path
    _check_registered(path, table, top)
    if table.job is not None:
        if top:
            raise ConfigError(
                f"{path}: {TABLE}.job names another job file, but this file has torchtitan's "
                f"{', '.join(f'[{name}]' for name in sorted(top))} too. Keep one: take out {TABLE}.job, "
                "or move these tables to the file that it names."
            )
        job_path = str(Path(path).parent / table.job)
        job, data = _read(job_path, f"{TABLE}.job in {path}")
        digest.update(data)
        if TABLE in job:
            raise ConfigError(
                f"{job_path}: has a [{TABLE}] table, and so has {path}, which names it. Keep one of them."
            )
    return AuditConfig(
        path=path,
        sha256=digest.hexdigest(),
        job=job,
        job_path=job_path,
        module=table.module,
        config_name=table.config,
        overrides=(*table.overrides, *overrides),
        world_size=table.world_size if world_size is None else world_size,
        timeout=table.timeout if timeout is None else timeout,
        device=table.device if device is None else device,
        suppress=table.suppress,
    )
