"""Build, trace, judge, in that order, inside one rank; fills in what ran and how long each phase took."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from typing import TYPE_CHECKING

import placement_audit
from placement_audit.config import AuditConfig, RankEnv
from placement_audit.errors import IncompleteError, NotMeasurable
from placement_audit.measurement import Measurement
from placement_audit.progress import PROGRESS
from placement_audit.tracing import RunRecord, Trace
from placement_audit.verdicts import Report

if TYPE_CHECKING:
    from placement_audit.case import Case
    from placement_audit.engine.trace import Tracer
    from placement_audit.measure.activations import Watch
    from placement_audit.measure.run import Prepared

_SEED = 2217
"""Of a measurement's weights."""


def _silent(phase: str, seconds: float | None) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run, apart from what.

    Attributes:
        verbose: let torchtitan log and torch warn.
        rank_env: this process's place under torchrun; None alone.
        measure: measure real values against one device (real ranks only).
        tell: called with each phase's name, and None when it begins or its seconds when it ends.
        today: to set the last days of suppressions against.
    """

    verbose: bool = False
    rank_env: RankEnv | None = None
    measure: bool = False
    tell: Callable[[str, float | None], None] = _silent
    today: date = field(default_factory=date.today)


@contextmanager
def quiet(verbose: bool = False) -> Generator[None]:
    """Silence torchtitan's log and torch's warnings; torchtitan logs to the root logger."""
    if verbose:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def run(
    config: AuditConfig, options: Options | None = None, build: Callable[..., Case] | None = None
) -> Report:
    """Audit one job in this process.

    Args:
        config: see `placement_audit.config.load`.
        options: see `Options`.
        build: in place of `placement_audit.build.build`, for a job that is no file.

    Returns:
        The report; `RunRecord.phases` has the seconds of each phase.

    Raises:
        BuildError, ConfigError: the job cannot be built as configured.
        IncompleteError: the model failed, or nothing was there to audit.
    """
    options = options or Options()
    phases: list[tuple[str, float]] = []

    @contextmanager
    def phase(name: str) -> Generator[None]:
        PROGRESS.phase(name)
        options.tell(name, None)
        start = time.perf_counter()
        yield
        phases.append((name, round(time.perf_counter() - start, 3)))
        options.tell(*phases[-1])

    with quiet(options.verbose):
        with phase("build"):
            if build is None:
                from placement_audit.build import build
            case = build(config, rank_env=options.rank_env, float32=options.measure)
        _check_case(case)
        prepared = None
        if options.measure:
            with phase("weights"):
                case, prepared = _prepared(case)
        with phase("trace"):
            from placement_audit import stepfailed
            from placement_audit.engine.trace import Tracer
            from placement_audit.measure.fingerprint import fingerprint

            tracer = Tracer(case, PROGRESS.note, fingerprint if prepared is not None else None)
            if case.varying is not None:
                from placement_audit.engine.apart import Stream

                tracer.stream = Stream(case.varying)
            watch = None
            with stepfailed.told(case):
                with prepared.watching(case, tracer) if prepared is not None else nullcontext() as watch:
                    loss = tracer.run()
                tracer.follow_readers()
            trace = tracer.freeze(record_of(config, case, measured=prepared is not None))
            trace = replace(trace, other_ranks=case.other_ranks)
        measurement = None
        if prepared is not None:
            with phase("measure"):
                try:
                    measurement = _measured(prepared, case, loss, tracer, watch)
                except NotMeasurable as why:
                    run_record = replace(trace.run, evidence=("traced",), notes=(*trace.run.notes, str(why)))
                    trace = replace(trace, run=run_record)
        if case.in_own_dtypes is not None:
            with phase("own dtypes"):
                trace = _in_own_dtypes(trace, config, case.in_own_dtypes)
        with phase("judge"):
            from placement_audit import suppress
            from placement_audit.judge import judge

            report = judge(trace, measurement, apart=None if measurement else case.replicas_apart)
            report = suppress.apply(report, config.suppress, today=options.today)
    if not report.judgements:
        raise IncompleteError(f"audited nothing: {case.name} has no trainable parameter.")
    record = replace(report.trace.run, phases=tuple(phases))
    return replace(report, trace=replace(report.trace, run=record))


def _prepared(case: Case) -> tuple[Case, Prepared | None]:
    """The case with new weights and its reference; without, and a note why, where it can't be measured."""
    from placement_audit.measure.run import prepare

    try:
        return case, prepare(case, seed=_SEED, note=PROGRESS.note)
    except NotMeasurable as why:
        return replace(case, notes=(*case.notes, str(why))), None


def _in_own_dtypes(trace: Trace, config: AuditConfig, build: Callable[[], Case]) -> Trace:
    """The trace of a step in float32, with the dtypes of the same step as the job asks for it; collective.

    The same code ran twice, so the same calls crossed the same boundaries. Where they did not, the job chooses
    its way by dtype, and its dtypes stay unknown.
    """
    from placement_audit import stepfailed
    from placement_audit.engine.trace import Tracer

    case = build()
    tracer = Tracer(case, PROGRESS.note)
    with stepfailed.told(case):
        tracer.run()
    own = tracer.freeze(record_of(config, case, measured=True))
    if _ways(own) == _ways(trace):
        return replace(trace, collectives=own.collectives, reduce_dtype=own.reduce_dtype)
    note = "the dtypes of reductions were not looked at: in its own dtypes the job makes other calls."
    return replace(trace, run=replace(trace.run, notes=(*trace.run.notes, note)))


def _ways(trace: Trace) -> list[object]:
    """What a step did, apart from dtypes."""
    calls = [(b.kind, b.call_site, b.module_fqn, b.src, b.dst) for b in trace.boundaries]
    sent = [(c.name, c.reduce_op, c.mesh_dims, c.phase, c.boundary) for c in trace.collectives]
    return [*calls, *sent]


def _measured(
    prepared: Prepared, case: Case, loss: object, tracer: Tracer, watch: Watch | None
) -> Measurement:
    from placement_audit.measure.fingerprint import BoundaryPrints
    from placement_audit.measure.run import finish

    prints = [
        BoundaryPrints(index=index, value=value, arrived=arrived, left=left)
        for index, value, arrived, left in tracer.fingerprints()
    ]
    return finish(prepared, case, loss=loss, boundaries=prints, watch=watch, note=PROGRESS.note)


def record_of(config: AuditConfig, case: Case, *, measured: bool) -> RunRecord:
    """What ran, for a trace of ``case``."""
    from placement_audit.build import versions

    return RunRecord(
        tool_version=placement_audit.__version__,
        versions=versions(),
        model=case.name,
        config_path=config.path,
        config_sha256=config.sha256,
        overrides=config.overrides,
        world_size=case.mesh.size(),
        backend=case.backend,
        device_type=case.device_type,
        evidence=("traced", "measured") if measured else ("traced",),
        notes=case.notes,
        phases=(),
    )


def _check_case(case: Case) -> None:
    if case.mesh.size() == 1:
        raise IncompleteError(
            f"audited nothing: {case.name} runs on 1 rank, so no gradient needs a reduction. Give the job a "
            "degree "
            "of 2 or more (parallelism.tensor_parallel_degree, data_parallel_shard_degree), or --world-size."
        )
