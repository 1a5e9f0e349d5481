"""Ways through what reads a gradient after backward, and through where numbers depart."""

from __future__ import annotations

import re
from dataclasses import replace

import make_places as p
import pytest
from ways import backward, forward, readers, route_of, shown

from placement_audit.model import State, StateKind
from placement_audit.report.lanes import lanes
from placement_audit.report.route_words import named_in_words
from placement_audit.tracing import UpdateRecord
from placement_audit.verdicts import PathStep

pytestmark = pytest.mark.unit


# --------------------------------------------------------------------------- after backward


def test_an_update_with_a_term_is_wrong_behind_the_update() -> None:
    report = p.drifting()
    found = route_of(report, "PA403")
    assert readers(report, "PA403") == [
        ("update", "job/train.py:70", "tp P(sum) ..", "tp R (really each rank its own) !")
    ]
    assert (found.read_end, shown(found.grad), found.met) == ("updated parameter", "tp P(sum)", "mul in mlp")
    lost = UpdateRecord(state=(State(StateKind.LOST),), call_site=p.STEPPED)
    report = p.judge(p.with_params(replace(p.WEIGHT, update=lost), readers=True))
    assert readers(report, "PA403")[0][3] == "tp R (really one rank's) !"


def test_a_gradient_clipped_apart_is_wrong_behind_the_clipping() -> None:
    own = "plain (really each rank its own)"
    assert readers(p.clipped_apart()) == [
        ("reader", "job/train.py:60", "plain ..", f"{own} !"),
        ("update", "job/train.py:70", f"{own} ~", f"{own} ~"),
    ]
    # not written: what is wrong is the gradient
    only = UpdateRecord(state=None, call_site=None, grad_state=(p.VARYING,), grad_site=p.CLIPPED)
    report = p.judge(p.with_params(replace(p.BIAS, update=only), readers=True))
    assert readers(report) == [("reader", "job/train.py:60", "plain ..", f"{own} !")]
    assert route_of(report).read_end == "changed .grad"


def test_clipping_and_update_at_one_line() -> None:
    update = UpdateRecord(
        state=(p.VARYING,), call_site=p.STEPPED, grad_state=(p.VARYING,), grad_site=p.STEPPED
    )
    report = p.judge(p.with_params(replace(p.BIAS, update=update), readers=True))
    assert [r[0] for r in readers(report)] == ["reader", "update"]


def test_a_gradient_that_is_spoilt_on_another_mesh_dim_alone_is_read_by_the_update() -> None:
    update = UpdateRecord(
        state=(p.VARYING,), call_site=p.STEPPED, grad_state=(p.INVARIANT,), grad_site=p.STEPPED
    )
    report = p.judge(p.with_params(replace(p.BIAS, update=update), readers=True))
    assert [r[0] for r in readers(report)] == ["update"]


def test_a_norm_of_each_part_is_wrong_between_the_norm_and_the_update() -> None:
    of = "linalg_vector_norm of each rank's part"
    report = p.updated_with_parts()
    assert readers(report) == [
        ("linalg_vector_norm", "job/train.py:60", "plain (really S(1) on tp) ..", f"plain (really {of}) !"),
        ("update", "job/train.py:70", f"plain (really {of}) ~", f"tp S(1) (really updated with {of}) ~"),
    ]
    assert route_of(report).read_end == "updated parameter"


def test_a_norm_of_terms_is_wrong_among_the_readers_of_all_gradients() -> None:
    report = p.norm_of_terms()
    found = route_of(report)
    assert [r[0] for r in readers(report)] == ["pow", "sum"]
    assert readers(report)[0][3] == "plain (really pow of each rank's term) !"
    assert (found.stops, found.start, found.grad, found.about) == ((), None, None, "the gradients")


def test_readers_are_in_one_box_for_none_hands_it_to_another() -> None:
    report = p.read_in_part()
    assert readers(report) == [
        (
            "clipping, optimizer step",
            "job/train.py:70",
            "tp P(sum) (really one rank's term of it is read) !",
            "tp R (relative error 0.25) ~",
        )
    ]
    assert route_of(report).readers[0].notes == (
        "to_local reads one rank's term of it, train.py:70",
        "reads it through aten._foreach_norm, train.py:60",
    )


def test_where_all_readers_take_the_whole_it_goes_wrong_behind_them() -> None:
    report = p.read_in_part()
    assert report.measurement is not None
    whole = tuple(replace(r, whole=True) for r in report.measurement.readers)
    report = p.judge(report.trace, replace(report.measurement, readers=whole))
    assert readers(report)[0][2:] == ("tp P(sum)", "tp R (relative error 0.25) !")


