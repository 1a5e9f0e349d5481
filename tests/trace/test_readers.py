"""What the readers of gradients make of the parameters, traced: where it is told, and where it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from placement_audit import Job, audit, audit_factory, watch
from placement_audit.dtensor_api import EagerMode
from placement_audit.engine.flow import Flow
from placement_audit.engine.singly import Singly, _spans_places
from placement_audit.errors import UsageError
from placement_audit.report import json_io
from placement_audit.verdicts import Outcome, Verdict
from tests.faults.family import Bag, draw, laid_out, mine, on
from tests.faults.functions import Copy, Reduce
from tests.trace.worlds import fake_mesh, of_rule, verdicts

pytestmark = pytest.mark.trace

D, H, T = 6, 8, 4


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def deferred(mesh: DeviceMesh) -> tuple[Bag, Callable[[], torch.Tensor]]:
    """A norm weight whose gradient is left Partial."""
    model = Bag(norm=laid_out(1 + draw("norm", D), mesh, Replicate()))
    x = draw("x", T, D)

    def step() -> torch.Tensor:
        rows = on(mine(x, mesh, "tp"), mesh, Shard(0)).to_local()
        out = F.rms_norm(rows, (D,), model.norm.to_local(grad_placements=[Partial()]))
        return on(out, mesh, Shard(0)).full_tensor().square().mean()

    return model, step


def plain(mesh: DeviceMesh) -> tuple[Bag, Callable[[], torch.Tensor]]:
    """A replicated gain before a column-parallel weight, plain tensors."""
    x, group = draw("x", T, D), mesh.get_group("tp")
    model = Bag(gain=1 + draw("gain", D), w=mine(draw("w", H, D), mesh, "tp"))
    return model, lambda: Reduce.apply(
        F.linear(Copy.apply(x * model.gain, group), model.w).square().sum(), group
    )


SHARDS = {"w": {"tp": Shard(0)}}


@torch.no_grad()
def own_terms(m: nn.Module) -> None:
    for p in m.parameters():
        p.to_local().sub_(p.grad.to_local(), alpha=0.1)


# --------------------------------------------------------------------------- what is told


def test_an_update_with_own_terms_is_told_with_its_place() -> None:
    model, step = deferred(fake_mesh(tp=2))
    report = audit(step, model, optimizer=own_terms)
    assert verdicts(report, "norm") == {"tp": Verdict.DEFERRED}
    (finding,) = of_rule(report, "PA403")
    assert finding.mesh_dim == "tp"
    assert finding.message == (
        "the update of norm differs between the ranks along tp: it comes of a gradient of which each rank holds "
        "its own term"
    )
    (at,) = finding.path
    assert (at.role, at.call_site.function) == ("cause: updates the parameter", "own_terms")
    assert at.call_site.code_line == "p.to_local().sub_(p.grad.to_local(), alpha=0.1)"
    assert "redistribute(placements=p.placements)" in finding.next_step
    assert report.exit_status == 1
    assert json_io.loads(json_io.dumps(report)) == report
    assert report.trace.params[0].update is not None


def test_a_clipping_of_own_is_told_with_both_places() -> None:
    mesh = fake_mesh(tp=2)
    model, step = plain(mesh)

    def clip_and_step(m: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(p.grad, alpha=0.1)

    report = audit(step, model, mesh=mesh, declared=SHARDS, optimizer=clip_and_step)
    (finding,) = of_rule(report, "PA403")
    assert finding.param_fqn == "gain"
    assert [s.call_site.code_line for s in finding.path] == [
        "torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)",
        "p.sub_(p.grad, alpha=0.1)",
    ]
    assert "total norm" in finding.next_step
    assert verdicts(report, "gain") == verdicts(report, "w") == {"tp": Verdict.OK}


@pytest.mark.parametrize("stepped", [True, False])
def test_clipping_inside_a_watched_step_is_no_fault_of_the_gradient(stepped: bool) -> None:
    mesh = fake_mesh(tp=2)
    model, loss = plain(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, mesh=mesh, declared=SHARDS) as seen:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if stepped:
            optimizer.step()
    report = seen.report()
    assert verdicts(report, "gain") == {"tp": Verdict.OK}
    (finding,) = of_rule(report, "PA403")
    assert finding.message.startswith(f"the {'update' if stepped else 'gradient'} of gain differs")
    assert finding.path[0].call_site.code_line == "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
    assert [f.rule_id for f in report.findings if f.severity == "error"] == ["PA403"]


def test_where_a_gradient_is_wrong_its_readers_are_not_accused() -> None:
    mesh = fake_mesh(tp=2)
    model = Bag(norm=laid_out(1 + draw("norm", D), mesh, Replicate()))
    x = draw("x", T, D)

    def step() -> torch.Tensor:
        rows = on(mine(x, mesh, "tp"), mesh, Shard(0)).to_local()
        return on(F.rms_norm(rows, (D,), model.norm.to_local()), mesh, Shard(0)).full_tensor().square().mean()

    report = audit(step, model, optimizer=own_terms)
    assert [f.rule_id for f in report.findings if f.severity == "error"] == ["PA201"]


def test_clipping_spreads_a_wrong_gradient_and_is_not_accused() -> None:
    mesh = fake_mesh(tp=2)
    x, group = draw("x", T, D), mesh.get_group("tp")
    model = Bag(lost=1 + draw("lost", D), right=1 + draw("right", D))

    def step() -> torch.Tensor:
        rows = on(x * model.right, mesh, Replicate()).redistribute(placements=[Shard(0)]).to_local()
        return Reduce.apply((rows * model.lost).square().sum(), group)

    def clip_and_step(m: nn.Module) -> torch.optim.Optimizer:
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        return torch.optim.SGD(m.parameters(), lr=0.1)

    report = audit(step, model, mesh=mesh, optimizer=clip_and_step)
    assert verdicts(report, "right") == {"tp": Verdict.OK}
    assert [(f.rule_id, f.param_fqn) for f in report.findings if f.severity == "error"] == [("PA201", "lost")]


def test_what_was_summed_by_hand_and_then_spoilt_is_no_lost_reduction() -> None:
    mesh = fake_mesh(dp=2)
    model, x = nn.Linear(D, H), draw("x", T, D)

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))
            p.grad.mul_(loss.detach())  # this rank's alone

    report = audit(step, model, mesh=mesh, batch_placements={"dp": Shard(0)})
    assert verdicts(report, "weight") == {"dp": Verdict.OK}
    assert {f.param_fqn for f in of_rule(report, "PA403")} == {"weight", "bias"}
    assert all("loss.detach()" in f.path[0].call_site.code_line for f in of_rule(report, "PA403"))


# --------------------------------------------------------------------------- what is right


@torch.no_grad()
def by_number(m: Any, group: Any) -> None:
    squares = m.w.grad.square().sum()
    dist.all_reduce(squares, group=group)
    total = (squares + m.gain.grad.square().sum()).sqrt().item()
    for p in m.parameters():
        p.grad.mul_(min(1.0, 0.1 / total))
        p.sub_(p.grad, alpha=0.1)


@torch.no_grad()
def by_shares(m: Any, group: Any) -> None:
    total = (m.w.grad * m.w.grad).sum() + m.gain.grad.pow(2).sum() / dist.get_world_size(group)
    dist.all_reduce(total, group=group)
    for p in m.parameters():
        p.grad.mul_((0.1 / total.sqrt()).clamp(max=1.0))
        p.sub_(p.grad, alpha=0.1)


@torch.no_grad()
def by_owner(m: Any, group: Any) -> None:
    if dist.get_rank(group) == 0:
        m.gain.sub_(m.gain.grad, alpha=0.1)
    dist.broadcast(m.gain.data, 0, group=group)


@torch.no_grad()
def by_pieces(m: Any, group: Any) -> None:
    rank = dist.get_rank(group)
    own = m.gain.data.chunk(2)[rank]
    own.sub_(m.gain.grad.chunk(2)[rank], alpha=0.1)
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, own.contiguous(), group=group)
    m.gain.data.copy_(torch.cat(parts))


def by_torch(m: Any, _group: Any) -> None:
    torch.optim.AdamW(
        m.parameters(), lr=0.1, foreach=True
    ).step()  # shards and what is replicated in one list


@pytest.mark.parametrize("inside", [True, False], ids=["in the step", "after it"])
@pytest.mark.parametrize("update", [by_number, by_shares, by_owner, by_pieces, by_torch])
def test_right_readers_are_not_accused(update: Callable[[Any, Any], None], inside: bool) -> None:
    def build() -> Job:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, loss = plain(mesh)
        group = mesh.get_group("tp")

        def step() -> None:
            loss().backward()
            if inside:
                update(model, group)

        return Job(
            model=model,
            step=step,
            mesh=mesh,
            declared=SHARDS,
            optimizer=None if inside else lambda m: update(m, group),
        )

    report = audit_factory(build, world_size=2)
    assert report.outcome is Outcome.CLEAN, [f.message for f in report.findings]


def test_nothing_of_the_users_changes() -> None:
    model, step = deferred(fake_mesh(tp=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.norm.to_local().clone()
    report = audit(step, model, optimizer=optimizer)
    assert report.exit_status == 0
    assert report.trace.readers
    assert torch.equal(model.norm.to_local(), before)
    assert model.norm.grad is None
    assert not optimizer.state


def test_the_readers_leave_nothing_in_the_trace() -> None:
    mesh = fake_mesh(tp=2)
    model, step = deferred(mesh)
    alone = audit(step, model).trace
    followed = audit(step, model, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1)).trace
    assert followed.ops == alone.ops
    assert followed.collectives == alone.collectives
    assert followed.boundaries == alone.boundaries
    assert followed.assumed_invariant == alone.assumed_invariant


# --------------------------------------------------------------------------- on the meta device, in lists


def on_meta(mesh: DeviceMesh) -> tuple[Bag, Callable[[], torch.Tensor]]:
    """A shard, a replicated weight whose gradient is left Partial, and one whose gradient is complete."""
    with torch.device("meta"):
        w = DTensor.from_local(torch.empty(H // 2, D), mesh, [Shard(0)])
        norm, gain = (DTensor.from_local(torch.empty(D), mesh, [Replicate()], run_check=False) for _ in "ng")
        x = DTensor.from_local(torch.empty(T, D), mesh, [Replicate()], run_check=False)
    model = Bag(w=w, norm=norm, gain=gain)

    def step() -> torch.Tensor:
        rows = x.redistribute(placements=[Shard(0)]).to_local()
        out = F.rms_norm(rows, (D,), model.norm.to_local(grad_placements=[Partial()]))
        whole = on(out, mesh, Shard(0)).redistribute(placements=[Replicate()])
        return (F.linear(whole, model.w).square().sum() + (x * model.gain).sum()).full_tensor()

    return model, step


@pytest.mark.parametrize("kernel", ["fused", "foreach", None])
def test_kernels_of_lists_are_followed_on_the_meta_device(kernel: str | None) -> None:
    def clip_and_step(m: nn.Module) -> torch.Tensor:
        options = {} if kernel is None else {kernel: True}
        norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True)
        torch.optim.AdamW(m.parameters(), lr=0.1, **options).step()
        return norm

    model, step = on_meta(fake_mesh(tp=2))
    report = audit(step, model, optimizer=clip_and_step)
    assert report.trace.run.notes == ()
    assert report.trace.readers
    assert {f.rule_id for f in report.findings} == set()
    assert verdicts(report, "norm") == {"tp": Verdict.DEFERRED}
    assert {
        p.fqn: str(p.update.state[0].kind) for p in report.trace.params if p.update and p.update.state
    } == {
        "w": "varying",
        "norm": "invariant",
        "gain": "invariant",
    }


def test_a_fault_in_a_list_is_told_of_its_own_place() -> None:
    def own_part(m: Any) -> None:
        grads = [p.grad for p in m.parameters()]
        torch._foreach_mul_(grads, m.w.grad.to_local().norm())
        torch.optim.AdamW(m.parameters(), lr=0.1, fused=True).step()

    model, step = on_meta(fake_mesh(tp=2))
    report = audit(step, model, optimizer=own_part)
    (finding,) = of_rule(report, "PA403")
    assert finding.param_fqn == "gain", "the norm's terms are summed after it, on all ranks alike"
    assert [s.call_site.code_line for s in finding.path] == [
        "torch._foreach_mul_(grads, m.w.grad.to_local().norm())",
        "torch.optim.AdamW(m.parameters(), lr=0.1, fused=True).step()",
    ]


class Lengths(EagerMode):
    """Notes how long the lists of each op are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "foreach" in func._opname or "fused" in func._opname:
            self.seen.append((func._opname, len(args[0])))
        return func(*args, **(kwargs or {}))


