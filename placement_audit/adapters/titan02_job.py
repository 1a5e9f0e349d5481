"""torchtitan 0.2.x: our job dict and the user's overrides -> torchtitan's own JobConfig.

torchtitan's ConfigManager does the work; this file checks first what it would answer with a traceback, a
box of help text, or (a wrong type in the file) nothing at all until some tensor operation fails.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from placement_audit.config import TABLE, AuditConfig, near_miss, toml_text, toml_type
from placement_audit.errors import BuildError, ConfigError


def _sections(cls: type) -> dict[str, Any]:
    return {f.name: f.type for f in fields(cls)}


def _all_keys(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every ``section.key`` below a config class, with its type; sections themselves too."""
    for f in fields(cls):
        name = f"{prefix}{f.name}"
        yield name, f.type
        if isinstance(f.type, type) and is_dataclass(f.type):
            yield from _all_keys(f.type, f"{name}.")


def _type_words(kind: Any) -> str:
    """A field's type in words for people."""
    words = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        type(None): "nothing",
    }
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in words:
        return words[kind]
    if origin is typing.Literal:
        return " or ".join(toml_text(a) for a in args)
    if origin is list:
        return f"an array (each item {_type_words(args[0])})" if args else "an array"
    if args and origin not in (dict, tuple):
        return " or ".join(dict.fromkeys(_type_words(a) for a in args if a is not type(None)))
    return str(kind)


def check_job(cls: type, data: dict[str, Any], *, version: str) -> list[str]:
    """Compare a job dict with torchtitan's config class: unknown keys and wrong types.

    Args:
        cls: the config class, custom config module merged in.
        data: the job.
        version: of torchtitan, for the message.

    Returns:
        One sentence or two a problem, "section.key: ..."; all of them, in the job's order.
    """
    everything = [name for name, _ in _all_keys(cls)]
    return list(_check(cls, data, "", everything, version))


def _unknown(name: str, prefix: str, known: list[str], everything: list[str], version: str) -> str:
    hint = near_miss(name, known)
    if not hint:
        # A key in the wrong section is as common as a misspelt one.
        elsewhere = [full for full in everything if full.rpartition(".")[2] == name]
        hint = f" Did you mean {elsewhere[0]!r}?" if elsewhere else ""
    what = "key" if prefix else "section"
    return f"{prefix}{name}: torchtitan {version} has no such {what}.{hint}"


def _check(
    cls: type, data: dict[str, Any], prefix: str, everything: list[str], version: str
) -> Iterator[str]:
    known = _sections(cls)
    for key, value in data.items():
        if key not in known:
            names = list(known) + ([] if prefix else [TABLE])
            yield _unknown(key, prefix, names, everything, version)
            continue
        kind = known[key]
        if isinstance(kind, type) and is_dataclass(kind):
            if isinstance(value, dict):
                yield from _check(kind, value, f"{prefix}{key}.", everything, version)
            else:
                yield f"{prefix}{key}: expected a table; got {toml_text(value)} ({toml_type(value)})."
        elif not _fits(value, kind):
            yield f"{prefix}{key}: expected {_type_words(kind)}; got {toml_text(value)} ({toml_type(value)})."


def _fits(value: object, kind: Any) -> bool:
    if isinstance(kind, str):
        return True  # an annotation kept as text (custom config module); torchtitan does not check it either
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    except Exception:
        return True  # a type of a custom config module that msgspec has no rule for
    return True


def check_overrides(cls: type, overrides: tuple[str, ...], *, version: str) -> list[str]:
    """Check the names of the overrides; their values are the parser's to check.

    Args:
        cls: the config class, custom config module merged in.
        overrides: as typed after ``--``.
        version: of torchtitan, for the message.

    Returns:
        One sentence or two a problem.
    """
    known = [name for name, _ in _all_keys(cls)]
    problems = []
    for arg in overrides:
        if not arg.startswith("--"):
            continue
        name = arg[2:].partition("=")[0].replace("-", "_")
        section, _, key = name.rpartition(".")
        # A boolean has two flags: --section.key and --section.no-key.
        positive = f"{section}.{key[3:]}" if key.startswith("no_") else name
        if name == "job.config_file":
            problems.append(f"--{name}: the job file is given with --config, before the --.")
        elif name not in known and positive not in known:
            hint = near_miss(name, known)
            if not hint:
                elsewhere = [full for full in known if full.rpartition(".")[2] == key]
                hint = f" Did you mean {elsewhere[0]!r}?" if elsewhere else ""
            problems.append(f"--{arg[2:].partition('=')[0]}: torchtitan {version} has no such option.{hint}")
    return problems


