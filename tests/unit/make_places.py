"""Reports whose findings stand at places that are no boundaries: ops, sums, losses, readers, departing numbers.

A small model on two tp ranks, in plain tensors but for one weight. What a trace or a measurement holds is written by
hand; what is said of it, the judge says.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import make_report as m

from placement_audit.judge import judge
from placement_audit.measurement import (
    Checkpoint,
    Departure,
    DepartureStep,
    Measurement,
    ParamMeasure,
    Reader,
)
from placement_audit.model import REPLICATE, CallSite, Layout, MeshSpec, State, StateKind, TensorInfo
from placement_audit.tracing import (
    Boundary,
    Collective,
    GradCrossing,
    GradRecord,
    LossRecord,
    ParamRecord,
    ParamUse,
    Phase,
    Trace,
    UpdateRecord,
    ValueDoubt,
)
from placement_audit.verdicts import Report

VARYING, INVARIANT, PARTIAL = m.VARYING, m.INVARIANT, m.PARTIAL
TERM = State(StateKind.TERM)
SMALL = TensorInfo(global_shape=(8,), local_shape=(8,), dtype="float32")


def on_tp(placement: Any) -> Layout:
    """A layout on the only mesh dim."""
    return Layout(("tp",), (placement,))


def site(line: int, code: str, file: str = "model.py", function: str = "forward") -> CallSite:
    """A line of the user's own."""
    return CallSite(path=f"job/{file}", line=line, function=function, code_line=code)


ADDED = site(10, "term = F.linear(h, self.down, self.bias)")
SUMMED = site(20, "dist.all_reduce(term, group=tp)")
LABELLED = site(30, "out = DTensor.from_local(term, mesh, [Partial()])")
ACTED = site(40, "h = F.gelu(term)")
BEGUN = site(50, "loss.backward()", "train.py", "step")
CLIPPED = site(60, "clip_grad_norm_(params, 1.0)", "train.py", "step")
STEPPED = site(70, "optimizer.step()", "train.py", "step")
GATHERED = site(80, "w = self.weight.to_local()")


def call(
    index: int, at: CallSite, kind: str, src: Any, dst: Any, module: str = "mlp", **more: Any
) -> Boundary:
    """A boundary of the forward, and the gradient's way back through it, labelled as the forward is."""
    crossing = GradCrossing(
        order=index, arrived=dst and on_tp(REPLICATE), arrived_state=(INVARIANT,),
        left=src and on_tp(REPLICATE), left_state=(INVARIANT,), tensor=SMALL,
    )  # fmt: skip
    made = Boundary(
        index=index, kind=kind, phase=Phase.FORWARD, call_site=at, user_site=at, module_fqn=module, param_fqn=None,
        src=src, dst=dst, grad_declared=None, value_state=(VARYING,), tensor=SMALL, grad=crossing,
    )  # fmt: skip
    return replace(made, **more)


def param(
    fqn: str, layout: Layout | None, grad: Layout | None, state: State, use: ParamUse, **more: Any
) -> ParamRecord:
    """A parameter with its gradient."""
    made = ParamRecord(
        fqn=fqn, layout=layout, tensor=SMALL, requires_grad=True,
        grad=GradRecord(layout=grad, state=(state,), dtype="float32"), boundaries=(), uses=(use,),
    )  # fmt: skip
    return replace(made, **more)


def use(op: str, at: CallSite, layout: Layout | None = None, result: Layout | None = None) -> ParamUse:
    """Where a parameter meets the activations."""
    return ParamUse(op=op, module_fqn="mlp", layout=layout, result=result, call_site=at)


BIAS = param("mlp.bias", None, None, INVARIANT, use("addmm", ADDED))
DOWN = param("mlp.down", on_tp(m.shard(1)), on_tp(m.shard(1)), VARYING, use("addmm", ADDED))
WEIGHT = param(
    "norm.weight", on_tp(REPLICATE), on_tp(PARTIAL), VARYING, use("mul", ACTED, on_tp(REPLICATE), on_tp(m.shard(0)))
)  # fmt: skip

BASE: Trace = replace(
    m.stock_report(layers=1).trace,
    mesh=MeshSpec(device_type="meta", dim_names=("tp",), shape=(2,)),
    batch_dims=(),
    params=(BIAS, DOWN, WEIGHT),
    boundaries=(),
    collectives=(),
)


def with_params(*params: ParamRecord, **more: Any) -> Trace:
    """The base with some parameters in place of those of their names, or beside them."""
    new = {p.fqn: p for p in params}
    known = {p.fqn: p for p in BASE.params}
    return replace(BASE, params=tuple((known | new).values()), **more)


def doubt(kind: str, **more: Any) -> ValueDoubt:
    """A doubt about a term of a sum in the forward."""
    made = ValueDoubt(
        kind=kind, mesh_dim="tp", op="addmm", call_site=ADDED, summed_at=SUMMED, carried=PARTIAL, declared=None,
        counted=(), after_backward=False, module_fqn="mlp",
    )  # fmt: skip
    return replace(made, **more)


