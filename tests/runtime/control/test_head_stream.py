"""A member's way to a head that ends and starts again."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moeserve.runtime.control.head_stream import HeadStream, ReachAgain
from moeserve.runtime.control.stream import Stream, StreamClosed, connect

SECONDS = 5.0
SOON = 0.5


class Heads:
    """A socket that outlives heads: each takes one member's stream."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def take(self) -> Stream:
        self.listener.settimeout(SECONDS)
        return Stream(self.listener.accept()[0])


@pytest.fixture
def heads() -> Iterator[Heads]:
    made = Heads()
    yield made
    made.listener.close()


def member(
    heads: Heads, seconds: float, given_up: threading.Event | None = None
) -> tuple[HeadStream, Stream]:
    """A member's stream, and the first head's end of it."""
    first = connect(heads.address, SECONDS)
    again = ReachAgain(
        lambda within: connect(heads.address, min(within, SECONDS)),
        lambda: {"kind": "hello", "rank": 3},
        seconds,
        given_up or threading.Event(),
    )
    return HeadStream(first, again), heads.take()


def start(work: Any) -> queue.SimpleQueue[Any]:
    """Runs `work` in a thread; its result comes in the queue."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(work()), daemon=True).start()
    return found


def test_a_member_is_received_by_the_next_head_and_speaks_with_it(heads: Heads) -> None:
    stream, head = member(heads, SECONDS)
    head.send({"kind": "one"})
    assert stream.receive()["kind"] == "one"
    head.close()
    with pytest.raises(StreamClosed):
        stream.receive()
    back = start(stream.come_back)
    head = heads.take()
    assert head.receive() == {"kind": "hello", "rank": 3, "again": True}
    head.send({"kind": "welcome"})
    head.send({"kind": "two"})
    assert back.get(timeout=SECONDS) and stream.receive()["kind"] == "two"
    stream.send({"kind": "three"})
    assert head.receive()["kind"] == "three"


def test_one_that_does_not_begin_with_a_welcome_is_no_head(heads: Heads) -> None:
    stream, head = member(heads, SECONDS)
    head.close()
    back = start(stream.come_back)
    for answer in ({"kind": "prepare"}, None):
        head = heads.take()
        head.receive()
        if answer is not None:
            head.send(answer)
        head.close()
    head = heads.take()
    head.receive()
    head.send({"kind": "welcome"})
    assert back.get(timeout=SECONDS)


@pytest.mark.parametrize("takes", [True, False], ids=["that takes the hello", "that takes nothing"])
def test_a_head_that_says_nothing_is_waited_for_until_the_bound(heads: Heads, takes: bool) -> None:
    stream, head = member(heads, SOON)
    head.close()
    began = time.monotonic()
    back = start(stream.come_back)
    kept = [heads.take().receive()] if takes else []
    assert back.get(timeout=SECONDS) is False
    assert SOON <= time.monotonic() - began < SECONDS
    assert len(kept) == takes


def test_the_bound_counts_from_when_the_head_was_last_heard(heads: Heads) -> None:
    """One that welcomes and ends, again and again, is no head."""
    stream, head = member(heads, SOON)
    head.close()
    began, ends = time.monotonic(), threading.Event()

    def welcome_and_end() -> None:
        while not ends.is_set():
            try:
                taken = heads.take()
                taken.receive()
                taken.send({"kind": "welcome"})
            except (OSError, StreamClosed):
                continue
            taken.close()

    threading.Thread(target=welcome_and_end, daemon=True).start()
    try:
        times = 0
        while stream.come_back():
            times += 1
            with pytest.raises(StreamClosed):
                stream.receive()
        assert times > 0 and SOON <= time.monotonic() - began < SECONDS
    finally:
        ends.set()


def test_nobody_is_looked_for_once_the_launcher_has_ended(heads: Heads) -> None:
    given_up = threading.Event()
    stream, head = member(heads, 60.0, given_up)
    heads.listener.close()
    head.close()
    back = start(stream.come_back)
    given_up.set()
    assert back.get(timeout=SECONDS) is False


def test_without_patience_a_member_does_not_come_back(heads: Heads) -> None:
    stream, head = member(heads, 0.0)
    head.close()
    assert stream.come_back() is False


def test_who_cannot_send_has_who_receives_hear_of_it(heads: Heads) -> None:
    stream, head = member(heads, SECONDS)
    ended: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def receive() -> None:
        try:
            stream.receive()
        except StreamClosed:
            ended.put(True)

    threading.Thread(target=receive, daemon=True).start()
    head._socket.shutdown(socket.SHUT_RD)  # it takes nothing any more, and says nothing
    head._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    head._reader.close()
    head._socket.close()
    with pytest.raises(StreamClosed):
        while True:
            stream.send({"kind": "x"})
            time.sleep(0.01)
    assert ended.get(timeout=SECONDS)