def weights(mesh: DeviceMesh) -> list[torch.Tensor]:
    shapes = ((4, 6), (6,), (2, 4))
    found: list[torch.Tensor] = [on(draw(str(i), *s), mesh, Replicate()) for i, s in enumerate(shapes)]
    for i, p in enumerate(found):
        p.grad = on(draw(f"g{i}", *shapes[i]), mesh, Replicate())
    return found


def test_an_op_on_lists_of_dtensors_runs_one_by_one_and_means_the_same() -> None:
    mesh = fake_mesh(tp=2)

    def update(params: list[torch.Tensor]) -> list[torch.Tensor]:
        norm = torch.nn.utils.clip_grad_norm_(params, 0.1, foreach=True)
        torch.optim.AdamW(params, lr=0.1, fused=True, amsgrad=True).step()
        torch.optim.SGD(params, lr=0.1, foreach=True, momentum=0.9).step()
        return [norm, *torch._foreach_norm(params), *params]

    together = update(weights(mesh))
    with Lengths() as lengths, Singly():
        apart = update(weights(mesh))
    assert [x.to_local().tolist() for x in apart] == [x.to_local().tolist() for x in together]
    on_dtensors = {name: n for name, n in lengths.seen if name != "_foreach_add_"}
    assert on_dtensors == {"_foreach_norm": 1, "_foreach_mul_": 1, "_fused_adamw_": 1}
    assert [n for name, n in lengths.seen if name == "_fused_adamw_"] == [1, 1, 1]


