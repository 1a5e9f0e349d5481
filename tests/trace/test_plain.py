"""Code on plain tensors, in the style of Megatron: right as it stands, and each fault named at its line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch import nn

from placement_audit.engine.second_rank import trace_ranks
from placement_audit.judge import judge
from placement_audit.model import REPLICATE
from placement_audit.tracing import Phase
from placement_audit.verdicts import Report, Severity, Verdict
from tests.trace.megatron import (
    COLUMNS,
    DECLARED,
    ROWS,
    Block,
    Copy,
    Gather,
    GatherOnly,
    Nothing,
    Reduce,
    ReduceTwice,
    Scatter,
    audit,
    ffn,
    plain_case,
    summed,
)
from tests.trace.worlds import fake_mesh, judgement, of_rule, run_record, verdicts

pytestmark = [pytest.mark.trace, pytest.mark.filterwarnings("ignore::FutureWarning")]

OK, LOST, DOUBLE = Verdict.OK, Verdict.LOST_REDUCTION, Verdict.DOUBLE_REDUCTION
PARAMS = ("up", "down", "norm.weight", "norm.bias")


def tp(report: Report) -> dict[str, Verdict]:
    return {p.fqn: verdicts(report, p.fqn)["tp"] for p in report.trace.params}


def places(report: Report, rule: str, fqn: str | None = None) -> set[tuple[str, str]]:
    """(what is called, its line of code) of the causes."""
    found = [f for f in of_rule(report, rule) if fqn in (None, f.param_fqn)]
    return {(f.path[0].kind, f.path[0].call_site.code_line) for f in found}


# ---- tensor parallel


@pytest.mark.parametrize("size", [2, 4])
def test_f_and_g_are_right_as_they_stand(size: int) -> None:
    report = ffn(Copy, Reduce, size)
    assert tp(report) == dict.fromkeys(PARAMS, OK)
    assert report.findings == ()
    assert [(b.kind, b.name) for b in report.trace.boundaries] == [
        ("autograd_function", "Copy"),
        ("autograd_function", "Reduce"),
    ]


def test_a_g_that_sums_in_backward_as_well_doubles_all_before_it() -> None:
    report = ffn(Copy, ReduceTwice, 4)
    assert tp(report) == dict.fromkeys(PARAMS, DOUBLE)
    assert {j.factor for j in report.judgements} == {4}
    assert places(report, "PA202") == {
        ("autograd_function ReduceTwice", "return self.leave.apply(h, self.group)")
    }
    (role,) = {f.path[0].role for f in of_rule(report, "PA202")}
    assert role == "cause: its backward sums a gradient that is complete already"


def test_swapped_f_and_g_are_told_apart_from_right_ones() -> None:
    report = ffn(Reduce, Copy)
    assert tp(report)["norm.weight"] is not OK
    assert report.exit_status == 1
    line = "h = self.enter.apply(self.norm(x), self.group)"
    assert places(report, "PA201", "norm.weight") == {("autograd_function Reduce", line)}
    assert places(report, "PA105") == {("all_reduce", line)}
    assert [f.severity for f in of_rule(report, "PA105")] == [Severity.WARNING]
    assert [(f.mesh_dim, f.severity) for f in of_rule(report, "PA106")] == [("tp", Severity.WARNING)]


def test_a_row_parallel_weight_whose_sum_is_left_out_is_told_at_the_loss() -> None:
    """Each rank goes on with its term: no gradient's label is false, and the forward is wrong."""
    finding, applied = sorted(ffn(Copy, Copy).findings, key=lambda f: f.rule_id)
    assert applied.rule_id == "PA108", "and squared, as no term may be"
    assert (finding.rule_id, finding.severity, finding.mesh_dim) == ("PA106", Severity.WARNING, "tp")
    assert "down, sharded on it, reaches the loss" in finding.evidence[0].statement
    assert finding.path[0].call_site.function == "<lambda>"


