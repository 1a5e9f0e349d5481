"""The fifteen cells: five variants of the SimpleFSDP wrapper, three styles of norm module.

The right verdicts are the measured ones of shared/corpus/matrix.md (gloo, four ranks, float32, against a
single-process reference). The wrapper here is our own telling of what ReplicateComputation does.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from placement_audit.verdicts import Report, Verdict
from tests.trace.worlds import audit, fake_mesh, judgement, of_rule

pytestmark = pytest.mark.trace

V0, V1, V2, V3, V4 = "v0", "v1", "v2", "v3", "v4"
OK, DEFERRED, LOST, DOUBLE, SCALE = (
    Verdict.OK,
    Verdict.DEFERRED,
    Verdict.LOST_REDUCTION,
    Verdict.DOUBLE_REDUCTION,
    Verdict.WRONG_SCALE,
)


def gathered_weight(w: DTensor, variant: str) -> DTensor:
    """A fully sharded weight, gathered over fsdp and handed on as a DTensor on tp."""
    mesh = w.device_mesh
    summed = [Partial()]
    first = {"grad_placements": (Shard(0), Partial())} if variant in (V1, V2) else {}
    last = {"grad_placements": summed} if variant in (V2, V3) else {}
    middle = {} if variant == V4 else {"grad_placements": summed}
    shard = w.to_local(**first)
    on_fsdp = DTensor.from_local(shard, mesh["fsdp"], [Shard(0)])
    whole = on_fsdp.redistribute(placements=[Replicate()])
    plain = whole.to_local(**middle)
    return DTensor.from_local(plain, mesh["tp"], [Replicate()], **last)


class Norm(nn.Module):
    """A norm in one of three styles: on DTensors, on local tensors, on local tensors with the right label."""

    def __init__(self, mesh: DeviceMesh, variant: str, style: str) -> None:
        super().__init__()
        self.variant, self.style = variant, style
        weight = torch.ones(16) + 0.1 * torch.randn(16)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0), Replicate()]))

    def forward(self, x: DTensor) -> torch.Tensor:
        w = gathered_weight(self.weight, self.variant)
        if self.style == "N":
            return nn.functional.rms_norm(x, (16,), w).to_local()
        label = {"grad_placements": [Partial()]} if self.style == "NLF" else {}
        return nn.functional.rms_norm(x.to_local(), (16,), w.to_local(**label))


@dataclass(frozen=True)
class Cell:
    variant: str
    style: str
    fsdp: Verdict
    tp: Verdict
    factor: Fraction | None = Fraction(1)

    def __str__(self) -> str:
        return f"{self.variant}-{self.style}"


CELLS = [
    Cell(V0, "N", OK, OK),
    Cell(V0, "NL", OK, LOST, None),
    Cell(V0, "NLF", OK, OK),
    Cell(V1, "N", OK, DOUBLE, Fraction(2)),
    Cell(V1, "NL", OK, DEFERRED),
    Cell(V1, "NLF", OK, DOUBLE, Fraction(2)),
    Cell(V2, "N", OK, DEFERRED),
    Cell(V2, "NL", OK, SCALE, Fraction(1, 2)),
    Cell(V2, "NLF", OK, DEFERRED),
    Cell(V3, "N", OK, LOST, None),
    Cell(V3, "NL", OK, LOST, None),
    Cell(V3, "NLF", OK, LOST, None),
    Cell(V4, "N", LOST, OK),
    Cell(V4, "NL", LOST, LOST, None),
    Cell(V4, "NLF", LOST, OK),
]


def run_cell(cell: Cell) -> Report:
    torch.manual_seed(0)
    mesh = fake_mesh(fsdp=2, tp=2)
    model = Norm(mesh, cell.variant, cell.style)
    x, g = torch.randn(2, 4, 16), torch.randn(2, 4, 16)

    def step() -> None:
        y = model(DTensor.from_local(x, mesh["tp"], [Shard(1)]))
        (y * g).sum().backward()

    return audit(model, mesh, step, inputs=(x, g))


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {str(c): run_cell(c) for c in CELLS}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_verdict(cell: Cell, reports: dict[str, Report]) -> None:
    report = reports[str(cell)]
    on_fsdp, on_tp = judgement(report, "weight", "fsdp"), judgement(report, "weight", "tp")
    assert (on_fsdp.verdict, on_tp.verdict, on_tp.factor) == (cell.fsdp, cell.tp, cell.factor)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_only_wrong_cells_have_errors(cell: Cell, reports: dict[str, Report]) -> None:
    wrong = {d for d, v in (("fsdp", cell.fsdp), ("tp", cell.tp)) if v not in (OK, DEFERRED)}
    report = reports[str(cell)]
    assert {f.mesh_dim for f in report.findings if f.severity == "error"} == wrong
    assert report.exit_status == bool(wrong)


def code_of(report: Report, rule: str, mesh_dim: str) -> list[str]:
    """The code lines of a rule's only finding on a mesh dim, the cause first."""
    (finding,) = [f for f in of_rule(report, rule) if f.mesh_dim == mesh_dim]
    return [s.call_site.code_line for s in finding.path]


FIRST = "shard = w.to_local(**first)"
LAST = 'return DTensor.from_local(plain, mesh["tp"], [Replicate()], **last)'
MIDDLE = "plain = whole.to_local(**middle)"
IN_NORM = "return nn.functional.rms_norm(x.to_local(), (16,), w.to_local(**label))"


@pytest.mark.parametrize(
    ("cell", "rule", "mesh_dim", "places"),
    [
        ("v0-NL", "PA201", "tp", [IN_NORM, FIRST]),
        ("v1-N", "PA202", "tp", [FIRST, LAST]),
        ("v1-NLF", "PA202", "tp", [FIRST, LAST]),
        ("v2-NL", "PA203", "tp", [IN_NORM, LAST]),
        ("v3-N", "PA201", "tp", [FIRST, LAST]),
        ("v3-NL", "PA201", "tp", [IN_NORM, LAST, FIRST]),
        ("v4-N", "PA201", "fsdp", [MIDDLE]),
    ],
)
def test_places(cell: str, rule: str, mesh_dim: str, places: list[str], reports: dict[str, Report]) -> None:
    assert code_of(reports[cell], rule, mesh_dim) == places


def test_scale_is_told_beside_a_lost_reduction(reports: dict[str, Report]) -> None:
    assert "scaled by 1/2" in judgement(reports["v3-NL"], "weight", "tp").reason


def test_cancelling_labels_warn_where_the_first_is_false(reports: dict[str, Report]) -> None:
    (finding,) = of_rule(reports["v1-NL"], "PA101")
    assert finding.path[0].call_site.code_line == IN_NORM
    assert finding.severity == "warning"
    assert all(not of_rule(r, "PA101") for name, r in reports.items() if name != "v1-NL")
