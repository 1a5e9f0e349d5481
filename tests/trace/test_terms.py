"""Gradients of values that were declared Partial, where a shard of a parameter fed them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from placement_audit.verdicts import Report, Verdict
from tests.trace.worlds import audit, fake_mesh, judgement

pytestmark = pytest.mark.trace

TOKENS = torch.arange(8).view(2, 4)


class Rows(nn.Module):
    """A table, its rows sharded, and a bias."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.w = nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]))
        self.b = nn.Parameter(distribute_tensor(torch.randn(4), mesh, [Replicate()]))

    def looked_up(self) -> torch.Tensor:
        """This rank's term: the rows that it has, zeros for the rest; the offset is a number of its own."""
        rows = self.w.to_local()
        first = self.w.device_mesh.get_local_rank() * rows.shape[0]
        mine = (first <= TOKENS) & (first + rows.shape[0] > TOKENS)
        return F.embedding((TOKENS - first).clamp(0, rows.shape[0] - 1), rows) * mine.unsqueeze(-1)


def report_on(value: str) -> Report:
    mesh = fake_mesh(tp=2)
    model = Rows(mesh)

    def step() -> None:
        term = model.looked_up()
        if value == "a term":
            out = DTensor.from_local(term, mesh, [Partial()])
        elif value == "a term, and a bias on every rank":
            out = DTensor.from_local(term + model.b.to_local(), mesh, [Partial()])
        elif value == "a term, and elsewhere an equal value":
            out = DTensor.from_local(term, mesh, [Partial()])
            out = out + DTensor.from_local(model.b.to_local(), mesh, [Partial()])
        elif value == "the sum":
            summed = funcol.all_reduce(term, "sum", mesh.get_group("tp"))
            out = DTensor.from_local(summed, mesh, [Partial()])
        elif value == "a term, and a sum":
            out = term + funcol.all_reduce(term, "sum", mesh.get_group("tp"))
            out = DTensor.from_local(out, mesh, [Partial()])
        elif value == "a term, and the whole table":
            whole = model.w.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            out = DTensor.from_local(term + F.embedding(TOKENS, whole), mesh, [Partial()])
        else:
            out = DTensor.from_local(term, mesh, [Replicate()])
        out.redistribute(placements=[Replicate()]).to_local().square().sum().backward()

    return audit(model, mesh, step, batch_dims=())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a term", Verdict.OK),
        ("a term, and a bias on every rank", Verdict.OK),
        ("a term, and elsewhere an equal value", Verdict.NOT_JUDGED),
        ("the sum", Verdict.NOT_JUDGED),
        ("a term, and a sum", Verdict.NOT_JUDGED),
        ("a term, and the whole table", Verdict.NOT_JUDGED),
    ],
)
def test_a_shard_that_fed_a_partial_value(value: str, expected: Verdict) -> None:
    """Right where its own rank's term is all it fed; where an equal value was declared Partial, values decide."""
    assert judgement(report_on(value), "w", "tp").verdict is expected


def test_a_replicated_bias_in_a_partial_value_is_for_values_to_decide() -> None:
    report = report_on("a term, and a bias on every rank")
    assert judgement(report, "b", "tp").verdict is Verdict.NOT_JUDGED
    assert report.exit_status == 0


def test_a_term_declared_replicate_is_still_found() -> None:
    assert report_on("a term declared Replicate").exit_status == 1
