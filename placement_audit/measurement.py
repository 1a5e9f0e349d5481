"""What real ranks measured, as plain data: numbers against the same job on one device."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction

from placement_audit.model import CallSite

LARGEST = sys.float_info.max
"""Stands for a difference or an error that is no finite number; JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamMeasure:
    """One parameter's numbers, against the same job on one device.

    All errors are relative (Frobenius norm of the difference over the reference's norm), dimensionless, the
    worst over the ranks.

    Attributes:
        fqn: the parameter.
        grad_error: of the gradient assembled as its placements say; None where either side has none.
        grad_ratio: norm of the assembled gradient over the reference's, before ``grad_scale`` is taken out.
        grad_present: whether backward left a gradient on every rank.
        reference_present: whether the reference has one.
        local_error: of the stored local part, read as if it had the parameter's own placements.
        grad_spread: per world mesh dim, the largest relative difference between ranks that by the gradient's
            label hold the same; None where the label lets them differ.
        init_spread: likewise for the parameter before the step.
        step_error: of the parameter's value after one step with the job's own clipping and optimizer, over
            the elements whose gradient is not near zero (at least a hundredth of its root mean square): there
            the first step of Adam is a sign, which rounding decides. Compares with ``step_tolerance``.
        sgd_error: of the parameter's change in one plain SGD step with the same clipping, for AdamW's first
            step is blind to scale. Compares with ``tolerance``. Both steps are taken with gradients so large
            that clipping does clip; both are None where either side has no gradient.
        grad_noise: how far rounding alone moves the gradient: its relative change on one device when each weight
            is off by one unit of its last place. None where nobody asked, for all gradients were right.
    """

    fqn: str
    grad_error: float | None
    grad_ratio: float | None
    grad_present: bool
    reference_present: bool
    local_error: float | None
    grad_spread: tuple[float | None, ...]
    init_spread: tuple[float | None, ...]
    step_error: float | None
    sgd_error: float | None
    grad_noise: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryMeasure:
    """Whether the ranks' values really agreed at one boundary.

    Attributes:
        index: into ``Trace.boundaries``.
        value_spread: per world mesh dim, the largest relative difference between ranks of the input value.
        arrived_spread: likewise of the arriving gradient; () where none came.
        left_spread: likewise of the gradient that left; ().
    """

    index: int
    value_spread: tuple[float, ...]
    arrived_spread: tuple[float, ...]
    left_spread: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Somebody who read gradients that were left Partial, while the job's own clipping and optimizer ran.

    Attributes:
        params: FQNs of the gradients.
        through: the DTensor op ("aten._foreach_norm"), or "to_local".
        whole: whether it reads the reduced gradient: DTensor ops do, `to_local` gets one rank's term.
        call_site: first frame outside DTensor's own core.
        user_site: first frame outside torch.
    """

    params: tuple[str, ...]
    through: str
    whole: bool
    call_site: CallSite
    user_site: CallSite


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMeasure:
    """What one module put out, and the gradient that came back to it, against one device.

    Both are put together from the ranks' parts; errors are relative, the worst over the replicas.

    Attributes:
        fqn: the module.
        call: which of its calls, 0 first.
        output: which of the tensors that it put out.
        value_error: None where it was not compared.
        grad_error: likewise; a gradient that none of the two has is not compared.
        why_not: why one of them was not compared; "" where both were.
    """

    fqn: str
    call: int
    output: int
    value_error: float | None
    grad_error: float | None
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A place up to which all is right.

    Attributes:
        what: "the output of layers.0.attention.wo", "the loss".
        error: relative.
    """

    what: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DepartureStep:
    """Something that ran between the last right numbers and the first wrong ones.

    Attributes:
        role: what it is, in a few words.
        kind: the boundary's, the op's or the collective's name.
        call_site: where.
        boundary: index into ``Trace.boundaries``; -1 for something else.
    """

    role: str
    kind: str
    call_site: CallSite
    boundary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Where numbers part from one device's: wrong here, and all that this was computed from is right.

    Attributes:
        direction: "forward": a value; "backward": a gradient.
        what: of what: "the output of layers.0.attention.wo", "layers.0.attention_norm.weight", "the loss".
        module_fqn: the module; "" for the loss.
        param_fqn: the parameter whose gradient it is; None for an activation.
        error: relative.
        right: what it was computed from.
        steps: what ran in between; the first one is the place where it departs, as far as can be told.
        exact: whether values on both sides of the first step show that it is there.
    """

    direction: str
    what: str
    module_fqn: str
    param_fqn: str | None
    error: float
    right: tuple[Checkpoint, ...]
    steps: tuple[DepartureStep, ...]
    exact: bool = False


_OF_ROUNDING = 10
"""Ranks add up in another order at every op: so many times what a rounding of the weights does is no fault."""

_TELLING = 0.1
"""A lost or doubled reduction changes a gradient by more than this part of it, nearly always."""


def allowed(tolerance: float, noise: float | None) -> float:
    """Relative error below which a gradient counts as right; see `ParamMeasure.grad_noise`."""
    return max(tolerance, _OF_ROUNDING * (noise or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What real ranks with real numbers showed.

    Attributes:
        ranks: how many.
        device_type: "cpu" or "cuda".
        backend: "gloo" or "nccl".
        seed: of weights and batch.
        dtype: that everything was computed in.
        model: what was run, where it had to be smaller than the job's, in words; "" for the job's own.
        tolerance: relative error below which numbers count as equal.
        step_tolerance: likewise for changes of parameters.
        loss: global, as the ranks computed it.
        reference_loss: on one device.
        loss_error: relative.
        grad_scale: common factor of all gradients over the reference: 1 where the data-parallel ranks' parts
            are summed, 1/n where they are averaged; found out, not assumed.
        expected_scale: the factor that the job's loss calls for; None for unknown.
        grad_norm: total norm that the ranks' clipping reported.
        reference_grad_norm: on one device.
        params: in the model's order.
        boundaries: in call order.
        seconds: wall time of the measurement.
        readers: who read the gradients that were left Partial, on rank 0.
        activations: in forward order.
        departures: in forward order for values; where all of those are right, in backward order for gradients.
    """

    ranks: int
    device_type: str
    backend: str
    seed: int
    dtype: str
    model: str
    tolerance: float
    step_tolerance: float
    loss: float
    reference_loss: float
    loss_error: float
    grad_scale: Fraction
    grad_norm: float | None
    reference_grad_norm: float | None
    params: tuple[ParamMeasure, ...]
    boundaries: tuple[BoundaryMeasure, ...]
    seconds: float
    expected_scale: Fraction | None = None
    readers: tuple[Reader, ...] = ()
    activations: tuple[ActivationMeasure, ...] = ()
    departures: tuple[Departure, ...] = ()

    def allowed(self, p: ParamMeasure) -> float:
        """Relative error below which one parameter's gradient counts as right."""
        return allowed(self.tolerance, p.grad_noise)

    def telling(self, p: ParamMeasure) -> bool:
        """Whether its numbers can tell right from wrong: not those of a gradient that is zero but for rounding."""
        return self.allowed(p) < _TELLING
