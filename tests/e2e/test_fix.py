"""``--fix`` as a user types it: on a copy of torchtitan with faults, real ranks, real files.

Runs are shared, for each is some audits long. Where a run need not measure it does not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from titan_copy import PR_2532, WRAPPER, copy_of_torchtitan  # type: ignore[import-not-found]

from placement_audit.mend import files

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
MODEL = "torchtitan/models/llama3/model/model.py"

LOCAL_NORM = """\
class LocalNorm(nn.RMSNorm):
    def forward(self, x):
        if not isinstance(x, DTensor):
            return super().forward(x)
        y = F.rms_norm(x.to_local(), self.normalized_shape, self.weight.to_local(), self.eps)
        return DTensor.from_local(y, x.device_mesh, x.placements)


"""

MAPPED_NORM = """\
class MappedNorm(nn.RMSNorm):
    def forward(self, x):
        if not isinstance(x, DTensor):
            return super().forward(x)
        norm = local_map(
            lambda x, w: F.rms_norm(x, self.normalized_shape, w, self.eps),
            out_placements=[Shard(1)],
            in_placements=([Shard(1)], [Replicate()]),
            device_mesh=x.device_mesh,
        )
        return norm(x, self.weight)


"""

HEAD = "from torch.distributed.tensor import DTensor, Replicate, Shard\n"
MAP_HEAD = "from torch.distributed.tensor.experimental import local_map\n"


def faulty(folder: Path) -> dict[str, str]:
    """A copy of torchtitan with a `LocalNorm` in each block and a `MappedNorm` at the end; its environment."""
    environ = copy_of_torchtitan(folder)
    text = (folder / MODEL).read_text(encoding="utf-8")
    assert text.count("nn.RMSNorm(") == 3
    text = text.replace("_norm = nn.RMSNorm(", "_norm = LocalNorm(").replace("nn.RMSNorm(", "MappedNorm(")
    text = text.replace("class FeedForward(", f"{LOCAL_NORM}{MAPPED_NORM}class FeedForward(", 1)
    text = text.replace("from torch import nn\n", HEAD + MAP_HEAD + "from torch import nn\n", 1)
    (folder / MODEL).write_text(text, encoding="utf-8")
    return environ


@dataclass
class Fixed:
    """A copy and what a command did to it.

    Attributes:
        folder: of the copy.
        before: its files before.
        status: the command's exit status.
        report: what it wrote, as JSON.
        error: what it said.
    """

    folder: Path
    before: dict[str, bytes]
    status: int
    report: dict[str, Any]
    error: str

    def changed(self) -> dict[str, str]:
        """File -> its diff's added and removed lines, by what lies there now."""
        after = sources(self.folder)
        assert after.keys() >= self.before.keys()
        return {name: after[name].decode() for name in self.before if after[name] != self.before[name]}

    def edits(self) -> list[dict[str, Any]]:
        return self.report["edits"]


