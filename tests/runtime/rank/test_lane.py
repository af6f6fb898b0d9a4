"""A lane's word to the sequencer about jobs that nobody waits for any more."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moeserve.runtime.control.stream import StreamClosed
from moeserve.runtime.errors import CallerLeft, DeadlinePassed, GroupUnavailable
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.lane_call import LaneBatch
from moeserve.runtime.rank.member.member import Member
from moeserve.runtime.rank.member.member_group import ProcessGroupSettings
from moeserve.runtime.step import NOT_YET, Announcement, Upload


def made() -> tuple[Lane, list[int], list[list[int]]]:
    """A lane that takes 4 rows a job, what it announces and what it withdraws."""
    lane, announced, withdrawn = Lane(0, capacity=4, queue_limit=100), list[int](), list[list[int]]()

    def announce(job: Announcement) -> None:
        announced.append(job.job)

    lane.announce, lane.withdraw = announce, withdrawn.append
    lane.open()
    return lane, announced, withdrawn


def batch(rows: int) -> LaneBatch:
    return LaneBatch(0, torch.ones(rows, 1), torch.zeros(rows, 2, dtype=torch.int32), torch.ones(rows, 2))


def test_a_cancelled_calls_jobs_are_withdrawn_once() -> None:
    lane, announced, withdrawn = made()
    call = lane.submit(batch(10))
    assert announced == [1, 2, 3]
    (first,) = lane.take(((1, 4),))
    assert first is not None
    first.finish(torch.ones(4, 1), NOT_YET)
    lane.cancel(call)
    call.give_up(CallerLeft("the caller left"))
    lane.cancel(call)
    assert withdrawn == [[2, 3]], "the first has its answer"


def test_an_answered_call_withdraws_nothing() -> None:
    lane, announced, withdrawn = made()
    call = lane.submit(batch(6))
    for job in lane.take(tuple((number, 1) for number in announced)):
        assert job is not None
        job.finish(torch.ones(job.hidden.shape), NOT_YET)
    lane.cancel(call)  # its RPC is over
    assert call.result()[0].shape == (6, 1) and withdrawn == []


@pytest.mark.parametrize("aborted_before", [True, False])
def test_a_drained_lane_stays_so_when_the_group_forms_again(aborted_before: bool) -> None:
    lane, _, _ = made()
    if aborted_before:
        lane.close("rank 1 is lost")
    lane.drain("the service is stopping")
    lane.close("rank 1 is lost")
    lane.open()
    with pytest.raises(GroupUnavailable, match="the service is stopping"):
        lane.submit(batch(1))


def test_parts_of_a_call_that_failed_are_withdrawn() -> None:
    lane, _, withdrawn = made()
    lane.submit(batch(10))
    (second,) = lane.take(((2, 4),))
    assert second is not None
    second.fail(RuntimeError("a step failed"))
    assert withdrawn == [[1, 3]]


def test_a_member_says_what_is_withdrawn_and_bears_that_nobody_hears_it() -> None:
    sent: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    wire: Any = SimpleNamespace(send=sent.put)
    rank: Any = SimpleNamespace(index=3)
    member = Member(rank, None, wire, ProcessGroupSettings("gloo", 5.0), lambda record: None)
    member.withdraw([4, 6])
    assert sent.get() == {"kind": "withdraw", "generation": 0, "jobs": [4, 6]}

    def gone(message: dict[str, Any]) -> None:
        raise StreamClosed("gone")

    wire.send = gone
    member.withdraw([4])


def answered(lane: Lane, numbers: list[int]) -> None:
    for job in lane.take(tuple((number, 1) for number in numbers)):
        assert job is not None
        job.finish(torch.ones(job.hidden.shape), NOT_YET)


def test_a_held_lane_keeps_its_jobs_takes_more_and_announces_all_that_have_no_answer() -> None:
    lane, announced, _ = made()
    under_way, done = lane.submit(batch(6)), lane.submit(batch(1))
    answered(lane, [1, 3])
    assert lane.why_not == "", "probes of the rank say that it serves"
    lane.hold("rank 1 is lost")
    later = lane.submit(batch(2))
    assert announced == [1, 2, 3] and done.ended
    assert lane.why_not == "rank 1 is lost", "it takes calls, and none is answered now"
    assert lane.calls == 2
    lane.open(5)
    assert lane.why_not == ""
    assert announced == [1, 2, 3, 2, 4], "each once, in its order, but for those that were answered"
    answered(lane, [2, 4])
    assert under_way.result()[0].shape == (6, 1) and later.result()[0].shape == (2, 1)
    assert lane.in_flight == 0


def test_a_job_that_is_announced_while_its_lane_is_held_counts_once() -> None:
    """Its announcement is of a generation that has ended by then, which the head does not count."""
    lane, _, _ = made()
    said: list[tuple[int, int]] = []

    def announce(job: Announcement) -> None:
        if not said:
            said.append((job.job, job.generation))
            lane.hold("rank 1 is lost")
            lane.open(7)
        else:
            said.append((job.job, job.generation))

    lane.announce = announce
    lane.open(3)
    lane.submit(batch(1))
    assert said == [(1, 3), (1, 7)]


def test_a_held_lane_fails_what_is_late_and_all_once_it_was_held_for_too_long() -> None:
    lane, _, _ = made()
    lane.hold_seconds = 2.0
    short = replace(batch(1), deadline=time.monotonic() + 0.2)
    lane.hold("rank 1 is lost")
    late, kept = lane.submit(short), lane.submit(batch(1))
    assert late.wait(5.0) and not kept.ended
    with pytest.raises(DeadlinePassed):
        late.result()
    assert kept.wait(5.0)
    with pytest.raises(GroupUnavailable, match=r"rank 1 is lost; .* members.hold_seconds = 2"):
        kept.result()
    with pytest.raises(GroupUnavailable):
        lane.submit(batch(1))
    lane.open(9)
    lane.submit(batch(1))


def test_a_drained_lane_that_is_held_finishes_what_it_has_and_takes_nothing() -> None:
    lane, announced, _ = made()
    call = lane.submit(batch(1))
    lane.drain("the service is stopping")
    lane.hold("rank 1 is lost")
    with pytest.raises(GroupUnavailable, match="the service is stopping"):
        lane.submit(batch(1))
    lane.open(5)
    assert announced == [1, 1]
    answered(lane, [1])
    assert call.ended


def test_a_lane_that_holds_nothing_back_fails_its_jobs_at_once() -> None:
    lane, _, _ = made()
    lane.hold_seconds = 0.0
    call = lane.submit(batch(1))
    lane.hold("rank 1 is lost")
    with pytest.raises(GroupUnavailable, match="rank 1 is lost"):
        call.result()


def test_rows_that_a_failed_step_had_taken_from_the_device_are_brought_there_again() -> None:
    lane, _, _ = made()
    lane.submit(batch(1))
    (job,) = lane._jobs.values()
    job.upload = Upload(torch.ones(1, 1), cast(Any, None), lambda: None)
    (taken,) = lane.take(((1, 1),))
    assert taken is job and job.upload.claimed
    assert lane.take(((1, 1),)) == [None], "no other step may have them"
    lane.hold("rank 1 is lost")
    lane.open(5)
    assert job.upload is None and lane.take(((1, 1),)) == [job]


def test_jobs_of_a_layer_that_is_being_restored_wait_no_longer_than_calls_are_held() -> None:
    lane, _, _ = made()
    lane.hold_seconds = 5.0
    before = lane.submit(batch(1))
    lane.wait_for_layers([0, 7])
    after, other = lane.submit(batch(1)), lane.submit(replace(batch(1), layer=3))
    now = time.monotonic()
    lane.wait_for_layers([0])  # one more is whole; the others wait on
    lane.expire(now + 4.0)
    assert not (before.ended or after.ended or other.ended)
    lane.expire(now + 6.0)
    for call in (before, after):
        with pytest.raises(GroupUnavailable, match=r"layer 0 is being restored, .* members.hold_seconds = 5"):
            call.result()
    assert not other.ended
    lane.wait_for_layers([])
    again = lane.submit(batch(1))
    lane.expire(now + 60.0)
    assert not again.ended


def test_a_lane_that_is_held_again_and_again_holds_no_longer_for_it() -> None:
    """Generations that form, serve no step and abort do not begin the time anew; a step does."""
    lane, _, _ = made()
    lane.hold_seconds = 0.6
    call = lane.submit(batch(1))
    began = time.monotonic()
    while not call.ended and time.monotonic() - began < 5.0:
        lane.hold("the generation cannot form")
        time.sleep(0.2)
        if not call.ended:
            lane.open(3)
    assert call.ended and time.monotonic() - began < 2.0
    lane.open(4)
    lane.hold_seconds = 2.0
    for generation in range(5, 10):  # 2.5 s in all, and never 2 s without a step
        call = lane.submit(batch(1))
        lane.hold("rank 1 is lost")
        time.sleep(0.5)
        lane.open(generation)
        answered(lane, [call.jobs[0].number])
        assert call.result()


def test_a_call_of_many_parts_is_one_call() -> None:
    lane, announced, _ = made()
    whole = lane.submit(batch(6))
    lane.submit(batch(1))
    assert len(announced) == lane.in_flight == 3 and lane.calls == 2
    answered(lane, [1])
    assert lane.calls == 2, "one part is yet to be answered"
    answered(lane, [2, 3])
    assert whole.ended and lane.calls == 0
