"""Small programs with one fault each, and their right twins: what the trace says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint

from placement_audit.verdicts import Report, Verdict
from tests.trace.worlds import audit, fake_mesh, judgement, of_rule

pytestmark = pytest.mark.trace

R, P, S0 = Replicate(), Partial(), Shard(0)


class Bag(nn.Module):
    """Parameters under short names."""

    def __init__(self, **params: torch.Tensor) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))


def on_tp(value: torch.Tensor, mesh: DeviceMesh, placement: object) -> torch.Tensor:
    return distribute_tensor(value, mesh, [placement])


def run(
    build: Callable[[DeviceMesh], dict[str, torch.Tensor]],
    loss: Callable[[Bag, torch.Tensor, DeviceMesh], torch.Tensor],
) -> Report:
    """Audit a program on two tp ranks; ``x`` (8, 4) is equal on both."""
    torch.manual_seed(0)
    mesh = fake_mesh(tp=2)
    model = Bag(**build(mesh))
    x = torch.randn(8, 4)
    return audit(model, mesh, lambda: loss(model, x, mesh).backward(), batch_dims=())


def shard_of(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of ``x``."""
    return DTensor.from_local(x, mesh, [R]).redistribute(placements=[S0]).to_local()


def verdict(report: Report, fqn: str = "w") -> Verdict:
    return judgement(report, fqn, "tp").verdict


def cause(report: Report, rule: str) -> str:
    (finding,) = of_rule(report, rule)
    return finding.path[0].call_site.code_line


