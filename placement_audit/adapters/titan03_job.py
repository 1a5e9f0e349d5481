"""torchtitan 0.3: the names of a registered job and the user's overrides -> torchtitan's own Trainer.Config.

torchtitan's ConfigManager does the work. It takes any failing import for a missing module and goes on, so the
module is imported here first, and the import's own error told.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from placement_audit.adapters.degrees import Degrees
from placement_audit.adapters.titan02_job import _plain, make_importable
from placement_audit.config import AuditConfig, near_miss
from placement_audit.errors import BuildError, ConfigError
from placement_audit.failure import Failure

_SHORT = ("torchtitan.models.", "torchtitan.experiments.", "torchtitan.experiments.rl.examples.")
"""Where ConfigManager looks for a module that torchtitan knows by a short name, in this order."""


def parse(config: AuditConfig, *, version: str) -> Any:
    """Parse the job as torchtitan would.

    Args:
        config: the job's names and the overrides.
        version: of torchtitan.

    Returns:
        What the job's config function makes, overrides applied: a `Trainer.Config` or a subclass's.

    Raises:
        ConfigError: whatever torchtitan would refuse.
    """
    from torchtitan.config import ConfigManager

    assert config.module is not None
    assert config.config_name is not None
    make_importable(config.job_path)
    for word in config.overrides:
        if word.partition("=")[0] in ("--module", "--config"):
            raise ConfigError(
                f"{word.partition('=')[0]} after --: the job is named before it (--module, --config), or in "
                "the file."
            )
    _check_function(_registry(config.module), config.module, config.config_name)
    caught = io.StringIO()
    try:
        # tyro prints its box and leaves; the box is caught and told as one line.
        with contextlib.redirect_stderr(caught), contextlib.redirect_stdout(caught):
            return ConfigManager().parse_args(
                ["--module", config.module, "--config", config.config_name, *config.overrides]
            )
    except SystemExit as leaving:
        if not leaving.code:
            raise ConfigError(
                "--help after -- asks for torchtitan's options: python -m torchtitan.config.manager --module "
                f"{config.module} --config {config.config_name} --help lists them."
            ) from None
        raise ConfigError(
            f"torchtitan {version} refuses the overrides: {_plain(caught.getvalue())}"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"torchtitan {version} refuses {config.module} {config.config_name}: {Failure(error).what}"
        ) from error


def _registry(name: str) -> ModuleType:
    """The module with the config functions, looked for where ConfigManager looks."""
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    # Private names of torchtitan 0.3.0.
    known = sorted(_supported_models | _supported_experiments)
    if name in known:
        candidates = [f"{prefix}{name}.config_registry" for prefix in _SHORT]
    else:
        candidates = [f"{name}.config_registry", name]
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and f"{candidate}.".startswith(f"{missing}."):
                continue  # it is the candidate that does not exist
            failure = Failure(error)
            raise ConfigError(
                f"module {name!r}: {candidate} cannot be imported: {failure.what} ({failure.place})."
            ) from error
    raise ConfigError(
        f"module {name!r}: there is no such module.{near_miss(name, known)} torchtitan's own: "
        f"{', '.join(known)}. Others are looked for in the working directory and the environment."
    )


def _check_function(registry: ModuleType, module: str, name: str) -> None:
    if callable(getattr(registry, name, None)):
        return
    known = [
        n
        for n, value in vars(registry).items()
        if callable(value) and n[0].islower() and getattr(value, "__module__", None) == registry.__name__
    ]
    raise ConfigError(
        f"config {name!r}: {registry.__name__} has no such function.{near_miss(name, known)} "
        f"Known: {', '.join(known) or 'none'}."
    )


def check_job(cfg: Any, config: AuditConfig) -> None:
    """Check what the adapter does not know.

    Args:
        cfg: from `parse`.
        config: for its names.

    Raises:
        BuildError: the job is not one of training a language model on DTensors.
    """
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.trainer import Trainer

    name = f"{config.module} {config.config_name}"
    if not isinstance(cfg, Trainer.Config) or cfg.model_spec is None:
        raise BuildError(f"{name} is not supported: it makes a {type(cfg).__qualname__}, no training job.")
    model = cfg.model_spec.model
    if not isinstance(model, Decoder.Config):
        raise BuildError(
            f"{name} is not supported: its model is no decoder of tokens ({type(model).__qualname__})."
        )
    if cfg.parallelism.spmd_backend == "spmd_types":
        raise BuildError(
            f"{name}: parallelism.spmd_backend is spmd_types (torchtitan's default outside graph_trainer), which "
            "keeps activations as plain tensors and is not supported yet. What it would do on DTensors can be "
            "audited: -- --parallelism.spmd_backend partial_dtensor"
        )
    if any(True for _ in model.traverse(VarlenAttention.Config)):
        raise BuildError(
            f"{name} is not supported: its attention is varlen, which needs a GPU kernel. Audit the same model "
            "with flex attention."
        )


def degrees_of(cfg: Any) -> Degrees:
    """The parallelism degrees, unresolved."""
    p = cfg.parallelism
    return Degrees(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
    )


def make_eager(cfg: Any) -> tuple[str, ...]:
    """Switch off what only compiled code does; placements are those of the eager step."""
    from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

    off = list(_compiled(cfg.compile))
    if isinstance(cfg.activation_checkpoint, MemoryBudgetAC.Config):
        cfg.activation_checkpoint = None
        off.append("memory-budget activation checkpointing")
    return (f"audited eagerly, without {', '.join(off)}.",) if off else ()


def _compiled(options: Any) -> Iterator[str]:
    if options.enable:
        options.enable = False
        yield "compile.enable"
    if options.enable_async_tensor_parallel:
        options.enable_async_tensor_parallel = False
        yield "compile.enable_async_tensor_parallel"
    if hasattr(options, "mode"):  # graph_trainer's: any mode but None takes the step from a graph
        options.mode = None
        options.enable_passes = False
