"""The runtime fix, traced: ok everywhere, the sum where it belongs, nothing else moved; and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from placement_audit.errors import BuildError
from placement_audit.fix import Fixed, install, uninstall
from placement_audit.tracing import Phase
from placement_audit.verdicts import Report, Verdict
from tests.releases import Unreachable, release
from tests.trace.titan import report_on
from tests.trace.worlds import judgement

pytestmark = pytest.mark.trace

ROOT = Path(__file__).parents[2]
FIX = importlib.import_module("placement_audit.fix.install")
NAME = "torchtitan.experiments.simple_fsdp.simple_fsdp"
FLOAT32 = ("--training.mixed_precision_param", "float32")
FULL = ("--activation_checkpoint.mode", "full")
BY_OP = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
NO_SHARDS = ("--parallelism.data_parallel_shard_degree", "1")


@pytest.fixture(autouse=True)
def as_released() -> Generator[None]:
    uninstall()
    yield
    uninstall()


Kind = tuple[str, str, tuple[str, ...], int, str]


def collectives(report: Report) -> Counter[Kind]:
    return Counter((c.phase.value, c.name, c.mesh_dims, c.numel, c.dtype) for c in report.trace.collectives)


def norms(report: Report) -> set[str]:
    return {p.fqn for p in report.trace.params if "norm" in p.fqn}


def released_and_fixed(config: str, *overrides: str, deferred: bool = False) -> tuple[Report, Report]:
    old = report_on(config, *overrides)
    install(deferred=deferred)
    return old, report_on(config, *overrides)


def tp_sums(report: Report) -> Counter[Kind]:
    """The backward's all-reduces that go over tp, alone or jointly."""
    sums = collectives(report)
    return Counter({k: n for k, n in sums.items() if k[:2] == ("backward", "all_reduce") and "tp" in k[2]})


@pytest.mark.parametrize(
    ("config", "overrides", "numel"),
    [
        ("fsdp_tp.toml", (), 128),
        ("fsdp_tp.toml", FLOAT32, 128),
        ("fsdp_tp.toml", FULL, 128),
        ("fsdp_tp.toml", BY_OP, 128),
        ("fsdp_tp.toml", ("--model.flavor", "8B", *FULL), 2048),
        ("hsdp_tp.toml", (), 128),
    ],
    ids=str,
)
def test_the_sum_moves_behind_the_reduce_scatter_and_nothing_else_does(
    config: str, overrides: tuple[str, ...], numel: int
) -> None:
    old, new = released_and_fixed(config, *overrides)
    assert (new.findings, new.exit_status) == ((), 0)
    assert {j.verdict for j in new.judgements} == {Verdict.OK}
    dtype = "float32" if FLOAT32[0] in overrides else "bfloat16"
    n = len(norms(new))
    assert tp_sums(old) == {("backward", "all_reduce", ("tp",), numel * 2, dtype): n}
    assert tp_sums(new) == {("backward", "all_reduce", ("tp",), numel, "float32"): n}
    assert collectives(old) - tp_sums(old) == collectives(new) - tp_sums(new)


def test_it_is_the_parameter_s_own_redistribute_that_makes_both_sums_in_that_order() -> None:
    _, report = released_and_fixed("fsdp_tp.toml")
    trace = report.trace
    (fqn,) = {p.fqn for p in trace.params if p.fqn == "norm.weight"}
    (own,) = {b.index for b in trace.boundaries if b.param_fqn == fqn and b.kind == "redistribute"}
    backward = [c for c in trace.collectives if c.boundary == own and c.phase is Phase.BACKWARD]
    assert [(c.name, c.mesh_dims, c.numel) for c in backward] == [
        ("reduce_scatter", ("fsdp",), 256),
        ("all_reduce", ("tp",), 128),
    ]
    assert trace.boundaries[own].call_site.function == "forward", "called from the wrapper's forward"


