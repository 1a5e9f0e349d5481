"""Bad input of every kind: one clear message, status 2 (or 3), no traceback.

Most commands run in this process, which pays for importing torchtitan once; a few are typed, as users do.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from placement_audit import cli
from placement_audit.adapters import environment, titan02_job

pytestmark = pytest.mark.e2e

REPO = Path(__file__).parents[2]
FSDP_TP = (REPO / "configs" / "fsdp_tp.toml").read_text()


@pytest.fixture(autouse=True)
def work_folder(tmp_path, monkeypatch):
    """A folder with a good job file; what an audit leaves behind in this process is taken back."""
    (tmp_path / "job.toml").write_text(FSDP_TP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def changed(folder: Path, old: str, new: str) -> None:
    assert old in FSDP_TP
    (folder / "job.toml").write_text(FSDP_TP.replace(old, new))


def typed(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*(env or {}).get("PYTHONPATH", "").split(os.pathsep), str(REPO)]).lstrip(
        os.pathsep
    )
    return subprocess.run(
        [sys.executable, "-m", "placement_audit", *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(env or {}), "PYTHONPATH": path},
    )


def told(status: int, out: str, err: str, *, expect: int = 2, lines: int = 1) -> str:
    """Check that all there is, is one message; return it."""
    assert status == expect, err
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("placement-audit: error: ")
    assert len(err.splitlines()) == lines, err
    return err.removeprefix("placement-audit: error: ").rstrip("\n")


def called(capsys, *args: str, expect: int = 2, lines: int = 1) -> str:
    status = cli.main(list(args))
    out, err = capsys.readouterr()
    return told(status, out, err, expect=expect, lines=lines)


# --------------------------------------------------------------------------- typed


def test_typed_no_such_file():
    done = typed("--config", "none.toml")
    message = told(done.returncode, done.stdout, done.stderr)
    assert message == "none.toml: no such file. --config must be a torchtitan job file (TOML)."


def test_typed_a_degree_that_does_not_divide():
    done = typed("--config", "job.toml", "--world-size", "6")
    message = told(done.returncode, done.stdout, done.stderr)
    assert "the world size asked for is 6, but the job's degrees give 4" in message


BROKEN = """\
from torchtitan.models.llama3.model import model

def forward(self, x):
    raise RuntimeError("the matrix is missing")