def test_an_f_that_does_not_sum_loses_the_gradient_of_what_is_before_it() -> None:
    report = ffn(Nothing, Reduce)
    assert tp(report) == {"up": OK, "down": OK, "norm.weight": LOST, "norm.bias": LOST}
    (finding, other) = of_rule(report, "PA201")
    assert finding.path[0].role == "used here by native_layer_norm in norm; nothing reduces its gradient"
    assert other.path[0].call_site == finding.path[0].call_site
    assert finding.path[0].call_site.code_line == "h = self.enter.apply(self.norm(x), self.group)"


def test_the_functions_of_torch_distributed_nn_are_read_like_ones_own() -> None:
    mesh = fake_mesh(tp=2)
    group = mesh.get_group("tp")
    w = nn.Linear(4, 4, bias=False)
    x = torch.randn(8, 4)

    def step() -> None:
        y = differentiable.all_reduce(w(x), group=group)
        y.square().sum().backward()

    report = audit(w, mesh, step, declared={"weight": {"tp": COLUMNS}})
    assert tp(report) == {"weight": DOUBLE}, (
        "its backward sums as well: right for a loss that each rank has a part of"
    )
    assert places(report, "PA202") == {
        ("autograd_function _AllReduce", "y = differentiable.all_reduce(w(x), group=group)")
    }


class Gathered(GatherOnly):
    """Gather, for a loss that each rank has the whole of: this rank's rows of the gradient are complete."""


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        # Gathered, each rank has the whole loss; their backwards sum as if it had a part of it.
        (lambda y, g: funcol.all_gather_single_autograd(y, 0, g), DOUBLE),
        (lambda y, g: torch.cat(differentiable.all_gather(y, group=g)), DOUBLE),
        (lambda y, g: Gathered.apply(y, g), OK),
        (lambda y, g: funcol.reduce_scatter_single_autograd(y, "sum", 0, g), OK),
    ],
)
def test_a_gradient_of_a_varying_tensor_varies(call: Any, verdict: Verdict) -> None:
    """A layer shared by all, on rows of one's own: whatever the collective's backward gathers is a term."""
    mesh = fake_mesh(tp=2)
    group = mesh.get_group("tp")
    w, x = nn.Linear(4, 4), torch.randn(8, 4)

    def step(reduce: bool) -> None:
        call(w(x), group).square().sum().backward()
        for p in w.parameters() if reduce else ():
            dist.all_reduce(p.grad, group=group)

    right = audit(w, mesh, lambda: step(True), inputs=(x,), batch_dims=("tp",))
    assert tp(right) == {"weight": verdict, "bias": verdict}
    wrong = audit(w, mesh, lambda: step(False), inputs=(x,), batch_dims=("tp",))
    assert tp(wrong) == {"weight": LOST, "bias": LOST}


def test_a_function_taken_from_its_class_before_the_audit_is_watched() -> None:
    taken = Reduce.apply
    mesh = fake_mesh(tp=2)
    w, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)
    step = lambda: taken(w(x), mesh.get_group("tp")).sum().backward()  # noqa: E731
    report = audit(w, mesh, step, declared={"weight": {"tp": COLUMNS}})
    assert [b.name for b in report.trace.boundaries] == ["Reduce"]
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction), "and nothing is left behind"


def test_one_gradient_for_two_inputs_is_two_states() -> None:
    """``add`` hands the same tensor to both: what one function makes of it must not reach the other."""
    mesh = fake_mesh(tp=2)
    group = mesh.get_group("tp")
    m = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.randn(4))})

    def step() -> None:
        other = m["b"] * 1  # made first, so that its backward runs last
        (Reduce.apply(m["a"] * 1, group) + other).square().sum().backward()

    report = audit(m, mesh, step, declared={"a": {"tp": ROWS}})
    assert tp(report) == {"a": OK, "b": OK}


# ---- sequence parallel, with rank-dependent numbers


