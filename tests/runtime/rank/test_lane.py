"""A lane's word to the sequencer about jobs that nobody waits for any more."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import torch

from moeserve.runtime.control.stream import StreamClosed
from moeserve.runtime.errors import CallerLeft
from moeserve.runtime.rank.lane import Lane, LaneBatch
from moeserve.runtime.rank.member import Member
from moeserve.runtime.rank.member_group import ProcessGroupSettings
from moeserve.runtime.step import NOT_YET, Announcement


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