def of_doubt(x: ValueDoubt, **more: Any) -> Report:
    """The report on one doubt."""
    return judge(replace(BASE, value_doubts=(x,), **more))


# --------------------------------------------------------------------------- in the forward

COUNTED = doubt("added", counted=(("mlp.bias", Fraction(1)),))


def counted() -> Report:
    """PA107: a bias in each rank's term."""
    return of_doubt(COUNTED)


def counted_and_labelled() -> Report:
    """The same, the terms labelled Partial; the call stands in two modules."""
    calls = (
        call(0, LABELLED, "from_local", None, on_tp(PARTIAL), "other"),
        call(1, LABELLED, "from_local", None, on_tp(PARTIAL)),
    )
    return of_doubt(replace(COUNTED, summed_at=LABELLED), boundaries=calls)


def applied() -> Report:
    """PA108: a gelu of a term, by a collective that no boundary owns."""
    ran = Collective(
        order=0, name="all_reduce", reduce_op="sum", mesh_dims=("tp",), group_ranks=(), phase=Phase.FORWARD,
        boundary=None, op=None, module_fqn="mlp", dtype="float32", numel=8, call_site=SUMMED,
    )  # fmt: skip
    return of_doubt(doubt("applied", op="gelu", call_site=ACTED), collectives=(ran,))


def declared() -> Report:
    """PA109: a term that is labelled a part."""
    x = doubt("declared", op="from_local", call_site=LABELLED, summed_at=None, declared=m.shard(0))
    return of_doubt(x, boundaries=(call(0, LABELLED, "from_local", None, on_tp(m.shard(0))),))


def averaged() -> Report:
    """PA110."""
    return of_doubt(doubt("averaged", op="mean", call_site=ACTED, summed_at=None, carried=m.shard(0)))


def left_out() -> Report:
    """PA111."""
    return of_doubt(doubt("left_out", op="log_softmax", call_site=ACTED, summed_at=None, carried=m.shard(1)))


def loss() -> Report:
    """PA106, of which a term was never summed."""
    return judge(
        replace(BASE, losses=(LossRecord(state=(VARYING,), call_site=BEGUN, unsummed=(("tp", "mlp.down"),)),))
    )


def summed_again() -> Report:
    """PA105: a sum of what is equal, that no boundary owns."""
    ran = replace(applied().trace.collectives[0], already_equal=("tp",))
    return judge(replace(BASE, collectives=(ran,)))


# --------------------------------------------------------------------------- at the end of backward


def never_summed() -> Report:
    """PA201: nothing on the way reduces."""
    return judge(with_params(replace(BIAS, grad=GradRecord(layout=None, state=(VARYING,), dtype="float32"))))


def no_gradient() -> Report:
    """PA206."""
    return judge(with_params(replace(BIAS, grad=None)))


# --------------------------------------------------------------------------- after backward


def drifting() -> Report:
    """PA403: a gradient left Partial, of which each rank takes its own term."""
    return judge(
        with_params(replace(WEIGHT, update=UpdateRecord(state=(TERM,), call_site=STEPPED)), readers=True)
    )


def clipped_apart() -> Report:
    """PA403: clipped by another factor on each rank."""
    update = UpdateRecord(state=(VARYING,), call_site=STEPPED, grad_state=(VARYING,), grad_site=CLIPPED)
    return judge(with_params(replace(BIAS, update=update), readers=True))


def updated_with_parts() -> Report:
    """PA404."""
    x = doubt(
        "updated", op="linalg_vector_norm", call_site=CLIPPED, summed_at=STEPPED, carried=m.shard(1),
        counted=(("mlp.down", Fraction(1)),), after_backward=True, module_fqn="",
    )  # fmt: skip
    return of_doubt(x)


def norm_of_terms() -> Report:
    """PA108 among the gradients' readers."""
    return of_doubt(doubt("applied", op="pow", call_site=CLIPPED, after_backward=True, module_fqn=""))


# --------------------------------------------------------------------------- measured


def measurement(*wrong: ParamMeasure, **more: Any) -> Measurement:
    """Two ranks on which all is right but ``wrong``."""
    named = {p.fqn: p for p in wrong}
    made = Measurement(
        ranks=2, device_type="cpu", backend="gloo", seed=1, dtype="float32", model="", tolerance=1e-5,
        step_tolerance=1e-4, loss=1.0, reference_loss=1.0, loss_error=0.0, grad_scale=Fraction(1), grad_norm=None,
        reference_grad_norm=None, params=tuple(named.get(p.fqn, measured(p.fqn)) for p in BASE.params),
        boundaries=(), seconds=1.0,
    )  # fmt: skip
    return replace(made, **more)


