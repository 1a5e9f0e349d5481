"""From what the ranks posted to one message."""

from __future__ import annotations

import pytest

from placement_audit.errors import IncompleteError
from placement_audit.roll import (
    Answer,
    Trail,
    check_digests,
    failure_message,
    hang_message,
    lost_message,
    named,
    stuck_message,
)

pytestmark = pytest.mark.unit


AT = Trail(phase="trace", text="all_reduce #3 over tp in backward")


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
        "  rank 2: got as far as all_gather #6 over fsdp in forward, 60 s ago; at user.py:33 in f\n"
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
    assert failure_message(failures, 2, {}) == ("rank 1: broken", "traceback of broken", 3)


def test_what_all_ranks_say_is_told_once_without_a_rank():
    failures = {0: failure(2, "broken"), 1: failure(1, "broken")}
    assert failure_message(failures, 2, {})[0] == "broken"


def test_a_users_mistake_has_no_rank():
    # Not even where another rank is slow to answer: it may still be importing torch.
    message, _, status = failure_message({0: failure(1, "disk full", status=2)}, 4, {1: AT})
    assert (message, status) == ("disk full", 2)


def test_a_rank_without_an_answer_comes_before_what_the_others_met():
    assert failure_message({0: failure(1, "connection closed")}, 2, {1: AT}) == (
        "rank 1 gave no answer: killed (out of memory?), or busy outside Python.\n"
        "  rank 1 was last seen during trace, at or after all_reduce #3 over tp in backward\n"
        "  rank 0: connection closed",
        "traceback of connection closed",
        3,
    )


def test_no_failure_posted_still_says_something():
    assert failure_message({}, 2, {})[2] == 3


def test_lost_ranks_are_named_with_how_and_where_and_the_rest_with_where():
    trails = {0: AT, 1: Trail(phase="build"), 2: AT, 3: AT}
    assert lost_message({1: -9, 3: 5}, trails).splitlines() == [
        "rank 1 was killed by signal 9 (SIGKILL) during build.",
        "  If nobody sent it, memory ran out: take fewer ranks, or a smaller model.",
        "  rank 3: ended with exit status 5 before the audit was done, during trace, at or after all_reduce "
        "#3 over tp in backward",
        "  ranks 0, 2: during trace, at or after all_reduce #3 over tp in backward",
    ]


def test_ranks_lost_alike_are_one_line():
    assert lost_message({0: -11, 1: -11}, {0: AT, 1: AT}) == (
        "ranks 0-1 were killed by signal 11 (SIGSEGV) during trace, at or after all_reduce #3 over tp in "
        "backward."
    )


def test_an_unknown_signal_has_a_number_only():
    assert lost_message({0: -77}, {0: Trail()}) == "rank 0 was killed by signal 77 during start."


def test_what_a_survivor_met_is_cut_short():
    trails = {0: AT, 1: Trail(phase="trace", failed="lost its peer " + "and more " * 100)}
    line = lost_message({0: -6}, trails).splitlines()[1]
    assert line.startswith("  rank 1: during trace; then failed: lost its peer and more")
    assert line.endswith(" ...")
    assert len(line) < 280


def test_ranks_that_none_can_ask_are_told_by_their_last_records():
    assert stuck_message({0: AT, 1: AT}, 60).splitlines() == [
        "all 2 ranks hang: no progress for 60 s (--timeout), and no watchdog answers.",
        "  ranks 0-1: during trace, at or after all_reduce #3 over tp in backward",
    ]


def test_ranks_that_agree_pass():
    check_digests({0: "a", 1: "a", 2: "a"})


def test_ranks_that_differ_are_named():
    with pytest.raises(IncompleteError, match=r"ranks 0-1, 3 agree, rank 2 differs"):
        check_digests({0: "a", 1: "a", 2: "b", 3: "a"})
