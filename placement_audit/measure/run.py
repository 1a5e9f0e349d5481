"""One measurement: `prepare`, then the caller runs the step, then `finish`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from placement_audit.case import Case, Reference
from placement_audit.engine.trace import Tracer
from placement_audit.engine.world import World
from placement_audit.errors import NotMeasurable
from placement_audit.measure import activations, again, compare, declared, weights
from placement_audit.measure.exchange import gather, on_rank0
from placement_audit.measure.fingerprint import LARGEST, BoundaryPrints, Fingerprint, spreads
from placement_audit.measure.gradients import errors, grad_table
from placement_audit.measure.labels import coordinates
from placement_audit.measure.localise import localise
from placement_audit.measure.outputs import Key
from placement_audit.measure.update import compare_update
from placement_audit.measurement import BoundaryMeasure, Measurement, ParamMeasure

Note = Callable[[str], None]


def _silent(_text: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Both models, with the same weights.

    Attributes:
        world: the world mesh.
        params: the parallel model's, by FQN.
        weights: what was drawn, and how far the replicas were apart after the job's own init.
        reference: the model on one device; None on every rank but 0.
        reference_params: its parameters, by FQN; empty on every rank but 0. They have their gradients.
        reference_loss: what its step returned; None on every rank but 0.
        reference_outputs: what its modules put out; empty on every rank but 0.
        shapes: of those outputs.
        started: when, in seconds of `time.perf_counter`.
    """

    world: World
    params: dict[str, nn.Parameter]
    weights: weights.Weights
    reference: Reference | None
    reference_params: dict[str, nn.Parameter]
    reference_loss: float | None
    reference_outputs: dict[Key, activations.WholeOutput]
    shapes: dict[Key, tuple[int, ...]]
    started: float

    def watching(self, case: Case, tracer: Tracer) -> AbstractContextManager[activations.Watch]:
        """Watch the activations of the step that the tracer runs while this is open, for `finish`."""
        return activations.watched(case, tracer, weights.parameters(case.model), self.shapes)


def prepare(case: Case, *, seed: int, note: Note = _silent) -> Prepared:
    """Give the job new weights, and run the step of the same model on one device; collective.

    Args:
        case: on real ranks, with real tensors, in float32.
        seed: of the weights.
        note: called with a few words before each stage (for naming a hung rank).

    Raises:
        NotMeasurable: this job cannot be measured; all ranks raise alike.
    """
    started = time.perf_counter()
    if case.reference is None or case.update is None or case.backend == "fake" or case.device_type == "meta":
        raise NotMeasurable(
            case.no_reference
            or "not measured: it takes real ranks with real values, and a model that fits one device."
        )
    build = case.reference
    world = World.of(case)
    params = declared.as_dtensors(weights.parameters(case.model), case)
    note("looking at the job's initial weights")
    drawn = weights.survey(params, world, seed)
    weights.fill_parallel(params, drawn, case.mesh)

    def reference() -> Reference:
        with again.own_random_state(case.device_type):
            made = build()
        theirs = weights.parameters(made.model)
        shapes = {(fqn, tuple(p.shape)) for fqn, p in theirs.items()}
        odd = sorted(shapes ^ {(fqn, tuple(p.shape)) for fqn, p in params.items()})
        if odd:
            raise NotMeasurable(
                "not measured: the model on one device has other parameters than the parallel one; only "
                f"one of them has {', '.join(f'{fqn} {shape}' for fqn, shape in odd[:4])}."
            )
        coarse = [f"{fqn} ({p.dtype})" for fqn, p in theirs.items() if _eps(p) > _eps(params[fqn])]
        if coarse:
            raise NotMeasurable(
                f"not measured: the model on one device has coarser parameters than the job: {', '.join(coarse[:4])}."
            )
        weights.part(made.model, case.model)
        weights.fill_reference(theirs, drawn)
        return made

    note("building the model on one device")
    made = on_rank0("building the model on one device", reference)
    note("the step on one device")
    outputs: dict[Key, activations.WholeOutput] = {}

    def reference_step() -> float:
        assert made is not None
        with again.own_random_state(case.device_type):
            before = again.random_state(case.device_type)
            with activations.on_one_device(made.model) as table:
                loss = _number(made.step())
            outputs.update(table)
            if before == again.random_state(case.device_type):
                return loss
            theirs = weights.parameters(made.model)
            within = compare.tolerance(_dtype(theirs), 1)
            if again.is_random(made.model, theirs, lambda: _number(made.step()), loss, within):
                raise NotMeasurable(
                    "not measured: the step draws random numbers (dropout?), so that it has another loss each time "
                    "it is taken, and ranks and one device another one; measure it without."
                )
        return loss

    reference_loss = on_rank0("the step on one device", reference_step)
    return Prepared(
        world=world,
        params=params,
        weights=drawn,
        reference=made,
        reference_params=weights.parameters(made.model) if made else {},
        reference_loss=reference_loss,
        reference_outputs=outputs,
        shapes=gather({key: o.value.shape for key, o in outputs.items()})[0],
        started=started,
    )


