"""Reports of the load: packed, of the right shape, and sent by a thread that is not the steps'."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeserve.runtime.control.messages import load_from, report_message
from moeserve.runtime.rank.member.reports import Counted, Reports
from moeserve.runtime.rank.member.steps import MemberSteps

SECONDS = 5.0
TOKENS = np.arange(24, dtype=np.int64).reshape(2, 3, 4) << 40


def test_a_load_travels_whole() -> None:
    message = report_message(7, (5, 6), TOKENS)
    assert (message["generation"], message["steps"], message["expert_rows"]) == (7, 5, 6)
    assert (load_from(message, (2, 3, 4)) == TOKENS).all()


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 3)])
def test_a_load_of_another_shape_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"is not of .* bytes"):
        load_from(report_message(7, (5, 6), TOKENS), shape)


@pytest.mark.parametrize("load", [b"x", b"", b"\x00\x00\x00", "a text", 7, None])
def test_what_is_no_load_is_refused(load: object) -> None:
    with pytest.raises(ValueError):
        load_from({"load": load}, (2, 3, 4))


def test_a_large_load_of_nothing_is_not_unpacked_whole() -> None:
    large = report_message(7, (5, 6), np.zeros((1, 1, 1 << 22), dtype=np.int64))
    with pytest.raises(ValueError, match="is not of 192 bytes"):
        load_from(large, (2, 3, 4))


def test_the_thread_of_the_steps_neither_reads_nor_sends_a_report() -> None:
    threads: queue.SimpleQueue[tuple[str, threading.Thread]] = queue.SimpleQueue()

    def read() -> Any:
        threads.put(("read", threading.current_thread()))
        return SimpleNamespace(tokens=TOKENS)

    def send(message: dict[str, Any]) -> None:
        threads.put((message["kind"], threading.current_thread()))

    meter = SimpleNamespace(snapshot=lambda now: SimpleNamespace(read=read))
    rank: Any = SimpleNamespace(index=0, meter=meter, rows_computed=lambda: None)
    steps = MemberSteps(rank, None, send, lambda record: None)
    steps.steps = 3
    steps.report(None)
    steps.report(1)
    found = [threads.get(timeout=SECONDS) for _ in range(2)]
    assert [what for what, _ in found] == ["read", "report"]
    assert threading.current_thread() not in {thread for _, thread in found}
    assert threads.empty(), "nothing is reported while no generation is live"
    steps.close()


def test_rows_that_a_device_has_counted_are_reported_though_no_step_follows() -> None:
    sent: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    load = SimpleNamespace(read=lambda: SimpleNamespace(tokens=TOKENS))
    meter = SimpleNamespace(snapshot=lambda now: load)
    counted = SimpleNamespace(read=lambda: [4, 5], taken=lambda: [2, 1])
    served = SimpleNamespace(layers=(0, 1))
    rank: Any = SimpleNamespace(index=0, meter=meter, served=served, rows_computed=lambda: counted)
    steps = MemberSteps(
        rank, None, lambda message: sent.put((message["steps"], message["expert_rows"])), lambda record: None
    )
    ran = list[tuple[int, int]]()
    steps.observe_ran = lambda layer, many: ran.append((layer, many))
    told = list[tuple[int, int, int]]()
    steps.observe_rows = lambda layer, rows, taken: told.append((layer, rows, taken))
    steps.ran([0, 1, 0])
    assert ran == [(0, 2), (1, 1)]
    steps.report(1)
    assert sent.get(timeout=SECONDS)[0] == 3, "the device is asked beside that"
    limit = time.monotonic() + SECONDS
    while not steps.expert_rows and time.monotonic() < limit:
        time.sleep(0.001)
    steps.report(1)
    assert sent.get(timeout=SECONDS) == (3, 9) and told[:2] == [(0, 4, 2), (1, 5, 1)]
    steps.report(1)
    steps.report(2)  # of a head that has started again, perhaps
    assert sent.get(timeout=SECONDS) == (3, 9)
    steps.close()
    assert sent.empty(), "nothing was new in generation 1"


def test_only_the_newest_report_waits() -> None:
    sent: queue.SimpleQueue[int] = queue.SimpleQueue()
    may_go = threading.Event()

    def send(message: dict[str, Any]) -> None:
        sent.put(message["steps"])
        assert may_go.wait(SECONDS)

    reports, load = Reports(send), SimpleNamespace(read=lambda: SimpleNamespace(tokens=TOKENS))
    held: Any = load
    reports.put(Counted(1, 1, 0, held))
    assert sent.get(timeout=SECONDS) == 1
    for steps in (2, 3, 4):
        reports.put(Counted(1, steps, 0, held))
    may_go.set()
    assert sent.get(timeout=SECONDS) == 4
    reports.close()
