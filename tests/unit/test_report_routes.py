"""Ways through places of the forward, and to the end of backward: no edge that nothing tells, the faulty one marked."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import make_places as p
import make_report as m
import pytest
from ways import backward, drawn, forward, route_of, shown

from placement_audit.model import State, StateKind
from placement_audit.report.route_words import named_in_words
from placement_audit.report.routes import Routes
from placement_audit.tracing import GradRecord, Share
from placement_audit.verdicts import PathStep

pytestmark = pytest.mark.unit

NOTHING = [("-", "-"), ("-", "-")]
TERMS = "really P(sum) on tp, mlp.bias in each of the 2 terms"


# --------------------------------------------------------------------------- in the forward


def test_a_bias_in_each_term() -> None:
    report = p.counted()
    found = route_of(report, "PA107")
    assert forward(report) == [
        ("addmm", "job/model.py:10", "plain", f"plain ({TERMS}) !"),
        ("sum", "job/model.py:20", f"plain ({TERMS}) ~", "? (with mlp.bias in it 2 times) ~"),
    ]
    # no backward of the two is in the trace
    assert [b[2:] for b in backward(report)] == NOTHING
    assert (found.name, found.met, shown(found.start), shown(found.grad)) == (
        "mlp.bias",
        "",
        "plain",
        "plain",
    )
    assert found.wrong == "at addmm"


def test_what_is_no_parameter_has_the_way_of_the_term() -> None:
    report = p.of_doubt(replace(p.COUNTED, counted=(("", Fraction(1)), ("1", Fraction(1, 4)))))
    assert forward(report) == [
        (
            "addmm",
            "job/model.py:10",
            "plain (really P(sum) on tp) ..",
            "plain (really P(sum) on tp, the number 0.25 in each of the 2 terms) !",
        ),
        (
            "sum",
            "job/model.py:20",
            "plain (really P(sum) on tp, the number 0.25 in each of the 2 terms) ~",
            "? (with the number 0.25 in it not once) ~",
        ),
    ]
    assert route_of(report).start is None


def test_a_parameter_that_meets_the_activations_elsewhere_comes_from_afar() -> None:
    bias = replace(p.BIAS, uses=(p.use("mul", p.ACTED),))
    report = p.judge(p.with_params(bias, value_doubts=(p.COUNTED,)))
    found = route_of(report, "PA107")
    assert (found.met, shown(found.stops[0].before)) == ("mul in mlp", "plain ..")


def test_an_op_of_the_same_name_elsewhere_is_not_where_it_meets_them() -> None:
    bias = replace(p.BIAS, uses=(p.use("addmm", p.ACTED),))
    found = route_of(p.judge(p.with_params(bias, value_doubts=(p.COUNTED,))), "PA107")
    assert (found.met, found.stops[0].own) == ("addmm in mlp", False)


@pytest.mark.parametrize(
    ("counted", "inside", "often"),
    [
        ((("mlp.bias", Fraction(3)),), "3 x mlp.bias", "with 3 x mlp.bias in it 6 times"),
        ((("1", Fraction(3)),), "the number 3", "with the number 3 in it 2 times"),
        (
            (("mlp.bias", Fraction(1)), ("mlp.down", Fraction(1))),
            "mlp.bias, mlp.down",
            "with mlp.bias, mlp.down in it not once",
        ),
    ],
)
def test_how_often_is_told(counted: tuple[tuple[str, Fraction], ...], inside: str, often: str) -> None:
    first, second = forward(p.of_doubt(replace(p.COUNTED, counted=counted)))
    assert first[3] == f"plain (really P(sum) on tp, {inside} in each of the 2 terms) !"
    assert second[3] == f"? ({often}) ~"


def test_terms_of_one_op_that_are_summed_at_two_places() -> None:
    one = p.doubt("applied", op="mean", call_site=p.ACTED)
    two = replace(one, summed_at=p.STEPPED, carried=replace(m.PARTIAL, reduce_op="max"))
    report = p.judge(replace(p.BASE, value_doubts=(one, two)))
    seen = {
        f.path[1].call_site: shown(r.stops[0].before) for f in report.findings if (r := Routes(report).of(f))
    }
    assert seen == {
        p.SUMMED: "plain (really P(sum) on tp) ..",
        p.STEPPED: "plain (really P(max) on tp) ..",
    }


def test_a_call_that_a_verdict_names_too_is_drawn_once() -> None:
    report = p.counted_and_labelled()
    blamed = tuple(replace(j, path=(1,)) if j.param_fqn == "mlp.bias" else j for j in report.judgements)
    assert [f[0] for f in forward(replace(report, judgements=blamed))] == ["addmm", "from_local"]


def test_a_call_on_the_parameter_itself_is_not_the_sum() -> None:
    trace = p.counted_and_labelled().trace
    params = tuple(replace(x, boundaries=(1,)) if x.fqn == "mlp.bias" else x for x in trace.params)
    report = p.judge(replace(trace, params=params))
    assert [f[0] for f in forward(report, "PA107")] == ["from_local", "addmm", "sum"]


def test_places_and_other_calls_have_no_order_among_them() -> None:
    report = p.counted()
    trace = replace(report.trace, boundaries=(p.call(0, p.LABELLED, "autograd_function", None, None),))
    blamed = tuple(replace(j, path=(0,)) if j.param_fqn == "mlp.bias" else j for j in report.judgements)
    found = route_of(replace(report, trace=trace, judgements=blamed), "PA107")
    assert [s.kind for s in found.stops] == ["autograd_function", "addmm", "sum"]
    assert (found.loose, found.says) == (1, ("named, too", "where among the calls above is not known"))
    assert route_of(report).loose is None


def test_terms_that_from_local_labels_have_its_edges() -> None:
    report = p.counted_and_labelled()
    assert forward(report) == [
        ("addmm", "job/model.py:10", "plain", f"plain ({TERMS}) !"),
        (
            "from_local",
            "job/model.py:30",
            f"plain ({TERMS}) ~",
            "tp P(sum) (really mlp.bias in each of the 2 terms) ~",
        ),
    ]
    assert backward(report)[1] == ("from_local", "job/model.py:30", "tp R", "plain")


def test_a_call_that_could_be_one_of_two_is_not_taken() -> None:
    trace = p.counted_and_labelled().trace
    again = replace(trace.boundaries[1], index=2)
    report = p.judge(replace(trace, boundaries=(*trace.boundaries, again)))
    assert forward(report)[1][0] == "sum"
    assert backward(report)[1][2:] == ("-", "-")


def test_a_call_that_gives_another_label_is_not_taken() -> None:
    trace = p.counted_and_labelled().trace
    other = replace(trace.boundaries[1], dst=p.on_tp(m.shard(0)))
    report = p.judge(replace(trace, boundaries=(trace.boundaries[0], other)))
    assert forward(report, "PA107")[1][0] == "sum"


def test_a_gelu_of_a_term_and_the_collective_that_sums_it() -> None:
    report = p.applied()
    of = "gelu of each rank's term"
    assert forward(report) == [
        ("gelu", "job/model.py:40", "plain (really P(sum) on tp) ..", f"plain (really {of}) !"),
        ("sum", "job/model.py:20", f"plain (really {of}) ~", f"? (a sum of {of}) ~"),
    ]
    assert [s.ran_forward for s in route_of(report).stops] == [
        (),
        ("all_reduce(sum) over tp: 8 elements, float32",),
    ]


@pytest.mark.parametrize("change", [{"mesh_dims": ()}, {"module_fqn": "other"}, {"call_site": p.ADDED}])
def test_another_collective_is_none_of_it(change: dict[str, Any]) -> None:
    trace = p.applied().trace
    report = p.judge(replace(trace, collectives=(replace(trace.collectives[0], **change),)))
    assert [s.ran_forward for s in route_of(report).stops] == [(), ()]


def test_a_term_that_nothing_sums_has_one_stop() -> None:
    report = p.of_doubt(p.doubt("applied", op="gelu", call_site=p.ACTED, summed_at=None))
    assert [f[0] for f in forward(report)] == ["gelu"]


def test_a_false_declaration_is_wrong_from_its_label_on() -> None:
    report = p.declared()
    assert forward(report) == [
        (
            "from_local",
            "job/model.py:30",
            "plain (really P(sum) on tp) ..",
            "tp S(0) (really P(sum) on tp) !",
        )
    ]
    assert backward(report)[0][2:] == ("tp R", "plain")
    # without the call in the trace, what the finding says is left
    alone = p.judge(replace(report.trace, boundaries=()))
    assert forward(alone) == forward(report)
    assert backward(alone)[0][2:] == ("-", "-")


def test_a_mean_of_unequal_parts() -> None:
    (stop,) = forward(p.averaged())
    assert stop[2:] == (
        "plain (really S(0) on tp, in parts of different sizes) ..",
        "plain (really mean of each rank's part) !",
    )


def test_a_backward_that_was_left_out_is_wrong_on_the_way_back() -> None:
    assert forward(p.left_out()) == [("log_softmax", "job/model.py:40", "tp S(1) ..", "tp S(1) ..")]
    assert backward(p.left_out())[0][2:] == ("-", "? (handed on as it came) !")


def test_two_doubts_at_one_op_are_told_apart() -> None:
    """A mean of a term and of unequal parts, at one line; and in another module."""
    one = p.doubt("applied", op="mean", call_site=p.ACTED, summed_at=None)
    parts = replace(one, kind="averaged", carried=m.shard(0))
    elsewhere = replace(one, module_fqn="other", carried=replace(m.PARTIAL, reduce_op="avg"))
    report = p.judge(replace(p.BASE, value_doubts=(elsewhere, one, parts)))
    seen = {
        (f.rule_id, f.module_fqn): shown(r.stops[0].before)
        for f in report.findings
        if (r := Routes(report).of(f)) is not None
    }
    assert seen == {
        ("PA108", "other"): "plain (really P(avg) on tp) ..",
        ("PA108", "mlp"): "plain (really P(sum) on tp) ..",
        ("PA110", "mlp"): "plain (really S(0) on tp, in parts of different sizes) ..",
    }


def test_a_loss_of_each_ranks_own_goes_into_its_backward() -> None:
    report = p.loss()
    found = route_of(report)
    assert forward(report) == [
        ("backward", "job/train.py:50", "plain (really each rank its own on tp) ! ..", "-")
    ]
    assert (found.about, found.turn) == ("the loss", "the gradients of each rank's own loss")


def test_a_sum_of_what_is_equal_is_too_large_after_it() -> None:
    report = p.summed_again()
    assert forward(report) == [
        (
            "all_reduce",
            "job/model.py:20",
            "plain (really equal on all ranks of tp) ..",
            "plain (really 2 times it) !",
        )
    ]
    # within a DTensor's op it is no plain tensor that is summed
    inside = replace(report.trace.collectives[0], op="aten.mm.default")
    report = p.judge(replace(report.trace, collectives=(inside,)))
    assert forward(report)[0][2:] == ("? (equal on all ranks of tp) ..", "? (2 times it) !")


def test_a_sum_of_what_is_equal_in_a_function_is_marked_in_forward_though_a_gradient_came_back() -> None:
    boundary = p.call(0, p.LABELLED, "autograd_function", None, None)
    assert boundary.grad is not None
    # its backward did not sum: that is another finding's, if any
    crossed = replace(boundary.grad, left_state=(State(StateKind.INVARIANT, Fraction(1, 2), (0,)),))
    boundary = replace(boundary, grad=crossed)
    again = replace(p.summed_again().trace.collectives[0], boundary=0, call_site=None)
    found = route_of(p.judge(replace(p.BASE, boundaries=(boundary,), collectives=(again,))))
    assert [(shown(s.after), shown(s.left)) for s in found.stops] == [
        ("plain (really 2 times what went in) !", "plain")
    ]


def test_a_value_that_is_not_what_from_local_says_is_marked_in_forward() -> None:
    for label, value, told in (
        (m.REPLICATE, p.VARYING, "tp R (really each rank its own) !"),
        (m.PARTIAL, p.INVARIANT, "tp P(sum) (really equal on all 2 ranks) !"),
    ):
        boundary = p.call(0, p.LABELLED, "from_local", None, p.on_tp(label), value_state=(value,))
        found = route_of(p.judge(replace(p.BASE, boundaries=(boundary,))), "PA10")
        assert [(shown(s.after), shown(s.left)) for s in found.stops] == [(told, "plain")]


def test_a_false_value_of_a_parameters_own_call_is_told_in_words() -> None:
    boundary = p.call(
        0,
        p.LABELLED,
        "from_local",
        None,
        p.on_tp(m.REPLICATE),
        value_state=(p.VARYING,),
        param_fqn="norm.weight",
    )
    report = p.judge(p.with_params(replace(p.WEIGHT, boundaries=(0,)), boundaries=(boundary,)))
    words = named_in_words(route_of(report, "PA102"))
    assert "HERE IT GOES WRONG: comes out tp R, really each rank its own\n" in words


def test_a_value_that_was_divided_is_what_from_local_says() -> None:
    boundary = p.call(
        0, p.LABELLED, "from_local", None, p.on_tp(m.PARTIAL), value_state=(p.INVARIANT,), divided=("tp",)
    )
    step = PathStep(role="cause", kind="from_local", call_site=p.LABELLED, boundary=0)
    finding = replace(p.declared().findings[0], rule_id="PA104", path=(step,))
    found = Routes(p.judge(replace(p.BASE, boundaries=(boundary,)))).of(finding)
    assert found is not None
    assert [(shown(s.after), shown(s.left)) for s in found.stops] == [("tp P(sum)", "plain !")]


# --------------------------------------------------------------------------- at the end of backward


def test_a_gradient_that_nothing_sums_is_wrong_at_its_end() -> None:
    found = route_of(p.never_summed(), "PA201")
    assert [(s.kind, s.where, shown(s.before), shown(s.after), s.own) for s in found.stops] == [
        ("addmm", "job/model.py:10", "plain", "plain", True)
    ]
    assert shown(found.grad) == "plain (really each rank its own) !"
    assert (found.met, found.wrong) == ("", "at .grad")


def test_no_gradient_has_no_arrow() -> None:
    found = route_of(p.no_gradient(), "PA206")
    assert found.grad is not None
    assert found.grad.missing
    assert shown(found.grad) == "? (no gradient) !"


def test_no_gradient_came_from_the_loss_either() -> None:
    own = replace(
        p.call(0, p.GATHERED, "to_local", p.on_tp(m.REPLICATE), None, param_fqn="norm.weight"), grad=None
    )
    weight = replace(p.WEIGHT, grad=None, boundaries=(0,))
    report = p.judge(p.with_params(weight, boundaries=(own,)))
    found = Routes(report).of(replace(report.findings[0], path=()))
    assert found is not None
    assert drawn(found, right=False) == [">", ">", ">"]
    assert drawn(found, right=True) == ["fault dotted", "dotted", "dotted"]


def test_a_parameter_of_no_known_use_is_not_joined_to_a_call_on_activations() -> None:
    blamed = State(StateKind.VARYING, Fraction(1), (0,))
    lost = replace(p.BIAS, uses=(), grad=GradRecord(layout=None, state=(blamed,), dtype="float32"))
    report = p.judge(
        p.with_params(lost, boundaries=(p.call(0, p.LABELLED, "autograd_function", None, None),))
    )
    found = route_of(report, "PA201")
    assert [s.kind for s in found.stops] == ["autograd_function"]
    assert drawn(found, right=False)[0] == "dotted >"


def test_a_wrong_multiple_is_told_where_the_state_does_not() -> None:
    """A bias whose half is added to a sum: equal on all ranks, and half of its gradient."""
    half = State(StateKind.AMBIGUOUS)
    shares = (Share(param_fqn="mlp.bias", mesh_dim="tp", value=Fraction(1, 2), grad=Fraction(1, 2)),)
    bias = replace(p.BIAS, grad=GradRecord(layout=None, state=(half,), dtype="float32"))
    found = route_of(p.judge(p.with_params(bias, shares=shares)), "PA203")
    assert shown(found.grad) == "plain (really 1/2 times the true gradient) !"