model.FeedForward.forward = forward
"""


def test_typed_a_model_that_fails_in_forward(work_folder):
    (work_folder / "broken.py").write_text(BROKEN)
    done = typed("--config", "job.toml", "--", "--experimental.custom_import", "broken")
    message = told(done.returncode, done.stdout, done.stderr, expect=3, lines=2)
    assert message.startswith(
        'simple_fsdp.llama3 debugmodel failed in forward, module "layers.0.feed_forward": '
        "RuntimeError: the matrix is missing (broken.py:4 in forward)."
    )


def test_typed_verbose_adds_the_traceback(work_folder):
    (work_folder / "broken.py").write_text(BROKEN)
    done = typed("--verbose", "--config", "job.toml", "--", "--experimental.custom_import", "broken")
    assert done.returncode == 3
    assert "Traceback" in done.stderr


def test_typed_an_unsupported_torchtitan(work_folder):
    info = work_folder / "site" / "torchtitan-0.4.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.4.0\n")
    done = typed("--config", "job.toml", env={"PYTHONPATH": str(work_folder / "site")})
    message = told(done.returncode, done.stdout, done.stderr)
    assert message.startswith("torchtitan 0.4.0 is not supported: expected 0.2.0 to 0.2.2")


# --------------------------------------------------------------------------- what is installed


def test_torchtitan_is_missing(capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(environment.util, "find_spec", lambda n: None if n == "torchtitan" else found(n))
    version = environment.version_of
    monkeypatch.setattr(environment, "version_of", lambda n: None if n == "torchtitan" else version(n))
    message = called(capsys, "--config", "job.toml")
    assert message.startswith("torchtitan is not installed")
    assert "pip install torchtitan==0.2.2" in message


def test_triton_is_missing(capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(environment.util, "find_spec", lambda n: None if n == "triton" else found(n))
    assert called(capsys, "--config", "job.toml").startswith("triton is not installed")


@pytest.mark.parametrize(
    ("package", "version", "words"),
    [
        ("torchtitan", "0.1.0", "torchtitan 0.1.0 is not supported: expected 0.2.0 to 0.2.2"),
        ("torchtitan", "0.3.0", "a TOML job file is torchtitan 0.2's, and torchtitan 0.3.0 is installed"),
        ("torch", "2.9.1+cu128", "torch 2.9.1+cu128 is not supported: expected 2.10 or newer"),
    ],
)
def test_unsupported_versions(capsys, monkeypatch, package, version, words):
    real = environment.version_of
    monkeypatch.setattr(environment, "version_of", lambda n: version if n == package else real(n))
    assert called(capsys, "--config", "job.toml").startswith(words)


def test_a_registered_job_needs_the_torchtitan_that_has_them(capsys, monkeypatch):
    registered = ("--module", "graph_trainer.llama3", "--config", "graph_trainer_llama3_debugmodel")
    message = called(capsys, *registered)
    assert message.startswith(
        "a job by --module and --config is torchtitan 0.3's, and torchtitan 0.2.2 is installed"
    )
    real = environment.version_of
    versions = {"torchtitan": "0.3.0", "torch": "2.10.0"}
    monkeypatch.setattr(environment, "version_of", lambda n: versions.get(n) or real(n))
    assert called(capsys, *registered).startswith("torch 2.10.0 is not supported: expected 2.11 or newer")


def test_a_checkout_on_the_path_says_its_own_version(work_folder, monkeypatch):
    (work_folder / "torchtitan").mkdir()
    (work_folder / "torchtitan" / "__init__.py").write_text("")
    (work_folder / "assets").mkdir()
    (work_folder / "assets" / "version.txt").write_text("0.9.9\n")
    monkeypatch.syspath_prepend(str(work_folder))
    monkeypatch.delitem(sys.modules, "torchtitan", raising=False)
    assert environment.torchtitan_version() == "0.9.9"


# --------------------------------------------------------------------------- the job file


def test_broken_toml(capsys, work_folder):
    (work_folder / "job.toml").write_text('[model]\nname = "llama3\n')
    assert called(capsys, "--config", "job.toml").startswith("job.toml: broken TOML: ")


def test_unknown_key_in_our_table(capsys, work_folder):
    (work_folder / "job.toml").write_text(f"{FSDP_TP}\n[placement_audit]\nworldsize = 4\n")
    message = called(capsys, "--config", "job.toml")
    assert message == "job.toml: placement_audit.worldsize: unknown key. Did you mean 'world_size'?"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "tensor_parallel_degree = 2",
            "tensor_parallel_degre = 2",
            "parallelism.tensor_parallel_degre: torchtitan 0.2.2 has no such key. "
            "Did you mean 'tensor_parallel_degree'?",
        ),
        (
            "[optimizer]",
            "[optimiser]",
            "optimiser: torchtitan 0.2.2 has no such section. Did you mean 'optimizer'?",
        ),
        (
            "steps = 10",
            "steps = 10\ntensor_parallel_degree = 2",
            "training.tensor_parallel_degree: torchtitan 0.2.2 has no such key. "
            "Did you mean 'parallelism.tensor_parallel_degree'?",
        ),
        (
            "[optimizer]",
            "[placement-audit]\n[optimizer]",
            "placement-audit: torchtitan 0.2.2 has no such section. Did you mean 'placement_audit'?",
        ),
        (
            "tensor_parallel_degree = 2",
            'tensor_parallel_degree = "2"',
            'parallelism.tensor_parallel_degree: expected an integer; got "2" (string).',
        ),
        ("seq_len = 512", "seq_len = 512.0", "training.seq_len: expected an integer; got 512.0 (float)."),
        (
            "[checkpoint]\nenable = false",
            "[checkpoint]\nenable = 1",
            "checkpoint.enable: expected true or false; got 1",
        ),
        ('name = "AdamW"', "name = 3", "optimizer.name: expected a string; got 3 (integer)."),
        (
            'mode = "selective"',
            'mode = "some"',
            'activation_checkpoint.mode: expected "selective" or "full" or "memory_budget" or "none"; '
            'got "some" (string).',
        ),
        (
            'custom_config_module = "torchtitan.experiments.simple_fsdp.job_config"',
            'custom_config_module = "no_such_module"',
            "job.custom_config_module = 'no_such_module': cannot be imported: ModuleNotFoundError",
        ),
    ],
)
def test_torchtitans_part(capsys, work_folder, old, new, words):
    changed(work_folder, old, new)
    message = called(capsys, "--config", "job.toml")
    assert words in message


def test_all_mistakes_of_a_job_are_told_at_once(capsys, work_folder):
    changed(work_folder, "seq_len = 512", 'seq_len = "512"\nlocal_batchsize = 2')
    message = called(capsys, "--config", "job.toml", lines=2)
    assert "training.seq_len" in message
    assert "training.local_batchsize" in message


# --------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["--model.flavour", "8B"],
            "--model.flavour: torchtitan 0.2.2 has no such option. Did you mean 'model.flavor'?",
        ),
        (
            ["--seq_len", "64"],
            "--seq_len: torchtitan 0.2.2 has no such option. Did you mean 'training.seq_len'?",
        ),
        (
            ["--job.config_file", "x"],
            "--job.config_file: the job file is given with --config, before the --.",
        ),
        (
            ["--training.seq_len", "many"],
            "refuses the overrides after --: Error parsing --training.seq-len: invalid",
        ),
        (
            ["--activation_checkpoint.mode=some"],
            "invalid choice 'some' for argument '--activation-checkpoint.mode'",
        ),
        (["stray"], "refuses the overrides after --: Unrecognized options: stray"),
        (["--training.seq_len"], "Missing value for argument '--training.seq-len'"),
        (
            ["--experimental.custom_import", "nomodule"],
            "experimental.custom_import = 'nomodule': cannot be imported",
        ),
    ],
)
def test_overrides(capsys, overrides, words):
    message = called(capsys, "--config", "job.toml", "--", *overrides)
    assert words in message
    assert message.isascii()


def test_a_box_of_help_text_becomes_one_line():
    bar, dash = "\u2502", "\u2500"
    box = f"\x1b[31m{dash} Parsing error {dash * 9}\n{bar} No such: x {bar}\n{bar} For full helptext, see"
    assert titan02_job._plain(box) == "No such: x"


# --------------------------------------------------------------------------- what cannot be built


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["--training.seq_len", "510"],
            "training.seq_len = 510 does not divide: torchtitan wants a multiple of",
        ),
        (["--parallelism.tensor_parallel_degree", "32"], "does not divide the model's heads"),
        (["--parallelism.tensor_parallel_degree", "0"], "tensor_parallel_degree: expected 1 or more; got 0."),
        (["--parallelism.pipeline_parallel_degree", "2"], "pipeline parallelism is not supported yet"),
        (
            ["--model.name", "simple_fsdp.llama4"],
            "torchtitan has no such model. Did you mean 'simple_fsdp.llama3'?",
        ),
        (["--model.name", "nonesuch"], "torchtitan has no such model. Known: autoparallel.deepseek_v3, "),
        (
            ["--model.flavor", "debugmodle"],
            "has no such flavor. Did you mean 'debugmodel'? Known: debugmodel, ",
        ),
        (["--model.converters", "float8"], "model.converters: torchtitan has no converter 'float8'."),
        (["--training.local_batch_size", "0"], "training.local_batch_size: expected 1 or more; got 0."),
    ],
)
def test_jobs_that_cannot_be_built(capsys, overrides, words):
    assert words in called(capsys, "--config", "job.toml", "--", *overrides)


def test_world_size_that_leaves_no_whole_shard(capsys):
    overrides = [
        "--parallelism.data_parallel_shard_degree",
        "-1",
        "--parallelism.tensor_parallel_degree",
        "4",
    ]
    message = called(capsys, "--config", "job.toml", "--world-size", "6", "--", *overrides)
    assert "6 = 1 x 4 + 2. Take a multiple of 4." in message


def test_nothing_to_audit_is_incomplete(capsys):
    overrides = ["--parallelism.data_parallel_shard_degree", "1", "--parallelism.tensor_parallel_degree", "1"]
    message = called(capsys, "--config", "job.toml", "--", *overrides, expect=3)
    assert message.startswith("audited nothing: simple_fsdp.llama3 debugmodel runs on 1 rank")


def test_cuda_that_is_not_there(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert "torch sees no CUDA device here" in called(capsys, "--config", "job.toml", "--device", "cuda")


def test_an_output_folder_that_is_not_there_is_told_before_the_audit(capsys):
    message = called(capsys, "--config", "job.toml", "--output-file", "none/report.txt")
    assert "there is no folder" in message
