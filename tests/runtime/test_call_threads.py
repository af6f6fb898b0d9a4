"""The threads of calls: as many as calls are under way, and few when they are over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from moeserve.runtime.doors.calls.threads import SPARE, Threads

SECONDS = 10.0


def until(true: Callable[[], bool]) -> bool:
    limit = time.monotonic() + SECONDS
    while not true() and time.monotonic() < limit:
        time.sleep(0.01)
    return true()


def running(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_threads_come_with_calls_and_end_after_them() -> None:
    threads, go = Threads(100, "grow", 0.2), threading.Event()
    waiting = [threads.submit(go.wait, SECONDS) for _ in range(150)]
    assert until(lambda: running("grow") == 100), "no more than it may have"
    time.sleep(0.5)
    assert running("grow") == 100
    go.set()
    assert all(each.result(SECONDS) for each in waiting)
    assert until(lambda: running("grow") <= SPARE)
    assert threads.submit(lambda: 5).result(SECONDS) == 5
    threads.shutdown()
    assert until(lambda: running("grow") == 0)


def test_threads_end_though_a_few_calls_go_on() -> None:
    threads, go = Threads(100, "few", 0.2), threading.Event()
    waiting = [threads.submit(go.wait, SECONDS) for _ in range(80)]
    go.set()
    assert all(each.result(SECONDS) for each in waiting)
    limit = time.monotonic() + SECONDS
    while running("few") > SPARE + 1 and time.monotonic() < limit:
        threads.submit(time.sleep, 0.001).result(SECONDS)
    assert running("few") <= SPARE + 1
    threads.shutdown()


def test_a_call_at_a_time_needs_one_thread() -> None:
    threads = Threads(100, "one", 0.2)
    for at in range(200):
        assert threads.submit(lambda at=at: at).result(SECONDS) == at
    assert running("one") <= 3
    threads.shutdown()


def test_what_a_call_raises_is_its_own() -> None:
    threads = Threads(2, "raise")
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 // 0).result(SECONDS)
    assert threads.submit(lambda: 5).result(SECONDS) == 5
    threads.shutdown()
    with pytest.raises(RuntimeError, match="the threads 'raise' have ended"):
        threads.submit(lambda: 5)


def test_many_calls_at_once_are_all_run() -> None:
    threads, done = Threads(8, "many", 0.001), []

    def from_outside() -> None:
        for at in range(500):
            threads.submit(done.append, at)
            if at % 50 == 0:
                time.sleep(0.002)  # some threads end meanwhile

    callers = [threading.Thread(target=from_outside) for _ in range(8)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert until(lambda: len(done) == 4000)
    threads.shutdown()