def sequence_parallel(enter: Any, leave: Any, *, tp: int = 2, reduce: bool = True) -> Report:
    """Rows of one's own up to the loss; the norm's gradients are summed by hand."""

    def build(rank: int) -> Any:
        torch.manual_seed(0)
        mesh = fake_mesh(rank=rank, tp=tp)
        group = mesh.get_group("tp")
        model, x = Block(group, enter, leave), torch.randn(8, 4)

        def step() -> None:
            mine = x.chunk(group.size())[group.rank()]
            (mine + model(mine)).square().sum().backward()
            if reduce:
                for p in model.norm.parameters():
                    dist.all_reduce(p.grad, group=group)

        return plain_case(model, mesh, step, inputs=(x,))

    return judge(trace_ranks(build, run_record))


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallelism_is_right_as_it_stands(size: int) -> None:
    report = sequence_parallel(Gather, Scatter, tp=size)
    assert tp(report) == dict.fromkeys(PARAMS, OK)
    assert {f.severity for f in report.findings} == {Severity.NOTE}
    by_hand = [b for b in report.trace.boundaries if b.phase is Phase.BACKWARD]
    assert [(b.kind, b.param_fqn) for b in by_hand] == [
        ("all_reduce", "norm.weight"),
        ("all_reduce", "norm.bias"),
    ]
    assert {b.call_site.code_line for b in by_hand} == {"dist.all_reduce(p.grad, group=group)"}


def test_a_norm_that_nobody_sums_is_lost_where_it_is_used() -> None:
    report = sequence_parallel(Gather, Scatter, reduce=False)
    assert tp(report) == {"up": OK, "down": OK, "norm.weight": LOST, "norm.bias": LOST}
    assert places(report, "PA201") == {("op", "h = self.enter.apply(self.norm(x), self.group)")}


def test_a_gather_whose_backward_does_not_sum_loses_the_other_ranks_terms() -> None:
    report = sequence_parallel(GatherOnly, Scatter)
    assert tp(report) == {"up": OK, "down": OK, "norm.weight": LOST, "norm.bias": LOST}
    assert places(report, "PA201") == {
        ("autograd_function GatherOnly", "h = self.enter.apply(self.norm(x), self.group)")
    }
    assert "dropped" in judgement(report, "norm.weight", "tp").reason


# ---- reductions by hand


def by_hand(step: Any, **batch: Any) -> Report:
    """One shared weight on a batch that varies over dp, two ranks."""
    mesh = fake_mesh(dp=2)
    w, x = nn.Linear(4, 1, bias=False), torch.randn(8, 4)
    return audit(
        w,
        mesh,
        lambda: step(w, x, mesh.get_group("dp")),
        inputs=(x,),
        batch_dims=("dp",),
        declared={},
        **batch,
    )


def dp(report: Report) -> Verdict:
    return verdicts(report, "weight")["dp"]


def test_an_all_reduce_of_the_gradient_after_backward() -> None:
    def step(w: nn.Linear, x: torch.Tensor, group: Any) -> None:
        w(x).sum().backward()
        dist.all_reduce(w.weight.grad, group=group)

    report = by_hand(step)
    assert dp(report) is OK
    (c,) = report.trace.collectives
    assert (c.phase, c.boundary) == (Phase.BACKWARD, 0)


def test_a_second_all_reduce_of_a_complete_gradient() -> None:
    def step(w: nn.Linear, x: torch.Tensor, group: Any) -> None:
        w(x).sum().backward()
        dist.all_reduce(w.weight.grad, group=group)
        w.weight.grad = summed(w.weight.grad, group)

    report = by_hand(step)
    assert dp(report) is DOUBLE
    assert places(report, "PA202") == {("all_reduce", "dist.all_reduce(x, group=group)")}
    assert of_rule(report, "PA105") == []


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_sums_is_seen_at_its_place(kind: str) -> None:
    def step(w: nn.Linear, x: torch.Tensor, group: Any) -> None:
        if kind == "register_hook":
            handle = w.weight.register_hook(lambda g: summed(g, group))
        else:
            handle = w.weight.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad, group=group)
            )
        w(x).sum().backward()
        handle.remove()

    report = by_hand(step)
    assert dp(report) is OK
    (b,) = report.trace.boundaries
    assert (b.kind, b.phase, b.param_fqn) == ("all_reduce", Phase.BACKWARD, "weight")
    assert "dist.all_reduce(" in b.call_site.code_line
    assert [i.index for i in report.trace.boundaries] == list(report.trace.params[0].boundaries)
    assert b.grad is not None
    assert (b.grad.arrived_state[0].kind, b.grad.left_state[0].kind) == ("varying", "invariant")