def _plain(text: str) -> str:
    """The boxed help text of tyro as one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"[^\x20-\x7e]+", " ", text)
    text = " ".join(re.sub(r"-{3,}", " ", text).split())
    text = re.sub(r" (Argument helptext:|For full helptext,).*$", "", text)
    # The box's title says the same once more.
    return re.sub(
        r"^(Parsing error|Value error|Invalid choice|Missing argument|Unrecognized options) ", "", text
    )


def import_by_name(module: str, *, option: str) -> Any:
    """Import a module that the job names.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"{option} = {module!r}: cannot be imported: {type(error).__name__}: {error}. "
            f"Modules are looked for in the working directory, the job file's folder and the environment."
        ) from error


def make_importable(job_path: str) -> None:
    """Let modules beside the user be found.

    ``torchrun -m`` has the working directory first on the path; a console script does not.
    """
    for position, folder in ((0, Path.cwd()), (len(sys.path), Path(job_path).resolve().parent)):
        if str(folder) not in sys.path and not (position == 0 and "" in sys.path):
            sys.path.insert(position, str(folder))


def parse(config: AuditConfig, *, version: str) -> Any:
    """Parse the job as torchtitan would.

    Args:
        config: the job dict and the overrides.
        version: of torchtitan.

    Returns:
        torchtitan's JobConfig (with the job's custom config module merged in).

    Raises:
        ConfigError: whatever torchtitan would refuse, and wrong types that it would not.
    """
    from torchtitan.config import ConfigManager

    overrides = config.overrides

    class Manager(ConfigManager):
        # Private names of torchtitan 0.2.0, 0.2.1 and 0.2.2: _maybe_load_toml, _maybe_add_custom_config.
        def _maybe_load_toml(self, args: list[str]) -> dict[str, Any]:
            return config.job

        def _maybe_add_custom_config(self, args: list[str], toml_values: dict[str, Any] | None) -> Any:
            custom = _custom_config_module(args, config.job)
            if custom:
                module = import_by_name(custom, option="job.custom_config_module")
                if not hasattr(module, "JobConfig"):
                    raise ConfigError(f"job.custom_config_module = {custom!r}: has no class JobConfig.")
            cls = super()._maybe_add_custom_config(args, toml_values)
            problems = [f"{config.job_path}: {p}" for p in check_job(cls, config.job, version=version)]
            problems += check_overrides(cls, overrides, version=version)
            if problems:
                raise ConfigError("\n".join(problems))
            return cls

    make_importable(config.job_path)
    caught = io.StringIO()
    try:
        # tyro prints its box and leaves; the box is caught and told as one line.
        with contextlib.redirect_stderr(caught), contextlib.redirect_stdout(caught):
            job = Manager().parse_args(list(overrides))
    except SystemExit as leaving:
        if not leaving.code:
            raise ConfigError(
                "--help after -- asks for torchtitan's options: python -m torchtitan.config.manager --help "
                "lists them."
            ) from None
        raise ConfigError(
            f"torchtitan {version} refuses the overrides after --: {_plain(caught.getvalue())}"
        ) from None
    except (ConfigError, BuildError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{config.job_path}: torchtitan {version} refuses the job: {type(error).__name__}: {error}"
        ) from error
    job.job.config_file = os.fspath(config.job_path)
    return job


def _custom_config_module(args: list[str], job: dict[str, Any]) -> str | None:
    """The custom config module, looked for where ConfigManager looks, to tell a failing import."""
    for i, arg in enumerate(args):
        name, eq, value = arg.partition("=")
        if name in ("--job.custom_config_module", "--job.custom-config-module"):
            return value if eq else (args[i + 1] if i + 1 < len(args) else None)
    section = job.get("job", {})
    value = section.get("custom_config_module") if isinstance(section, dict) else None
    return value if isinstance(value, str) else None
