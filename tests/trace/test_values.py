"""Placements followed through plain ops: PA107 to PA109 by the line that is wrong, and nothing in right programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from placement_audit import Job, audit, audit_factory
from placement_audit.engine.additive import additive
from placement_audit.engine.implied import _goes_to
from placement_audit.verdicts import Finding, Outcome, Report, Severity, Verdict
from tests.trace.megatron import Copy, Reduce
from tests.trace.worlds import fake_mesh

pytestmark = pytest.mark.trace

aten = torch.ops.aten
T, D, H = 8, 6, 8


class Mlp(nn.Module):
    """A column-parallel and a row-parallel linear, this rank's parts."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(H // n, D))
        self.down = nn.Parameter(torch.randn(D, H // n))
        self.bias = nn.Parameter(torch.randn(D))


Forward = Callable[[Mlp, torch.Tensor, DeviceMesh], torch.Tensor]


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def audited(forward: Forward, n: int = 2) -> Report:
    """The report on one MLP, another rank looked at as well."""

    def build() -> Job:
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        model, x = Mlp(n), torch.randn(T, D)

        def step() -> None:
            forward(model, x, mesh).square().mean().backward()

        declared = {"up": {"tp": Shard(0)}, "down": {"tp": Shard(1)}}
        return Job(model=model, step=step, mesh=mesh, inputs=(x,), declared=declared)

    return audit_factory(build, world_size=n)


def hidden(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return F.relu(F.linear(Copy.apply(x, mesh.get_group()), m.up))


def summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return Reduce.apply(x, mesh.get_group())


def bias_after(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return summed(F.linear(hidden(m, x, mesh), m.down), mesh) + m.bias


def bias_in_linear(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return summed(F.linear(hidden(m, x, mesh), m.down, m.bias), mesh)  # the bias


def bias_added(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    term = F.linear(hidden(m, x, mesh), m.down)
    term += m.bias  # added in place
    return summed(2 * term.view(2, T // 2, D), mesh)


def residual_inside(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    x = F.relu(x)
    return summed(x + F.linear(hidden(m, x, mesh), m.down), mesh) + m.bias  # the residual


def bias_divided(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    part = m.bias + (m.bias / mesh.size() - m.bias).detach()
    return summed(F.linear(hidden(m, x, mesh), m.down) + part, mesh)


def bias_divided_before_and_after(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    term = F.linear(hidden(m, x, mesh), m.down) * 4.0
    both = term + m.bias.mul(4.0 / mesh.size())
    return summed(both / 4.0, mesh)


def bias_on_one_rank(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    bias = m.bias if mesh.get_local_rank() == 0 else None
    return summed(F.linear(hidden(m, x, mesh), m.down, bias), mesh)


def activation_inside(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return summed(F.gelu(F.linear(hidden(m, x, mesh), m.down)), mesh) + m.bias  # of a term


def norm_of_terms(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return summed(F.layer_norm(F.linear(hidden(m, x, mesh), m.down), (D,)), mesh) + m.bias  # of terms


def scaled_terms(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    gain = torch.sigmoid(m.bias)
    return summed(F.linear(hidden(m, x, mesh), m.down) * gain / 3.0, mesh) + m.bias


def heads(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Parts may have anything added, and be turned over and over."""
    h = hidden(m, x, mesh).view(2, T // 2, -1, 2).transpose(1, 2)
    h = torch.softmax(h, dim=-1) + x.sum()
    return summed(F.linear(h.transpose(1, 2).reshape(T, -1), m.down), mesh) + m.bias


def nothing_added(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return summed(F.linear(hidden(m, x, mesh), m.down) + torch.zeros(D), mesh) + m.bias


def for_the_log(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    term = F.linear(hidden(m, x, mesh), m.down)
    with torch.no_grad():
        dist.all_reduce(F.relu(term + m.bias), group=mesh.get_group())
    return summed(term, mesh) + m.bias


def written_over(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """What shares the memory of a term is none any more."""
    term = F.linear(hidden(m, x, mesh), m.down)
    spare = term.detach().clone()
    rows = spare.view(-1)
    spare.copy_(x)
    both = rows.view(T, D) + m.bias
    return summed(term, mesh) + summed(both / 2, mesh)


def summed_before(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum is no term, and may have anything added and done to it."""
    out = F.linear(hidden(m, x, mesh), m.down)
    out = funcol.all_reduce(out.detach(), "sum", mesh) + (out - out.detach())
    return F.gelu(out.detach() + m.bias)


def beside_a_scaled_term(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return summed(4.0 * F.linear(hidden(m, x, mesh), m.down) + m.bias / mesh.size(), mesh)


def divided_by_beta(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return summed(torch.addmm(m.bias, hidden(m, x, mesh), m.down.t(), beta=1 / mesh.size()), mesh)


def divided_and_copied(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    part = (m.bias / mesh.size()).double().float().clone()
    return summed(F.linear(hidden(m, x, mesh), m.down) + part, mesh)


def of_two_values(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """What a buffer holds first and what it holds then are not one value."""
    buffer = m.bias.detach().clone()
    first = buffer / mesh.size()
    buffer.mul_(m.bias.detach())
    return summed(F.linear(hidden(m, x, mesh), m.down) + first + buffer / mesh.size(), mesh)


def kept_in_a_buffer(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    buffer = torch.empty(T, D)
    buffer.copy_(F.linear(hidden(m, x, mesh), m.down))
    return summed(buffer, mesh) + m.bias


def line_of(function: Forward, marker: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if marker in line)


def told(report: Report, rule: str) -> list[Finding]:
    return [f for f in report.findings if f.rule_id == rule]


@pytest.mark.parametrize(
    ("forward", "marker", "param"),
    [
        (bias_in_linear, "# the bias", "bias"),
        (bias_added, "# added in place", "bias"),
        (residual_inside, "# the residual", None),
    ],
)
@pytest.mark.parametrize("n", [2, 4])
def test_what_each_rank_adds_to_its_term_is_counted_as_often(
    forward: Forward, marker: str, param: str | None, n: int
) -> None:
    report = audited(forward, n)
    (finding,) = told(report, "PA107")
    assert (finding.severity, finding.mesh_dim, finding.param_fqn) == (Severity.ERROR, "tp", param)
    assert f"counted {n} times" in finding.message
    assert finding.path[0].call_site.line == line_of(forward, marker)
    assert finding.path[1].role == "sums the terms"
    assert report.outcome is Outcome.FINDINGS
    assert {j.verdict for j in report.judgements} == {Verdict.NOT_JUDGED}, "no gradient is one device's"


@pytest.mark.parametrize(
    "forward",
    [
        bias_after,
        bias_divided,
        bias_divided_before_and_after,
        bias_on_one_rank,
        scaled_terms,
        heads,
        nothing_added,
        for_the_log,
        written_over,
        summed_before,
        beside_a_scaled_term,
        divided_by_beta,
        divided_and_copied,
        of_two_values,
        kept_in_a_buffer,
    ],
)
@pytest.mark.parametrize("n", [2, 4])
def test_right_values_are_not_doubted(forward: Forward, n: int) -> None:
    report = audited(forward, n)
    assert [f.rule_id for f in report.findings if f.rule_id in ("PA107", "PA108", "PA109")] == []


@pytest.mark.parametrize(
    ("number", "severity"), [(1.0, Severity.ERROR), (0.1, Severity.WARNING), (0.5, None), (0.0, None)]
)
def test_a_number_may_have_been_divided_before(number: float, severity: Severity | None) -> None:
    """Half of one is what each of two ranks adds to one; of a tenth nobody knows."""

    def forward(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return summed(F.linear(hidden(m, x, mesh), m.down) - number, mesh) + m.bias

    findings = told(audited(forward), "PA107")
    assert [f.severity for f in findings] == ([] if severity is None else [severity])
    assert all(f"the number {-number:g} is added" in f.message for f in findings)
    assert told(audited(forward), "PA108") == []


def test_without_another_rank_it_is_a_warning() -> None:
    mesh = fake_mesh(tp=2)
    model, x = Mlp(2), torch.randn(T, D)

    def step() -> None:
        bias_on_one_rank(model, x, mesh).square().mean().backward()

    declared = {"up": {"tp": Shard(0)}, "down": {"tp": Shard(1)}}
    report = audit(step, model, mesh=mesh, inputs=(x,), declared=declared)
    (finding,) = told(report, "PA107")
    assert finding.severity is Severity.WARNING, "a rank that adds nothing cannot be seen"
    assert report.exit_status == 0


@pytest.mark.parametrize(
    ("forward", "marker", "op"),
    [(activation_inside, "# of a term", "gelu"), (norm_of_terms, "# of terms", "native_layer_norm")],
)
def test_ops_that_are_not_linear_want_their_terms_summed(forward: Forward, marker: str, op: str) -> None:
    report = audited(forward)
    (finding,) = told(report, "PA108")
    assert (finding.severity, finding.mesh_dim) == (Severity.WARNING, "tp")
    assert finding.message.startswith(f"{op} is applied")
    assert finding.message.endswith("the results are summed")
    assert finding.path[0].call_site.line == line_of(forward, marker)
    assert finding.path[1].role == "sums the terms"


def not_summed(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    term = F.linear(hidden(m, x, mesh), m.down)
    return F.gelu(term).mul(2.0) + m.bias  # of a term


def test_what_is_not_summed_then_may_serve_another_end() -> None:
    (finding,) = told(audited(not_summed), "PA108")
    assert len(finding.path) == 1
    assert "summed" not in finding.message.rpartition(",")[2]


def test_a_variance_put_together_from_each_rank_s_is_no_error() -> None:
    """Chan's way: the ranks' own means, and how far they are from the whole's."""

    def forward(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        h = hidden(m, x, mesh)
        rows = h.shape[1] * mesh.size()
        own = h.sum(1) / h.shape[1]
        whole = Copy.apply(summed(h.sum(1), mesh) / rows, mesh.get_group())
        spread = summed((h - own.unsqueeze(1)).square().sum(1), mesh)
        spread = spread + summed(h.shape[1] * (own - whole).square(), mesh)
        return (spread / rows).sqrt() + m.bias.sum()

    report = audited(forward)
    assert told(report, "PA107") == []
    assert {f.severity for f in told(report, "PA108")} == {Severity.WARNING}
    assert report.exit_status == 0


def through_dtensor(label: Any) -> Forward:
    def forward(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        term = F.linear(hidden(m, x, mesh), m.down)
        whole = DTensor.from_local(term, mesh, [label], run_check=False).full_tensor()
        return whole + m.bias

    return forward


def test_a_label_is_set_beside_what_the_ops_made() -> None:
    (finding,) = told(audited(through_dtensor(Shard(0))), "PA109")
    assert (finding.expected, finding.observed, finding.mesh_dim) == ("Partial(sum)", "Shard(0)", "tp")
    assert told(audited(through_dtensor(Partial())), "PA109") == []


def test_ops_without_a_rule_are_counted() -> None:
    def forward(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        h = torch.softmax(hidden(m, x, mesh), dim=-1)  # over what is spread over the ranks
        return summed(F.linear(h, m.down, m.bias), mesh)

    report = audited(forward)
    assert report.trace.unfollowed == (("aten._softmax.default", "tp", 1),)
    assert "_softmax (1)" in report.blind_spots[-1]
    assert told(report, "PA107") == [], "what is not followed is not judged"


def test_over_the_batch_sums_and_averages_are_the_job_s_own_affair() -> None:
    """A regulariser beside a sum over each rank's own rows: how losses are summed, values tell."""
    mesh = fake_mesh(dp=2)
    model = nn.Linear(D, D, bias=False)
    rows = DTensor.from_local(torch.randn(T, D), mesh, [Shard(0)], run_check=False)

    def step() -> None:
        own = rows.to_local()
        loss = torch.softmax(model(own), dim=0).square().sum() + model.weight.square().sum()
        Reduce.apply(loss, mesh.get_group()).backward()

    report = audit(step, model, mesh=mesh, inputs=(rows,), batch_placements={"dp": Shard(0)})
    assert [f.rule_id for f in report.findings if f.rule_id in ("PA107", "PA108", "PA109")] == []
    assert report.trace.unfollowed == ()


@pytest.mark.parametrize(("rows", "told_of"), [(8, 0), (6, 2)])
def test_parts_of_a_part_may_be_of_one_size(rows: int, told_of: int) -> None:
    mesh = fake_mesh(ep=2, tp=2)
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.randn(rows, D), mesh, [Shard(0), Shard(0)]))

    def step() -> None:
        Reduce.apply(model.w.to_local().square().mean(), mesh.get_group("tp")).backward()

    assert len(told(audit(step, model, mesh=mesh), "PA110")) == told_of


def scattered(m: Mlp, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    term = F.linear(hidden(m, x, mesh), m.down)
    part = funcol.reduce_scatter_tensor_autograd(term, "sum", 0, mesh)
    return DTensor.from_local(part, mesh, [Shard(1)], run_check=False).full_tensor().sum() + m.bias


def test_a_reduce_scatter_leaves_parts() -> None:
    (finding,) = told(audited(scattered), "PA109")
    assert (finding.expected, finding.observed) == ("Shard(0)", "Shard(1)")


@pytest.mark.parametrize(
    ("op", "args", "terms", "expected"),
    [
        (aten.relu.default, (torch.ones(3),), (0,), False),
        (aten.clone.default, (torch.ones(3),), (0,), True),
        (aten.copy_.default, (torch.zeros(3), torch.ones(3)), (1,), True),
        (aten.mul.Tensor, (torch.ones(3), torch.ones(3)), (0,), True),
        (aten.mul.Tensor, (torch.ones(3), torch.ones(3)), (0, 1), False),
        (aten.div.Tensor, (torch.ones(3), torch.ones(3)), (1,), False),
        (aten.masked_fill.Scalar, (torch.ones(3), torch.ones(3, dtype=torch.bool), 0.0), (0,), True),
        (aten.gelu.default, (torch.empty(1 << 20, 2, device="meta"),), (0,), False),
        (aten._softmax.default, (torch.empty(1 << 20, 2, device="meta"), 1, False), (0,), None),
        (aten._softmax.default, (torch.empty(4, 2, device="meta"), 1, False), (0,), False),
        (aten.embedding.default, (torch.ones(5, 3), torch.arange(4)), (0,), True),
    ],
)
def test_whether_an_op_of_a_sum_is_a_sum_is_tried(
    op: Any, args: Any, terms: tuple[int, ...], expected: bool | None
) -> None:
    """What is too large to be tried is not called anything."""
    assert additive(op, args, {}, terms) is expected


@pytest.mark.parametrize(
    ("shape", "sharded", "out", "at"),
    [
        ((4, 6), 0, (24,), 0),
        ((4, 6), 1, (24,), None),
        ((4, 6), 1, (4, 2, 3), 1),
        ((4, 2, 3), 1, (4, 6), 1),
        ((4, 2, 3), 2, (4, 6), None),
        ((2, 4, 6), 1, (8, 6), None),
        ((2, 4, 6), 0, (8, 6), 0),
        ((1, 4, 6), 1, (1, 2, 2, 6), 1),
        ((16, 5), 0, (1, 16, 5), None),
        ((4, 1, 6), 0, (4, 3, 6), 0),
        ((4, 6), 1, (2, 4, 6), 2),
    ],
)
def test_where_a_view_takes_a_shard(
    shape: tuple[int, ...], sharded: int, out: tuple[int, ...], at: int | None
) -> None:
    assert _goes_to(shape, sharded, out) == at