def test_without_shards_the_two_sums_become_one() -> None:
    old, new = released_and_fixed("hsdp_tp.toml", *NO_SHARDS)
    assert (new.findings, {j.verdict for j in new.judgements}) == ((), {Verdict.OK})
    both = ("backward", "all_reduce", ("dp_replicate", "tp"), 256, "float32")
    assert tp_sums(new) == {both: 13}
    assert sum(collectives(old).values()) - sum(collectives(new).values()) == 13


@pytest.mark.parametrize(
    ("config", "overrides"),
    [("fsdp_tp.toml", FULL), ("hsdp_tp.toml", ()), ("hsdp_tp.toml", NO_SHARDS)],
    ids=str,
)
def test_deferred_it_is_left_to_the_readers(config: str, overrides: tuple[str, ...]) -> None:
    old, new = released_and_fixed(config, *overrides, deferred=True)
    assert (new.findings, new.exit_status) == ((), 0)
    late = {j.param_fqn for j in new.judgements if j.verdict is Verdict.DEFERRED}
    assert late == norms(new)
    assert {str(judgement(new, fqn, "tp").observed) for fqn in late} == {"Partial(sum)"}
    assert tp_sums(new) == {}
    assert collectives(old) - tp_sums(old) == collectives(new)


def test_a_job_installs_it_by_its_own_custom_import() -> None:
    sys.modules.pop("placement_audit.fix.auto", None)
    report = report_on("fsdp_tp_fixed.toml")
    assert (report.findings, len(norms(report))) == ((), 13)
    assert tp_sums(report) == {("backward", "all_reduce", ("tp",), 128, "float32"): 13}
    sys.modules.pop("placement_audit.fix.auto_deferred", None)
    report = report_on("fsdp_tp.toml", "--experimental.custom_import", "placement_audit.fix.auto_deferred")
    assert tp_sums(report) == {}


# --------------------------------------------------------------------------- install, uninstall


def state(module: Any) -> tuple[object, object]:
    return module.ReplicateComputation.replicate_compute, module._register_parametrization


def test_install_says_what_it_did_once_and_uninstall_undoes_it(caplog: pytest.LogCaptureFixture) -> None:
    module = importlib.import_module(NAME)
    before = state(module)
    with caplog.at_level(logging.INFO, "placement_audit.fix"):
        done = install()
        assert install() is done
    assert done == Fixed(modules=(NAME,), deferred=False, caches=())
    assert [r.getMessage() for r in caplog.records] == [
        f"placement-audit fixed {NAME}: the sum over tensor-parallel ranks of a replicated weight's gradient is "
        "made after the data-parallel reduction, in its dtype."
    ]
    assert state(module)[0] is not before[0]
    once = state(module)
    assert install(deferred=True).deferred
    assert state(module)[0] not in (before[0], once[0])
    uninstall()
    assert state(module) == before
    uninstall()
    assert state(module) == before


def test_a_model_made_before_is_fixed_too() -> None:
    from placement_audit.engine.trace import trace_step
    from placement_audit.judge import judge
    from tests.trace.titan import case_of
    from tests.trace.worlds import run_record

    case = case_of("fsdp_tp.toml")
    install()
    report = judge(trace_step(case, run_record(case)))
    assert set(tp_sums(report)) == {("backward", "all_reduce", ("tp",), 128, "float32")}


