"""Who looks at a rank's lanes: a thread of their own, or the one that launches steps, and never both."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from mail_callers import Caller

from moeserve.proto import moe_pb2
from moeserve.runtime.doors.passes import looking as module
from moeserve.runtime.doors.passes.announced import AnnouncedLane, LaneModel
from moeserve.runtime.doors.passes.asked import DeviceLaneLimits
from moeserve.runtime.doors.passes.device_lane import DeviceLane
from moeserve.runtime.doors.passes.device_lanes import DeviceLanes
from moeserve.runtime.doors.passes.mail_host import MailHost
from moeserve.runtime.doors.passes.mail_lane import MailLane
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.doors.payloads import RegionLimits, Regions

SECONDS = 5.0


class Seen:
    """Notes by which thread each look at a lane is, and whether two are at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: list[int] = []
        self.at_once = 0
        self.takes = 0.0
        self._at = 0
        monkeypatch.setattr(DeviceLane, "stirs", lambda lane, now: True)
        monkeypatch.setattr(DeviceLane, "look", lambda lane, now: self._look())

    def _look(self) -> bool:
        self._at += 1
        self.at_once = max(self.at_once, self._at)
        self.by.append(threading.get_ident())
        time.sleep(self.takes)
        self._at -= 1
        return False

    def since(self, count: int) -> set[int]:
        """Threads of the looks since there were so many."""
        return set(self.by[count:])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


@pytest.fixture
def lanes(seen: Seen) -> Any:
    regions = Regions(RegionLimits(max_bytes=1 << 20))
    model = LaneModel("tiny", 8, 4, 2, (3, 5))
    made = DeviceLanes(regions, model, DeviceLaneLimits(lanes=4), lambda peer: lambda *step: None)
    attach(made, "one")
    yield made
    made.close()
    regions.close()


def attach(lanes: DeviceLanes, name: str) -> str:
    asked = moe_pb2.AttachLaneRequest(name=name, device="cpu", dtype=moe_pb2.DTYPE_FP32, rows=4, stages=1)
    return lanes.attach(asked, "tester").mailbox


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < until, "it did not come to be"
        time.sleep(0.001)


