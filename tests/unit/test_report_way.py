"""The way of one gradient: every step in order, and a straight answer for each mesh dim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import make_report as m
import pytest
from snapshot import assert_snapshot

from placement_audit.errors import UsageError
from placement_audit.model import Layout, State, StateKind
from placement_audit.report.way import explain_param, find_param
from placement_audit.tracing import Phase
from placement_audit.verdicts import Report, Verdict

pytestmark = pytest.mark.unit

NORM = "layers.0.attention_norm.weight"


@pytest.mark.parametrize(
    ("name", "make", "fqn"),
    [
        ("way_stock_norm.txt", m.stock_report, NORM),
        ("way_stock_linear.txt", m.stock_report, "layers.0.attention.wo.weight"),
        ("way_doubled.txt", m.one_sided_report, "norm.weight"),
        ("way_deferred.txt", m.two_sided_report, "layers.1.ffn_norm.weight"),
        ("way_lost.txt", m.mixed_report, "layers.1.attention_norm.weight"),
        ("way_untrained.txt", m.mixed_report, "rope.scale"),
    ],
)
def test_whole_way(name: str, make: Callable[[], Report], fqn: str) -> None:
    assert_snapshot(name, explain_param(make(), fqn))


def answers(source: Any, fqn: str) -> dict[str, str]:
    """Mesh dim -> its answer, on one line."""
    block = explain_param(source, fqn).rstrip("\n").split("\n\n")[-1]
    out: dict[str, str] = {}
    for line in block.splitlines():
        if not line.startswith(" "):
            mesh_dim, _, rest = line.partition(" ")
            out[mesh_dim] = rest.strip()
        else:
            out[mesh_dim] += " " + line.strip()
    return out


# --------------------------------------------------------------------------- the answer


def test_where_is_my_all_reduce() -> None:
    assert answers(m.stock_report(), NORM) == {
        "fsdp": "The reduce-scatter over fsdp runs in the backward of DTensor.redistribute at "
        "torchtitan/experiments/simple_fsdp/simple_fsdp.py:196: 256 elements, float32.",
        "tp": "The all-reduce over tp runs in the backward of DTensor.from_local at "
        "torchtitan/experiments/simple_fsdp/simple_fsdp.py:214: 256 elements, float32.",
    }


def test_deferred() -> None:
    assert answers(m.two_sided_report(), NORM)["tp"] == (
        "No reduction over tp runs in backward: "
        ".grad is Partial(sum) on tp and whoever reads it must reduce it."
    )


def test_lost() -> None:
    assert answers(m.mixed_report(), "layers.1.attention_norm.weight")["tp"] == (
        "The reduction over tp is lost in the backward of DTensor.to_local at my_model/norm.py:31: "
        "A per-rank part of the gradient is labelled Replicate."
    )


def test_doubled_names_both_places() -> None:
    answer = answers(m.one_sided_report(), "norm.weight")["tp"]
    assert "The all-reduce over tp runs in the backward of DTensor.from_local at" in answer
    assert "reduced once more because of the label that DTensor.to_local at" in answer
    assert "simple_fsdp.py:189 gives it" in answer


def test_a_shard_needs_none() -> None:
    assert answers(m.stock_report(), "output.weight")["tp"] == (
        "No reduction over tp is due: the parameter is Shard(0) on tp, "
        "and each rank's gradient is that of its own part."
    )


def judged(report: Report, fqn: str, mesh_dim: str, **changes: Any) -> Report:
    judgements = tuple(
        replace(j, **changes) if (j.param_fqn, j.mesh_dim) == (fqn, mesh_dim) else j
        for j in report.judgements
    )
    return replace(report, judgements=judgements)


@pytest.mark.parametrize(
    ("verdict", "starts"),
    [
        (Verdict.NOT_JUDGED, "Not judged on tp: only values decide."),
        (Verdict.WRONG_SCALE, "The gradient has a wrong scale on tp in the backward of DTensor.to_local at"),
        (Verdict.WRONG_PLACEMENT, "The gradient has a wrong placement on tp in the backward of"),
        (Verdict.RANKS_DISAGREE, "The gradient has a ranks disagree on tp"),
    ],
)
def test_other_verdicts(verdict: Verdict, starts: str) -> None:
    report = m.stock_report(layers=1)
    path = report.trace.params[-2].boundaries[:1]
    report = judged(report, "norm.weight", "tp", verdict=verdict, reason="only values decide", path=path)
    assert answers(report, "norm.weight")["tp"].startswith(starts)


def test_no_gradient() -> None:
    report = without_grad(m.stock_report(layers=1), "norm.weight")
    assert answers(report, "norm.weight")["tp"] == "Backward left no gradient: there is nothing to reduce."
    assert "\n.grad       none\n" in explain_param(report, "norm.weight")


def test_a_replicated_gradient_of_a_shard() -> None:
    report = m.stock_report(layers=1)
    (p,) = [p for p in report.trace.params if p.fqn == "output.weight"]
    assert p.grad is not None
    layout = Layout(("fsdp", "tp"), (m.STRIDED, m.REPLICATE))
    report = with_param(report, "output.weight", grad=replace(p.grad, layout=layout))
    assert answers(report, "output.weight")["tp"] == (
        "No reduction over tp is due: .grad is Replicate(), complete on every rank, "
        "although the parameter is Shard(0) on tp."
    )


def test_an_equal_gradient_needs_none() -> None:
    report = m.stock_report(layers=1)
    collectives = tuple(c for c in report.trace.collectives if c.name != "all_reduce")
    report = replace(report, trace=replace(report.trace, collectives=collectives))
    assert answers(report, "norm.weight")["tp"] == (
        "No reduction over tp is due: the gradient arrives equal on all ranks."
    )


@pytest.mark.parametrize(
    "change",
    [{"phase": Phase.FORWARD}, {"name": "all_gather"}, {"mesh_dims": ("fsdp",)}],
    ids=lambda c: next(iter(c)),
)
def test_only_backward_reductions_over_the_mesh_dim_count(change: dict[str, Any]) -> None:
    report = m.stock_report(layers=1)
    collectives = tuple(
        replace(c, **change) if c.name == "all_reduce" and c.boundary is not None else c
        for c in report.trace.collectives
    )
    report = replace(report, trace=replace(report.trace, collectives=collectives))
    assert answers(report, "norm.weight")["tp"].startswith("No reduction over tp is due")


def test_a_reduction_by_an_op_of_the_module() -> None:
    answer = answers(m.stock_report(layers=1), "tok_embeddings.weight")["tp"]
    assert answer == (
        "No boundary on the parameter's way reduces over tp; the backward of tok_embeddings ran "
        "an all-reduce over tp by aten.embedding_dense_backward.default: 4 elements, float32."
    )


def test_reductions_outside_any_boundary() -> None:
    report = m.stock_report(layers=1)
    collectives = tuple(
        replace(c, boundary=None, module_fqn="") if c.name == "reduce_scatter" else c
        for c in report.trace.collectives
    )
    report = replace(report, trace=replace(report.trace, collectives=collectives))
    assert answers(report, "norm.weight")["fsdp"].startswith(
        "No boundary on the parameter's way reduces over fsdp; 12 reductions over fsdp ran in backward"
    )


# --------------------------------------------------------------------------- a trace alone


def test_a_trace_alone_has_no_verdict() -> None:
    out = explain_param(m.one_sided_report().trace, "norm.weight")
    assert "verdict" not in out
    assert "expected" not in out
    assert "FALSE LABEL: leaves as Partial(sum) on tp" in out


def test_a_trace_alone_still_answers() -> None:
    assert "runs in the backward of DTensor.from_local" in answers(m.stock_report().trace, NORM)["tp"]
    assert answers(m.two_sided_report().trace, NORM)["tp"].startswith("No reduction over tp runs in backward")


# --------------------------------------------------------------------------- the steps


def test_backward_goes_by_order_not_by_index() -> None:
    report = m.stock_report(layers=1)
    trace = report.trace
    (p,) = [p for p in trace.params if p.fqn == "norm.weight"]
    boundaries = list(trace.boundaries)
    first, last = p.boundaries[0], p.boundaries[-1]
    a, b = boundaries[first].grad, boundaries[last].grad
    assert a is not None
    assert b is not None
    boundaries[first] = replace(boundaries[first], grad=replace(a, order=b.order))
    boundaries[last] = replace(boundaries[last], grad=replace(b, order=a.order))
    out = explain_param(replace(trace, boundaries=tuple(boundaries)), "norm.weight")
    assert "  7. backward of to_local, step 1:" in out
    assert " 11. backward of from_local, step 5:" in out


def test_a_blamed_call_upstream_is_a_step_too() -> None:
    report = m.stock_report(layers=1)
    upstream = next(b.index for b in report.trace.boundaries if b.param_fqn is None)
    report = judged(
        report, "norm.weight", "tp", verdict=Verdict.LOST_REDUCTION, reason="lost", path=(upstream,)
    )
    out = explain_param(report, "norm.weight")
    assert "not a call on the parameter itself, but its gradient came through here" in out
    assert "called from torchtitan/models/llama3/model/model.py:351 in forward" in out


def test_recompute_is_counted() -> None:
    report = m.stock_report(layers=1)
    trace = report.trace
    (p,) = [p for p in trace.params if p.fqn == "norm.weight"]
    again = tuple(
        replace(trace.boundaries[i], index=len(trace.boundaries) + n, phase=Phase.RECOMPUTE, grad=None)
        for n, i in enumerate(p.boundaries)
    )
    trace = replace(trace, boundaries=trace.boundaries + again)
    params = tuple(
        replace(q, boundaries=q.boundaries + tuple(b.index for b in again)) if q is p else q
        for q in trace.params
    )
    out = explain_param(replace(trace, params=params), "norm.weight")
    assert "  5 calls ran again in recompute (activation checkpointing)\n" in out
    assert "\n  6. aten._fused_rms_norm.default in norm" in out


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State(StateKind.INVARIANT), "tp complete and equal on all ranks"),
        (State(StateKind.INVARIANT, Fraction(1, 2)), "tp complete and equal on all ranks, x1/2"),
        (State(StateKind.INVARIANT, None), "tp complete and equal on all ranks, parts of different scale"),
        (State(StateKind.VARYING), "tp each rank its own"),
        (State(StateKind.AMBIGUOUS), "tp equal on all ranks, complete or one term of a sum"),
        (State(StateKind.MIXED), "tp a complete part plus each rank's own"),
        (State(StateKind.LOST), "tp incomplete, terms of other ranks are gone"),
        (State(StateKind.ZERO), "tp zero"),
    ],
)
def test_states_in_plain_words(state: State, words: str) -> None:
    report = m.stock_report(layers=1)
    (p,) = [p for p in report.trace.params if p.fqn == "norm.weight"]
    assert p.grad is not None
    report = with_param(report, "norm.weight", grad=replace(p.grad, state=(m.VARYING, state)))
    assert f"\nreally      fsdp each rank its own part; {words}\n" in explain_param(report, "norm.weight")


# --------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("norm.weight", "norm.weight"),
        (NORM, NORM),
        ("1.ffn_norm.weight", "layers.1.ffn_norm.weight"),
        ("output.weight", "output.weight"),
    ],
)
def test_find(asked: str, found: str) -> None:
    assert find_param(m.stock_report(layers=2).trace, asked).fqn == found


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "layers.0.attn_norm.weight",
            "The model has no parameter 'layers.0.attn_norm.weight' among its 21. "
            "Did you mean layers.0.attention_norm.weight or layers.0.ffn_norm.weight",
        ),
        ("zzz", "The model has no parameter 'zzz' among its 21.$"),
        ("", "The model has no parameter '' among its 21.$"),
        ("orm.weight", "The model has no parameter 'orm.weight' among its 21. Did you mean norm.weight"),
        (
            "ffn_norm.weight",
            "2 parameters end in 'ffn_norm.weight'; say which: "
            "layers.0.ffn_norm.weight, layers.1.ffn_norm.weight$",
        ),
        ("weight", r"21 parameters end in 'weight'; say which: .*, \.\.\.$"),
    ],
)
def test_unknown(asked: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        explain_param(m.stock_report(layers=2), asked)


# --------------------------------------------------------------------------- helpers


def with_param(report: Report, fqn: str, **changes: Any) -> Report:
    params = tuple(replace(p, **changes) if p.fqn == fqn else p for p in report.trace.params)
    return replace(report, trace=replace(report.trace, params=params))


def without_grad(report: Report, fqn: str) -> Report:
    return judged(with_param(report, fqn, grad=None), fqn, "tp", verdict=Verdict.NO_GRADIENT)
