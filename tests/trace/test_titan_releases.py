"""The released torchtitan 0.2.0 and 0.2.1, besides the installed one: README says they work."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from placement_audit.report.json_io import loads
from placement_audit.verdicts import Report, Verdict
from tests.releases import Unreachable, release
from tests.trace.titan03 import Job, command, reports, seeing
from tests.trace.worlds import of_rule

pytestmark = pytest.mark.trace

JOBS: tuple[Job, ...] = tuple(
    (name, None, f"configs/{name}.toml", ()) for name in ("tp", "fsdp_tp", "hsdp_tp")
)


@pytest.fixture(scope="module", params=["0.2.0", "0.2.1"])
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(f"titan{request.param}")
    try:
        return request.param, release(request.param, folder)
    except Unreachable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def traced(old: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return dict(reports(seeing(old[1]), tmp_path_factory.mktemp("reports"), JOBS))


def norms(report: Report) -> set[str]:
    return {p.fqn for p in report.trace.params if "norm" in p.fqn}


def of(report: Report, verdict: Verdict) -> set[str]:
    return {j.param_fqn for j in report.judgements if j.verdict is verdict}


@pytest.mark.parametrize("name", [name for name, *_ in JOBS])
def test_stock_is_right(old: tuple[str, Path], traced: dict[str, Report], name: str) -> None:
    report = traced[name]
    assert dict(report.trace.run.versions)["torchtitan"] == old[0]
    assert [f for f in report.findings if f.severity != "note"] == []
    assert report.exit_status == 0
    assert len({j.param_fqn for j in report.judgements}) == 57
    assert {j.verdict for j in report.judgements} <= {Verdict.OK, Verdict.DEFERRED}
    assert of(report, Verdict.DEFERRED) == (norms(report) if name == "tp" else set())
    assert report.trace.readers
    assert not any("not followed" in n for n in report.trace.run.notes)


def test_data_parallel_parts_are_averaged(traced: dict[str, Report]) -> None:
    """Each rank's loss is a mean over its own tokens; 0.2.2 sums."""
    report = traced["hsdp_tp"]
    dims = report.trace.batch_dims
    assert {d: {j.factor for j in report.judgements if j.mesh_dim == d} for d in dims} == {
        d: {Fraction(1, 2)} for d in dims
    }


OWN = """
import dataclasses
import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

class Own(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            g = p.grad.to_local()
            p.to_local().sub_(g @ g.T @ g if g.dim() == 2 else g)

def built(model_parts, options, dims, manager):
    return OptimizersContainer(model_parts, Own, {"defaults": {}})

spec = get_train_spec("simple_fsdp.llama3")
register_train_spec("own", dataclasses.replace(spec, build_optimizers_fn=built))
"""


def test_a_users_optimizer_is_given_what_the_trainer_gives(old: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "own_optimizer.py").write_text(OWN)
    saved = tmp_path / "report.json"
    words = ("--config", "configs/fsdp_tp.toml", "--format", "json", "--output-file", str(saved), "--")
    names = ("--experimental.custom_import", "own_optimizer", "--model.name", "own")
    done = command(seeing(old[1], tmp_path), *words, *names)
    assert done.returncode == 0, done.stderr
    report = loads(saved.read_bytes())
    assert report.trace.readers
    assert {f.param_fqn for f in of_rule(report, "PA404")} == {
        p.fqn for p in report.trace.params if len(p.tensor.global_shape) == 2
    }


@pytest.mark.gloo
def test_ranks_measure_it_right(old: tuple[str, Path], tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    saving = ("--format", "json", "--output-file", str(saved))
    done = command(seeing(old[1]), "--config", "configs/tp.toml", "--measure", *saving)
    assert done.returncode == 0, done.stderr
    report = loads(saved.read_bytes())
    assert report.measurement is not None
    assert len(report.measurement.params) == 57
    assert max(p.grad_error for p in report.measurement.params) < 1e-5
    assert max(p.sgd_error for p in report.measurement.params) < 1e-5
    assert of(report, Verdict.DEFERRED) == norms(report)
