"""From what the ranks posted to one message."""

from __future__ import annotations

import pytest

from placement_audit.errors import IncompleteError
from placement_audit.roll import Answer, check_digests, failure_message, hang_message, named

pytestmark = pytest.mark.unit


def answer(count: int, text: str, place: str = "model.py:3 in forward") -> Answer:
    return Answer(count=count, phase="trace", text=text, seconds=60.0, place=place)


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([4, 1], "ranks 1, 4")]
)
def test_named(ranks, words):
    assert named(ranks) == words


def test_the_rank_furthest_behind_hung():
    waiting = answer(9, "all_reduce #7 over tp in forward")
    answers = {
        0: waiting,
        1: waiting,
        2: answer(8, "all_gather #6 over fsdp in forward", "user.py:33 in f"),
        3: waiting,
    }
    assert hang_message(answers, 4, 60) == (
        "rank 2 hung: no progress for 60 s (--timeout).\n"
        "  rank 2: last collective was all_gather #6 over fsdp in forward, 60 s ago; at user.py:33 in f\n"
        "  ranks 0-1, 3: waiting in all_reduce #7 over tp in forward, 60 s ago; at model.py:3 in forward"
    )


def test_a_rank_that_does_not_answer_hung():
    message = hang_message({0: answer(9, "all_reduce #7 over tp in forward")}, 2, 60)
    assert message.splitlines()[0] == "rank 1 hung: no progress for 60 s (--timeout)."
    assert "rank 1: no answer" in message
    assert "rank 0: waiting in all_reduce #7 over tp in forward" in message


def test_ranks_equally_far_all_hang():
    message = hang_message(
        {0: answer(9, "all_reduce #7 over tp"), 1: answer(9, "all_gather #7 over tp")}, 2, 60
    )
    assert message.splitlines()[0] == "all 2 ranks hang: no progress for 60 s (--timeout)."
    assert "rank 0: waiting in all_reduce #7" in message
    assert "rank 1: waiting in all_gather #7" in message


def test_a_rank_before_its_first_collective_is_told_by_phase():
    message = hang_message({0: answer(2, ""), 1: answer(3, "all_gather #0 over tp in forward")}, 2, 5)
    assert "rank 0: in phase trace" in message


def failure(order: int, message: str, status: int = 3) -> dict:
    return {"order": order, "status": status, "message": message, "details": f"traceback of {message}"}


def test_the_first_failure_is_told_with_its_rank():
    failures = {0: failure(2, "connection closed"), 1: failure(1, "broken")}
    assert failure_message(failures, 2) == ("rank 1: broken", "traceback of broken", 3)


def test_what_all_ranks_say_is_told_once_without_a_rank():
    failures = {0: failure(2, "broken"), 1: failure(1, "broken")}
    assert failure_message(failures, 2)[0] == "broken"


def test_a_users_mistake_has_no_rank():
    message, _, status = failure_message({0: failure(1, "disk full", status=2)}, 4)
    assert (message, status) == ("disk full", 2)


def test_no_failure_posted_still_says_something():
    assert failure_message({}, 2)[2] == 3


def test_ranks_that_agree_pass():
    check_digests({0: "a", 1: "a", 2: "a"})


def test_ranks_that_differ_are_named():
    with pytest.raises(IncompleteError, match=r"ranks 0-1, 3 agree, rank 2 differs"):
        check_digests({0: "a", 1: "a", 2: "b", 3: "a"})
