"""Numbers that differ between ranks: seen by tracing a second rank a mesh dim, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from placement_audit.engine.apart import NUMBERS, Met, Stream, another, difference
from placement_audit.engine.second_rank import trace_ranks
from placement_audit.judge import BLIND_SPOTS, judge
from placement_audit.verdicts import Report, Verdict
from tests.faults.functions import CopyHeld
from tests.trace.megatron import ROWS, Copy, Reduce, audit, plain_case
from tests.trace.worlds import fake_mesh, run_record, verdicts

pytestmark = [pytest.mark.trace, pytest.mark.filterwarnings("ignore::FutureWarning")]

Program = Callable[[nn.Module, torch.Tensor, int, Any], None]


def weight() -> nn.Module:
    return nn.Linear(4, 4, bias=False)


def on_ranks(
    program: Program, *, model: Callable[[], nn.Module] = weight, tp: int = 2, dp: int = 2, **more: Any
) -> Report:
    """The report on ``program(model, x, tp rank, tp group)``, with a second rank traced."""

    def build(rank: int) -> Any:
        torch.manual_seed(0)
        mesh = fake_mesh(rank=rank, tp=tp) if dp == 1 else fake_mesh(rank=rank, dp=dp, tp=tp)
        group, m, x = mesh.get_group("tp"), model(), torch.randn(8, 4)
        more.setdefault("declared", {})
        return plain_case(
            m,
            mesh,
            lambda: program(m, x, dist.get_rank(group), group),
            inputs=(x,),
            batch_dims=("dp",) if dp > 1 else (),
            **more,
        )

    return judge(trace_ranks(build, run_record))


def tp(report: Report, fqn: str = "weight") -> Verdict:
    return verdicts(report, fqn)["tp"]


def summed_over_dp(m: nn.Module) -> None:
    for p in m.parameters():
        dist.all_reduce(p.grad)


def chunk(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
    m(x.chunk(group.size())[rank]).square().sum().backward()


def narrow(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
    m(x.narrow(0, rank * 4, 4)).square().sum().backward()


def mask(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
    rows = torch.arange(8).unsqueeze(1)
    m(x * ((rows >= rank * 4) & (rows < rank * 4 + 4))).square().sum().backward()


def offset(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
    m(x + torch.tensor([rank * 10.0])).square().sum().backward()


def in_place(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
    mine = x.clone()
    mine[rank * 4 : rank * 4 + 4] = 0
    m(mine).square().sum().backward()


def filled(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
    (m(x) * torch.full((4,), float(rank))).square().sum().backward()


@pytest.mark.parametrize("program", [chunk, narrow, mask, offset, in_place, filled])
def test_what_a_rank_s_number_went_into_is_each_rank_s_own(program: Program) -> None:
    assert tp(on_ranks(program)) is Verdict.LOST_REDUCTION


def test_one_rank_alone_does_not_see_it() -> None:
    mesh = fake_mesh(dp=2, tp=2)
    m, x = weight(), torch.randn(8, 4)
    report = audit(m, mesh, lambda: chunk(m, x, 0, mesh.get_group("tp")), inputs=(x,), declared={})
    assert tp(report) is Verdict.OK
    assert set(report.blind_spots) == set(BLIND_SPOTS)
    assert set(BLIND_SPOTS) - set(on_ranks(chunk).blind_spots) == {
        "Numbers that differ between ranks without being tensors (an offset taken from the rank) are not seen by "
        "one rank's trace."
    }


def test_the_dims_of_a_number_are_those_that_it_differs_along() -> None:
    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        m(x.chunk(2)[dist.get_rank() // 2]).square().sum().backward()  # of the dp rank

    report = on_ranks(program)
    assert verdicts(report, "weight") == {"dp": Verdict.LOST_REDUCTION, "tp": Verdict.OK}


def test_a_number_that_is_the_same_on_all_ranks_changes_nothing() -> None:
    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        m(x[2:6] * 3 + torch.tensor([1.0])).square().sum().backward()

    assert tp(on_ranks(program)) is Verdict.OK


def test_rows_of_one_s_own_reduced_by_hand_are_right() -> None:
    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        chunk(m, x, rank, group)
        dist.all_reduce(m.weight.grad)

    report = on_ranks(program)
    assert set(verdicts(report, "weight").values()) == {Verdict.OK}


def test_a_vocabulary_that_is_sharded_by_offset() -> None:
    """Rows of the table on each rank, a mask and an offset from the rank, a sum: right, and wrong without it."""

    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any, leave: Any) -> None:
        tokens = torch.tensor([0, 3, 5, 7])
        start = rank * 4
        outside = (tokens < start) | (tokens >= start + 4)
        found = m.table[(tokens - start).masked_fill(outside, 0)].masked_fill(outside.unsqueeze(1), 0.0)
        h = leave.apply(found, group) * m.scale
        h.square().sum().backward()
        summed_over_dp(m) if leave is None else None

    def model() -> nn.Module:
        m = nn.Module()
        m.table, m.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4))
        return m

    right = on_ranks(lambda *a: program(*a, Reduce), model=model, declared={"table": {"tp": ROWS}})
    assert (tp(right, "table"), tp(right, "scale")) == (Verdict.OK, Verdict.OK)
    wrong = on_ranks(lambda *a: program(*a, Copy), model=model, declared={"table": {"tp": ROWS}})
    assert tp(wrong, "scale") is Verdict.LOST_REDUCTION


def test_ranks_that_run_different_ops_are_told_where() -> None:
    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        y = m(x)
        if rank == 0:
            y = y * 2
        y.square().sum().backward()

    report = on_ranks(program)
    assert tp(report) is Verdict.LOST_REDUCTION, "what only this rank multiplied is its own"
    (note,) = [n for n in report.trace.run.notes if '"tp"' in n]
    assert "aten.mul.Tensor at tests/trace/test_second_rank.py:" in note
    assert "where the other runs" in note


def test_a_log_line_of_rank_0_changes_no_verdict() -> None:
    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        loss = m(x).square().sum()
        if rank == 0:
            str(loss.detach().item())
        loss.backward()

    report = on_ranks(program)
    assert tp(report) is Verdict.OK
    assert len([n for n in report.trace.run.notes if '"tp"' in n]) == 1


def test_numbers_read_from_memory_that_nobody_wrote_are_no_ranks() -> None:
    calls = iter(range(100))

    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        (m(x) * float(next(calls))).square().sum().backward()  # differs between any two runs

    assert tp(on_ranks(program)) is Verdict.OK


@pytest.mark.parametrize("pick", ["tensors", "parameters", "chunks"])
def test_which_tensor_a_rank_takes_is_a_number_too(pick: str) -> None:
    """No op has another argument that is no tensor: the rank picks its tensor in Python."""

    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        match pick:
            case "tensors":
                m["a"]([x * 1, x * 2][rank]).sum().backward()
            case "parameters":
                (m["a"](x) * [m["b"], m["c"]][rank].weight.detach().sum()).sum().backward()
            case _:
                m["a"](x.chunk(2)[rank]).sum().backward()

    def model() -> nn.Module:
        return nn.ModuleDict({n: weight() for n in "abc"})

    assert tp(on_ranks(program, model=model), "a.weight") is Verdict.LOST_REDUCTION


def test_a_function_that_is_given_a_rank_s_own_part_is_given_what_varies() -> None:
    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        h = m(x)
        Reduce.apply(h.chunk(2)[rank], group).square().sum().backward()

    report = on_ranks(program)
    (b,) = report.trace.boundaries
    assert [s.kind for s in b.value_state] == ["varying", "varying"]
    assert tp(report) is Verdict.LOST_REDUCTION
    assert [f for f in report.findings if f.rule_id == "PA105"] == []


def test_a_part_that_is_zeroed_leaves_the_rest_as_it_was() -> None:
    mesh = fake_mesh(dp=2)
    m, x = weight(), torch.randn(8, 4)

    def step() -> None:
        y = x.clone()
        y[:2] = 0
        y[2:4].fill_(1.0)
        m(y).square().sum().backward()

    report = audit(m, mesh, step, inputs=(x,), batch_dims=("dp",), declared={})
    assert verdicts(report, "weight") == {"dp": Verdict.LOST_REDUCTION}


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("meets", [False, True], ids=["kept", "met by another"])
def test_a_gradient_that_torch_copies_because_somebody_holds_it_is_the_same_gradient(
    holder: int, meets: bool
) -> None:
    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        y = m["a"](x).sum() if meets else 0.0
        z = F.linear(x, CopyHeld.apply(m["a"].weight, group, [] if rank == holder else None))
        (y + Reduce.apply(m["b"](z).sum(), group)).backward()

    def model() -> nn.Module:
        return nn.ModuleDict({n: weight() for n in "ab"})

    report = on_ranks(program, model=model, dp=1, declared={"b.weight": {"tp": ROWS}})
    assert tp(report, "a.weight") is Verdict.OK
    assert report.trace.run.notes == ()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, in_place: bool) -> torch.Tensor:
        ctx.in_place = in_place
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        g = g.clone()
        return g.add_(g) if ctx.in_place else g + g, None


@pytest.mark.parametrize("in_place", [0, 1])
def test_a_sum_of_gradients_in_place_is_the_same_sum(in_place: int) -> None:
    """Where two meet, torch adds in place if nobody else holds the first."""

    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        Twice.apply(m(x), rank == in_place).square().sum().backward()

    report = on_ranks(program, dp=1)
    assert tp(report) is Verdict.OK
    assert report.trace.run.notes == ()


def test_a_gradient_that_came_another_way_on_the_other_rank_is_its_own() -> None:
    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        if rank == 1:
            m.weight.register_hook(lambda g: g * 2)
        m(x).square().sum().backward()

    assert tp(on_ranks(program)) is Verdict.LOST_REDUCTION


def test_what_only_the_other_rank_writes_in_place_is_seen() -> None:
    def program(m: nn.Module, x: torch.Tensor, rank: int, group: Any) -> None:
        x = x.clone()
        if rank == 1:
            x.mul_(2)
        m(x).square().sum().backward()

    assert tp(on_ranks(program)) is Verdict.LOST_REDUCTION


def test_streams_are_set_side_by_side() -> None:
    def met(text: str) -> list[Met]:
        """Each op reads what the one before it made."""
        found: list[Met] = []
        for c in text.split():
            source = ("op", len(found) - 1, 0) if found else ("input", 0)
            found.append(Met(op=c[0], numbers=int(c[1:] or 0), tensors=((source, 0),), site=None))
        return found

    same = difference(met("a1 b2 c3"), met("a1 b2 c3"))
    assert (same.at, same.parted) == (frozenset(), ())
    assert difference(met("a1 b2 c3"), met("a1 b9 c3")).at == {(1, NUMBERS)}
    more = difference(met("a1 b2 x c3 d4"), met("a1 b2 c3 d5"))
    # What follows an op that only one rank ran reads another tensor; what follows that, the same again.
    assert more.at == {(2, NUMBERS), (3, another(0)), (4, NUMBERS)}
    assert [(a.op if a else None, b) for a, b in more.parted] == [("x", None)]
    less = difference(met("a1 c3"), met("a2 x c3"))
    assert less.at == {(0, NUMBERS), (1, another(0))}
    assert [(a, b.op if b else None) for a, b in less.parted] == [(None, "x")]
    assert difference(met("a"), met("")).at == {(0, NUMBERS)}


def test_a_number_that_was_made_a_tensor_of_is_not_known_again() -> None:
    """It is gone after the op, and what is at its address next is another one, or not, as memory goes."""
    stream, number, tensor = Stream(), torch.tensor(2.0), torch.ones(1)
    for _ in range(2):
        stream.take("aten.mul.Tensor", [tensor, number])
    assert [m.tensors for m in stream.met] == [
        ((("met", 0, 0), 0), (("met", 0, 1), 0)),
        ((("met", 0, 0), 0), (("met", 1, 1), 0)),
    ]


def test_a_tensor_at_the_address_of_a_dead_one_is_not_taken_for_it() -> None:
    """gloo's own buffers come and go, and where one lies is chance: on one rank where another lay, on the next not."""
    stream = Stream()
    for _ in range(50):
        stream.take("aten.split.Tensor", [torch.ones(36)])
    assert [m.tensors for m in stream.met] == [((("met", i, 0), 0),) for i in range(50)]
    for _ in range(50):
        stream.made([torch.ones(36)], [], talks=False, anew=False)
        stream.take("aten.split.Tensor", [torch.ones(36)])
    assert [m.tensors for m in stream.met] == [((("met", i, 0), 0),) for i in range(100)]
