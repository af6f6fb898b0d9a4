"""Waiting for sockets for parts of a millisecond, by the system's ppoll and without it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from moeserve.proto.passes.futex import Words
from moeserve.proto.transports import fine_poll
from moeserve.proto.transports.fine_poll import LONGEST_MS, FinePoll

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["ppoll", "poll"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param == "poll":
        monkeypatch.setattr(fine_poll, "_PPOLL", None)
    elif fine_poll._PPOLL is None:
        pytest.fail("Linux has ppoll")
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("limit", [0, 0.3, 3, 7.5, 2 * LONGEST_MS])
def test_nothing_comes_and_the_wait_is_over(pair: Pair, limit: float) -> None:
    wait, began = FinePoll((pair[0],)), time.monotonic()
    assert wait(limit) == []
    assert time.monotonic() - began >= limit / 1000


def test_a_part_of_a_millisecond_is_waited_for_and_no_more(pair: Pair) -> None:
    wait, seconds = FinePoll((pair[0],)), list[float]()
    for _ in range(50):
        began = time.monotonic()
        assert wait(0.2) == []
        seconds.append(time.monotonic() - began)
    if fine_poll._PPOLL is not None:
        assert min(seconds) < 0.0009


@pytest.mark.parametrize("limit", [0, 0.3, 40.5, 5000.0, None])
def test_what_is_there_is_found_at_once(pair: Pair, limit: float | None) -> None:
    one, other = pair
    silent, its_end = socket.socketpair()
    with silent, its_end:
        wait = FinePoll((silent, one))
        other.send(b"x")
        assert wait(limit) == [(one.fileno(), select.POLLIN)]
        one.recv(1)
        assert wait(0.2) == []


@pytest.mark.parametrize("limit", [90.5, 5000.0, None])
def test_what_comes_ends_a_wait(pair: Pair, limit: float | None) -> None:
    one, other = pair
    sends = threading.Timer(0.02, lambda: other.send(b"x"))
    sends.start()
    wait, began = FinePoll((one,)), time.monotonic()
    found = wait(limit)
    sends.join()
    if limit == 90.5 and not found:  # the timer came late
        assert time.monotonic() - began > 0.09
    else:
        assert found == [(one.fileno(), select.POLLIN)]


def test_what_may_be_sent_is_waited_for_too(pair: Pair) -> None:
    one, other = pair
    one.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            one.send(bytes(1 << 16))
    wait = FinePoll((one,), select.POLLOUT)
    assert wait(0.5) == []
    while other.recv(1 << 20, socket.MSG_DONTWAIT):
        if found := wait(0.5):
            break
    assert found == [(one.fileno(), select.POLLOUT)]


def test_the_end_of_a_connection_is_found(pair: Pair) -> None:
    one, other = pair
    other.close()
    found = dict(FinePoll((one,))(0.5))
    assert found[one.fileno()] & select.POLLIN


def test_a_signal_does_not_end_a_wait(pair: Pair) -> None:
    came = list[int]()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        main, stop = threading.get_ident(), threading.Event()

        def signals() -> None:
            while not stop.wait(0.01):
                signal.pthread_kill(main, signal.SIGUSR1)

        thread = threading.Thread(target=signals)
        thread.start()
        wait = FinePoll((pair[0],))
        try:
            for _ in range(50):
                began, before_it = time.monotonic(), len(came)
                assert wait(80.5) == [] and time.monotonic() - began >= 0.08
                if len(came) > before_it:
                    break
        finally:
            stop.set()
            thread.join()
        assert came
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_fails_a_call_of_the_system_does_not_end_a_wait(pair: Pair) -> None:
    """It leaves another number where libraries look for that of the call that was interrupted."""
    memory = Words(memoryview(bytearray(8)).cast("Q"))
    came = list[bool]()
    before = signal.signal(signal.SIGALRM, lambda number, frame: came.append(memory.sleep(0, 1, 1.0)))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        began = time.monotonic()
        assert FinePoll((pair[0],))(80.5) == []
        assert time.monotonic() - began >= 0.08 and came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_descriptor_that_is_none_is_said(pair: Pair) -> None:
    number = fcntl.fcntl(pair[0].fileno(), fcntl.F_DUPFD, 700)  # that no other thread is given meanwhile

    class Was:
        def fileno(self) -> int:
            return number

    wait = FinePoll((Was(),))
    os.close(number)
    assert dict(wait(0.5)) == {number: select.POLLNVAL}
