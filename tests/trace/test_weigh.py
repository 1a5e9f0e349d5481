"""Traced against measured: who decides, and when it is our fault. The traces are real, the numbers made."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from placement_audit.judge import judge
from placement_audit.measurement import BoundaryMeasure, Measurement, ParamMeasure
from placement_audit.model import StateKind
from placement_audit.tracing import Trace
from placement_audit.verdicts import Report, Verdict
from placement_audit.weigh import slots
from tests.trace.test_matrix import CELLS, run_cell
from tests.trace.worlds import judgement, of_rule

pytestmark = pytest.mark.trace

RIGHT = ParamMeasure(
    fqn="weight",
    grad_error=1e-7,
    grad_ratio=1.0,
    grad_present=True,
    reference_present=True,
    local_error=1e-7,
    grad_spread=(None, 0.0),
    init_spread=(None, 0.0),
    step_error=1e-8,
    sgd_error=1e-8,
)


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {str(c): run_cell(c).trace for c in CELLS if str(c) in ("v0-N", "v0-NL", "v1-N", "v2-N")}


def numbers(trace: Trace, changes: dict[str, Any] | None = None, **whole: Any) -> Measurement:
    """What ranks would measure where the traced states are the truth."""

    def spread(states: tuple[Any, ...]) -> tuple[float, ...]:
        return tuple(0.5 if s.kind in (StateKind.VARYING, StateKind.MIXED) else 0.0 for s in states)

    boundaries = tuple(
        BoundaryMeasure(
            index=b.index,
            value_spread=spread(b.value_state),
            arrived_spread=spread(b.grad.arrived_state) if b.grad else (),
            left_spread=spread(b.grad.left_state) if b.grad else (),
        )
        for b in trace.boundaries
    )
    m = Measurement(
        ranks=4,
        device_type="cpu",
        backend="gloo",
        seed=0,
        dtype="float32",
        model="",
        tolerance=1e-5,
        step_tolerance=1e-6,
        loss=1.0,
        reference_loss=1.0,
        loss_error=0.0,
        grad_scale=Fraction(1),
        grad_norm=1.0,
        reference_grad_norm=1.0,
        params=(replace(RIGHT, **(changes or {})),),
        boundaries=boundaries,
        seconds=1.0,
    )
    return replace(m, **whole)


def on_tp(report: Report) -> Verdict:
    return judgement(report, "weight", "tp").verdict


def test_both_right_lists_both(traces: dict[str, Trace]) -> None:
    report = judge(traces["v0-N"], numbers(traces["v0-N"]))
    assert (report.exit_status, report.findings) == (0, ())
    evidence = judgement(report, "weight", "tp").evidence
    assert [e.strength for e in evidence] == ["traced", "measured"]
    assert evidence[1].statement == (
        "4 gloo ranks, float32: relative error 1e-07 (tolerance 1e-05), norm ratio 1; replicas agree"
    )


def test_both_wrong_agree(traces: dict[str, Trace]) -> None:
    report = judge(traces["v1-N"], numbers(traces["v1-N"], {"grad_error": 1.0, "grad_ratio": 2.0}))
    assert on_tp(report) is Verdict.DOUBLE_REDUCTION
    assert [f.rule_id for f in report.findings] == ["PA202"]
    assert report.exit_status == 1


def test_traced_wrong_and_measured_right_is_a_fault_of_ours(traces: dict[str, Trace]) -> None:
    report = judge(traces["v1-N"], numbers(traces["v1-N"]))
    assert [(f.param_fqn, f.mesh_dim) for f in of_rule(report, "PA901")] == [("weight", "tp")]
    assert report.exit_status == 3


def test_a_value_traced_equal_that_differs_is_a_fault_of_ours(traces: dict[str, Trace]) -> None:
    trace = traces["v0-N"]
    m = numbers(trace)
    last = trace.boundaries[-1].index
    whole = next(
        b for b in m.boundaries if trace.boundaries[b.index].value_state[1].kind is StateKind.INVARIANT
    )
    wrong = replace(whole, value_spread=(whole.value_spread[0], 0.3))
    m = replace(m, boundaries=tuple(wrong if b is whole else b for b in m.boundaries))
    report = judge(trace, m)
    (finding,) = of_rule(report, "PA901")
    assert finding.path[0].boundary == whole.index <= last
    assert report.exit_status == 3
    assert slots(trace, m)[2] == 1


def test_a_value_traced_varying_that_is_equal_is_only_counted(traces: dict[str, Trace]) -> None:
    trace = traces["v0-N"]
    m = numbers(trace)
    varying = next(
        b for b in m.boundaries if trace.boundaries[b.index].value_state[0].kind is StateKind.VARYING
    )
    calm = replace(varying, value_spread=(0.0, varying.value_spread[1]))
    m = replace(m, boundaries=tuple(calm if b is varying else b for b in m.boundaries))
    assert judge(trace, m).exit_status == 0
    assert slots(trace, m)[1:] == (1, 0)


def test_replicas_that_differed_before_the_step_excuse_the_trace(traces: dict[str, Trace]) -> None:
    trace = traces["v0-N"]
    m = numbers(
        trace, {"grad_error": 0.1, "grad_ratio": 1.01, "init_spread": (None, 0.2), "grad_spread": (None, 0.2)}
    )
    m = replace(m, boundaries=tuple(replace(b, value_spread=(0.5, 0.5)) for b in m.boundaries))
    report = judge(trace, m)
    assert on_tp(report) is Verdict.RANKS_DISAGREE
    assert [f.rule_id for f in report.findings] == ["PA205"]
    assert report.exit_status == 1


@pytest.mark.parametrize(
    ("changes", "whole", "verdict", "rule"),
    [
        ({"grad_error": 0.3, "grad_ratio": 0.98}, {}, Verdict.WRONG_GRADIENT, "PA207"),
        (
            {"grad_error": 0.3, "grad_ratio": 1.1, "grad_spread": (None, 0.4)},
            {},
            Verdict.LOST_REDUCTION,
            "PA201",
        ),
        # two mesh dims of size 2: numbers alone can't say which one doubled
        ({"grad_error": 1.0, "grad_ratio": 2.0}, {}, Verdict.WRONG_GRADIENT, "PA207"),
        (
            {"grad_present": False, "grad_error": None, "grad_ratio": None},
            {},
            Verdict.WRONG_GRADIENT,
            "PA207",
        ),
    ],
    ids=["numbers", "replicas", "factor", "missing"],
)
def test_what_only_numbers_show(
    changes: dict[str, Any], whole: dict[str, Any], verdict: Verdict, rule: str, traces: dict[str, Trace]
) -> None:
    report = judge(traces["v0-N"], numbers(traces["v0-N"], changes, **whole))
    assert on_tp(report) is verdict
    assert [f.rule_id for f in report.findings if f.severity == "error"] == [rule]
    assert report.exit_status == 1


def test_a_wrong_loss_is_a_finding(traces: dict[str, Trace]) -> None:
    report = judge(traces["v0-N"], numbers(traces["v0-N"], loss=1.1, loss_error=0.1))
    assert [f.rule_id for f in report.findings] == ["PA208"]
    assert report.exit_status == 1


def test_a_reader_that_spoils_a_right_gradient_is_named(traces: dict[str, Trace]) -> None:
    report = judge(traces["v2-N"], numbers(traces["v2-N"], {"sgd_error": 0.5}))
    assert on_tp(report) is Verdict.DEFERRED
    assert [(f.rule_id, f.param_fqn, f.mesh_dim) for f in report.findings] == [("PA402", "weight", "tp")]


def test_wrong_gradients_are_not_blamed_on_their_readers(traces: dict[str, Trace]) -> None:
    m = numbers(traces["v1-N"], {"grad_error": 1.0, "grad_ratio": 2.0, "sgd_error": 1.0, "step_error": 1.0})
    assert not of_rule(judge(traces["v1-N"], m), "PA402")


def test_numbers_decide_what_the_trace_could_not(traces: dict[str, Trace]) -> None:
    """An ambiguous gradient: right numbers make it ok, wrong ones wrong."""
    trace = traces["v0-N"]
    (p,) = trace.params
    assert p.grad is not None
    state = tuple(replace(s, kind=StateKind.AMBIGUOUS) if i == 1 else s for i, s in enumerate(p.grad.state))
    open_question = replace(trace, params=(replace(p, grad=replace(p.grad, state=state)),))
    assert on_tp(judge(open_question)) is Verdict.NOT_JUDGED
    assert on_tp(judge(open_question, numbers(trace))) is Verdict.OK
    wrong = numbers(trace, {"grad_error": 0.5, "grad_ratio": 0.5})
    assert on_tp(judge(open_question, wrong)) is Verdict.WRONG_GRADIENT


def test_a_common_factor_that_the_trace_does_not_show_is_no_average(traces: dict[str, Trace]) -> None:
    """With one parameter every factor is common to all: only a traced average excuses it."""
    m = numbers(traces["v0-N"], {"grad_ratio": 0.5}, grad_scale=Fraction(1, 2))
    report = judge(traces["v0-N"], m)
    assert on_tp(report) is Verdict.WRONG_GRADIENT
    assert report.exit_status == 1


def test_an_ambiguous_gradient_that_differs_between_ranks_contradicts_nothing(
    traces: dict[str, Trace],
) -> None:
    """It was equal where it arose; a number that differs between ranks may have met it since."""
    trace = traces["v0-N"]
    at, crossing = next((i, b.grad) for i, b in enumerate(trace.boundaries) if b.grad is not None)
    state = tuple(replace(s, kind=StateKind.AMBIGUOUS) for s in crossing.arrived_state)
    boundary = replace(trace.boundaries[at], grad=replace(crossing, arrived_state=state))
    trace = replace(trace, boundaries=(*trace.boundaries[:at], boundary, *trace.boundaries[at + 1 :]))
    m = numbers(trace)
    apart = tuple(replace(b, arrived_spread=(0.5, 0.5)) if b.index == at else b for b in m.boundaries)
    assert of_rule(judge(trace, replace(m, boundaries=apart)), "PA901") == []