def measured(fqn: str, grad: float = 0.0, step: float = 0.0) -> ParamMeasure:
    """Numbers of a parameter."""
    return ParamMeasure(
        fqn=fqn, grad_error=grad, grad_ratio=1.0, grad_present=True, reference_present=True, local_error=None,
        grad_spread=(0.0,), init_spread=(0.0,), step_error=step, sgd_error=None,
    )  # fmt: skip


def read_in_part() -> Report:
    """PA402: one reader takes a term, another the whole."""
    readers = (
        Reader(params=("norm.weight",), through="aten._foreach_norm", whole=True, call_site=CLIPPED, user_site=CLIPPED),
        Reader(params=("norm.weight",), through="to_local", whole=False, call_site=STEPPED, user_site=STEPPED),
    )  # fmt: skip
    return judge(BASE, measurement(measured("norm.weight", step=0.25), readers=readers))


def wrong_update() -> Report:
    """PA402 of which no place is known."""
    return judge(BASE, measurement(measured("mlp.down", step=0.25)))


def departed(*, backward: bool = False, exact: bool = False) -> Report:
    """PA207, and PA208 where the forward departs: candidates, one of them a boundary."""
    steps = (
        DepartureStep(role="Mm's backward" if backward else "Mm", kind="op", call_site=ADDED, boundary=-1),
        DepartureStep(role="from_local", kind="from_local", call_site=LABELLED, boundary=0),
        DepartureStep(
            role="Sum's backward" if backward else "Sum", kind="op", call_site=CLIPPED, boundary=-1
        ),
        DepartureStep(role="own backward of Mine", kind="op", call_site=ACTED, boundary=-1),
    )
    d = Departure(
        direction="backward" if backward else "forward", what="the output of mlp", module_fqn="mlp", param_fqn=None,
        error=0.5, right=(Checkpoint(what="the output of norm", error=0.0),), steps=steps[:1] if exact else steps,
        exact=exact,
    )  # fmt: skip
    trace = replace(BASE, boundaries=(call(0, LABELLED, "from_local", None, on_tp(PARTIAL)),))
    off = 0.0 if backward else 0.5
    return judge(trace, measurement(measured("mlp.down", grad=0.5), loss_error=off, departures=(d,)))


def everything() -> Report:
    """What a trace can name, in one report; names are long, and one op stands in two modules."""
    long = "layers.0.feed_forward.experts.shared_experts.down_projection.lora_adapter.bias"
    counts = replace(COUNTED, counted=((long, Fraction(1)), ("", Fraction(1)), ("1", Fraction(1, 3))))
    doubts = (
        COUNTED,
        counts,
        *applied().trace.value_doubts,
        *(replace(x, module_fqn="other") for x in declared().trace.value_doubts),
        *averaged().trace.value_doubts,
        *left_out().trace.value_doubts,
        *updated_with_parts().trace.value_doubts,
        *norm_of_terms().trace.value_doubts,
    )
    trace = with_params(
        param(long, None, None, VARYING, use("aten.native_layer_norm_backward.default", ADDED)),
        replace(param(f"{long}.none", None, None, VARYING, use("mm", ADDED)), grad=None),
        value_doubts=doubts,
        boundaries=counted_and_labelled().trace.boundaries,
        collectives=applied().trace.collectives,
        losses=loss().trace.losses,
        readers=True,
    )
    return judge(trace)


def readers() -> Report:
    """What reads gradients, by numbers and by a trace, and where numbers depart, in one report."""
    bias, weight = clipped_apart().trace.params[0].update, drifting().trace.params[2].update
    backward, read = departed(backward=True), read_in_part()
    assert backward.measurement is not None
    assert read.measurement is not None
    trace = replace(
        with_params(replace(BIAS, update=bias), replace(WEIGHT, update=weight), readers=True),
        boundaries=backward.trace.boundaries,
    )
    report = judge(trace, replace(backward.measurement, readers=read.measurement.readers, loss_error=0.5))
    more = (*read.findings, *wrong_update().findings, *judge(trace).findings)
    known = {f.fingerprint for f in report.findings}
    return replace(report, findings=(*report.findings, *(f for f in more if f.fingerprint not in known)))


REPORTS = {
    "counted": counted,
    "counted and labelled": counted_and_labelled,
    "applied": applied,
    "declared": declared,
    "averaged": averaged,
    "left out": left_out,
    "loss": loss,
    "summed again": summed_again,
    "never summed": never_summed,
    "no gradient": no_gradient,
    "drifting": drifting,
    "clipped apart": clipped_apart,
    "updated with parts": updated_with_parts,
    "norm of terms": norm_of_terms,
    "read in part": read_in_part,
    "wrong update": wrong_update,
    "departed": departed,
    "departed in backward": lambda: departed(backward=True),
}
"""All of them, by what is wrong."""