def test_readers_meet_dtensors_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a thousand takes DTensor longer than the step itself."""
    ran: list[tuple[str, int]] = []
    run = Flow._dtensor_op

    def noted(flow: Flow, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], list):
            ran.append((func._opname, len(args[0])))
        return run(flow, func, args, kwargs)

    monkeypatch.setattr(Flow, "_dtensor_op", noted)
    model, step = on_meta(fake_mesh(tp=2))
    audit(step, model, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True))
    assert ran == [("_fused_adamw_", 1)] * 3


def test_an_op_whose_numbers_go_by_place_runs_as_it_is() -> None:
    mesh = fake_mesh(tp=2)
    by_place = torch.tensor([1.0, 2.0, 3.0])
    params, plain = weights(mesh), [torch.ones(2), torch.ones(3)]
    want = [torch.addcmul(p, p.grad, p.grad, value=i + 1).to_local() for i, p in enumerate(params)]
    with Lengths() as lengths, Singly():
        torch._foreach_mul_(plain, 2.0)
        grads = [p.grad for p in params]
        torch._foreach_addcmul_(params, grads, grads, [1.0, 2.0, 3.0])
    assert [n for name, n in lengths.seen if name == "_foreach_mul_"] == [2], "plain tensors stay together"
    assert [n for name, n in lengths.seen if name == "_foreach_addcmul_"] == [1, 1, 1]
    assert [p.to_local().tolist() for p in params] == [w.tolist() for w in want]
    assert _spans_places(by_place, 3)
    assert not _spans_places(by_place[0], 3)


# --------------------------------------------------------------------------- what is not followed


def test_an_optimizer_that_needs_values_is_not_followed_and_said_so() -> None:
    mesh = fake_mesh(tp=2)
    with torch.device("meta"):
        model = Bag(w=torch.empty(D))

    def values(m: Any) -> float:
        return m.w.grad.sum().item()

    report = audit(lambda: model.w.square().sum(), model, mesh=mesh, optimizer=values)
    assert any(
        "The optimizer of Bag was not followed" in n and "in values" in n for n in report.trace.run.notes
    )
    assert not report.trace.readers
    assert any("were not judged" in b for b in report.blind_spots)
    assert report.outcome is Outcome.CLEAN


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ("AdamW", "expected a torch optimizer, or a function of the model; got str."),
        (lambda: None, "which is called with the model alone: too many positional arguments."),
        (torch.optim.SGD([torch.zeros(1)], lr=1).step, None),
    ],
    ids=["no function", "no argument", "an optional one"],
)
def test_an_optimizer_that_cannot_be_called_is_refused(optimizer: Any, told: str | None) -> None:
    model, step = deferred(fake_mesh(tp=2))
    if told is None:
        assert audit(step, model, optimizer=optimizer).exit_status == 0
        return
    with pytest.raises(UsageError) as refused:
        audit(step, model, optimizer=optimizer)
    assert told in str(refused.value)


def test_what_a_trace_cannot_see_of_readers_is_said() -> None:
    model, step = deferred(fake_mesh(tp=2))
    assert any("ran after the trace and were not judged" in b for b in audit(step, model).blind_spots)
    followed = audit(step, model, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    assert any("not whether their numbers are right" in b for b in followed.blind_spots)


# --------------------------------------------------------------------------- DistributedDataParallel


def wrapped(mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = DistributedDataParallel(nn.Linear(D, H), process_group=mesh.get_group("dp"))
    return model, lambda: model(draw("x", T, D)).square().mean()


def test_the_reducer_runs_again_and_stays_usable() -> None:
    mesh = fake_mesh(dp=2)
    model, step = wrapped(mesh)
    for _ in range(2):
        report = audit(step, model, mesh=mesh, batch_placements={"dp": Shard(0)})
        assert verdicts(report, "weight") == {"dp": Verdict.OK}
        assert [(c.name, c.mesh_dims) for c in report.trace.collectives if c.name == "all_reduce"] == [
            ("all_reduce", ("dp",))
        ]
    followed = audit(
        step,
        model,
        mesh=mesh,
        batch_placements={"dp": Shard(0)},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert {j.factor for j in followed.judgements} == {Fraction(1, 2)}, "the average that backward left"
    step().backward()
    assert model.module.weight.grad is not None


def test_a_hook_in_cpp_is_refused_with_a_reason() -> None:
    mesh = fake_mesh(dp=2)
    model, step = wrapped(mesh)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(
        UsageError, match=r"built-in communication hook ALLREDUCE.*default_hooks\.allreduce_hook"
    ):
        audit(step, model, mesh=mesh, batch_placements={"dp": Shard(0)})


def test_backward_in_no_sync_alone_is_lost() -> None:
    mesh = fake_mesh(dp=2)
    model, loss = wrapped(mesh)

    def step() -> None:
        with model.no_sync():
            loss().backward()

    report = audit(step, model, mesh=mesh, batch_placements={"dp": Shard(0)})
    assert verdicts(report, "weight") == {"dp": Verdict.LOST_REDUCTION}