GOOD = """
class ReplicateComputation:
    def __init__(self, mesh):
        self.device_mesh = self.compute_placements = self.grad_placements = mesh
        self.param_dtype = self.reduce_dtype = None

    def replicate_compute(self, x):
        return x.to_local().from_local().redistribute()


def _register_parametrization(module, param_names, parametrization):
    pass
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("class Rep", "class Other", "a class ReplicateComputation with a method replicate_compute"),
        ("compute(self, x)", "compute(self, x, mesh)", "replicate_compute(self, x); got (self, x, mesh)"),
        (".redistribute()", "", "replicate_compute calling redistribute; it does not"),
        ("self.reduce_dtype = ", "", "ReplicateComputation keeping reduce_dtype; it does not"),
        ("def _register", "def _other", "_register_parametrization(module, param_names, parametrization)"),
        ("", "", None),
    ],
)
def test_another_class_of_that_name_is_refused(
    old: str, new: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that this fix does not know is left alone; one that has all it relies on is taken."""
    name = f"simple_fsdp_{abs(hash((old, new)))}"
    (tmp_path / f"{name}.py").write_text(GOOD.replace(old, new) if old else GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(FIX, "_MODULES", (name, "no.such.module"))
    if expected is None:
        assert install().modules == (name,)
        return
    module = importlib.import_module(name)
    before = dict(vars(module))
    with pytest.raises(BuildError) as refused:
        install()
    assert expected in refused.value.message
    assert f"{name}.py) is not a SimpleFSDP that placement-audit can fix" in refused.value.message
    assert "Nothing was changed" in refused.value.message
    assert dict(vars(module)) == before


def test_no_simple_fsdp_and_one_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FIX, "_MODULES", ("no.such.module", "nor.this"))
    with pytest.raises(BuildError, match="no SimpleFSDP to fix"):
        install()
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(FIX, "_MODULES", ("needs_more",))
    with pytest.raises(BuildError, match="needs_more cannot be imported: No module named 'a_package_that"):
        install()


# --------------------------------------------------------------------------- 0.3.0's wrapper classes

TWO_MODELS = """
import json, sys, torch
torch._utils._get_available_device_type = lambda: "cpu"
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from tests.trace.worlds import fake_mesh
from torchtitan.experiments.graph_trainer import simple_fsdp
from placement_audit.fix import install

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

def model(mesh, dtype):
    out = nn.Sequential(Norm(), Norm())
    for norm in out:
        norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh["tp"], [Replicate()]))
    policy = simple_fsdp.MixedPrecisionPolicy(dtype, torch.float32)
    return simple_fsdp.data_parallel(out, mesh["fsdp"], "fully_shard", mp_policy=policy)

mesh = fake_mesh(fsdp=2, tp=2)
if sys.argv[1] == "before":  # one that the release wrapped
    model(mesh, torch.float64)
if sys.argv[1] != "released":
    print(install(), file=sys.stderr)
a, b = model(mesh, torch.bfloat16), model(mesh, torch.float16)
classes = [type(m) for m in (*a, *b)]
print(json.dumps({
    "dtypes": [str(m.weight.dtype) for m in (*a, *b)],
    "shared": [classes[0] is classes[1], classes[2] is classes[3], classes[0] is classes[2]],
    "found": [getattr(sys.modules[c.__module__], c.__name__, None) is c for c in classes],
    "named": [c.__name__.startswith("SimpleFSDPNorm") for c in classes],
}))
"""


@pytest.fixture(scope="session")
def titan03(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Import path of torchtitan 0.3.0."""
    folder = tmp_path_factory.mktemp("titan03")
    try:
        release("0.3.0", folder / "site")
    except Unreachable as reason:
        pytest.skip(str(reason))
    path = [str(folder / "site"), str(ROOT)]
    if importlib.util.find_spec("spmd_types") is None:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder / "more"),
        ]
        done = subprocess.run([*pip, "spmd_types==0.2.3"], capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"torchtitan 0.3.0 needs spmd_types: {done.stderr.strip().splitlines()[-1]}")
        path.append(str(folder / "more"))
    return path


@pytest.mark.parametrize("when", ["released", "fixed", "before"])
def test_two_models_in_one_process_of_0_3(when: str, titan03: list[str]) -> None:
    """As released, the second model computes in the first one's dtype; its classes stay shared within a model."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(titan03), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_MODELS, when],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    second = "torch.bfloat16" if when == "released" else "torch.float16"
    assert got["dtypes"] == ["torch.bfloat16"] * 2 + [second] * 2
    assert got["shared"] == [True, True, when == "released"]
    assert got["found"] == got["named"] == [True] * 4
    if when != "released":
        name = "torchtitan.experiments.graph_trainer.simple_fsdp"
        assert str(Fixed(modules=(name,), deferred=False, caches=(name,))) in done.stderr
