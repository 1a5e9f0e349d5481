"""What torchtitan 0.2.x has kernels for on GPUs alone, on the CPU that a job is audited on."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from placement_audit.dtensor_rules import with_cpu_attention


@contextmanager
def kernels_on(device: torch.device) -> Generator[None]:
    """For the duration, every call of the model runs on the device.

    The router of a mixture of experts counts integers by `torch.histc`, which the CPU has for floating numbers only;
    tokens are put in order by a Triton kernel, beside which torchtitan keeps the same on a CPU, for its tests; and
    qwen3's attention is on DTensors.
    """
    if device.type != "cpu":
        yield
        return
    moe: Any = sys.modules.get("torchtitan.models.moe.kernels")
    histc = torch.histc
    fill = getattr(moe, "fill_indices_wrapper", None)
    torch.histc = lambda x, *args, **kwargs: histc(x.float(), *args, **kwargs).to(x.dtype)
    if fill is not None:
        # It takes the block size and the number of blocks besides, which are Triton's.
        moe.fill_indices_wrapper = lambda *args, **_triton: moe.fill_indices_cpu(*args[:6])
    try:
        with with_cpu_attention():
            yield
    finally:
        torch.histc = histc
        if fill is not None:
            moe.fill_indices_wrapper = fill
