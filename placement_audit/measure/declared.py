"""Plain-tensor parameters that are declared shards, seen as DTensors: the rest of a measurement knows no others."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from placement_audit.case import Case, dim_names
from placement_audit.dtensor_api import clean_fqn
from placement_audit.errors import NotMeasurable
from placement_audit.measure.exchange import gather


def as_dtensors(params: dict[str, nn.Parameter], case: Case) -> dict[str, nn.Parameter]:
    """The same parameters, with declared shards as DTensors over the same storage; collective.

    Args:
        params: the parallel model's, by FQN.
        case: says which are declared.

    Raises:
        NotMeasurable: shards of unequal size.
    """
    out = dict(params)
    parts = sorted({d for placements in case.declared.values() for d in placements if "[" in d})
    if parts:
        raise NotMeasurable(
            f"not measured: a declaration names {parts[0]!r}, a part of a mesh dim; a mesh with a dim for each part "
            "can be measured."
        )
    shapes = gather(
        {fqn: tuple(params[fqn].shape) for fqn, placements in case.declared.items() if placements}
    )
    for fqn in shapes[0]:
        p = params[fqn]
        if len({s[fqn] for s in shapes}) > 1:
            raise NotMeasurable(
                f"not measured: {fqn} is declared a shard, and the ranks hold shards of unequal size, "
                f"{' and '.join(sorted({str(s[fqn]) for s in shapes}))}."
            )
        whole = DTensor.from_local(p.detach(), case.mesh, placements_of(case, fqn), run_check=False)
        out[fqn] = nn.Parameter(whole, requires_grad=p.requires_grad)
    return out


def placements_of(case: Case, fqn: str) -> list[Shard | Replicate]:
    """Torch's placements of a declared parameter, one for each dim of the world mesh."""
    declared = case.declared[fqn]
    found: list[Shard | Replicate] = []
    for name in dim_names(case.mesh):
        p = declared.get(name)
        found.append(Replicate() if p is None or p.tensor_dim is None else Shard(p.tensor_dim))
    return found


def take_gradients(params: dict[str, nn.Parameter], case: Case) -> None:
    """Give what `as_dtensors` made the gradients that the model's own parameters have now."""
    own = {clean_fqn(n): p for n, p in case.model.named_parameters(remove_duplicate=False)}
    for fqn, placements in case.declared.items():
        if not placements:
            continue
        grad = own[fqn].grad
        params[fqn].grad = None
        if grad is not None:
            params[fqn].grad = _labelled(grad, case, fqn)


def _labelled(grad: torch.Tensor, case: Case, fqn: str) -> torch.Tensor:
    with torch.no_grad():
        return DTensor.from_local(grad.detach(), case.mesh, placements_of(case, fqn), run_check=False)
