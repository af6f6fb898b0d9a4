"""A stream at the front door holds a bounded number of requests and replies, whatever its caller does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from moeserve.proto import moe_pb2
from moeserve.runtime.doors.front_door import STREAM_CALLS, _FrontStream

MANY = 20 * STREAM_CALLS


def answer(request: moe_pb2.ForwardRequest) -> moe_pb2.ForwardStreamReply:
    return moe_pb2.ForwardStreamReply(job_id=request.job_id)


class Asking:
    """Requests without end of need, and how many were read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[moe_pb2.ForwardRequest]:
        for at in range(MANY):
            self.read += 1
            yield moe_pb2.ForwardRequest(job_id=str(at))


def settled(asking: Asking) -> int:
    """How many were read once no more are."""
    before, until = -1, time.monotonic() + 10
    while before != asking.read and time.monotonic() < until:
        before = asking.read
        time.sleep(0.1)
    return asking.read


def test_a_caller_that_reads_no_reply_is_read_no_further() -> None:
    stream, asking = _FrontStream(answer), Asking()
    thread = threading.Thread(target=stream.consume, args=(iter(asking),))
    thread.start()
    assert settled(asking) <= STREAM_CALLS + 1
    replies = stream.replies()
    next(replies)
    next(replies)  # the first was taken
    assert settled(asking) <= STREAM_CALLS + 2
    assert len(list(replies)) == MANY - 2
    thread.join(timeout=10)
    assert not thread.is_alive() and asking.read == MANY


def test_a_caller_that_leaves_its_replies_unread_ends_the_stream() -> None:
    stream, asking = _FrontStream(answer), Asking()
    thread = threading.Thread(target=stream.consume, args=(iter(asking),))
    thread.start()
    settled(asking)
    stream.leave()
    thread.join(timeout=10)
    assert not thread.is_alive() and asking.read <= STREAM_CALLS + 1
