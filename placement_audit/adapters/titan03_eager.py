"""torchtitan 0.3: what its models leave to compiled GPU kernels, in plain tensor operations.

Flex attention has no backward on CPU, and its block masks are made by compiled code; the same attention over a
dense mask has the same gradients, on any device, the meta device too. Experts multiply in bfloat16 whatever
the job's dtype is; to be compared with numbers they have to multiply in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.overrides import TorchFunctionMode


def use_dense_attention() -> None:
    """Have torchtitan's flex attention computed over dense masks, in this process from now on."""
    from torchtitan.models.common import attention

    # Private names of torchtitan 0.3.0: both are what torch.compile returned.
    attention._compiled_create_block_mask = create_block_mask
    attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_aux: Any = None,
    **_options: Any,
) -> tuple[torch.Tensor, Any]:
    """What `flex_attention` computes.

    Args:
        q: [batch, heads, queries, head dim].
        k: [batch, heads or fewer, keys, head dim].
        v: like ``k``.
        score_mod: changes a score, given its batch, head, query and key.
        block_mask: says which scores count.
        scale: of the scores; None for the usual one.
        enable_gqa: some query heads share their keys.
        return_aux: whether the logarithm of the scores' sum is wanted too.

    Returns:
        The attention, and an object with ``lse``.
    """
    from torch.nn.attention.flex_attention import AuxOutput

    mask = None
    if block_mask is not None:
        batch, heads, _, _ = block_mask.shape
        mask = create_mask(block_mask.mask_mod, batch, heads, q.shape[2], k.shape[2], device=q.device)
    wants_lse = return_aux is not None and return_aux.lse
    if score_mod is None and not wants_lse:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        return out, AuxOutput(lse=None, max_scores=None)
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-2, -1)).float() * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if score_mod is not None:
        at = [torch.arange(n, device=q.device) for n in scores.shape]
        grid = [x.view([-1 if i == n else 1 for i in range(4)]) for n, x in enumerate(at)]
        scores = score_mod(scores, *grid)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    out = torch.softmax(scores, dim=-1).to(v.dtype) @ v
    return out, AuxOutput(lse=torch.logsumexp(scores, dim=-1), max_scores=None)


def needs_values(model: nn.Module) -> bool:
    """Whether the model reads values: routing of tokens to experts does."""
    from torchtitan.models.common.moe import MoE

    return any(isinstance(m, MoE) for m in model.modules())


def experts_in_float32(model: nn.Module) -> None:
    """Have the model's experts multiply in the dtype of their inputs."""
    from torchtitan.models.common.moe import GroupedExperts

    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.forward = functools.partial(_forward_in_own_dtype, module.forward)


def _forward_in_own_dtype(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _OwnDtype():
        return forward(*args, **kwargs)


class _OwnDtype(TorchFunctionMode):
    """No casts to bfloat16, and no kernel that takes nothing else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0]
        if func is torch._grouped_mm:  # private name of torch, which torchtitan 0.3.0 calls
            return _grouped_mm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """Rows of ``a`` up to each offset, times the matrix of that group; rows past the last one give zeros."""
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    parts = [a[start:end] @ b[i] for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
    parts.append(a[ends[-1] :] @ b[0] * 0)
    return torch.cat(parts)
