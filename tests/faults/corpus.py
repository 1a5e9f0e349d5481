"""The founders' corpus of faults and traps, where it lies beside this checkout: each case as a `Job`.

A case is a program of its own that calls one driver with its model, its loss and what is true of each variant. Here
the driver is one that keeps what it is called with, so that the very same program is audited.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from placement_audit import Job, Report, audit, audit_factory
from placement_audit.config import RankEnv
from placement_audit.userjob import unwrapped

CASES = Path(
    os.environ.get("PLACEMENT_AUDIT_CORPUS", Path(__file__).parents[3] / "shared" / "corpus" / "cases")
)

VARIES = {
    **dict.fromkeys(("01", "13", "21", "24", "T01", "T11"), "dp"),
    **dict.fromkeys(("17", "T09"), "tp"),
    "27": "ep",
}
"""What a user would say of the batch: the mesh dim that it is spread over, by the case's number."""

Item = tuple[str, str]
"""A case's folder and a variant's name."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variant.

    Attributes:
        job: it.
        expected: parameter, or what else is spoken of -> "OK", "PENDING", "WRONG" or "MISSING".
        runs: whether this torch has what it needs.
    """

    job: Job
    expected: dict[str, str]
    runs: bool


def items(ranks: int | None = None) -> Iterator[Item]:
    """All variants of the cases for so many ranks; () where the corpus is not there."""
    for path in sorted(CASES.glob("*/case.py")):
        text = path.read_text()
        if ranks in (None, int(_line("ranks", text))):
            yield from ((path.parent.name, v) for v in _line("variants", text).split())


def ranks_of(name: str) -> int:
    """How many ranks a case is for."""
    return int(_line("ranks", (CASES / name / "case.py").read_text()))


def _line(key: str, text: str) -> str:
    found = re.search(rf"^# {key}: (.*)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def made(item: Item) -> Case:
    """A variant, on the process group that is there."""
    name, variant = item
    sys.path.insert(0, str(CASES))
    try:
        import common  # pyrefly: ignore [missing-import]

        kept: dict[str, Any] = {}
        path = str(CASES / name / "case.py")
        main, argv = common.main, sys.argv
        common.main, sys.argv = lambda **given: kept.update(given), [path, "--variant", variant]
        try:
            runpy.run_path(path, run_name="__main__")
        finally:
            common.main, sys.argv = main, argv
    finally:
        sys.path.remove(str(CASES))
    torch_now = ".".join(torch.__version__.split(".")[:2])
    expected = {
        what: truth.get(torch_now, truth.get("*")) if isinstance(truth, dict) else truth
        for what, truth in kept["expect"][variant].items()
    }
    needs = kept.get("needs")
    return Case(job=_job(item, kept), expected=expected, runs=needs is None or needs(variant))


def _job(item: Item, given: dict[str, Any]) -> Job:
    name, variant = item
    mesh = init_device_mesh("cpu", given["mesh"], mesh_dim_names=given["names"])
    torch.manual_seed(0)
    whole = given["ref"]()
    torch.manual_seed(1)
    batch = given["batch"]()
    model = given["build"](whole, mesh, variant)
    number = name.partition("_")[0]
    clips = "total_norm" in given["expect"][variant]
    step, its_step = given.get("step"), given.get("ref_step")

    def reference() -> Any:
        torch.manual_seed(0)
        one = given["ref"]()
        holder = _named(one, model)
        loss = lambda: given["ref_loss"](one, batch)  # noqa: E731
        if clips:
            return holder, loss, _clip_whole
        return (holder, loss) if step is None else (holder, loss, its_step or (lambda _model: None))

    def clip(m: nn.Module) -> float:
        norm = given["extra"](m, whole, mesh, variant)["total_norm"][0]
        with torch.no_grad():
            for p in m.parameters():
                assert isinstance(p, DTensor)
                assert isinstance(p.grad, DTensor)
                g = p.grad.redistribute(placements=p.placements)
                p.to_local().sub_(g.to_local(), alpha=float(10 / norm))
        return norm

    for p in whole.parameters() if clips else ():
        p.grad = torch.ones_like(p)  # what its driver would have left there
    optimizer: Any = clip if clips else None if step is None else lambda m: step(m, mesh, variant)
    return Job(
        model=model,
        step=lambda: given["loss"](model, batch, mesh, variant),
        mesh=mesh,
        inputs=batch,
        batch_placements={VARIES[number]: Shard(0)} if number in VARIES else {},
        optimizer=optimizer,
        declared={n: list(p) for n, p in (given.get("plain") or {}).items()},
        reference=reference,
        name=f"{name}/{variant}",
        reduce_dtype=torch.float32 if number == "21" else None,
    )


def _clip_whole(model: nn.Module) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=float(10 / norm))
    return norm


def _named(one: nn.Module, model: nn.Module) -> nn.Module:
    """The reference under the names that the parallel model has: some cases hold it in another module."""
    names = {n for n, _ in unwrapped(model).named_parameters()}
    if names & {n for n, _ in one.named_parameters()}:
        return one
    prefixes = {n.partition(".")[0] for n in names}
    holder = nn.Module()
    holder.add_module(prefixes.pop(), one)
    return holder


def traced(item: Item) -> tuple[Report, dict[str, str]] | None:
    """(the traced report, what is true); None where this torch cannot run it."""
    case: Case | None = None

    def build() -> Job:
        nonlocal case
        case = made(item)
        return case.job

    report = audit_factory(build, world_size=ranks_of(item[0]))
    assert case is not None
    return (report, case.expected) if case.runs else None


def measured(_env: RankEnv, todo: list[Item]) -> dict[Item, tuple[Report, dict[str, str]] | None]:
    """The measured report on each, on the ranks that are there, and what is true."""
    found: dict[Item, tuple[Report, dict[str, str]] | None] = {}
    for item in todo:
        case = made(item)
        arguments = {f.name: getattr(case.job, f.name) for f in fields(Job)}
        report = audit(arguments.pop("step"), arguments.pop("model"), **arguments) if case.runs else None
        found[item] = None if report is None else (report, case.expected)
    return found
