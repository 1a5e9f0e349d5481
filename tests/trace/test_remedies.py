"""What a call should say, on real traces: the label that is true there, and whether one can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from placement_audit.verdicts import Remedy, Report
from tests.trace.test_faults import Bag, on_tp, run, shard_of, w_replicate
from tests.trace.test_matrix import CELLS, Cell, run_cell
from tests.trace.worlds import audit, fake_mesh, of_rule

pytestmark = pytest.mark.trace

R, P, S0 = Replicate(), Partial(), Shard(0)


def remedy(report: Report, rule: str, mesh_dim: str = "tp") -> Remedy:
    (finding,) = [f for f in of_rule(report, rule) if f.mesh_dim == mesh_dim]
    assert finding.remedy is not None
    return finding.remedy


def rows(what: Remedy) -> list[list[str]]:
    return [[str(p) for p in row] for row in what.placements]


def code(what: Remedy) -> str:
    """The text of the call, by its span."""
    site = what.call_site
    assert site.span is not None
    line, column, end_line, end_column = site.span
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert line == end_line
    return lines[line - 1][column:end_column]


# --------------------------------------------------------------------------- the matrix

RIGHT = {
    # cell, rule, mesh dim -> (placements, safe), as the matrix's measured twins have them
    ("v0-NL", "PA201", "tp"): (["Partial(sum)"], True),
    ("v1-N", "PA202", "tp"): (["Shard(0)", "Replicate()"], True),
    ("v1-NL", "PA101", "tp"): (["Partial(sum)"], False),
    ("v1-NLF", "PA202", "tp"): (["Shard(0)", "Replicate()"], True),
    ("v2-NL", "PA203", "tp"): (["Partial(sum)"], True),
    ("v3-N", "PA201", "tp"): (["Shard(0)", "Partial(sum)"], True),
    ("v4-N", "PA201", "fsdp"): (["Partial(sum)"], True),
}


@pytest.mark.parametrize(("cell", "rule", "mesh_dim"), RIGHT, ids="-".join)
def test_the_matrix(cell: str, rule: str, mesh_dim: str) -> None:
    made: Cell = next(c for c in CELLS if str(c) == cell)
    what = remedy(run_cell(made), rule, mesh_dim)
    placements, safe = RIGHT[cell, rule, mesh_dim]
    assert (rows(what), what.safe, what.argument) == ([placements], safe, "grad_placements")


def test_labels_that_cancel_are_not_safe_to_change() -> None:
    made = next(c for c in CELLS if str(c) == "v1-NL")
    assert "another label makes up for this one" in remedy(run_cell(made), "PA101").why


# --------------------------------------------------------------------------- which call


def test_two_calls_on_one_line_are_told_apart() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        rows = DTensor.from_local(shard_of(x, mesh), mesh, [S0])
        return (rows.to_local() * m.w.to_local()).square().sum()

    what = remedy(run(w_replicate, loss), "PA201")
    assert code(what) == "m.w.to_local()"


def test_columns_count_characters() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        rows = shard_of(x, mesh)
        return {"\u00e9\u00e9": rows, "é": rows * m.w.to_local()}["é"].square().sum()

    what = remedy(run(w_replicate, loss), "PA201")
    assert code(what) == "m.w.to_local()"


def test_a_call_over_lines() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        w = (
            m.w.float()
            .to_local(
                grad_placements=None,
            )
            .sin()
        )
        return (shard_of(x, mesh) * w).square().sum()

    span = remedy(run(w_replicate, loss), "PA201").call_site.span
    assert span is not None
    line, _, end_line, _ = span
    assert end_line == line + 2


# --------------------------------------------------------------------------- one call, many tensors


def local(w: DTensor) -> torch.Tensor:
    return w.to_local()


def test_a_call_that_serves_tensors_of_different_needs_gets_no_constant() -> None:
    def build(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return {"w": on_tp(torch.randn(4), mesh, R), "v": on_tp(torch.randn(4), mesh, R)}

    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        mine = DTensor.from_local((shard_of(x, mesh) * local(m.w)).square().sum(), mesh, [P])
        return mine.full_tensor() + (x * local(m.v)).square().sum()

    what = remedy(run(build, loss), "PA201")
    assert (what.placements, what.safe) == ((), False)
    assert "1 need [Partial(sum)], 1 need [Replicate()]" in what.why


def test_a_call_that_also_serves_a_tensor_that_no_gradient_comes_back_to() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        rows = distribute_tensor(x, mesh, [S0])
        return (local(rows) * local(m.w)).square().sum()

    what = remedy(run(w_replicate, loss), "PA201")
    assert (what.placements, what.safe) == ((), False)
    assert "tensors of other placements too" in what.why


def test_a_call_that_serves_tensors_of_the_same_need() -> None:
    def build(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return {"w": on_tp(torch.randn(4), mesh, R), "v": on_tp(torch.randn(4), mesh, R)}

    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (shard_of(x, mesh) * local(m.w) * local(m.v)).square().sum()

    found = of_rule(run(build, loss), "PA201")
    assert {f.param_fqn for f in found} == {"w", "v"}
    assert len({f.remedy for f in found}) == 1
    assert found[0].remedy is not None
    assert (rows(found[0].remedy), found[0].remedy.safe) == ([["Partial(sum)"]], True)
    assert "all 2 gradients" in found[0].remedy.why


def test_a_mixed_gradient_has_no_right_label() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        w = m.w.to_local()
        mine = DTensor.from_local((shard_of(x, mesh) * w).square().sum(), mesh, [P])
        return mine.full_tensor() + (x * w).square().sum()

    what = remedy(run(w_replicate, loss), "PA201")
    assert (what.placements, what.safe) == ((), False)
    assert "no label is right for both" in what.why


# --------------------------------------------------------------------------- other boundaries


def test_a_label_that_cannot_fit_becomes_the_forward_s() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (x @ m.w.to_local(grad_placements=[R])).square().sum()

    report = run(lambda mesh: {"w": on_tp(torch.randn(4, 4), mesh, Shard(1))}, loss)
    what = remedy(report, "PA104")
    assert (rows(what), what.safe) == ([["Shard(1)"]], True)


def test_a_double_reduction_takes_partial_out() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (x * m.w.to_local(grad_placements=[P])).square().sum()

    what = remedy(run(w_replicate, loss), "PA202")
    assert (rows(what), what.safe) == ([["Replicate()"]], True)


def test_full_tensor_of_a_shard() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (shard_of(x, mesh) * m.w.full_tensor()).square().sum()

    what = remedy(run(lambda mesh: {"w": on_tp(torch.randn(4), mesh, S0)}, loss), "PA201")
    assert (what.kind, rows(what), what.safe) == ("full_tensor", [["Partial(sum)"]], True)


def test_a_term_of_a_sum_declared_partial_again() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        mine = DTensor.from_local(x, mesh, [R]).redistribute(placements=[Shard(1)]).to_local()
        y = DTensor.from_local(mine @ m.w.to_local(), mesh, [P], grad_placements=[P])
        return y.full_tensor().square().sum()

    what = remedy(run(lambda mesh: {"w": on_tp(torch.randn(4, 4), mesh, S0)}, loss), "PA203")
    assert (what.kind, what.argument, rows(what)) == ("from_local", "grad_placements", [["Replicate()"]])


def test_a_bias_declared_partial_is_only_shown() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        b = DTensor.from_local(m.w.to_local() * 1, mesh, [P])
        return (DTensor.from_local(x, mesh, [R]) + b).square().sum().full_tensor()

    what = remedy(run(w_replicate, loss), "PA103")
    assert (what.argument, rows(what), what.safe) == ("placements", [["Replicate()"]], False)
    assert "values decide" in what.why


def test_what_no_call_can_mend_has_no_remedy() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        lie = DTensor.from_local(shard_of(x, mesh) + 0, mesh, [R])
        return (lie * m.w).square().sum().to_local()

    report = run(w_replicate, loss)
    assert [f.remedy for f in of_rule(report, "PA102")] == [None]
    plain = run(
        lambda mesh: {"w": torch.randn(4)}, lambda m, x, mesh: (shard_of(x, mesh) * m.w).square().sum()
    )
    assert [f.remedy for f in of_rule(plain, "PA201")] == [None]


def test_local_map_gets_a_row_for_each_dtensor() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        here = DTensor.from_local(x, mesh, [R]).redistribute(placements=[S0])
        scale = local_map(lambda a, b: a * b, out_placements=[S0], device_mesh=mesh)
        return (scale(here, m.w).square().sum() + scale(here, m.w).sum()).full_tensor()

    found = of_rule(run(w_replicate, loss), "PA201")
    what = found[0].remedy
    assert what is not None
    assert (what.kind, what.argument) == ("local_map", "in_grad_placements")
    assert (rows(what), what.safe) == ([["Shard(0)"], ["Partial(sum)"]], True)


def test_local_map_called_in_a_loop() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        here = DTensor.from_local(x, mesh, [R]).redistribute(placements=[S0])
        scale = local_map(lambda a, b: a * b, out_placements=[S0], device_mesh=mesh)
        for _ in range(3):
            here = scale(here, m.w)
        return here.square().sum().full_tensor()

    what = remedy(run(w_replicate, loss), "PA201")
    assert (rows(what), what.safe) == ([["Shard(0)"], ["Partial(sum)"]], True)


# --------------------------------------------------------------------------- meshes


def test_a_mesh_dim_of_one_rank_has_its_placement_too() -> None:
    mesh = fake_mesh(pp=1, tp=2)
    model = Bag(w=distribute_tensor(torch.randn(4, 4), mesh, [Shard(1), R]))
    x = torch.randn(8, 4)

    def step() -> None:
        rows = DTensor.from_local(x, mesh, [R, R]).redistribute(placements=[R, S0]).to_local()
        (rows @ model.w.to_local()).square().sum().backward()

    what = remedy(audit(model, mesh, step, batch_dims=()), "PA201")
    assert rows(what) == [["Shard(1)", "Partial(sum)"]]


def test_a_mesh_dim_that_spans_two_of_the_world_s() -> None:
    world = fake_mesh(a=2, b=2)
    both = init_device_mesh("cpu", (4,), mesh_dim_names=("both",))
    model = Bag(w=distribute_tensor(torch.randn(4), both, [R]))
    x = torch.randn(8, 4)

    def step() -> None:
        rows = DTensor.from_local(x, both, [R]).redistribute(placements=[S0]).to_local()
        (rows * model.w.to_local()).square().sum().backward()

    report = audit(model, world, step, batch_dims=())
    assert rows(remedy(report, "PA201", "a")) == [["Partial(sum)"]]


def test_over_the_batch_the_job_s_own_average_is_kept() -> None:
    mesh = fake_mesh(fsdp=2)
    average = Partial("avg")
    model = Bag(
        w=distribute_tensor(torch.randn(4), mesh, [R]), v=distribute_tensor(torch.randn(4), mesh, [R])
    )
    x = torch.randn(8, 4)

    def step() -> None:
        y = x * model.w.to_local(grad_placements=[average]) * model.v.to_local()
        y.square().sum().backward()

    report = audit(model, mesh, step, inputs=(x,))
    assert rows(remedy(report, "PA201", "fsdp")) == [["Partial(avg)"]]
