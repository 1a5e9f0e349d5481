"""A gradient that somebody holds for a while on one rank: torch copies it there, and it is the same gradient."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.ranks import on_ranks

pytestmark = pytest.mark.gloo


def _held(env: Any, holder: int, meets: bool) -> tuple[str, set[str], tuple[str, ...]]:
    """(Verdict on the weight, rules of all findings, notes of the run)."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from placement_audit import audit
    from tests.faults.family import one_device
    from tests.faults.functions import CopyHeld, Reduce

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")
    torch.manual_seed(0)
    a, b, x = torch.randn(4, 4), torch.randn(8, 4), torch.randn(8, 4)
    model = nn.ParameterDict({"a": a, "b": b.chunk(2)[env.rank]})
    held: list[torch.Tensor] | None = [] if env.rank == holder else None

    def step() -> torch.Tensor:
        y = (x @ model["a"]).square().mean() if meets else 0.0
        z = x @ CopyHeld.apply(model["a"], group, held)
        return y + Reduce.apply((z @ model["b"].T).square().mean(), group)

    def loss(m: Any) -> torch.Tensor:
        y = (x @ m["a"]).square().mean() if meets else 0.0
        return y + 2 * ((x @ m["a"]) @ m["b"].T).square().mean()

    report = audit(
        step,
        model,
        mesh=mesh,
        inputs=(x,),
        declared={"b": {"tp": Shard(0)}},
        reference=one_device(nn.ParameterDict({"a": a, "b": b}), loss),
    )
    assert report.measurement is not None, report.trace.run.notes
    (j,) = [j for j in report.judgements if j.param_fqn == "a"]
    return str(j.verdict), {f.rule_id for f in report.findings}, report.trace.run.notes


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("meets", [False, True], ids=["kept", "met by another"])
def test_it_is_the_same_gradient(holder: int, meets: bool) -> None:
    for verdict, rules, notes in on_ranks(2, _held, holder, meets):
        assert (verdict, rules, notes) == ("ok", set(), ())
