"""Are the gradients of this torchtitan right under tensor parallelism? On 2 real ranks, on the CPU, in a minute.

Copy this file into a fork of torchtitan 0.2 and run ``pytest test_two_ranks.py`` in an environment that has it and
placement-audit. It needs no GPU, no data and no tokenizer, and nothing else of this repository. It shows that

- the LLaMA-3 debug model, as it is, has every gradient right: traced, and measured against one device;
- a norm that calls ``weight.to_local()`` is found, at its line: the gradient is never summed over tp;
- the edit of that line which ``--fix`` would make mends it, proven by numbers.

Each audit is a process of its own, which starts its ranks (gloo) and ends them. `JOB` is the job; to watch another
one, put its text there, or mark a test ``@pytest.mark.placement_audit(config="my.toml", nproc=2)``.
"""

import subprocess
import sys

import pytest

from placement_audit.pytest_audit import Request, audit
from placement_audit.report.json_io import loads

JOB = """\
[job]
custom_config_module = "torchtitan.experiments.simple_fsdp.job_config"
[model]
name = "simple_fsdp.llama3"
flavor = "debugmodel"
[training]
local_batch_size = 2
seq_len = 64
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = 1
[activation_checkpoint]
mode = "none"
"""

FAULTY_JOB = f'{JOB}[experimental]\ncustom_import = "faulty_norm"\n'

FAULT = "self.weight.to_local()"

FAULTY_NORM = f"""\
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

usual = nn.RMSNorm.forward


def forward(self, x):
    if not isinstance(x, DTensor):
        return usual(self, x)
    weight = {FAULT}
    y = F.rms_norm(x.to_local(), self.normalized_shape, weight, self.eps)
    return DTensor.from_local(y, x.device_mesh, x.placements)


nn.RMSNorm.forward = forward
"""


def bad(report):
    return [(f.rule_id, f.param_fqn) for f in report.findings if f.severity == "error"]


def norms(report):
    return {p.fqn for p in report.trace.params if p.fqn.endswith("norm.weight")}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A folder with a job whose norms lose a reduction, and what ``--fix-dry-run`` reports of it."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "job.toml").write_text(FAULTY_JOB)
    (folder / "faulty_norm.py").write_text(FAULTY_NORM)
    command = [sys.executable, "-m", "placement_audit", "--config", "job.toml", "--fix-dry-run"]
    written = ["--format", "json", "--output-file", "report.json"]
    done = subprocess.run([*command, *written], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return folder, loads((folder / "report.json").read_bytes())


def test_stock_is_right(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    report = audit(Request(config="job.toml", nproc=2, device="cpu"), tmp_path)
    assert report.measurement is not None
    assert bad(report) == []
    assert report.exit_status == 0
    assert norms(report)
    assert all(j.verdict in ("ok", "deferred") for j in report.judgements)


def test_a_lost_reduction_is_found_at_its_line(faulty):
    _, report = faulty
    assert sorted(bad(report)) == [("PA201", fqn) for fqn in sorted(norms(report))]
    (cause,) = {f.path[0].call_site for f in report.findings if f.rule_id == "PA201"}
    assert cause.path.endswith("faulty_norm.py")
    assert cause.code_line == f"weight = {FAULT}"
    for f in report.findings:
        if f.rule_id == "PA201":
            assert {e.strength for e in f.evidence} == {"traced", "measured"}


def test_the_fix_is_proven(faulty):
    folder, report = faulty
    (edit,) = report.edits
    assert edit.status == "proven"
    assert "measured on 2 gloo ranks" in edit.proof
    assert {f.fingerprint for f in report.findings if f.rule_id == "PA201"} == set(edit.fingerprints)
    assert f"\n-    weight = {FAULT}\n+    weight = self.weight.to_local(grad_placements=" in edit.diff
    assert (folder / "faulty_norm.py").read_text() == FAULTY_NORM