def test_a_wrong_update_of_which_no_place_is_known() -> None:
    report = p.wrong_update()
    assert readers(report) == [
        ("clipping, optimizer step", "", "tp S(1) ..", "tp S(1) (relative error 0.25) !")
    ]


# --------------------------------------------------------------------------- numbers that depart


def test_candidates_are_right_before_and_wrong_after_and_none_is_accused() -> None:
    found = route_of(p.departed(), "PA207")
    assert forward(p.departed(), "PA207") == [
        ("Mm", "job/model.py:10", "? (right) ..", "-"),
        ("from_local", "job/model.py:30", "plain", "tp P(sum)"),
        ("Sum", "job/train.py:60", "-", "-"),
        ("own backward of Mine", "job/model.py:40", "-", "? (off by 0.5) ?! .."),
    ]
    assert (found.loose, found.says[0]) == (0, "it goes wrong in one of these")
    assert found.wrong == "in one of the calls that are named"
    assert shown(found.grad) == "tp S(1) ~"
    assert 'class="box fault"' not in lanes(found, "way", "tp")


def test_candidates_in_backward_stand_in_the_order_of_forward() -> None:
    assert backward(p.departed(backward=True), "PA207") == [
        ("own backward of Mine", "job/model.py:40", "-", "? (off by 0.5) ?! .."),
        ("Sum's backward", "job/train.py:60", "-", "-"),
        ("from_local", "job/model.py:30", "tp R", "plain"),
        ("Mm's backward", "job/model.py:10", "? (right) ..", "-"),
    ]


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_candidate_on_the_parameters_own_way_stays_there_and_is_not_accused(first: bool) -> None:
    base = p.departed()
    down = replace(p.DOWN, boundaries=(0,))
    assert base.measurement is not None
    (d,) = base.measurement.departures
    steps = (d.steps[1], d.steps[0], *d.steps[2:]) if first else d.steps
    trace = p.with_params(down, boundaries=base.trace.boundaries)
    report = p.judge(trace, replace(base.measurement, departures=(replace(d, steps=steps),)))
    found = route_of(report, "PA207")
    assert [(s.kind, s.own, s.notes, s.faulty) for s in found.stops] == [
        ("from_local", True, (f"{'first departure' if first else 'or here'}: from_local",), False),
        ("Mm", False, ("or here" if first else "first departure",), False),
        ("Sum", False, ("or here",), False),
        ("own backward of Mine", False, ("or here",), False),
    ]


def test_what_nothing_right_came_before_is_not_called_right() -> None:
    base = p.departed()
    assert base.measurement is not None
    (d,) = base.measurement.departures
    report = p.judge(base.trace, replace(base.measurement, departures=(replace(d, right=()),)))
    found = route_of(report, "PA208")
    assert (shown(found.stops[0].before), found.says) == ("-", ("it goes wrong in one of these", ""))


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
def test_candidates_are_told_once_and_in_the_order_in_which_they_ran(back: bool) -> None:
    words = named_in_words(route_of(p.departed(backward=back), "PA207"))
    section = words.split("in backward\n")[1] if back else words.split("in backward")[0]
    told = re.findall(r"^ +\d+\. ([^:\n]+)", section, re.MULTILINE)
    tail = "'s backward" if back else ""
    assert told == [f"Mm{tail}", "from_local", f"Sum{tail}", "own backward of Mine"]
    assert (words.count("first departure"), words.count("or here")) == (1, 3)
    assert words.count(f". Sum{tail}\n") == 1


def test_a_departure_that_is_exact_is_the_place() -> None:
    report = p.departed(exact=True)
    assert forward(report, "PA208") == [("Mm", "job/model.py:10", "? (right)", "? (off by 0.5) !")]
    assert route_of(report, "PA208").wrong == "at Mm"


def test_the_loss_has_the_same_candidates() -> None:
    found = route_of(p.departed(), "PA208")
    assert [s.kind for s in found.stops] == ["Mm", "from_local", "Sum", "own backward of Mine"]
    assert (found.about, found.start) == ("the output of mlp", None)


def test_where_a_trace_names_the_cause_a_departure_is_named_too() -> None:
    report = p.never_summed()
    (finding,) = report.findings
    d = replace(p.departed().measurement.departures[0], param_fqn="mlp.bias")  # type: ignore[union-attr]
    step = PathStep(role="first departure: Mm", kind="op", call_site=p.ADDED, boundary=-1)
    finding = replace(finding, path=(*finding.path, step))
    report = replace(report, findings=(finding,), measurement=p.measurement(departures=(d,)))
    found = route_of(report)
    assert [(s.kind, shown(s.before), shown(s.after)) for s in found.stops] == [
        ("addmm", "plain", "plain"),
        ("Mm", "-", "-"),
    ]
    assert found.wrong == "at .grad"
