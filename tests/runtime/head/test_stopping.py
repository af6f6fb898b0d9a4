"""What a head keeps of lanes while the service stops."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

from moeserve.runtime.head.draining import Draining
from moeserve.runtime.head.group import Group
from moeserve.runtime.launch.head_process import HeadProcess


def test_what_a_lane_said_before_it_takes_calls_again_is_no_word_on_those() -> None:
    seats = {0: object(), 1: object()}
    group: Any = SimpleNamespace(
        lock=threading.Condition(), seats=seats, generation=1, broadcast=lambda message: None
    )
    draining = Draining(cast(Group, group))
    draining.note_lanes()
    with group.lock:
        draining.begin(1.0, "the service is stopping")
        del seats[0]
        assert draining.lost == [0]
        draining.take_again()
        draining.ended(1)  # it was on its way, and lane 1 takes calls by now
        del seats[1]
        assert draining.lost == [1]


def test_lanes_that_leave_once_more_do_so_within_the_time_that_is_left() -> None:
    waited = list[float]()
    head: Any = object.__new__(HeadProcess)
    head._telling, head._leaving_seconds, head._probes = threading.Lock(), 20.0, None
    head._endpoint = SimpleNamespace(set_serving=lambda serving: None, drain=lambda reason: None)
    head._front = SimpleNamespace(drain=lambda reason: None)
    head.coordinator = SimpleNamespace(
        stopping=SimpleNamespace(reason="", wait_lost=waited.append),
        progress=lambda: SimpleNamespace(state="serving"),
    )
    head._leave("the service is stopping", time.monotonic() + 0.5)
    head._leave("the service is stopping", time.monotonic() - 1.0)
    assert 0.0 < waited[0] <= 0.5
    assert waited[1] == 0.0