def w_replicate(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {"w": on_tp(torch.randn(4), mesh, R)}


@pytest.mark.parametrize(
    ("label", "expected"),
    [(None, Verdict.LOST_REDUCTION), ([P], Verdict.DEFERRED), ([R], Verdict.LOST_REDUCTION)],
)
def test_a_weight_used_on_a_sharded_activation(label: list[object] | None, expected: Verdict) -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (shard_of(x, mesh) * m.w.to_local(grad_placements=label)).square().sum()

    report = run(w_replicate, loss)
    assert verdict(report) is expected
    assert report.exit_status == (expected is Verdict.LOST_REDUCTION)


@pytest.mark.parametrize(("label", "expected"), [(None, Verdict.OK), ([P], Verdict.DOUBLE_REDUCTION)])
def test_a_weight_used_on_a_replicated_activation(label: list[object] | None, expected: Verdict) -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (x * m.w.to_local(grad_placements=label)).square().sum()

    report = run(w_replicate, loss)
    assert verdict(report) is expected


def test_one_local_weight_used_both_ways_is_mixed() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        w = m.w.to_local()
        mine = DTensor.from_local((shard_of(x, mesh) * w).square().sum(), mesh, [P])
        return mine.full_tensor() + (x * w).square().sum()

    report = run(w_replicate, loss)
    assert verdict(report) is Verdict.LOST_REDUCTION
    assert "a complete part and a per-rank part" in judgement(report, "w", "tp").reason


def test_a_plain_parameter_on_a_sharded_activation_is_never_summed() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (shard_of(x, mesh) * m.w).square().sum()

    report = run(lambda mesh: {"w": torch.randn(4)}, loss)
    assert verdict(report) is Verdict.LOST_REDUCTION
    (finding,) = of_rule(report, "PA201")
    assert finding.path[0].call_site.code_line == "return (shard_of(x, mesh) * m.w).square().sum()"


def test_varying_declared_replicate() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        lie = DTensor.from_local(shard_of(x, mesh) + 0, mesh, [R])
        return (lie * m.w).square().sum().to_local()

    report = run(w_replicate, loss)
    assert cause(report, "PA102") == "lie = DTensor.from_local(shard_of(x, mesh) + 0, mesh, [R])"
    assert verdict(report) is Verdict.LOST_REDUCTION


@pytest.mark.parametrize(("by", "told"), [(1, ["PA103"]), (2, []), (4, ["PA103"])])
def test_invariant_declared_partial_is_for_values_to_decide(by: int, told: list[str]) -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        y = DTensor.from_local(x * m.w.to_local(grad_placements=[P]) / by, mesh, [P])
        return y.full_tensor().square().sum()

    report = run(w_replicate, loss)
    assert verdict(report) is Verdict.NOT_JUDGED
    assert [f.rule_id for f in report.findings if f.severity != "note"] == told
    assert report.exit_status == 3, "the only parameter was not judged: that is no clean bill"


@pytest.mark.parametrize(
    ("label", "by", "hidden", "expected"),
    [
        (None, 2, False, Verdict.WRONG_SCALE),
        (P, 2, False, Verdict.DEFERRED),
        (None, 2, True, Verdict.OK),
        (P, 2, True, Verdict.DOUBLE_REDUCTION),
        (None, 4, False, Verdict.NOT_JUDGED),
        (None, 1, False, Verdict.NOT_JUDGED),
    ],
)
def test_a_bias_added_to_a_term_is_judged_where_it_was_divided_by_the_ranks(
    label: Any, by: int, hidden: bool, expected: Verdict
) -> None:
    """Right with one label, wrong with the other, as autograd knows of the division or not (corpus 07)."""

    def build(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return {"w": on_tp(torch.randn(4, 4), mesh, S0), "b": on_tp(torch.randn(4), mesh, R)}

    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        mine = DTensor.from_local(x, mesh, [R]).redistribute(placements=[Shard(1)]).to_local()
        b = m.b.to_local(grad_placements=None if label is None else [label])
        b = b + (b / by - b).detach() if hidden else b / by
        y = mine @ m.w.to_local() + b
        return DTensor.from_local(y, mesh, [P]).full_tensor().square().sum()

    report = run(build, loss)
    assert verdict(report, "w") is Verdict.OK
    assert verdict(report, "b") is expected


@pytest.mark.parametrize(("label", "fits"), [(Shard(1), True), (S0, False), (R, False), (P, False)], ids=str)
def test_a_gradient_label_that_cannot_fit(label: object, fits: bool) -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (x @ m.w.to_local(grad_placements=[label])).square().sum()

    report = run(lambda mesh: {"w": on_tp(torch.randn(4, 4), mesh, Shard(1))}, loss)
    assert [f.path[0].kind for f in of_rule(report, "PA104")] == ([] if fits else ["to_local"])
    assert (verdict(report) is Verdict.OK) is fits
    if label == S0:
        assert verdict(report) is Verdict.WRONG_PLACEMENT
        assert of_rule(report, "PA204")[0].param_fqn == "w"


def test_a_term_of_a_sum_needs_the_whole_gradient() -> None:
    """from_local(Partial) with a Partial gradient hands each rank's term only its share."""

    def build(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return {"w": on_tp(torch.randn(4, 4), mesh, S0)}

    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh, label: list[object] | None) -> torch.Tensor:
        mine = DTensor.from_local(x, mesh, [R]).redistribute(placements=[Shard(1)]).to_local()
        y = DTensor.from_local(mine @ m.w.to_local(), mesh, [P], grad_placements=label)
        return y.full_tensor().square().sum()

    assert verdict(run(build, lambda *a: loss(*a, None))) is Verdict.OK
    wrong = run(build, lambda *a: loss(*a, [P]))
    assert verdict(wrong) is Verdict.WRONG_SCALE
    assert str(judgement(wrong, "w", "tp").factor) == "1/2"


def test_activation_checkpointing_tells_a_fault_once() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        def block(rows: torch.Tensor) -> torch.Tensor:
            lie = DTensor.from_local(rows * m.w.to_local(grad_placements=[P]), mesh, [R])
            return lie.sin().to_local()

        return checkpoint(block, shard_of(x, mesh), use_reentrant=False).square().sum()

    report = run(w_replicate, loss)
    assert len(of_rule(report, "PA102")) == 1
    assert {b.phase.value for b in report.trace.boundaries} == {"forward", "recompute"}


def test_local_map_without_in_grad_placements() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        rows = DTensor.from_local(x, mesh, [R]).redistribute(placements=[S0])
        scale = local_map(
            lambda a, b: a * b, out_placements=[S0], in_placements=([S0], [R]), device_mesh=mesh
        )
        return scale(rows, m.w).square().sum().full_tensor()

    report = run(w_replicate, loss)
    (finding,) = of_rule(report, "PA201")
    assert finding.path[0].kind == "local_map"
    assert finding.path[0].call_site.code_line == "return scale(rows, m.w).square().sum().full_tensor()"


def test_local_map_with_in_grad_placements_is_right() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        rows = DTensor.from_local(x, mesh, [R]).redistribute(placements=[S0])
        scale = local_map(
            lambda a, b: a * b,
            out_placements=[S0],
            in_placements=([S0], [R]),
            in_grad_placements=([S0], [P]),
            device_mesh=mesh,
        )
        return scale(rows, m.w).square().sum().full_tensor()

    assert verdict(run(w_replicate, loss)) is Verdict.DEFERRED


def test_an_activation_that_loses_its_sum_spoils_the_weights_before_it() -> None:
    def build(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return {"w": on_tp(torch.randn(4, 4), mesh, R), "v": on_tp(torch.randn(4, 4), mesh, Shard(1))}

    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        h = DTensor.from_local(x, mesh, [R]) @ m.w
        y = h.to_local() @ m.v.to_local()
        return DTensor.from_local(y, mesh, [Shard(1)]).square().sum().full_tensor()

    report = run(build, loss)
    assert (verdict(report, "w"), verdict(report, "v")) == (Verdict.LOST_REDUCTION, Verdict.OK)
    assert cause(report, "PA201") == "y = h.to_local() @ m.v.to_local()"


def test_full_tensor_used_on_one_rank_s_rows_only() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (shard_of(x, mesh) * m.w.full_tensor()).square().sum()

    report = run(lambda mesh: {"w": on_tp(torch.randn(4), mesh, S0)}, loss)
    assert verdict(report) is Verdict.LOST_REDUCTION
    (finding,) = of_rule(report, "PA201")
    assert finding.path[0].kind == "full_tensor"


def test_full_tensor_with_a_partial_gradient_is_right() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (shard_of(x, mesh) * m.w.full_tensor(grad_placements=[P])).square().sum()

    assert verdict(run(lambda mesh: {"w": on_tp(torch.randn(4), mesh, S0)}, loss)) is Verdict.OK


def test_a_parameter_without_a_gradient() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return (x * m.w.to_local()).sum() + (x * m.gate.to_local().detach()).sum()

    report = run(lambda mesh: w_replicate(mesh) | {"gate": on_tp(torch.randn(4), mesh, R)}, loss)
    assert verdict(report, "gate") is Verdict.NO_GRADIENT
    assert [f.param_fqn for f in of_rule(report, "PA206")] == ["gate"]


def test_an_all_reduce_of_what_is_equal_already_is_noted() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        count = funcol.wait_tensor(funcol.all_reduce(torch.ones(1), "sum", mesh))
        return (x * m.w.to_local()).sum() / count.sum()

    report = run(w_replicate, loss)
    assert [f.mesh_dim for f in of_rule(report, "PA105")] == ["tp"]
    assert verdict(report) is Verdict.OK
    assert report.exit_status == 0


def test_a_round_trip_of_a_partial_value_is_right() -> None:
    """Corpus 09 and pytorch#172932: torch >= 2.13 labels the gradient Replicate at both ends."""

    def build(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return {"w": on_tp(torch.randn(4, 4), mesh, S0)}

    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        z = DTensor.from_local(x, mesh, [R]).redistribute(placements=[Shard(1)]) @ m.w
        back = DTensor.from_local(z.to_local() * 2, mesh, z.placements)
        return back.full_tensor().square().sum()

    report = run(build, loss)
    assert verdict(report) is Verdict.OK
    assert report.findings == ()


def test_the_same_round_trip_that_says_partial_doubles() -> None:
    def build(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return {"w": on_tp(torch.randn(4, 4), mesh, S0)}

    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        z = DTensor.from_local(x, mesh, [R]).redistribute(placements=[Shard(1)]) @ m.w
        back = DTensor.from_local(z.to_local(grad_placements=[P]) * 2, mesh, z.placements)
        return back.full_tensor().square().sum()

    report = run(build, loss)
    assert verdict(report) is Verdict.DOUBLE_REDUCTION
    assert (
        cause(report, "PA202")
        == "back = DTensor.from_local(z.to_local(grad_placements=[P]) * 2, mesh, z.placements)"
    )


@pytest.mark.parametrize("placement", [R, S0], ids=str)
def test_distribute_tensor_makes_its_placement_true(placement: object) -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        noise = shard_of(x, mesh).sum() + torch.zeros(8, 4)
        made = distribute_tensor(noise, mesh, [placement])
        return (made * m.w).square().sum().full_tensor()

    report = run(w_replicate, loss)
    made = [b for b in report.trace.boundaries if b.kind == "distribute_tensor"]
    assert [b.call_site.code_line for b in made] == ["made = distribute_tensor(noise, mesh, [placement])"]
    assert [b.value_state[0].kind.value for b in made] == ["varying"]
    assert of_rule(report, "PA102") == []
    assert verdict(report) in (Verdict.OK, Verdict.DEFERRED)


def test_every_kind_of_boundary_is_told_apart() -> None:
    def loss(m: Bag, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        rows = DTensor.from_local(x, mesh, [R]).redistribute(placements=[S0])
        doubled = local_map(lambda a: a * 2, out_placements=[S0], in_placements=([S0],), device_mesh=mesh)
        return (doubled(rows) * m.w).full_tensor().square().sum() + m.w.to_local().sum()

    report = run(w_replicate, loss)
    assert [b.kind for b in report.trace.boundaries] == [
        "from_local",
        "redistribute",
        "local_map",
        "local_map",
        "full_tensor",
        "to_local",
    ]
    assert [b.param_fqn for b in report.trace.boundaries][-1] == "w"
