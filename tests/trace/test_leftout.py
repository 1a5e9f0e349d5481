"""PA111: a log_softmax under loss_parallel that something else than nll_loss reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from placement_audit.verdicts import Finding, Severity, Verdict
from tests.trace.worlds import audit, fake_mesh

pytestmark = pytest.mark.trace

T, D, V = 8, 6, 12
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Head(nn.Module):
    """Logits whose classes are spread over tp."""

    def __init__(self, weight: DTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def found(loss: Loss, *, again: bool = False, dtype: torch.dtype = torch.float32) -> list[Finding]:
    """What is told of a loss of log_softmax's input and the labels, rows over fsdp and classes over tp."""
    mesh = fake_mesh(fsdp=2, tp=2)
    model = Head(distribute_tensor(torch.randn(V, D, dtype=dtype), mesh, [Replicate(), Shard(0)]))
    x = distribute_tensor(torch.randn(T, D, dtype=dtype), mesh, [Shard(0), Replicate()])
    y = distribute_tensor(torch.arange(T), mesh, [Shard(0), Replicate()])

    def step() -> None:
        with loss_parallel():
            logits = model(x)
            value = checkpoint(loss, logits, y, use_reentrant=False) if again else loss(logits, y)
            assert isinstance(value, DTensor)
            value.full_tensor().backward()

    report = audit(model, mesh, step, (x, y))
    told = [f for f in report.findings if f.rule_id == "PA111"]
    judged = {j.verdict for j in report.judgements}
    assert (Verdict.NOT_JUDGED in judged) is bool(told)
    return told


def nll(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(logits, -1), y, reduction="sum")


def in_float32(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(logits, -1, dtype=torch.float32), y, reduction="sum")


def cast_after(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(logits, -1).float(), y, reduction="sum")


def penalised(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logp = F.log_softmax(logits, -1)  # read twice
    return F.nll_loss(logp, y, reduction="sum") - logp.sum()


def penalised_in_float32(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logp = F.log_softmax(logits, -1, dtype=torch.float32)  # read twice
    return F.nll_loss(logp, y, reduction="sum") - logp.sum()


def beside(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    own = F.log_softmax(logits, -1)  # read by a penalty
    return F.cross_entropy(logits, y, reduction="sum") - own.sum()


def hooked(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logp = F.log_softmax(logits, -1)  # read by nll_loss, whose gradient is written over
    logp.register_hook(lambda g: g.mul_(0.9))
    return F.nll_loss(logp, y, reduction="sum")


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
@pytest.mark.parametrize("loss", [nll, cast_after, in_float32])
def test_nll_loss_alone_is_right(loss: Loss, again: bool) -> None:
    dtype = torch.bfloat16 if loss is in_float32 else torch.float32
    assert found(loss, again=again, dtype=dtype) == []


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
@pytest.mark.parametrize("loss", [penalised, penalised_in_float32, beside, hooked])
def test_what_else_reads_it_is_told_where_it_is_made(loss: Loss, again: bool) -> None:
    dtype = torch.bfloat16 if loss is penalised_in_float32 else torch.float32
    (finding,) = found(loss, again=again, dtype=dtype)
    assert finding.mesh_dim == "tp"
    assert finding.severity is Severity.ERROR
    assert finding.observed.startswith('classes Shard(1) on "tp"')
    (step,) = finding.path
    assert "log_softmax" in step.call_site.code_line
    assert step.call_site.function == loss.__name__
    assert "# read" in step.call_site.code_line


def test_outside_loss_parallel_it_has_its_backward() -> None:
    mesh = fake_mesh(tp=2)
    model = Head(distribute_tensor(torch.randn(V, D), mesh, [Shard(0)]))
    x = distribute_tensor(torch.randn(T, D), mesh, [Replicate()])
    report = audit(model, mesh, lambda: F.log_softmax(model(x), -1).sum().full_tensor().backward(), (x,))
    assert [f.rule_id for f in report.findings] == []
