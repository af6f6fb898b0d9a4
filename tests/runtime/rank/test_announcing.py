"""Jobs that come at once go to the head together, in their order, and before they are withdrawn."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from moeserve.runtime.control.frames import LENGTH, decoded, encoded
from moeserve.runtime.control.messages import announcement_message, announcements_from
from moeserve.runtime.rank.member.announcing import MOST_TOGETHER, Announcing
from moeserve.runtime.step import Announcement


def job(number: int, generation: int = 3, deadline: float = math.inf) -> Announcement:
    return Announcement(1, number, 5, number + 10, deadline, generation)


def said(told: list[dict[str, Any]]) -> list[tuple[str, int, list[int]]]:
    """Kind, generation and jobs of each message, as they come at the head."""
    found = []
    for message in told:
        came = decoded(encoded(message)[LENGTH.size :])
        jobs = came["jobs"] if came["kind"] == "withdraw" else numbers(came)
        found.append((came["kind"], came["generation"], jobs))
    return found


def numbers(message: dict[str, Any]) -> list[int]:
    jobs = announcements_from(message, 1, 100.0)
    assert all((one.lane, one.layer, one.rows) == (1, 5, one.job + 10) for one in jobs)
    return [one.job for one in jobs]


def test_a_job_that_comes_alone_is_told_at_once() -> None:
    told: list[dict[str, Any]] = []
    announcing = Announcing(told.append)
    announcing.announce(job(1))
    announcing.announce(job(2))
    assert said(told) == [("announce", 3, [1]), ("announce", 3, [2])] and "more" not in told[0]


def test_jobs_that_come_together_are_told_together_and_not_too_many() -> None:
    told: list[dict[str, Any]] = []
    announcing = Announcing(told.append)
    count = 2 * MOST_TOGETHER + 3
    with announcing.together():
        for number in range(count):
            announcing.announce(job(number))
        assert len(told) == 2  # the last ones at the end
    assert [len(jobs) for _, _, jobs in said(told)] == [MOST_TOGETHER, MOST_TOGETHER, 3]
    assert [number for _, _, jobs in said(told) for number in jobs] == list(range(count))
    announcing.announce(job(99))
    assert said(told)[-1] == ("announce", 3, [99])


def test_jobs_of_two_generations_are_told_apart() -> None:
    told: list[dict[str, Any]] = []
    announcing = Announcing(told.append)
    with announcing.together():
        for number, generation in enumerate((3, 3, 4, 4, 3)):
            announcing.announce(job(number, generation))
    assert said(told) == [("announce", 3, [0, 1]), ("announce", 4, [2, 3]), ("announce", 3, [4])]


def test_a_job_is_announced_before_it_is_withdrawn() -> None:
    told: list[dict[str, Any]] = []
    announcing = Announcing(told.append)
    with announcing.together():
        announcing.announce(job(1))
        leaves = threading.Thread(target=announcing.withdraw, args=(3, [1]))
        leaves.start()
        leaves.join(5.0)
        announcing.announce(job(2))
    assert said(told) == [("announce", 3, [1]), ("withdraw", 3, [1]), ("announce", 3, [2])]


def test_other_threads_wait_for_nobody() -> None:
    told: list[dict[str, Any]] = []
    announcing = Announcing(told.append)

    def other() -> None:
        with announcing.together():  # it takes no jobs together meanwhile
            announcing.announce(job(7))

    with announcing.together():
        announcing.announce(job(1))
        for act in (lambda: announcing.announce(job(6)), other):
            thread = threading.Thread(target=act)
            thread.start()
            thread.join(5.0)
        assert said(told) == [("announce", 3, [6]), ("announce", 3, [7])]
    assert said(told)[-1] == ("announce", 3, [1])


def test_what_was_taken_before_a_failure_is_told() -> None:
    told: list[dict[str, Any]] = []
    announcing = Announcing(told.append)
    with pytest.raises(RuntimeError, match="unforeseen"), announcing.together():
        announcing.announce(job(1))
        raise RuntimeError("unforeseen")
    assert said(told) == [("announce", 3, [1])]
    announcing.announce(job(2))
    assert said(told)[-1] == ("announce", 3, [2])


def test_each_job_has_its_own_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    announcing = Announcing(told.append)
    monkeypatch.setattr("moeserve.runtime.control.messages.time.monotonic", lambda: 40.0)
    with announcing.together():
        for number, deadline in enumerate((41.0, math.inf, 43.5)):
            announcing.announce(job(number, deadline=deadline))
    (message,) = told
    assert [one.deadline for one in announcements_from(message, 1, 100.0)] == [101.0, math.inf, 103.5]


@pytest.mark.parametrize("more", [1, [1], [[1, 2, 3]], [[1, 2, 3, "x"]], [["x", 2, 3, None]]])
def test_garbage_among_the_jobs_is_an_error(more: Any) -> None:
    message = {"kind": "announce", "job": 1, "layer": 0, "rows": 1, "left": None, "more": more}
    with pytest.raises((TypeError, ValueError)):
        announcements_from(message, 0, 0.0)


@pytest.mark.parametrize("gathered", [False, True])
def test_that_a_job_has_all_callers_who_were_there_is_told(gathered: bool) -> None:
    one = Announcement(1, 4, 5, 14, math.inf, 3, gathered)
    message = decoded(encoded(announcement_message(one))[LENGTH.size :])
    (found,) = announcements_from(message, 1, 100.0)
    assert found.gathered is gathered and found.job == 4
    (first, second) = announcements_from(announcement_message(one, one), 1, 100.0)
    assert not first.gathered and not second.gathered, "calls beside it have not"


@pytest.mark.parametrize("said", [None, 1, "yes", [True]])
def test_only_a_true_word_counts_as_one(said: Any) -> None:
    message = {"kind": "announce", "job": 1, "layer": 0, "rows": 1, "left": None, "gathered": said}
    (found,) = announcements_from(message, 0, 0.0)
    assert found.gathered is False