def finish(
    prepared: Prepared,
    case: Case,
    *,
    loss: object,
    boundaries: Sequence[BoundaryPrints] = (),
    watch: activations.Watch | None = None,
    note: Note = _silent,
) -> Measurement:
    """Measure the step that was just run; collective. Leaves parameters and gradients as they were.

    Args:
        prepared: from `prepare`.
        case: the same.
        loss: what ``case.step()`` returned on this rank.
        boundaries: this rank's fingerprints, in call order.
        watch: what `Prepared.watching` noted; None where nothing was watched.
        note: as for `prepare`.

    Raises:
        NotMeasurable: a step of the optimizer on one device failed.
    """
    reference = prepared.reference
    assert case.update is not None
    declared.take_gradients(prepared.params, case)
    losses = gather((_number(loss), prepared.reference_loss))
    world = prepared.world
    within = compare.tolerance(_dtype(prepared.params), _tokens(case, world))
    note("comparing gradients")
    sizes = tuple(s for d, s in zip(world.dims, world.sizes, strict=True) if d in case.batch_dims)
    table = grad_table(
        prepared.params,
        prepared.reference_params if reference else None,
        world,
        sizes,
        within,
        case.grad_scale,
    )
    noise: Mapping[str, float] = {}
    if any(gather(any(e is not None and e > within for e in errors(table, within, {}).values()))):
        note("the step on one device, its weights rounded")
        noise = gather(on_rank0("that step", lambda: _rounding(prepared, case.device_type)))[0] or {}
    total, loss_error = _loss([mine for mine, _ in losses], losses[0][1], case, world)
    rows, departures = (), ()
    if watch is not None:
        note("comparing activations")
        compared = activations.compare_activations(watch, prepared.reference_outputs, world)
        rows = tuple(compared.rows.values())
        departures = localise(
            watch,
            compared,
            weights.parameters(case.model),
            errors(table, within, noise),
            loss_error,
            world,
            within,
        )
    both = (reference.model, prepared.reference_params) if reference else None
    steps = {}
    for which in ("sgd", "job"):
        note(f"comparing a step ({which})")
        steps[which] = compare_update(
            case.update, which, case.model, prepared.params, both, scale=table.scale
        )
    return Measurement(
        ranks=dist.get_world_size(),
        device_type=case.device_type,
        backend=case.backend,
        seed=prepared.weights.seed,
        dtype=str(_dtype(prepared.params)).removeprefix("torch."),
        model=case.twin,
        tolerance=within,
        step_tolerance=compare.step_tolerance(within),
        loss=total,
        reference_loss=_finite(losses[0][1]),
        loss_error=loss_error,
        grad_scale=table.scale,
        expected_scale=case.grad_scale,
        grad_norm=_optional(steps["job"].norm),
        reference_grad_norm=_optional(steps["job"].reference_norm),
        params=tuple(
            ParamMeasure(
                fqn=fqn,
                grad_error=row.grad_error,
                grad_ratio=row.grad_ratio,
                grad_present=row.grad_present,
                reference_present=row.reference_present,
                local_error=row.local_error,
                grad_spread=row.grad_spread,
                init_spread=prepared.weights.init_spread[fqn],
                step_error=steps["job"].errors.get(fqn),
                sgd_error=steps["sgd"].errors.get(fqn),
                grad_noise=noise.get(fqn),
            )
            for fqn, row in table.rows.items()
        ),
        boundaries=_boundaries(boundaries, world),
        # One rank's, so that all ranks have the same.
        readers=gather(steps["job"].readers)[0],
        activations=rows,
        departures=departures,
        seconds=round(time.perf_counter() - prepared.started, 3),
    )