def test_two_micro_batches_into_one_gradient() -> None:
    def step(w: nn.Linear, x: torch.Tensor, group: Any, each: bool) -> None:
        for part in x.chunk(2):
            w(part).sum().backward()
            if each:
                dist.all_reduce(w.weight.grad, group=group)
        if not each:
            dist.all_reduce(w.weight.grad, group=group)

    assert dp(by_hand(lambda *a: step(*a, each=False))) is OK
    wrong = by_hand(lambda *a: step(*a, each=True))
    assert dp(wrong) is Verdict.WRONG_SCALE, "what was summed after the first is summed again with the second"
    assert "hold the same gradient, parts of it scaled otherwise than others" in (
        judgement(wrong, "weight", "dp").evidence[0].statement
    )
    (finding,) = of_rule(wrong, "PA203")
    (call,) = finding.path
    why = "a part is complete already: that part counts once for each rank"
    assert call.role == f"cause: sums a gradient of which {why}"
    assert call.call_site.code_line == "dist.all_reduce(w.weight.grad, group=group)"
    assert "the gradient of each micro-batch by itself, or all of them after the last" in finding.next_step


def test_a_first_backward_without_the_reduction_that_the_second_has() -> None:
    def step(w: nn.Linear, x: torch.Tensor, group: Any) -> None:
        w(x[:4]).sum().backward()  # no_sync
        handle = w.weight.register_hook(lambda g: summed(g, group))
        w(x[4:]).sum().backward()
        handle.remove()

    assert dp(by_hand(step)) is LOST


def test_the_gradient_is_judged_as_the_optimizer_first_reads_it() -> None:
    def step(w: nn.Linear, x: torch.Tensor, group: Any, late: bool) -> None:
        optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
        w(x).sum().backward()
        if not late:
            dist.all_reduce(w.weight.grad, group=group)
        optimizer.step()
        if late:
            dist.all_reduce(w.weight.grad, group=group)
        optimizer.zero_grad()

    assert dp(by_hand(lambda *a: step(*a, late=False))) is OK
    assert dp(by_hand(lambda *a: step(*a, late=True))) is LOST


def test_a_gradient_given_to_backward_is_the_loss_s_own() -> None:
    """Ones for each rank's own rows: a bias, whose gradient is their sum, gets a term."""
    mesh = fake_mesh(dp=2)
    w, x = nn.Linear(4, 1), torch.randn(8, 4)
    report = audit(
        w, mesh, lambda: w(x).backward(torch.ones(8, 1)), inputs=(x,), batch_dims=("dp",), declared={}
    )
    assert {j.param_fqn: j.verdict for j in report.judgements} == {"weight": LOST, "bias": LOST}


# ---- declared parameters


def test_a_plain_shard_is_what_it_is_declared_to_be() -> None:
    mesh = fake_mesh(tp=2)
    w, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)
    step = lambda: Reduce.apply(w(x).sum(), mesh.get_group("tp")).backward()  # noqa: E731
    shard = audit(w, mesh, step, declared={"weight": {"tp": ROWS}})
    assert tp(shard) == {"weight": OK}
    assert judgement(shard, "weight", "tp").expected == ROWS
    assert judgement(shard, "weight", "tp").observed == ROWS
    replica = audit(w, mesh, step, declared={})
    assert of_rule(replica, "PA105") != [], "a replica is summed though it is equal on both ranks"
    assert DECLARED["up"] == {"tp": ROWS}


# ---- a part of a mesh dim