def sources(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.py")}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "placement_audit", *words, "--format", "json"]


def fixed(folder: Path, environ: dict[str, str], *words: str, cwd: Path = ROOT) -> Fixed:
    before = sources(folder)
    done = subprocess.run(command(*words), cwd=cwd, env=environ, capture_output=True, text=True)
    report = json.loads(done.stdout) if done.stdout else {}
    return Fixed(folder=folder, before=before, status=done.returncode, report=report, error=done.stderr)


# --------------------------------------------------------------------------- two places, measured


@pytest.fixture(scope="module")
def two_places(tmp_path_factory: pytest.TempPathFactory) -> Fixed:
    """A bare to_local() in the blocks' norms, a local_map without in_grad_placements in the last."""
    folder = tmp_path_factory.mktemp("two")
    return fixed(folder, faulty(folder), "--config", "configs/tp.toml", "--fix")


def test_both_are_mended_and_the_second_audit_is_clean(two_places: Fixed) -> None:
    assert two_places.status == 0, two_places.error
    assert two_places.report["outcome"] == "clean"
    assert [f["rule_id"] for f in two_places.report["findings"] if f["severity"] != "note"] == []
    assert two_places.report["measurement"] is not None
    assert [e["status"] for e in two_places.edits()] == ["applied", "applied"]
    assert all("measured on 2 gloo ranks" in e["proof"] for e in two_places.edits())
    assert {len(e["fingerprints"]) for e in two_places.edits()} == {12, 1}


def test_the_file_says_what_it_should(two_places: Fixed) -> None:
    (name, text), *rest = two_places.changed().items()
    assert (name, rest) == (MODEL, [])
    expected = two_places.before[MODEL].decode()
    for old, new in (
        ("self.weight.to_local()", "self.weight.to_local(grad_placements=[Partial()])"),
        (
            "            device_mesh=x.device_mesh,\n        )\n",
            "            device_mesh=x.device_mesh,\n"
            "            in_grad_placements=([Shard(1)], [Partial()]),\n        )\n",
        ),
        ("tensor import DTensor, Replicate, Shard", "tensor import DTensor, Partial, Replicate, Shard"),
    ):
        assert expected.count(old) == 1
        expected = expected.replace(old, new)
    assert text == expected


def test_it_can_be_taken_back(two_places: Fixed) -> None:
    """Last, for it undoes the run."""
    files.revert((two_places.folder / MODEL).resolve())
    assert sources(two_places.folder) == two_places.before


# --------------------------------------------------------------------------- the wrapper, measured


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Fixed:
    """The fix that torchtitan PR 2532 proposed."""
    folder = tmp_path_factory.mktemp("wrapper")
    return fixed(folder, copy_of_torchtitan(folder, PR_2532), "--config", "configs/fsdp_tp.toml", "--fix")


def test_the_wrapper_is_mended_as_a_whole(wrapper: Fixed) -> None:
    assert wrapper.status == 0, wrapper.error
    assert wrapper.report["outcome"] == "clean"
    (edit,) = wrapper.edits()
    assert (edit["status"], edit["path"], len(edit["fingerprints"])) == ("applied", WRAPPER, 13)
    assert list(wrapper.changed()) == [WRAPPER]


# --------------------------------------------------------------------------- a small program

PROGRAM = """\
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if not isinstance(x, DTensor):
            return x * self.weight
        return DTensor.from_local({product}, x.device_mesh, x.placements)


def local(t):
    return t.to_local()


def wrapped(w):
    mesh = w.device_mesh
    return DTensor.from_local(w.to_local(), mesh, [Replicate()], grad_placements=[Partial()])


def build():
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = distribute_module(Scale(), mesh)

    def step():
        return model(distribute_tensor(x, mesh, [Shard(0)])).sin().sum().full_tensor()

    def reference():
        one = Scale()
        return one, lambda: one(x).sin().sum().backward()

    return {"model": model, "step": step, "mesh": mesh, "inputs": x, "reference": reference}
"""
BARE = "x.to_local() * self.weight.to_local()"
RUN = ("run", "program.py:build", "--world-size", "2")


def program(folder: Path, product: str) -> dict[str, str]:
    """A program in ``folder`` that multiplies so; its environment."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM.replace("{product}", product))
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path}


def ran(folder: Path, product: str, *words: str) -> Fixed:
    return fixed(folder, program(folder, product), *RUN, *words, cwd=folder)


def untouched(done: Fixed) -> bool:
    return not done.changed() and not list(done.folder.rglob(".placement-audit"))


def test_a_program_of_the_user_s_own(tmp_path: Path) -> None:
    done = ran(tmp_path, BARE, "--fix")
    assert done.status == 0, done.error
    (edit,) = done.edits()
    assert (edit["status"], edit["path"]) == ("applied", "program.py")
    mended = BARE.replace("weight.to_local()", "weight.to_local(grad_placements=[Partial()])")
    assert done.changed() == {"program.py": PROGRAM.replace("{product}", mended)}


def test_a_proof_that_fails_keeps_nothing_and_says_why(tmp_path: Path) -> None:
    """The wrapper leaves the sum to a label that never comes: to mend the product alone moves the fault there."""
    done = ran(tmp_path, "x.to_local() * wrapped(self.weight).to_local()", "--fix")
    assert done.status == 1, done.error
    assert untouched(done)
    (edit,) = done.edits()
    assert (edit["status"], edit["safe"]) == ("not kept", True)
    assert edit["proof"].startswith("new: PA201 lost-reduction of weight on tp at program.py:")
    assert "in wrapped" in edit["proof"]


def test_a_gradient_left_partial_is_not_kept_on_a_trace_s_word(tmp_path: Path) -> None:
    done = ran(tmp_path, BARE, "--fix", "--no-measure")
    assert (done.status, untouched(done)) == (1, True), done.error
    (edit,) = done.edits()
    assert edit["status"] == "not kept"
    assert edit["proof"].startswith("right only if its readers reduce it")


def test_an_unsafe_one_is_only_shown(tmp_path: Path) -> None:
    """One to_local() serves the weight and the activation, which is sharded."""
    done = ran(tmp_path, "local(x) * local(self.weight)", "--fix", "--no-measure")
    assert (done.status, untouched(done)) == (1, True), done.error
    (edit,) = done.edits()
    assert (edit["status"], edit["safe"], edit["diff"]) == ("shown", False, "")
    assert "no constant is right for all" in edit["reason"]


def test_a_dry_run_proves_and_writes_nothing(tmp_path: Path) -> None:
    done = ran(tmp_path, BARE, "--fix-dry-run")
    assert (done.status, untouched(done)) == (1, True), done.error
    (edit,) = done.edits()
    assert edit["status"] == "proven"
    assert "measured on 2 gloo ranks" in edit["proof"]
    assert [f["rule_id"] for f in done.report["findings"]] == ["PA201"]


# --------------------------------------------------------------------------- interrupted, misplaced


def _until(what: str, holds: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_killed_during_the_proof_the_files_are_untouched(tmp_path: Path, number: int) -> None:
    copy, place = tmp_path / "copy", tmp_path / "tmp"
    place.mkdir()
    environ = {**program(copy, BARE), "TMPDIR": str(place)}
    before = sources(copy)
    words = command(*RUN, "--fix")
    with subprocess.Popen(words, cwd=copy, env=environ, stdout=subprocess.PIPE, text=True) as process:
        _until("no proof began", lambda: list(place.glob("*/overlay.json")))
        _until("no process proves", lambda: _children(process.pid))
        children = _children(process.pid)
        process.send_signal(number)
        process.wait(30)
    assert process.returncode == -number
    assert sources(copy) == before
    assert not list(copy.rglob(".placement-audit"))
    _until("the proof outlives it", lambda: not any(_alive(pid) for pid in children), 30)
    if number == signal.SIGTERM:
        assert not list(place.glob("placement-audit-*"))


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_under_torchrun_it_is_refused() -> None:
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        command("--config", "configs/tp.toml", "--fix"), cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "placement-audit: error: --fix starts ranks of its own, again and again: run it without torchrun.\n"
    )
