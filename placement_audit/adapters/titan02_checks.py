"""torchtitan 0.2.x: what a JobConfig asks for, checked before anything is built with it."""

from __future__ import annotations

import copy
from typing import Any

from placement_audit.adapters.degrees import Degrees
from placement_audit.config import near_miss
from placement_audit.errors import BuildError


def degrees_of(job: Any) -> Degrees:
    """The `[parallelism]` degrees, unresolved."""
    p = job.parallelism
    return Degrees(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
        etp=p.expert_tensor_parallel_degree,
    )


def model_of(job: Any) -> tuple[Any, Any]:
    """The train spec and the flavor's model args, a copy of its own."""
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models
    from torchtitan.protocols import train_spec

    name, flavor = job.model.name, job.model.flavor
    # Private names of torchtitan 0.2.0 to 0.2.2.
    known = sorted({*_supported_models, *_supported_experiments, *train_spec._extra_train_specs})
    if name not in known:
        raise BuildError(
            f"model.name = {name!r}: torchtitan has no such model.{near_miss(name, known)} Known: "
            f"{', '.join(known)}. "
            "A model of your own must be registered by a module named in experimental.custom_import."
        )
    try:
        spec = train_spec.get_train_spec(name)
    except ImportError as error:
        raise BuildError(
            f"model.name = {name!r}: torchtitan cannot import it: {error}. Install what is missing, as for "
            "training."
        ) from error
    if flavor not in spec.model_args:
        flavors = list(spec.model_args)
        raise BuildError(
            f"model.flavor = {flavor!r}: {name} has no such flavor.{near_miss(flavor, flavors)} "
            f"Known: {', '.join(flavors)}."
        )
    # torchtitan writes the job's values into its registered object; a copy lets one process build twice.
    return spec, copy.deepcopy(spec.model_args[flavor])


def check_sizes(job: Any, degrees: Degrees, args: Any) -> None:
    """Check what the degrees must divide.

    Args:
        job: torchtitan's JobConfig.
        degrees: resolved.
        args: the model's args.

    Raises:
        BuildError: a size does not divide, or the model takes no tokens.
    """
    seq_len, batch = job.training.seq_len, job.training.local_batch_size
    for key, value in (("seq_len", seq_len), ("local_batch_size", batch)):
        if value < 1:
            raise BuildError(f"training.{key}: expected 1 or more; got {value}.")
    # torchtitan's rule for every model (ParallelDims.seq_len_divisor).
    divisor = degrees.tp * 2 * degrees.cp
    if (degrees.tp > 1 or degrees.cp > 1) and seq_len % divisor:
        raise BuildError(
            f"training.seq_len = {seq_len} does not divide: torchtitan wants a multiple of "
            "tensor_parallel_degree "
            f"{degrees.tp} x 2 x context_parallel_degree {degrees.cp} = {divisor}, and {seq_len} = "
            f"{seq_len // divisor} x {divisor} + {seq_len % divisor}. Take "
            f"{-(-seq_len // divisor) * divisor}."
        )
    for key in ("n_heads", "n_kv_heads"):
        heads = getattr(args, key, None)
        if heads is not None and heads % degrees.tp:
            raise BuildError(
                f"parallelism.tensor_parallel_degree = {degrees.tp} does not divide the model's heads: "
                f"{job.model.name} {job.model.flavor} has {key} = {heads}. Take a divisor of {heads}."
            )
    if not isinstance(getattr(args, "vocab_size", None), int):
        raise BuildError(
            f"model.name = {job.model.name!r} is not supported: it takes no tokens (its model args have no "
            "vocab_size)."
        )


def check_converters(job: Any) -> None:
    """Check the names of the model converters; torchtitan would answer with a bare KeyError.

    Raises:
        BuildError: one is not registered.
    """
    from torchtitan.protocols.model_converter import _registry_model_converter_cls as known

    for name in job.model.converters:  # the registry is a private name of torchtitan 0.2.0 to 0.2.2
        if name not in known:
            raise BuildError(
                f"model.converters: torchtitan has no converter {name!r}.{near_miss(name, known)} Known "
                "here: "
                f"{', '.join(sorted(known)) or 'none'}."
            )


def make_eager(job: Any) -> tuple[str, ...]:
    """Switch off what only compiled code does; placements are those of the eager step."""
    off = []
    if job.compile.enable:
        job.compile.enable = False
        off.append("compile.enable")
    if job.parallelism.enable_async_tensor_parallel:
        job.parallelism.enable_async_tensor_parallel = False
        off.append("parallelism.enable_async_tensor_parallel")
    if job.activation_checkpoint.mode == "memory_budget":
        job.activation_checkpoint.mode = "none"
        off.append('activation_checkpoint.mode = "memory_budget"')
    return (f"audited eagerly, without {', '.join(off)}.",) if off else ()