def look_for(lanes: DeviceLanes, seconds: float) -> None:
    """Looks as the thread that launches steps does, for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        lanes.look_elsewhere()
        time.sleep(1e-4)


def test_while_the_thread_of_the_steps_looks_no_other_one_does(
    lanes: DeviceLanes, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ELSEWHERE_SECONDS", 2.0)
    wait_for(lambda: bool(seen.by))
    assert threading.get_ident() not in seen.by
    look_for(lanes, 0.05)  # the other thread may be at a look when it begins
    count = len(seen.by)
    look_for(lanes, 0.1)
    assert len(seen.by) > count and seen.since(count) == {threading.get_ident()}
    count = len(seen.by)
    lanes.back()
    began = time.monotonic()
    wait_for(lambda: len(seen.by) > count + 3)
    assert seen.since(count) == {lanes._thread.ident} and time.monotonic() - began < 1.0


def test_where_that_one_is_away_for_long_the_lanes_thread_looks(lanes: DeviceLanes, seen: Seen) -> None:
    look_for(lanes, 0.02)
    count = len(seen.by)  # from here on it is in a launch, and says nothing
    wait_for(lambda: lanes._thread.ident in seen.since(count))


def test_two_threads_are_never_at_a_look_together(lanes: DeviceLanes, seen: Seen) -> None:
    seen.takes = 0.002
    for _ in range(20):
        look_for(lanes, 0.008)
        lanes.back()
        time.sleep(0.004)
    assert seen.at_once == 1 and seen.since(0) == {threading.get_ident(), lanes._thread.ident}


def test_between_two_looks_it_waits_as_the_other_thread_does(
    lanes: DeviceLanes, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_LOOK", 10.0)
    lanes.looking._look = lambda *given, **named: (seen.by.append(-1), (10.0, None))[1]  # type: ignore[method-assign]
    look_for(lanes, 0.05)
    count = len(seen.by)
    look_for(lanes, 0.05)
    assert seen.since(count) <= {lanes._thread.ident}, "nothing is due"
    lanes.looking.pauses.step_ended()
    lanes.look_elsewhere()
    assert seen.by[-1] == -1, "a step has ended"


def test_what_a_look_begins_may_be_launched_at_once_by_the_thread_that_launches(
    lanes: DeviceLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ELSEWHERE_SECONDS", 2.0)
    said = list[tuple[int, bool]]()

    class Mail:
        def looks(self, *, launches: bool) -> None:
            said.append((threading.get_ident(), launches))

        def await_launches(self, seconds: float) -> None:
            pass

        def flow(self, lanes: list[MailLane]) -> None:
            assert not lanes, "the one that is attached is of the host"

    lanes.looking.mail = Mail()  # type: ignore[assignment]
    wait_for(lambda: bool(said))
    look_for(lanes, 0.05)
    assert set(said) == {(threading.get_ident(), True), (lanes._thread.ident, False)}


def test_a_lane_that_leaves_is_let_go_of_by_its_own_thread_meanwhile(
    lanes: DeviceLanes, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox, closed = attach(lanes, "two"), threading.Event()
    monkeypatch.setattr(DeviceLane, "close", lambda lane: closed.set())
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            lanes.look_elsewhere()
            time.sleep(1e-4)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        wait_for(lambda: thread.ident in seen.by)
        lanes.detach(mailbox)
        assert closed.wait(SECONDS)
        count = len(seen.by)
        wait_for(lambda: thread.ident in seen.since(count))
        attach(lanes, "two")
        assert [one.name for one in lanes.attached()] == ["one", "two"]
    finally:
        stop.set()
        thread.join(SECONDS)


def test_a_look_that_fails_ends_no_step(
    lanes: DeviceLanes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object, **named: object) -> Any:
        raise RuntimeError("no look")

    lanes.looking.look_elsewhere = fail  # type: ignore[method-assign]
    lanes.look_elsewhere()
    lanes.look_elsewhere()
    assert caplog.text.count("RuntimeError: no look") == 1
    assert lanes._thread.is_alive()


def test_steps_that_cannot_be_begun_end_no_lane(
    lanes: DeviceLanes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = list[int]()

    class Steps:
        def begin(self) -> None:
            begun.append(1)
            if len(begun) == 1:
                raise MemoryError("no room")

    monkeypatch.setattr(lanes.looking, "steps", Steps())
    wait_for(lambda: len(begun) > 3)
    assert lanes._thread.is_alive() and caplog.text.count("could not be begun") == 1
    assert [one.name for one in lanes.attached()] == ["one"]


def test_once_the_lanes_thread_has_ended_nobody_looks_at_what_it_closes(
    lanes: DeviceLanes, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[list[object]]()

    def fail(*given: object) -> Any:
        raise RuntimeError("the thread ends")

    monkeypatch.setattr(lanes.looking, "look", fail)
    lanes._thread.join(SECONDS)
    assert not lanes._thread.is_alive() and not lanes.attached() and not lanes.looking._there
    lanes.looking.look_elsewhere(lambda: looked.append(list(lanes._there)) or [])  # type: ignore[func-returns-value]
    assert looked == [[]]


def test_callers_of_other_lanes_of_the_group_are_company(lanes: DeviceLanes) -> None:
    looking, (lane,) = lanes.looking, lanes._there
    assert looking.group_at == -math.inf
    looking.note_company([lane], time.monotonic())
    assert looking.company_of(lane) is Company.NONE
    looking.company()
    looking.note_company([lane], time.monotonic())
    assert looking.company_of(lane) is Company.CALLS
    assert looking.group_at == -math.inf, "who waits behind its runs may call this rank"
    before = time.monotonic()
    looking.others_came()
    assert before <= looking.group_at <= time.monotonic()
    looking.note_company([lane], time.monotonic() + 0.4)
    assert looking.company_of(lane) is Company.CALLS
    looking.note_company([lane], time.monotonic() + 0.6)
    assert looking.company_of(lane) is Company.NONE


def test_lanes_of_two_tracks_are_company_beside_each_other(
    lanes: DeviceLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, (host,) = lanes.looking, lanes._there
    callers = [Caller(lanes._regions) for _ in range(3)]
    few, many, idle = (caller.lane for caller in callers)
    few.short = True
    flows = list[list[bool]]()

    class Mail:
        def flow(self, lanes: list[MailLane]) -> None:
            flows.append([lane.short for lane in lanes])

        def waits_for(self, lane: MailLane) -> bool:
            return lane is many

    looking.mail = Mail()  # type: ignore[assignment]
    now = time.monotonic()
    few.active_at = many.active_at = now
    there: list[AnnouncedLane] = [few, many, idle, host]
    looking.note_company(there, now)
    assert [looking._waits_for(one) for one in (few, many, host)] == [False, True, False]
    assert flows == [[True, False]], "whose callers have wanted steps lately"
    assert looking.company_of(few) is looking.company_of(many) is Company.BESIDE
    assert looking.company_of(idle) is Company.LANES
    left = list[tuple[bool, Company]]()
    for one in (few, many):
        monkeypatch.setattr(one, "yield_steps", lambda company, one=one: left.append((one.short, company)))
    looking._leads = [few, many]
    looking._look_at([], there, now)
    assert left == [(True, Company.BESIDE), (False, Company.CALLS)], "which the launching thread waits for"
    idle.active_at = now
    looking.note_company(there, now)
    assert looking.company_of(few) is Company.BESIDE and looking.company_of(many) is Company.LANES
    host.active_at = now
    looking.note_company(there, now)
    assert looking.company_of(few) is Company.CALLS and looking.company_of(host) is Company.LANES
    looking.mail = None
    for caller in callers:
        caller.lane.close()


def test_a_lane_whose_steps_lie_on_the_device_keeps_its_track_however_long_its_caller_rests(
    lanes: DeviceLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = lanes.looking
    callers = [Caller(lanes._regions) for _ in range(2)]
    few, many = (caller.lane for caller in callers)
    few.short = True
    host = MailHost(SimpleNamespace(waits_for=lambda lane: lane is few), None, 0)  # type: ignore[arg-type]
    looking.mail = host
    now = time.monotonic()
    few.active_at, many.active_at = -math.inf, now
    looking.note_company([few, many], now)
    assert host._turns.flows == [True, False] and looking.company_of(many) is Company.NONE
    monkeypatch.setattr(MailLane, "soon", property(lambda lane: lane is few))
    looking.note_company([few, many], now)
    assert host._turns.flows == [True, True] and host._turns.apart(short=False)
    assert looking.company_of(many) is Company.NONE, "its caller wants nothing"
    assert looking.company_of(few) is Company.BESIDE
    assert [looking._waits_for(one) for one in (few, many)] == [True, False]
    looking.mail = None
    for caller in callers:
        caller.lane.close()
