"""Who reads a member's stream: the executing thread between steps, the receiving one while a step runs."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moeserve.runtime.control.head_stream import HeadStream, ReachAgain
from moeserve.runtime.control.ring import RingEnd, make_rings, supported
from moeserve.runtime.control.stream import Stream, StreamClosed
from moeserve.runtime.rank.member import entries as entries_module
from moeserve.runtime.rank.member.entries import LOOK_SECONDS, Entries

pytestmark = pytest.mark.skipif(not supported(), reason="rings need x86-64 Linux")

SECONDS = 10.0


def no_head(within: float) -> Stream:
    raise StreamClosed("there is no other head")


class Reading:
    """A head's end, and a member's two threads: what each got, and which read the stream."""

    def __init__(self) -> None:
        self.head, end = (Stream(one) for one in socket.socketpair())
        descriptors = make_rings(1 << 14)
        theirs = descriptors.copied()
        self.head.attach(RingEnd(descriptors, self.head.fileno(), first=True))
        end.attach(RingEnd(theirs, end.fileno(), first=False))
        self.head.move()
        self.stream = HeadStream(end, ReachAgain(no_head, dict, 0.0))
        self.entries = Entries(self.stream)
        self.received: queue.SimpleQueue[tuple[float, dict[str, Any]]] = queue.SimpleQueue()
        self.executed: list[dict[str, Any]] = []
        self.steps: dict[int, Callable[[], object]] = {}  # what a step does that is no short one
        self.ended: list[str] = []
        self.threads = [threading.Thread(target=act, daemon=True) for act in (self._receive, self._execute)]
        for thread in self.threads:
            thread.start()

    def _receive(self) -> None:
        try:
            while True:
                self.entries.await_turn()
                message = self.stream.receive()
                self.received.put((time.monotonic(), message))
                if message["kind"] != "ask":
                    self.entries.put(message)
        except StreamClosed as closed:
            self.ended.append(str(closed))
        self.entries.put({"kind": "stop"})

    def _execute(self) -> None:
        while True:
            entry = self.entries.next(0.05)
            if entry is None:
                continue
            self.executed.append(entry)
            if entry["kind"] == "stop":
                return
            self.steps.get(entry.get("number", -1), lambda: None)()

    def send(self, kind: str, **said: Any) -> None:
        self.head.send({"kind": kind, **said})

    def until(self, count: int) -> None:
        """Waits until so many entries have been executed."""
        end = time.monotonic() + SECONDS
        while len(self.executed) < count and time.monotonic() < end:
            time.sleep(0.001)
        assert len(self.executed) == count, self.executed

    def close(self) -> None:
        self.head.close()
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    made.close()


def test_steps_between_which_nothing_comes_are_taken_by_who_executes_them(reading: Reading) -> None:
    for number in range(50):
        reading.send("run" if number % 3 == 1 else "step", number=number)
        reading.until(number + 1)
    assert [entry["number"] for entry in reading.executed] == list(range(50))
    assert reading.received.qsize() < 10  # the first, and hardly any other


def test_all_entries_are_executed_in_their_order_whoever_reads_them(reading: Reading) -> None:
    kinds = ["step", "commit", "ask", "run", "step", "abort"]
    for number in range(600):
        kind = kinds[number * 7 % 11 % len(kinds)]
        if number % 97 == 0:
            reading.steps[number] = lambda: time.sleep(3 * LOOK_SECONDS)
        reading.send(kind, number=number)
        if number % 13 == 0:
            time.sleep(0.002)
    sent = [number for number in range(600) if kinds[number * 7 % 11 % len(kinds)] != "ask"]
    reading.until(len(sent))
    assert [entry["number"] for entry in reading.executed] == sent


@pytest.mark.timed
@pytest.mark.parametrize("kind", ["ask", "abort", "stage"])
@pytest.mark.parametrize("idle", [0.0, 0.4])
def test_what_comes_while_a_step_takes_long_is_seen_soon(
    reading: Reading, kind: str, idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries_module, "REST_LOOKS", 10)  # 0.1 s without a step: nobody looks any more
    for number in range(5):
        reading.send("step", number=number)
        reading.until(number + 1)
    time.sleep(idle)
    while not reading.received.empty():
        reading.received.get()
    released = threading.Event()
    reading.steps[9] = lambda: released.wait(SECONDS)
    reading.send("step", number=9)
    reading.until(6)
    sent = time.monotonic()
    reading.send(kind)
    came, message = reading.received.get(timeout=SECONDS)
    assert message["kind"] == kind and came - sent < 10 * LOOK_SECONDS
    assert len(reading.executed) == 6
    released.set()
    reading.send("step", number=10)
    count = 7 if kind == "ask" else 8
    reading.until(count)
    for number in range(1, 10):  # and who executes takes steps again
        reading.send("step", number=10 + number)
        reading.until(count + number)
    assert reading.received.qsize() < 5


@pytest.mark.parametrize("busy", [False, True])
def test_the_end_of_the_stream_is_seen_also_while_a_step_runs(reading: Reading, busy: bool) -> None:
    released = threading.Event()
    for number in range(3):
        reading.send("step", number=number)
        reading.until(number + 1)
    if busy:
        reading.steps[3] = lambda: released.wait(SECONDS)
        reading.send("step", number=3)
        reading.until(4)
    reading.head.close()
    reading.threads[0].join(SECONDS)
    assert len(reading.ended) == 1
    released.set()
    reading.threads[1].join(SECONDS)
    assert reading.executed[-1] == {"kind": "stop"}


def test_who_executes_hears_that_another_entry_waits(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries_module, "LOOK_SECONDS", 1.0)  # the receiving thread does not read meanwhile
    seen: list[bool] = []
    sent = threading.Event()

    def look() -> None:
        seen.append(reading.entries.another)
        reading.send("step", number=3)
        sent.set()
        seen.append(reading.entries.another)

    reading.steps[2] = look
    for number in range(2):
        reading.send("step", number=number)
        reading.until(number + 1)
    reading.send("step", number=2)
    assert sent.wait(SECONDS)
    reading.until(4)
    assert seen == [False, True]


@pytest.mark.timed
@pytest.mark.parametrize("steps", [0, 3], ids=["receiving", "taking"])
def test_what_is_added_beside_the_stream_is_executed_at_once_between_steps(
    reading: Reading, steps: int
) -> None:
    for number in range(steps):
        reading.send("step", number=number)
        reading.until(number + 1)
    took = []
    for at in range(20):
        time.sleep(0.003)  # whoever reads waits for the next message
        done = threading.Event()
        reading.steps[100 + at] = done.set
        started = time.monotonic()
        reading.entries.put_beside({"kind": "act", "number": 100 + at})
        assert done.wait(SECONDS)
        took.append(time.monotonic() - started)
    assert sorted(took)[len(took) // 2] < 0.02  # `next` itself is asked for 0.05 s
    reading.send("step", number=50)
    reading.until(steps + 21)
    assert [entry["number"] for entry in reading.executed] == [*range(steps), *range(100, 120), 50]


def test_steps_and_what_is_added_from_many_threads_are_all_executed(reading: Reading) -> None:
    def add(thread: int) -> None:
        for at in range(100):
            reading.entries.put_beside({"kind": "act", "number": 1000 * thread + at})

    threads = [threading.Thread(target=add, args=(thread,)) for thread in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for number in range(200):
        reading.send("step", number=number)
    for thread in threads:
        thread.join(SECONDS)
    reading.until(500)
    for first in (0, 1000, 2000, 3000):
        numbers = [entry["number"] for entry in reading.executed if first <= entry["number"] < first + 1000]
        assert numbers == list(range(first, first + (100 if first else 200)))


def test_without_a_ring_the_receiving_thread_reads_all() -> None:
    entries = Entries(None)
    for number in range(3):
        entries.await_turn()
        entries.put({"kind": "step", "number": number})
    assert entries.another
    found = [entries.next(1.0) for _ in range(3)]
    assert [entry and entry["number"] for entry in found] == [0, 1, 2]
    assert not entries.another and entries.next(0.01) is None