class GroupedQuery(nn.Module):
    """Four query heads, two key heads: two ranks of four share each, and its weight."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.q, self.k = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.o = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Copy.apply(x, self.group)
        scores = (x @ self.q.t()) @ (x @ self.k.t()).t()
        return Reduce.apply(torch.softmax(scores, -1) @ x @ self.o.t(), self.group)


SHARED = {"q": {"tp": ROWS}, "o": {"tp": COLUMNS}, "k": {"tp": ROWS, "tp[0,1]": REPLICATE}}


def grouped_query(over: list[int] | None, rank: int = 0, declared: Any = SHARED) -> Report:
    mesh = fake_mesh(rank=rank, tp=4)
    group = mesh.get_group("tp")
    model, x = GroupedQuery(group), torch.randn(6, 4)
    part = dist.new_group(over) if over else None

    def step() -> None:
        (x + model(x)).square().sum().backward()
        if part is not None:
            dist.all_reduce(model.k.grad, group=part)

    return audit(model, mesh, step, inputs=(x,), declared=declared)


@pytest.mark.parametrize(("rank", "pair"), [(0, [0, 1]), (3, [2, 3])])
def test_weights_shared_over_a_part_of_a_mesh_dim(rank: int, pair: list[int]) -> None:
    right = grouped_query(pair, rank)
    assert right.trace.mesh.dim_names == ("tp[0,2]", "tp[0,1]")
    assert {j.verdict for j in right.judgements} == {OK}
    assert {j.param_fqn: str(j.expected) for j in right.judgements if j.mesh_dim == "tp[0,1]"} == {
        "q": "Shard(0)",
        "k": "Replicate()",
        "o": "Shard(1)",
    }
    wrong = grouped_query(None, rank)
    assert verdicts(wrong, "k") == {"tp[0,2]": OK, "tp[0,1]": LOST}
    assert {j.verdict for j in wrong.judgements if j.param_fqn != "k"} == {OK}


def test_a_sum_over_the_wrong_part_of_a_mesh_dim_is_no_sum_over_the_right_one() -> None:
    assert verdicts(grouped_query([0, 2]), "k")["tp[0,1]"] is LOST


def test_a_group_that_is_a_part_of_a_mesh_dim_and_was_not_declared_is_told() -> None:
    report = grouped_query([0, 1], declared={"q": {"tp": ROWS}, "o": {"tp": COLUMNS}, "k": {"tp": ROWS}})
    (note,) = report.trace.run.notes
    assert note.startswith("Collectives ran over ranks [0, 1], a part of mesh dim tp: ")
    assert [(c.mesh_dims, c.group_ranks) for c in report.trace.collectives][-1] == ((), (0, 1))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("ep[0,1]", "'ep[0,1]' is no part of a mesh dim: expected a name of ['tp']"),
        ("tp[1,2]", "'tp[1,2]' is no part of a mesh dim"),
        ("tp[0,1,2]", "the parts of 'tp' do not divide its 4 ranks evenly"),
    ],
)
def test_a_part_that_is_none_is_refused(part: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        grouped_query(None, declared={"k": {part: REPLICATE}})


# ---- averages by hand


def averaged(step: Any, *, tp: int = 2, dp: int = 4) -> Report:
    """A shared weight on (dp, tp); the batch varies over dp."""
    mesh = fake_mesh(dp=dp, tp=tp)
    w, x = nn.Linear(4, 1, bias=False), torch.randn(8, 4)
    groups = mesh.get_group("dp"), mesh.get_group("tp")
    return audit(w, mesh, lambda: step(w, x, *groups), inputs=(x,), batch_dims=("dp",), declared={})


DIVISIONS: dict[str, Any] = {
    "after": lambda g, group: (dist.all_reduce(g, group=group), g.div_(group.size())),
    "before": lambda g, group: (g.div_(group.size()), dist.all_reduce(g, group=group)),
    "by a product": lambda g, group: (dist.all_reduce(g, group=group), g.mul_(1 / group.size())),
    "of a list": lambda g, group: (dist.all_reduce(g, group=group), torch._foreach_div_([g], group.size())),
    "avg": lambda g, group: dist.all_reduce(g, op=dist.ReduceOp.AVG, group=group),
}


@pytest.mark.parametrize("how", DIVISIONS)
def test_an_average_of_what_is_equal_already_is_right(how: str) -> None:
    """Replicas are often averaged for good measure; a sum without the division is n times too large."""

    def step(w: nn.Linear, x: torch.Tensor, dp: Any, tp: Any) -> None:
        w(x).sum().backward()
        dist.all_reduce(w.weight.grad, group=dp)
        DIVISIONS[how](w.weight.grad, tp)

    assert set(verdicts(averaged(step), "weight").values()) == {OK}


@pytest.mark.parametrize("how", DIVISIONS)
def test_an_average_over_the_batch_s_mesh_dim_is_right(how: str) -> None:
    def step(w: nn.Linear, x: torch.Tensor, dp: Any, tp: Any) -> None:
        w(x).sum().backward()
        DIVISIONS[how](w.weight.grad, dp)

    report = averaged(step)
    assert set(verdicts(report, "weight").values()) == {OK}
    assert judgement(report, "weight", "dp").reason == "average over the batch's mesh dim"


@pytest.mark.parametrize("how", DIVISIONS)
def test_an_average_over_one_of_two_mesh_dims_of_one_size(how: str) -> None:
    def step(w: nn.Linear, x: torch.Tensor, dp: Any, tp: Any) -> None:
        w(x).sum().backward()
        dist.all_reduce(w.weight.grad, group=dp)
        DIVISIONS[how](w.weight.grad, tp)

    assert set(verdicts(averaged(step, dp=2), "weight").values()) == {OK}


def test_a_division_by_the_number_of_micro_batches_is_about_no_mesh_dim() -> None:
    mesh = fake_mesh(tp=2)
    w, x = nn.Linear(4, 1, bias=False), torch.randn(8, 4)

    def step() -> None:
        for part in x.chunk(2):
            w(part).sum().backward()
        w.weight.grad /= 2

    assert tp(audit(w, mesh, step, inputs=(x,), declared={})) == {"weight": OK}


class Half(torch.autograd.Function):
    """Its backward has a factor of a half, and no rank has anything to do with it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.nn.functional.gelu(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 0.5 * (1 + torch.erf(ctx.saved_tensors[0]))


def test_a_factor_in_a_backward_is_about_no_mesh_dim() -> None:
    def step(w: nn.Linear, x: torch.Tensor, dp: Any, tp: Any) -> None:
        Half.apply(w(x)).sum().backward()
        dist.all_reduce(w.weight.grad, group=dp)

    report = averaged(step, dp=2)
    assert set(verdicts(report, "weight").values()) == {OK}
    assert {j.factor for j in report.judgements} == {1}


def test_a_division_that_autograd_takes_is_no_average() -> None:
    """The forward divides, and so does its backward: what a second sum made too large stays so."""

    mesh = fake_mesh(tp=2)
    w, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)
    step = lambda: ReduceTwice.apply(w(x) / 2, mesh.get_group("tp")).sum().backward()  # noqa: E731
    assert tp(audit(w, mesh, step, inputs=(x,), declared={"weight": {"tp": COLUMNS}})) == {"weight": DOUBLE}


class Mean(torch.autograd.Function):
    """A mean over ranks; backward sums and divides, which is right only where the forward does not divide."""

    divides = True

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return summed(x, group) / group.size() if cls.divides else summed(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return summed(g, ctx.group) / ctx.group.size(), None


class Sum(Mean):
    divides = False


@pytest.mark.parametrize(("function", "verdict"), [(Mean, DOUBLE), (Sum, OK)])
def test_a_backward_that_divides_after_its_sum(function: Any, verdict: Verdict) -> None:
    mesh = fake_mesh(tp=2)
    w, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)
    step = lambda: function.apply(w(x), mesh.get_group("tp")).square().sum().backward()  # noqa: E731
    assert tp(audit(w, mesh, step, inputs=(x,), declared={"weight": {"tp": COLUMNS}})) == {"weight": verdict}
