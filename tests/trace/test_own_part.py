"""Gradients that are zero but in this rank's own part, and autograd's first ones: what may be made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from placement_audit import Job, Report, audit_factory
from placement_audit.verdicts import Verdict
from tests.trace.megatron import Reduce

pytestmark = pytest.mark.trace

N, D = 2, 4  # square: rows and columns of one length
ROWS, COLUMNS = Shard(0), Shard(1)
Cut = Callable[[torch.Tensor, int], torch.Tensor]


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Norms(nn.Module):
    """Two weights, one for each tensor that is cut."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        for name in ("first", "second"):
            whole = distribute_tensor(torch.randn(D), mesh, [Replicate()], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(whole))


def verdicts(cuts: dict[str, Cut], parts: Shard) -> dict[str, Verdict]:
    """Of the weights that were multiplied with what was in parts, was gathered, and then cut by each rank."""

    def build() -> Job:
        mesh = init_device_mesh("cpu", (N,), mesh_dim_names=("tp",))
        rank, model, x = mesh.get_local_rank(), Norms(mesh), torch.randn(D, D)

        def step() -> None:
            out = torch.zeros(())
            for name, cut in cuts.items():
                h = DTensor.from_local(x, mesh, [Replicate()], run_check=False) * getattr(model, name)
                out = out + cut(h.redistribute(placements=[parts]).full_tensor(), rank).square().sum()
            Reduce.apply(out, mesh.get_group()).backward()

        return Job(model=model, step=step, mesh=mesh, inputs=(x,))

    report: Report = audit_factory(build, world_size=N)
    return {j.param_fqn: j.verdict for j in report.judgements if j.param_fqn in cuts}


def own(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(N)[rank]


def own_narrow(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.narrow(0, rank * D // N, D // N)


def cast(x: torch.Tensor, rank: int) -> torch.Tensor:
    return own(x.double() / 3, rank)


def doubled_by_a_hook(x: torch.Tensor, rank: int) -> torch.Tensor:
    x = x * 1
    x.register_hook(lambda g: g.mul_(2))
    return own(x, rank)


def written_by_a_hook(x: torch.Tensor, rank: int) -> torch.Tensor:
    x = x * 1
    x.register_hook(lambda g: g.add_(1))
    return own(x, rank)


def first_rows(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x[rank : rank + 1]


def every_other(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x[rank::N]


def both(x: torch.Tensor, rank: int) -> torch.Tensor:
    parts = x.chunk(N)
    return parts[rank] + 2 * parts[1 - rank]


def another(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(N)[1 - rank]


def same_on_all(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(N)[0]


def turned(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.t().chunk(N, 1)[rank]


def summed(x: torch.Tensor, rank: int) -> torch.Tensor:
    return own(x.cumsum(0), rank)


@pytest.mark.parametrize("cut", [own, own_narrow, cast, doubled_by_a_hook])
def test_the_same_part_is_all_there_is(cut: Cut) -> None:
    assert verdicts({"first": cut}, ROWS) == {"first": Verdict.OK}
    assert verdicts({"first": cut}, COLUMNS) == {"first": Verdict.LOST_REDUCTION}


@pytest.mark.parametrize("cut", [first_rows, every_other, both, another, summed, written_by_a_hook])
def test_any_other_part_is_not(cut: Cut) -> None:
    assert verdicts({"first": cut}, ROWS) == {"first": Verdict.LOST_REDUCTION}


def test_a_view_of_the_same_memory_is_another_tensor() -> None:
    assert verdicts({"first": turned}, COLUMNS) == {"first": Verdict.LOST_REDUCTION}


def test_what_does_not_differ_between_ranks_is_no_ones_own() -> None:
    # Both ranks count the same rows, and the sum of their losses counts them twice.
    assert verdicts({"first": same_on_all}, ROWS)["first"] is not Verdict.OK


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")], ids="-".join)
def test_one_does_not_answer_for_the_other(order: tuple[str, str]) -> None:
    cuts = {"first": own, "second": another}
    assert verdicts({name: cuts[name] for name in order}, ROWS) == {
        "first": Verdict.OK,
        "second": Verdict.LOST_REDUCTION,
    }


# --------------------------------------------------------------------------- autograd's first gradient


@pytest.mark.parametrize(
    ("hook", "verdict"),
    [
        (lambda g, own: g / 2, Verdict.DEFERRED),
        (lambda g, own: g.mul_(2), Verdict.DEFERRED),
        (lambda g, own: g.add_(own), Verdict.LOST_REDUCTION),
        (lambda g, own: g * own, Verdict.LOST_REDUCTION),
    ],
)
def test_a_multiple_of_it_is_equal_on_all_ranks(hook: Callable[..., torch.Tensor], verdict: Verdict) -> None:
    def build() -> Job:
        mesh = init_device_mesh("cpu", (N,), mesh_dim_names=("dp",))
        model, x = Norms(mesh), torch.randn(D, D)

        def step() -> None:
            h = DTensor.from_local(x, mesh, [ROWS], run_check=False) * model.first
            loss = h.square().sum().to_local()
            loss.register_hook(lambda g: hook(g, x.sum()))
            loss.backward()

        return Job(model=model, step=step, mesh=mesh, inputs=(x,), batch_placements={"dp": ROWS})

    report = audit_factory(build, world_size=N)
    assert {j.verdict for j in report.judgements if j.param_fqn == "first"} == {verdict}
