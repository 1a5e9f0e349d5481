"""The Python API: `audit` one step of a model, `watch` a step that the user runs, `render` a report."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any, Literal

from placement_audit import pipeline, suppress, userjob, usermeasure
from placement_audit.adapters import factory
from placement_audit.case import Case
from placement_audit.config import AuditConfig
from placement_audit.engine.trace import Tracer
from placement_audit.errors import UsageError
from placement_audit.job import Job
from placement_audit.judge import judge
from placement_audit.report import render as _render
from placement_audit.tracing import Trace
from placement_audit.userstep import as_on_gpus
from placement_audit.verdicts import Report

if TYPE_CHECKING:
    from torch import dtype, nn
    from torch.distributed.device_mesh import DeviceMesh

    from placement_audit.job import Placements

_NO_FILE = AuditConfig(path="", sha256="", job={}, job_path="")


def audit(
    step: Callable[[], object],
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    inputs: Any = (),
    batch_placements: Placements | None = None,
    optimizer: Any = None,
    declared: Mapping[str, Placements] | None = None,
    reference: Callable[[], Any] | None = None,
    reduce_dtype: dtype | None = None,
    name: str = "",
    verbose: bool = False,
) -> Report:
    """Audit one training step of a model.

    In one process on torch's fake process group the step is traced: any world size, CPU or meta tensors. On real
    ranks every rank calls this alike, and with ``reference`` the verdicts are proven with numbers: the model gets
    seeded weights, each gradient is compared with the one of one device, and so is each parameter after
    ``optimizer`` has read the gradients. Weights, buffers, gradients and the optimizer are left as they were.

    Args:
        step: see `placement_audit.job.Job` for this and all other arguments.
        model: likewise.
        mesh: likewise.
        inputs: likewise.
        batch_placements: likewise.
        optimizer: likewise.
        declared: likewise.
        reference: likewise.
        reduce_dtype: likewise.
        name: likewise.
        verbose: let torch warn.

    Returns:
        The report; `placement_audit.render` makes text of it, and ``exit_status`` is 0 where it is clean.

    Raises:
        UsageError: an argument is wrong; the message says which and what was expected.
        IncompleteError: the step failed, or there is nothing to audit.
    """
    job = Job(
        model=model,
        step=step,
        mesh=mesh,
        inputs=inputs,
        batch_placements=batch_placements,
        optimizer=optimizer,
        declared=declared,
        reference=reference,
        reduce_dtype=reduce_dtype,
        name=name,
    )
    case = userjob.case_of(job)
    measure = reference is not None and case.backend != "fake"

    def build(_config: AuditConfig, **_how: Any) -> Case:
        if case.backend == "fake":
            return case
        return usermeasure.settled(case) if measure else usermeasure.looked_at(case)

    options = pipeline.Options(verbose=verbose, measure=measure)
    with usermeasure.kept(case.model):
        return pipeline.run(_NO_FILE, options, build)


def audit_factory(build: Callable[[], Any], *, world_size: int = 2, verbose: bool = False) -> Report:
    """Audit what a function makes, traced in this process as several ranks of a fake world.

    What one rank's trace cannot see, numbers that differ between ranks, shows where others are played beside it:
    ``x.chunk(n)[rank]``, a vocabulary's offset. So the function is called several times, each time as another
    rank, with the process group there; ``placement-audit run FILE.py:FUNCTION`` does the same.

    Args:
        build: takes no arguments, makes mesh, model and step, and returns a `Job` or a dict of its fields.
        world_size: ranks of the fake world.
        verbose: let torch warn.

    Returns:
        The report. The fake process group of the last call stays.

    Raises:
        UsageError: what it made is no job, or something in it is wrong.
        IncompleteError: it or its step failed, or there is nothing to audit.
    """
    name = getattr(build, "__name__", type(build).__name__)
    config = replace(_NO_FILE, factory=name, world_size=world_size)

    def case(config: AuditConfig, **_how: Any) -> Case:
        return factory.build(config, make=build)

    return pipeline.run(config, pipeline.Options(verbose=verbose), case)


class Seen:
    """What `watch` saw."""

    def __init__(self) -> None:
        self._trace: Trace | None = None

    def report(self) -> Report:
        """The report on the step that ran inside the ``with`` block.

        Raises:
            UsageError: the block is not over, or no backward ran in it.
        """
        if self._trace is None:
            raise UsageError("watch: the with block is not over; ask for the report after it.")
        if all(p.grad is None for p in self._trace.params):
            raise UsageError(
                "watch: no parameter got a gradient; run forward and backward inside the with block."
            )
        return suppress.apply(judge(self._trace), (), today=date.today())


@contextmanager
def watch(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    inputs: Any = (),
    batch_placements: Placements | None = None,
    declared: Mapping[str, Placements] | None = None,
    name: str = "",
) -> Generator[Seen]:
    """Watch one step that runs inside a ``with`` block, as a training loop has it; traced evidence only.

    ::

        with placement_audit.watch(model, batch_placements={"dp": Shard(0)}) as seen:
            loss_of(model(batch)).backward()
        report = seen.report()

    Args:
        model: see `placement_audit.job.Job` for this and all other arguments.
        mesh: likewise.
        inputs: likewise.
        batch_placements: likewise.
        declared: likewise.
        name: likewise.

    Raises:
        UsageError: an argument is wrong, or gradients are there already.
    """
    job = Job(
        model=model,
        step=lambda: None,
        mesh=mesh,
        inputs=inputs,
        batch_placements=batch_placements,
        declared=declared,
        name=name,
    )
    case = userjob.case_of(job)
    if any(p.grad is not None for p in case.model.parameters()):
        raise UsageError(
            "watch: there are gradients already, and what they are nobody saw. Call optimizer.zero_grad() first."
        )
    seen = Seen()
    tracer = Tracer(case)
    with tracer.watching(), as_on_gpus():
        yield seen
    seen._trace = tracer.freeze(pipeline.record_of(_NO_FILE, case, measured=False))


def render(report: Report, fmt: Literal["text", "json"] = "text", *, width: int | None = None) -> str:
    """The report as a text for people, or as JSON.

    Args:
        report: from `audit` or `Seen.report`.
        fmt: "text" or "json".
        width: columns of the text; None asks the terminal.
    """
    return _render(report, fmt, width=width)
