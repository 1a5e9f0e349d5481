"""torchtitan 0.3 (Python config registry): a job -> a parallelised model on its mesh and one training step.

As `titan02`, for another release: the job is a config function's, the model is built from the config tree, and
what its models leave to compiled kernels is computed by plain operations (`titan03_eager`).
"""

from __future__ import annotations

import sys
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from placement_audit.adapters import (
    titan02_device,
    titan02_reference,
    titan02_twin,
    titan03_eager,
    titan03_job,
    titan03_reference,
    titan03_step,
)
from placement_audit.adapters.degrees import Degrees, resolve
from placement_audit.adapters.own_words import own_words
from placement_audit.case import Case
from placement_audit.config import AuditConfig, RankEnv
from placement_audit.errors import NotMeasurable


def build(
    config: AuditConfig,
    *,
    version: str,
    rank_env: RankEnv | None = None,
    fake_rank: int = 0,
    float32: bool = False,
) -> Case:
    """Build the job as torchtitan would.

    Args:
        config: the job and how to run it.
        version: torchtitan's, for messages.
        rank_env: this process's place under torchrun; None to play one rank of a fake world.
        fake_rank: the rank to play, without ``rank_env``.
        float32: compute in float32 whatever the job's mixed precision is, to be measured.

    Returns:
        The case, ready to step.

    Raises:
        BuildError: the job cannot be built as configured.
        ConfigError: torchtitan refuses the job.
        IncompleteError: the model or its parallelize function failed.
        NotMeasurable: ``float32``, and the machine is too small.
    """
    device_type = titan02_device.device_type(config, rank_env)
    titan02_device.claim_device(device_type)
    name = f"{config.module} {config.config_name}"
    cfg = titan03_job.parse(config, version=version)
    titan03_job.check_job(cfg, config)
    recast = titan02_reference.in_float32(cfg) if float32 else False
    degrees, notes = resolve(
        titan03_job.degrees_of(cfg),
        asked=config.world_size,
        launched=rank_env.world_size if rank_env else None,
    )
    cfg.parallelism.data_parallel_shard_degree = degrees.dp_shard
    notes += titan03_job.make_eager(cfg)

    backend = titan02_device.init_group(config, degrees.world_size, rank_env, device_type, fake_rank)
    rank = rank_env.rank if rank_env else fake_rank
    with own_words(name):
        dims = _parallel_dims(cfg, degrees)
        model = _model(cfg)
        if float32 and rank_env is not None:
            _check_memory(name, model, cfg, degrees, rank_env, device_type)
        model = _parallelised(cfg, model, dims)
        device = titan02_device.device_of(model, config, rank_env, device_type)
        if device.type == "meta" and titan03_eager.needs_values(model):
            device = torch.device(device_type)
        if device.type == "meta":
            # Not for values: models tie their weights in here.
            with torch.no_grad():
                model.init_weights(buffer_device=device)
        else:
            titan02_device.materialise(model, device, alone=rank_env is None)
        if float32:
            titan03_eager.experts_in_float32(model)
        model.train()
        trainer = titan03_step.trainer_of(cfg, dims, model, device)
        inputs = titan03_step.batch(
            cfg, device, seed=titan02_device.SEED, rank=degrees.batch_rank(rank), ranks=degrees.batch_size
        )
    real = device.type != "meta" and rank_env is not None
    unfollowed = titan02_device.too_large_for_readers(model, device) if rank_env is None else ""
    mesh = dims._global_meshes["dense"]  # private name of torchtitan 0.3.0
    return Case(
        name=name,
        model=model,
        mesh=mesh,
        batch_dims=tuple(n for n in mesh.mesh_dim_names or () if n not in ("pp", "tp")),
        inputs=inputs,
        step=titan03_step.step_of(trainer, inputs, degrees.batch_size),
        device_type=device.type,
        backend=backend,
        grad_scale=Fraction(1),  # each rank divides its sum by the tokens of all ranks
        reduce_dtype=cfg.training.mixed_precision_reduce,
        notes=(*notes, *_notes(cfg, device, rank_env), *([unfollowed] if unfollowed else [])),
        reference=partial(
            titan03_reference.reference,
            parse=partial(_again, config, version),
            build_model=_model,
            job=cfg,
            device=device,
            seed=titan02_device.SEED,
            batch_ranks=degrees.batch_size,
        )
        if real
        else None,
        update=titan03_reference.updater(job=cfg, dims=dims, model=model),
        own_readers=rank_env is None and not unfollowed,
        in_own_dtypes=partial(build, config, version=version, rank_env=rank_env) if recast and real else None,
    )


