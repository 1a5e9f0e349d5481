"""``placement-audit run my_script.py:build``: a function of the user's that makes a `placement_audit.job.Job`.

Alone, one process plays rank 0 of a fake world; on real ranks each calls the function alike. The process group is
there when it is called: the function makes the mesh and the model, and leaves ``init_process_group`` alone.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from placement_audit.adapters.titan02_device import device_type, init_group
from placement_audit.case import Case
from placement_audit.config import AuditConfig, RankEnv, near_miss
from placement_audit.dtensor_api import replaced_everywhere
from placement_audit.errors import AuditError, IncompleteError, UsageError
from placement_audit.failure import Failure
from placement_audit.job import Job, as_job
from placement_audit.userjob import case_of
from placement_audit.usermeasure import looked_at, settled
from placement_audit.userranks import played

DEFAULT_WORLD_SIZE = 2
"""Ranks of a world that nobody gave a size."""


def build(
    config: AuditConfig,
    *,
    rank_env: RankEnv | None = None,
    fake_rank: int = 0,
    measured: bool = False,
    make: Callable[..., Any] | None = None,
) -> Case:
    """Call the user's function and take what it made.

    Args:
        config: `AuditConfig.factory` names it, the overrides are its arguments.
        rank_env: this process's place among real ranks; None to play one of a fake world.
        fake_rank: the rank to play, without ``rank_env``.
        measured: whether its numbers will be measured.
        make: the function itself, where the caller has it.

    Raises:
        UsageError: there is no such function, or what it made is no job.
        IncompleteError: it failed.
    """
    function = make or find(config.factory or "")
    if rank_env is None:
        return played(lambda rank: _made(function, config, None, rank)[1], fake_rank)
    job, case = _made(function, config, rank_env, 0)
    return settled(case) if measured and job.reference is not None else looked_at(case)


def _made(
    make: Callable[..., Any], config: AuditConfig, rank_env: RankEnv | None, fake_rank: int
) -> tuple[Job, Case]:
    world_size = config.world_size or DEFAULT_WORLD_SIZE
    init_group(config, world_size, rank_env, device_type(config, rank_env), fake_rank)
    with _groups_of_this_world():
        job = as_job(_called(make, config), config.factory or "")
    return job, case_of(job)


@contextmanager
def _groups_of_this_world() -> Generator[None]:
    """For the duration, groups of processes get the backend that is there, whatever the user asks for.

    A job for GPUs asks for NCCL's, or for gloo's beside them; on the fake process group and on CPU ranks there is one.
    """
    original = dist.new_group
    if dist.get_backend() not in ("fake", "gloo"):
        yield
        return

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        wanted = inspect.signature(original).bind(*args, **kwargs)
        wanted.arguments |= {"backend": None, "pg_options": None}
        return original(*wanted.args, **wanted.kwargs)

    with replaced_everywhere({original: new_group}):
        yield


def find(name: str) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` or ``package.module:FUNCTION`` names.

    Raises:
        UsageError: there is none.
        IncompleteError: its module failed.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise UsageError(
            f"{name}: expected FILE.py:FUNCTION or package.module:FUNCTION, such as train.py:build."
        )
    module = _module(where)
    found = getattr(module, attribute, None)
    if found is None:
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = near_miss(attribute, functions) or " It must be a function at the top of the file."
        raise UsageError(f"{where} has no {attribute}.{hint}")
    if not callable(found):
        raise UsageError(f"{name} is no function, but {type(found).__name__}.")
    return found


@functools.cache  # a place in it must be the same however often its function is called
def _module(where: str) -> ModuleType:
    is_file = where.endswith(".py") or "/" in where
    if is_file and not Path(where).is_file():
        raise UsageError(f"{where}: no such file.")
    # As for `python my_script.py`: what lies beside it can be imported.
    folder = str(Path(where).resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not is_file:
            return importlib.import_module(where)
        name = Path(where).stem
        spec = importlib.util.spec_from_file_location(name, where)
        if spec is None or spec.loader is None:
            raise UsageError(f"{where}: is no Python file.")
        module = importlib.util.module_from_spec(spec)
        # Named before it runs: dataclasses and pickle look their module up.
        sys.modules.setdefault(name, module)
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        if error.name == where.partition(".")[0] and not is_file:
            raise UsageError(
                f"{where}: no such module; give a file (FILE.py:FUNCTION) or a module's name."
            ) from None
        raise _failed(where, "could not be imported", error) from error
    except AuditError:
        raise
    except Exception as error:
        raise _failed(where, "could not be imported", error) from error


def _called(factory: Callable[..., Any], config: AuditConfig) -> object:
    args, kwargs = arguments(config.overrides)
    try:
        inspect.signature(factory).bind(*args, **kwargs)
    except TypeError as error:
        given = " ".join(config.overrides) or "none"
        raise UsageError(
            f"{config.factory} cannot be called with the arguments given ({given}): {error}. Arguments go after "
            "--: -- 4 hidden=64."
        ) from None
    except ValueError:
        pass
    try:
        return factory(*args, **kwargs)
    except AuditError:
        raise
    except Exception as error:
        failed = _failed(config.factory or "", "failed", error)
        raise IncompleteError(f"{failed.message}{_world_hint(error)}", details=failed.details) from error


def _failed(name: str, how: str, error: Exception) -> IncompleteError:
    failure = Failure(error)
    return IncompleteError(f"{name} {how}: {failure.what} ({failure.place}).", details=failure.details)


def _world_hint(error: Exception) -> str:
    """The two mistakes that are made most: a mesh of another size, a second process group."""
    text = str(error)
    if "initialize the default process group twice" in text:
        return "\nThe process group is there when the function is called: leave init_process_group out of it."
    if "mesh" in text.lower() and "world size" in text.lower():
        return f"\nThe world has {dist.get_world_size()} ranks; --world-size N gives it others."
    return ""


def arguments(words: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Words of a command line as arguments: ``name=value`` by name, Python literals as what they are."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, found, text = word.partition("=")
        if found and name.isidentifier():
            kwargs[name] = _value(text)
        else:
            args.append(_value(word))
    return args, kwargs


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
