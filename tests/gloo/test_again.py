"""What of one device's numbers is rounding, and what is chance: neither is a fault of the job."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from placement_audit import Report, audit, render
from placement_audit.measure.update import compare_update
from tests.faults.family import Bag, draw, one_device
from tests.faults.functions import Copy, Gather, Reduce
from tests.gloo.ranks import on_ranks

pytestmark = pytest.mark.gloo

T, D, V = 32, 8, 16

# One number added to all logits changes no probability: its gradient is zero but for rounding. A thousandth of it on
# one class alone makes the rest of large terms that cancel.
_ALIKE = torch.ones(V)
_NEARLY = _ALIKE + 1e-3 * F.one_hot(torch.tensor(3), V)


def _report(_env: Any, f_is_there: bool, shift_is: torch.Tensor, again: str = "") -> Report:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group, rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
    x, y = draw("x", T, D, scale=1), torch.arange(T) % V
    values = {"w": draw("w", V, D), "shift": draw("shift", 1)}
    model = Bag(w=values["w"].chunk(2)[rank], shift=values["shift"])

    def step() -> torch.Tensor:
        shift = Copy.apply(model.shift, group) if f_is_there else model.shift
        logits = F.linear(x, model.w) + shift * shift_is.chunk(2)[rank]
        rows = Gather.apply(logits.t().contiguous(), group)
        return Reduce.apply(
            F.cross_entropy(rows.t(), y) / 2, group
        )  # the backward of Gather sums both ranks' halves

    calls = []

    def loss(m: Any) -> torch.Tensor:
        calls.append(1)
        if again == "fails" and len(calls) > 2:
            raise RuntimeError("the data is at its end")
        factor = 2.0 if again == "reads other data" and len(calls) > 2 else 1.0
        return F.cross_entropy(F.linear(x, m.w) + m.shift * shift_is, y) * factor

    return audit(
        step,
        model,
        mesh=mesh,
        inputs=(x,),
        declared={"w": {"tp": Shard(0)}},
        reference=one_device(Bag(**values), loss),
    )


def _verdicts(report: Report) -> dict[str, str]:
    return {j.param_fqn: str(j.verdict) for j in report.judgements}


@pytest.mark.parametrize("shift_is", [_ALIKE, _NEARLY], ids=["zero", "small rest"])
def test_rounding_is_no_fault(shift_is: torch.Tensor) -> None:
    report = on_ranks(2, _report, True, shift_is)[0]
    assert report.measurement is not None
    assert _verdicts(report) == {"w": "ok", "shift": "ok"}
    assert report.exit_status == 0
    w, shift = report.measurement.params
    assert w.grad_noise is not None
    assert w.grad_noise < 1e-6
    # Off by far more than the tolerance: without a look at rounding that is a wrong gradient.
    assert shift.grad_error is not None
    assert 1e-5 < shift.grad_error < report.measurement.allowed(shift)
    assert report.measurement.telling(shift) is (shift_is is _NEARLY)
    told = "1 more within ten times what rounding moves them"
    assert (told if shift_is is _NEARLY else "1 not compared, zero but for rounding") in render(report)


@pytest.mark.parametrize("shift_is", [_ALIKE, _NEARLY], ids=["zero", "small rest"])
def test_a_lost_sum_is_one_still(shift_is: torch.Tensor) -> None:
    report = on_ranks(2, _report, False, shift_is)[0]
    assert _verdicts(report) == {"w": "ok", "shift": "lost reduction"}
    assert report.exit_status == 1
    assert {f.rule_id for f in report.findings} == {"PA201", "PA105"}


@pytest.mark.parametrize("again", ["fails", "reads other data"])
def test_a_step_that_cannot_be_taken_twice_says_nothing_of_rounding(again: str) -> None:
    report = on_ranks(2, _report, True, _NEARLY, again)[0]
    assert report.measurement is not None
    assert [p.grad_noise for p in report.measurement.params] == [None, None]
    assert _verdicts(report) == {"w": "ok", "shift": "wrong gradient"}


# --------------------------------------------------------------------------- random numbers


def _drawing(_env: Any, dropout: float) -> tuple[int, bool, tuple[str, ...]]:
    """(Exit status, whether it was measured, notes) of a step that draws its batch, seeded, and drops some of it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group, values = mesh.get_group("tp"), {"w": draw("w", V, D)}
    model, whole = Bag(w=values["w"].chunk(2)[mesh.get_local_rank("tp")]), Bag(**values)

    def after(w: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        x = torch.randn(T, D)
        torch.seed() if dropout else None
        return F.linear(F.dropout(x, dropout), w).square().sum() / T

    report = audit(
        lambda: Reduce.apply(after(model.w), group),
        model,
        mesh=mesh,
        declared={"w": {"tp": Shard(0)}},
        reference=lambda: (whole, lambda: after(whole.w)),
    )
    return report.exit_status, report.measurement is not None, report.trace.run.notes


def test_a_batch_that_the_step_draws_by_its_own_seed_is_measured() -> None:
    assert on_ranks(2, _drawing, 0.0) == [(0, True, ())] * 2


def test_dropout_is_not_measured() -> None:
    for status, measured, notes in on_ranks(2, _drawing, 0.5):
        assert (status, measured) == (0, False)
        assert any(n.startswith("not measured: the step draws random numbers (dropout?)") for n in notes), (
            notes
        )


# --------------------------------------------------------------------------- another way to the same


class _Rows(nn.Module):
    """Its inner module sees the rows in one order or the other; nothing that comes out depends on it."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.turned, self.act = turned, nn.Tanh()
        self.w = nn.Parameter(draw("w", V, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.linear(x, self.w)
        return self.act(rows.flip(0)).flip(0) if self.turned else self.act(rows)


def _turned(_env: Any) -> Report:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, model, whole = draw("x", T, D, scale=1), _Rows(turned=True), _Rows(turned=False)
    return audit(
        lambda: model(x).square().mean(),
        model,
        mesh=mesh,
        inputs=(x,),
        reference=lambda: (whole, lambda: whole(x).square().mean()),
    )


def test_where_all_numbers_are_right_no_place_is_told() -> None:
    """Inner values differ, as those of tokens sorted by expert do, and there is nothing to look for."""
    report = on_ranks(2, _turned)[0]
    assert report.measurement is not None
    assert report.exit_status == 0
    assert max(a.value_error or 0.0 for a in report.measurement.activations if a.fqn == "act") > 0.1
    assert report.measurement.departures == ()


# --------------------------------------------------------------------------- a step as large as the weight


def _step(_env: Any, off: float) -> float:
    w, g = draw("w", D, V), 1e4 * draw("g", D, V)
    ours, theirs = Bag(w=w), Bag(w=w)
    ours.w.grad, theirs.w.grad = g * (1 + off), g.clone()
    params = {"w": ours.w}
    reference = (theirs, {"w": theirs.w}) if dist.get_rank() == 0 else None

    def update(model: Any, _which: str) -> None:
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    step = compare_update(update, "job", ours, params, reference, scale=Fraction(1))
    assert torch.equal(ours.w, w)
    return step.errors["w"]


def test_a_large_step_is_off_by_as_much_as_its_gradient_may_be() -> None:
    """A parameter that is mostly the step has the gradient's error, which is right up to ten times `step_tolerance`."""
    assert on_ranks(2, _step, 5e-6) == [pytest.approx(5e-7, rel=0.1)] * 2
    assert on_ranks(2, _step, 5e-5) == [pytest.approx(5e-6, rel=0.1)] * 2