def world_size(config: AuditConfig, *, version: str) -> int:
    """The ranks that a job's mesh has; imports all that a rank of it needs.

    Args:
        config: the job, for CPU ranks.
        version: torchtitan's, for messages.

    Raises:
        BuildError, ConfigError: the job is wrong.
    """
    titan02_device.claim_device("cpu")
    cfg = titan03_job.parse(config, version=version)
    titan03_job.check_job(cfg, config)
    return resolve(titan03_job.degrees_of(cfg), asked=config.world_size)[0].world_size


# --------------------------------------------------------------------------- mesh and model


def _again(config: AuditConfig, version: str) -> Any:
    """The job's config once more, its own objects all through, as it is measured."""
    cfg = titan03_job.parse(config, version=version)
    titan03_job.make_eager(cfg)
    titan02_reference.in_float32(cfg)
    return cfg


def _parallel_dims(cfg: Any, degrees: Degrees) -> Any:
    from torchtitan.distributed import ParallelDims, utils

    dims = ParallelDims.from_config(cfg.parallelism, degrees.world_size)
    dims.build_mesh()
    utils.set_spmd_backend(cfg.parallelism.spmd_backend)
    return dims


def _model(cfg: Any) -> Any:
    """The model on the meta device, not parallelised."""
    from torchtitan.config import TORCH_DTYPE_MAP, apply_overrides
    from torchtitan.tools import utils

    titan03_eager.use_dense_attention()
    model_config = cfg.model_spec.model
    model_config.update_from_config(config=cfg)
    if cfg.override.imports:
        apply_overrides(cfg.override, cfg)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[cfg.training.dtype]):
        return cfg.model_spec.model.build()


def _parallelised(cfg: Any, model: nn.Module, dims: Any) -> Any:
    # Private name of torchtitan 0.3.0: classes that hold the mesh and the dtypes of the first model wrapped in
    # this process; another model of the same classes would get them.
    simple_fsdp = sys.modules.get("torchtitan.experiments.graph_trainer.simple_fsdp")
    getattr(simple_fsdp, "_wrap_class_cache", {}).clear()
    return cfg.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=cfg.training,
        parallelism=cfg.parallelism,
        compile_config=cfg.compile,
        ac_config=cfg.activation_checkpoint,
        dump_folder=cfg.dump_folder,
    )


def _check_memory(
    name: str, model: nn.Module, cfg: Any, degrees: Degrees, rank_env: RankEnv, device_type: str
) -> None:
    """Refuse what would not fit, while nothing is there yet; collective.

    Raises:
        NotMeasurable: with the numbers.
    """
    bytes_, ranks = titan02_twin.budget(rank_env, device_type)
    model_config = cfg.model_spec.model
    args = SimpleNamespace(
        dim=model_config.dim, n_layers=len(model_config.layers), vocab_size=model_config.vocab_size
    )
    shapes = {fqn: tuple(p.shape) for fqn, p in model.named_parameters()}
    batch = titan03_step.batch_shape(cfg, torch.device(device_type))
    needed = titan02_twin._needed(shapes, args, degrees, ranks, *batch)
    if needed > bytes_:
        raise NotMeasurable(
            f"not measured: {name} takes about {needed / 2**30:,.1f} GiB of memory to be measured; "
            f"{bytes_ / 2**30:,.1f} GiB, half of what is free, are there for it. Measure a smaller config of the "
            "same model, or trace this one alone, without ranks."
        )


def _notes(cfg: Any, device: torch.device, rank_env: RankEnv | None) -> tuple[str, ...]:
    """What the reader must know of how the step ran."""
    if device.type == "meta":
        return ()
    notes = []
    batch, seq_len = titan03_step.batch_shape(cfg, device)
    if (batch, seq_len) != (cfg.training.local_batch_size, cfg.training.seq_len):
        notes.append(
            f"ran batches of {batch} x {seq_len} tokens, not of {cfg.training.local_batch_size} x "
            f"{cfg.training.seq_len}: values take time to compute, and more tokens take the same way."
        )
    if rank_env is None:
        notes.append(
            f"one process on the fake process group with real {device.type} tensors: values mean nothing."
        )
    return tuple(notes)