def _rounding(prepared: Prepared, device_type: str) -> dict[str, float]:
    made, loss = prepared.reference, prepared.reference_loss
    assert made is not None
    assert loss is not None

    def step() -> float:
        with again.own_random_state(device_type):
            return _number(made.step())

    return again.rounding(made.model, prepared.reference_params, step, loss)


def _number(loss: object) -> float:
    """A loss as a number; collective for a DTensor."""
    assert isinstance(loss, torch.Tensor)
    return compare.whole(loss).sum().item()


def _loss(of_ranks: list[float], reference: float | None, case: Case, world: World) -> tuple[float, float]:
    """The global loss, and its relative error: the sum over the ranks with different batches.

    Ranks that share a batch (tp) each have its loss: each of them gives a sum, the worst is the error.
    """
    batch = [d in case.batch_dims for d in world.dims]
    at_rank = coordinates(world)
    sums: dict[tuple[int, ...], float] = {}
    for rank, loss in enumerate(of_ranks):
        at = tuple(c for c, varies in zip(at_rank[rank], batch, strict=True) if not varies)
        sums[at] = sums.get(at, 0.0) + loss
    assert reference is not None
    errors = [
        compare.ratio(abs(s - reference), abs(reference)) if s != reference else 0.0 for s in sums.values()
    ]
    return _finite(next(iter(sums.values()))), max(errors)


def _finite(x: float | None) -> float:
    return x if x is not None and math.isfinite(x) else LARGEST


def _optional(x: float | None) -> float | None:
    return None if x is None else _finite(x)


def _dtype(params: Mapping[str, nn.Parameter]) -> torch.dtype:
    """The coarsest dtype among the parameters."""
    dtypes = {p.dtype for p in params.values() if p.is_floating_point()}
    return max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float32)


def _eps(p: torch.Tensor) -> float:
    return torch.finfo(p.dtype).eps if p.is_floating_point() else 0.0


def _tokens(case: Case, world: World) -> int:
    """Tokens of the global batch."""
    sizes = [s for d, s in zip(world.dims, world.sizes, strict=True) if d in case.batch_dims]
    return max((x.numel() for x in case.inputs), default=1) * math.prod(sizes)


def _boundaries(mine: Sequence[BoundaryPrints], world: World) -> tuple[BoundaryMeasure, ...]:
    """Spreads at every boundary; none where the ranks did not make the same calls."""
    ranks = gather(list(mine))
    if len({tuple(b.index for b in r) for r in ranks}) > 1:
        return ()

    def over_ranks(prints: list[Fingerprint | None]) -> tuple[float, ...]:
        there = [p for p in prints if p is not None]
        return spreads(there, world) if len(there) == len(prints) else ()

    return tuple(
        BoundaryMeasure(
            index=calls[0].index,
            value_spread=over_ranks([c.value for c in calls]),
            arrived_spread=over_ranks([c.arrived for c in calls]),
            left_spread=over_ranks([c.left for c in calls]),
        )
        for calls in zip(*ranks, strict=True)
    )
