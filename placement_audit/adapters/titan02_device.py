"""Which device, which process group, and whether tensors need storage; for torchtitan 0.2.x."""

from __future__ import annotations

import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from placement_audit.config import AuditConfig, RankEnv
from placement_audit.errors import BuildError

SEED = 2217
"""Of weights and tokens: any number will do, and the same one repeats a run."""


def device_type(config: AuditConfig, rank_env: RankEnv | None) -> str:
    """The mesh's device type: "cpu" or "cuda"."""
    wanted = config.device
    if wanted == "auto":
        # Alone nothing is computed, so a GPU would only be occupied.
        return "cuda" if rank_env is not None and torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BuildError("--device cuda: torch sees no CUDA device here. Use --device cpu, or auto.")
    return wanted


def claim_device(device_type: str) -> None:
    """Make torchtitan see the device type that is used; it takes "cuda" where it finds none."""
    utils = sys.modules.get("torchtitan.tools.utils")
    if utils is None:
        # Private name of torch 2.10 to 2.13; torchtitan 0.2.x reads it once, when it is imported.
        torch._utils._get_available_device_type = lambda: device_type
    elif utils.device_type != device_type:
        raise BuildError(
            f"torchtitan was imported in this process for device type {utils.device_type!r} already; "
            f"{device_type!r} needs a process of its own."
        )


def init_group(
    config: AuditConfig, world_size: int, rank_env: RankEnv | None, device_type: str, fake_rank: int
) -> str:
    """Initialise the process group: fake alone, the real one under torchrun.

    Args:
        config: for the timeout.
        world_size: ranks of a fake world.
        rank_env: this process's place under torchrun; None alone.
        device_type: "cpu" or "cuda".
        fake_rank: the rank to play alone.

    Returns:
        The backend: "fake", "gloo" or "nccl".

    Raises:
        BuildError: no GPU for this rank, or a process group is there already.
    """
    if rank_env is None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            if dist.get_backend() != "fake":
                raise BuildError(
                    "a process group is initialised in this process already; audit in one of its own."
                )
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=fake_rank, world_size=world_size)
        return "fake"
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        if rank_env.local_rank >= torch.cuda.device_count():
            raise BuildError(
                f"local rank {rank_env.local_rank} has no GPU of its own: torch sees "
                f"{torch.cuda.device_count()}. Start fewer processes a machine, or use --device cpu."
            )
        torch.cuda.set_device(rank_env.local_rank)
    if not dist.is_initialized():
        # Longer than our own deadline, whose message names the hung rank; gloo's does not.
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout + 60))
    return backend


def device_of(
    model: nn.Module, config: AuditConfig, rank_env: RankEnv | None, device_type: str
) -> torch.device:
    """Where the tensors live: meta, unless values are wanted or the model cannot do without."""
    if rank_env is not None:
        return (
            torch.device(device_type, rank_env.local_rank) if device_type == "cuda" else torch.device("cpu")
        )
    if config.device == "auto" and not _needs_storage(model):
        return torch.device("meta")
    return torch.device(device_type)


def _needs_storage(model: nn.Module) -> bool:
    """FSDP2 and DDP (composable replicate) refuse parameters on the meta device when the forward starts."""
    marks = ("set_force_sum_reduction_for_comms", "register_comm_hook")  # methods of FSDPModule and of DDP
    return any(hasattr(m, mark) for m in model.modules() for mark in marks)


def materialise(model: Any, device: torch.device, *, alone: bool) -> None:
    """Give the parameters storage and seeded values, equal on all ranks where they are replicated.

    Raises:
        BuildError: alone, and the machine has too little memory.
    """
    for module in model.modules():
        # gloo has no PREMUL_SUM and no AVG, which FSDP2 picks by itself; sum and divide is the same gradient.
        if device.type == "cpu" and hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    if alone:
        _check_memory(model, device)
    torch.manual_seed(SEED)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)


def too_large_for_readers(model: nn.Module, device: torch.device) -> str:
    """Whether to leave the job's clipping and optimizer unfollowed, alone: a note why; "" where they fit.

    Args:
        model: its parameters are there, no gradients yet.
        device: where they are.
    """
    # Gradients, Adam's two states, and copies of weights and gradients, to be put back.
    needed, free = 5 * _bytes_of_rank(model), _free(device)
    if needed <= free:
        return ""
    return (
        f"clipping and the optimizer were not followed: beside the weights they take {needed / 2**30:.1f} GiB, and "
        f"{free / 2**30:.1f} GiB are free."
    )


def _bytes_of_rank(model: nn.Module) -> int:
    local = (getattr(p, "_local_tensor", p) for p in model.parameters())
    return sum(t.numel() * t.element_size() for t in local)


def _free(device: torch.device) -> float:
    if device.type == "meta":
        return math.inf
    return _available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _check_memory(model: nn.Module, device: torch.device) -> None:
    """Refuse before the machine swaps: parameters and gradients of one rank must fit."""
    needed, available = 2 * _bytes_of_rank(model), _free(device)
    if needed > available:
        raise BuildError(
            f"this model does not run on the meta device, and one rank's parameters and gradients need "
            f"{needed / 2**30:.1f} GiB where {available / 2**30:.1f} GiB are free. Audit a smaller flavor "
            "(-- --model.flavor NAME), or more ranks (--world-size)."
        )


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 2**62
