"""The dtype of each reduction, on real ranks: measured in float32, reduced in the job's own dtypes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from placement_audit import pipeline
from placement_audit.config import RankEnv, load
from placement_audit.verdicts import Finding, Report
from tests.gloo.ranks import on_ranks
from tests.gloo.test_audit import FLOAT32, SHORT, errors, norms, replaced
from tests.trace.titan import CONFIGS

pytestmark = pytest.mark.gloo

BFLOAT16 = ("--training.dtype", "bfloat16")
"""Parameters, gradients and all in bfloat16; torchtitan 0.2.2 knows no reduce dtype but float32."""


@contextmanager
def another_way_in_bfloat16() -> Generator[None]:
    """A model that takes an extra turn (a redistribute there and back) where it computes in bfloat16."""
    original = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out: Any = original(self, x)
        if out.dtype is torch.bfloat16 and hasattr(out, "placements"):
            return out.redistribute(placements=out.placements)
        return out

    with replaced(nn.Linear, "forward", forward):
        yield


def audits(env: RankEnv) -> dict[str, Report]:
    out = {}
    for name, overrides in {
        "as it is": (),
        "float32": FLOAT32,
        "bfloat16": BFLOAT16,
        "another way": (),
    }.items():
        job = load(str(CONFIGS / "fsdp_tp.toml"), overrides=[*SHORT, *overrides], device="cpu")
        other = another_way_in_bfloat16() if name == "another way" else pipeline.quiet()
        with other:
            out[name] = pipeline.run(job, pipeline.Options(rank_env=env, measure=True))
    return out


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """FSDP 2 x TP 2; the job file asks for bfloat16 parameters and for float32 in reductions."""
    return on_ranks(4, audits)[0]


def dtype_findings(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.rule_id == "PA501"]


def test_the_sum_of_norm_gradients_over_tp_runs_in_bfloat16(reports: dict[str, Report]) -> None:
    """pytorch#190626. The numbers are those of float32 all the same."""
    report = reports["as it is"]
    found = dtype_findings(report)
    assert {f.param_fqn for f in found} == norms(report)
    assert {(f.mesh_dim, f.observed.split()[-1], f.expected.split(",")[0]) for f in found} == {
        ("tp", "bfloat16", "float32")
    }
    assert {f.path[0].call_site.code_line for f in found} == {"output = DTensor.from_local("}
    assert {e.strength for f in found for e in f.evidence} == {"measured"}
    assert (report.exit_status, errors(report)) == (0, set())
    assert report.measurement is not None
    assert report.measurement.dtype == "float32"
    assert max(p.grad_error for p in report.measurement.params if p.grad_error is not None) < 1e-5


def test_collectives_are_told_in_the_job_s_own_dtypes(reports: dict[str, Report]) -> None:
    def dtypes(name: str) -> set[tuple[str, str]]:
        return {
            (c.mesh_dims[0], c.dtype)
            for c in reports[name].trace.collectives
            if c.name == "reduce_scatter" and c.phase == "backward"
        }

    assert dtypes("as it is") == {("fsdp", "float32"), ("tp", "bfloat16")}
    assert dtypes("float32") == {("fsdp", "float32"), ("tp", "float32")}
    assert dtypes("bfloat16") == {("fsdp", "float32"), ("tp", "bfloat16")}


def test_a_job_in_float32_is_not_told_of_dtypes(reports: dict[str, Report]) -> None:
    assert dtype_findings(reports["float32"]) == []
    assert reports["float32"].trace.reduce_dtype == "float32"


def test_a_job_with_bfloat16_parameters_is(reports: dict[str, Report]) -> None:
    assert {f.param_fqn for f in dtype_findings(reports["bfloat16"])} == norms(reports["bfloat16"])


def test_a_step_that_goes_another_way_in_its_own_dtypes_says_so(reports: dict[str, Report]) -> None:
    report = reports["another way"]
    assert dtype_findings(report) == []
    assert "in its own dtypes the job makes other calls" in report.trace.run.notes[-1]
