"""torchtitan 0.2.0 to 0.2.2 (TOML jobs): a job -> a parallelised model on its mesh and one training step.

Follows `Trainer.__init__` as far as it decides gradients, and leaves out what it needs a GPU, a tokenizer
or a dataset for. The step is the user's own `Trainer.forward_backward_step` (see `titan02_step`).

Alone, one process plays rank 0 of the whole world on torch's fake process group, with tensors on the meta
device: placements are right, values do not exist. Under torchrun the group and the values are real.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from placement_audit.adapters import (
    titan02_checks,
    titan02_device,
    titan02_job,
    titan02_reference,
    titan02_step,
    titan02_twin,
)
from placement_audit.adapters.degrees import Degrees, resolve
from placement_audit.adapters.own_words import own_words
from placement_audit.case import Case
from placement_audit.config import AuditConfig, RankEnv


def build(
    config: AuditConfig,
    *,
    version: str,
    rank_env: RankEnv | None = None,
    fake_rank: int = 0,
    float32: bool = False,
    small: bool = False,
) -> Case:
    """Build the job as torchtitan would.

    Args:
        config: the job and how to run it.
        version: torchtitan's, for messages.
        rank_env: this process's place under torchrun; None to play one rank of a fake world.
        fake_rank: the rank to play, without ``rank_env``.
        float32: compute in float32 whatever the job's mixed precision is, to be measured.
        small: no larger than can be measured, as with ``float32``.

    Returns:
        The case, ready to step.

    Raises:
        BuildError: the job cannot be built as configured.
        ConfigError: torchtitan refuses the job.
        IncompleteError: the model or its parallelize function failed.
    """
    device_type = titan02_device.device_type(config, rank_env)
    titan02_device.claim_device(device_type)
    job = titan02_job.parse(config, version=version)
    recast = titan02_reference.in_float32(job) if float32 else False
    if job.experimental.custom_import:
        titan02_job.import_by_name(job.experimental.custom_import, option="experimental.custom_import")
    degrees, notes = resolve(
        titan02_checks.degrees_of(job),
        asked=config.world_size,
        launched=rank_env.world_size if rank_env else None,
    )
    spec, args = titan02_checks.model_of(job)
    titan02_checks.check_sizes(job, degrees, args)
    titan02_checks.check_converters(job)
    notes += titan02_checks.make_eager(job)

    backend = titan02_device.init_group(config, degrees.world_size, rank_env, device_type, fake_rank)
    rank = rank_env.rank if rank_env else fake_rank
    twin = titan02_twin.Twin(args=args)
    with own_words(f"{job.model.name} {job.model.flavor}"):
        if (float32 or small) and rank_env is not None:
            twin = _twin(job, spec, args, degrees, rank_env, device_type)
            args, notes = twin.args, (*notes, *twin.notes)
        dims = _parallel_dims(degrees)
        mesh = _world_mesh(dims, device_type)
        model = _parallelised(job, spec, args, dims)
        device = titan02_device.device_of(model, config, rank_env, device_type)
        if device.type != "meta":
            titan02_device.materialise(model, device, alone=rank_env is None)
        model.train()
        case_step, inputs = titan02_step.step_of(
            job=job,
            spec=spec,
            args=args,
            dims=dims,
            mesh=mesh,
            model=model,
            device=device,
            seed=titan02_device.SEED,
            batch_rank=degrees.batch_rank(rank),
            batch_ranks=degrees.batch_size,
        )
    if device.type != "meta" and rank_env is None:
        notes += (
            f"one process on the fake process group with real {device.type} tensors: values mean nothing.",
        )
    real = device.type != "meta" and rank_env is not None
    unfollowed = titan02_device.too_large_for_readers(model, device) if rank_env is None else ""
    return Case(
        name=f"{job.model.name} {job.model.flavor}",
        model=model,
        mesh=mesh,
        batch_dims=tuple(n for n in mesh.mesh_dim_names or () if n not in ("pp", "tp")),
        inputs=inputs,
        step=case_step,
        device_type=device.type,
        backend=backend,
        grad_scale=titan02_step.grad_scale(degrees.batch_size),
        # Under TP alone torchtitan applies no mixed precision, and so no reduce dtype either.
        reduce_dtype=job.training.mixed_precision_reduce
        if degrees.dp_shard * degrees.dp_replicate > 1
        else None,
        notes=(*notes, unfollowed) if unfollowed else notes,
        twin=twin.words,
        reference=partial(
            titan02_reference.reference,
            job=job,
            spec=spec,
            args=args,
            dims=dims,
            device=device,
            seed=titan02_device.SEED,
            batch_ranks=degrees.batch_size,
        )
        if real
        else None,
        update=titan02_reference.updater(job=job, spec=spec, dims=dims, model=model),
        own_readers=rank_env is None and not unfollowed,
        in_own_dtypes=partial(build, config, version=version, rank_env=rank_env, small=True)
        if recast and real
        else None,
    )


# --------------------------------------------------------------------------- mesh and model


def _twin(
    job: Any, spec: Any, args: Any, degrees: Degrees, rank_env: RankEnv, device_type: str
) -> titan02_twin.Twin:
    """What to measure; makes the job's batches smaller with the model. Collective."""
    bytes_, ranks = titan02_twin.budget(rank_env, device_type)
    twin = titan02_twin.twin(
        job,
        args,
        degrees,
        shapes=partial(titan02_twin.shapes_of, job, spec),
        budget_bytes=bytes_,
        local_ranks=ranks,
    )
    for key, value in twin.training.items():
        setattr(job.training, key, value)
    return twin


def _parallel_dims(degrees: Degrees) -> Any:
    from torchtitan.distributed import ParallelDims

    return ParallelDims(
        dp_shard=degrees.dp_shard,
        dp_replicate=degrees.dp_replicate,
        cp=degrees.cp,
        tp=degrees.tp,
        pp=degrees.pp,
        ep=degrees.ep,
        etp=degrees.etp,
        world_size=degrees.world_size,
    )


def _world_mesh(dims: Any, device_type: str) -> DeviceMesh:
    """The mesh that names every dim of the dense parameters; built before anything else."""
    if not hasattr(dims, "get_mesh"):  # 0.2.0: one world mesh, dims of size 1 left out
        if dims.world_size == 1:
            return DeviceMesh(device_type, [0], mesh_dim_names=("tp",))
        return dims.world_mesh
    dims.build_mesh()
    return dims._global_meshes["dense"]  # private name of torchtitan 0.2.1 and 0.2.2


def _parallelised(job: Any, spec: Any, args: Any, dims: Any) -> nn.Module:
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.tools import utils

    args.update_from_config(job)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job.training.dtype]):
        model = spec.model_cls(args)
    build_model_converters(job, dims).convert(model)
    return spec.parallelize_fn(model, dims, job)
