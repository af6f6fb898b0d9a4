"""The calls of a lane's stream when their caller leaves: before, while and after they are started."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest

from moeserve.proto import moe_pb2
from moeserve.runtime.doors.calls.lane_stream import LaneStream
from moeserve.runtime.rank.lanes.lane_call import LaneCall

Ended = Callable[[moe_pb2.ForwardStreamReply], None]


class Door:
    """Starts calls that end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[LaneCall, Ended]] = []
        self.left: list[LaneCall] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def begin(self, request: moe_pb2.ForwardRequest, ended: Ended, peer: str) -> LaneCall | None:
        call = LaneCall(lambda call: ended(moe_pb2.ForwardStreamReply(job_id=request.job_id)))
        self.begun.append((call, ended))
        self.meanwhile()
        return call

    def leave(self, call: LaneCall) -> None:
        self.left.append(call)
        call.give_up(RuntimeError("left"))


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def replies() -> queue.SimpleQueue[Any]:
    return queue.SimpleQueue()


@pytest.fixture
def stream(door: Door, replies: queue.SimpleQueue[Any]) -> LaneStream:
    made: Any = door
    return LaneStream(made, replies)


def request(name: str) -> moe_pb2.ForwardRequest:
    return moe_pb2.ForwardRequest(job_id=name)


def test_a_caller_that_leaves_takes_its_calls_along(door: Door, stream: LaneStream) -> None:
    stream.start(0, request("a"))
    stream.start(1, request("b"))
    door.begun[0][0].give_up(RuntimeError("done"))
    stream.left()
    assert door.left == [door.begun[1][0]]


def test_a_call_that_starts_while_its_caller_leaves_ends_at_once(door: Door, stream: LaneStream) -> None:
    door.meanwhile = stream.left
    stream.start(0, request("a"))
    assert door.left == [door.begun[0][0]] and door.begun[0][0].ended


def test_nothing_starts_after_the_caller_left(door: Door, stream: LaneStream) -> None:
    stream.left()
    stream.consume(iter([request("a"), request("b")]))
    assert door.begun == []


def test_a_call_that_ends_while_it_starts_is_not_kept(door: Door, stream: LaneStream) -> None:
    door.meanwhile = lambda: door.begun[-1][0].give_up(RuntimeError("done"))
    stream.start(0, request("a"))
    stream.left()
    assert door.left == []


def test_replies_end_when_all_are_answered(
    door: Door, stream: LaneStream, replies: queue.SimpleQueue[Any]
) -> None:
    stream.consume(iter([request("a"), request("b")]))
    assert replies.empty()
    for call, _ in reversed(door.begun):
        call.give_up(RuntimeError("done"))
    assert [replies.get(timeout=1) for _ in range(3)] == [
        moe_pb2.ForwardStreamReply(job_id="b"),
        moe_pb2.ForwardStreamReply(job_id="a"),
        None,
    ]
