"""How the thread that looks at callers' words waits: until a step ends, or a caller rings, or for a while."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest
from begun_steps import Step

from moeserve.proto import moe_pb2
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.futex import SUPPORTED, Words
from moeserve.proto.passes.mailbox import tag_of
from moeserve.runtime.doors.passes import pauses as module
from moeserve.runtime.doors.passes.announced import LaneModel
from moeserve.runtime.doors.passes.asked import DeviceLaneLimits
from moeserve.runtime.doors.passes.device_lanes import DeviceLanes
from moeserve.runtime.doors.passes.looking import Looking
from moeserve.runtime.doors.passes.pauses import Pauses
from moeserve.runtime.doors.payloads import RegionLimits, Regions

LONG = 20.0


def seconds_of(pauses: Pauses, seconds: float, words: Words | None = None, seen: int = 0) -> float:
    began = time.monotonic()
    pauses.wait(seconds, None if words is None else (words, m.BELL, seen))
    return time.monotonic() - began


def test_where_nothing_could_begin_the_end_of_a_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LOOK", LONG)
    pauses = Pauses()
    threading.Timer(0.1, pauses.step_ended).start()
    assert 0.05 < seconds_of(pauses, math.inf) < LONG / 2
    assert seconds_of(pauses, math.inf) < LONG / 2, "it was not looked at since"
    pauses.looks()
    monkeypatch.setattr(module, "LONGEST_LOOK", 0.05)
    assert seconds_of(pauses, math.inf) > 0.04


@pytest.mark.skipif(not SUPPORTED, reason="futexes are of Linux on x86-64 and aarch64")
def test_a_caller_that_rings_is_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LOOK", LONG)
    box = memoryview(bytearray(8 * 16)).cast("Q")
    words, pauses = Words(box), Pauses()

    def ring() -> None:
        box[m.BELL] = 1
        words.wake(m.BELL)

    threading.Timer(0.1, ring).start()
    assert 0.05 < seconds_of(pauses, 0.0, words) < LONG / 2
    assert seconds_of(pauses, 0.0, words) < LONG / 2, "it rang between the look and the wait"
    monkeypatch.setattr(module, "LONGEST_LOOK", 0.05)
    assert seconds_of(pauses, 0.0, words, seen=1) > 0.04


def test_a_caller_that_rings_all_the_time_has_no_thread_look_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SHORTEST_LOOK", 0.05)
    box = memoryview(bytearray(8 * 16)).cast("Q")
    box[m.BELL] = 7
    assert seconds_of(Pauses(), 0.0, Words(box), seen=6) >= 0.05


@pytest.mark.skipif(not SUPPORTED, reason="futexes are of Linux on x86-64 and aarch64")
def test_a_lone_caller_who_rings_is_looked_at_the_rarer_the_longer_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LONGEST_LOOK", 0.02)
    monkeypatch.setattr(module, "LONGEST_REST", 0.6)
    words = Words(memoryview(bytearray(8 * 16)).cast("Q"))
    for idle_eighth, at_least in ((0.0, 0.02), (0.1, 0.1), (LONG, 0.6)):
        assert 0.9 * at_least <= seconds_of(Pauses(), idle_eighth, words) < LONG / 2
    monkeypatch.setattr(Words, "wakes", False)
    assert seconds_of(Pauses(), LONG, words) < 0.6, "nobody could wake it"


@pytest.mark.skipif(not SUPPORTED, reason="futexes are of Linux on x86-64 and aarch64")
def test_who_rests_for_one_caller_is_woken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_REST", LONG)
    pauses = Pauses()
    pauses.interrupt()  # nobody rests
    words, over = Words(memoryview(bytearray(8 * 16)).cast("Q")), threading.Event()

    def interrupt() -> None:
        while not over.wait(0.05):
            pauses.interrupt()

    threading.Thread(target=interrupt).start()
    try:
        assert seconds_of(pauses, LONG, words) < LONG / 2
    finally:
        over.set()


@pytest.mark.parametrize("does", ["attaches", "detaches"])
def test_nobody_waits_for_the_rest_of_an_idle_caller_to_be_over(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_REST", LONG)
    regions = Regions(RegionLimits(max_bytes=1 << 20))
    model = LaneModel("tiny", 8, 4, 2, (3,))
    lanes = DeviceLanes(regions, model, DeviceLaneLimits(lanes=4), lambda peer: lambda request, ended: None)
    looked = list[object]()
    asked = {"device": "cpu", "dtype": moe_pb2.DTYPE_FP32, "rows": 4, "stages": 1}
    try:
        first = lanes.attach(moe_pb2.AttachLaneRequest(name="idle", **asked), "tester")  # type: ignore[arg-type]
        (idle,) = (attached.lane for attached in lanes._lanes.values())
        idle.stirred_at, idle._box[m.BELL] = -1e9, 1
        time.sleep(0.1)  # it rests
        look = lanes.looking.look
        lanes.looking.look = lambda there, leaving: (looked.append(None), look(there, leaving))[1]  # type: ignore
        if does == "attaches":
            lanes.attach(moe_pb2.AttachLaneRequest(name="other", **asked), "tester")  # type: ignore[arg-type]
        else:
            lanes.detach(first.mailbox)
        began = time.monotonic()
        while not looked:
            assert time.monotonic() - began < LONG / 2
            time.sleep(0.005)
    finally:
        lanes.close()
        regions.close()


class _GpuLane:
    """As much of a lane of a caller's GPU as a look asks for; `look` takes a while."""

    rings = unseen = silent = ahead = False
    rung = 0
    active_at = -math.inf

    def __init__(self, *, soon: bool, under_way: int = 0) -> None:
        self.soon, self.under_way, self.stirred_at = soon, under_way, time.monotonic()

    def stirs(self, now: float) -> bool:
        return True

    def look(self, now: float) -> bool:
        time.sleep(0.02)
        return False

    def pause(self, now: float) -> float:
        return (now - self.stirred_at) / 8


class _SlowLaunches:
    """Makes no lane; a launch takes long."""

    def looks(self, *, launches: bool) -> None:
        assert not launches, "another thread launches"

    def await_launches(self, seconds: float) -> None:
        time.sleep(0.2)

    def flow(self, lanes: list[object]) -> None:
        assert not lanes


@pytest.mark.parametrize(
    ("soon", "others", "least", "most"),
    [(True, 0, 0.0, 0.01), (True, 1, 0.035, 0.15), (False, 0, 0.07, 0.3), (False, 1, 0.07, 0.3)],
)
def test_a_launch_that_was_waited_for_makes_no_look_come_later(
    soon: bool, others: int, least: float, most: float
) -> None:
    """Of lanes of callers' GPUs, whose rows come a few microseconds after the answer that is on its way: at
    once, or after as long as the look itself took where callers of the host want steps, too; and after twice
    as long where no step is under way.
    """
    looking = Looking(None)
    looking.mail = _SlowLaunches()  # type: ignore[assignment]
    lanes = [_GpuLane(soon=soon), _GpuLane(soon=False, under_way=others)]
    pause, bell = looking.look(lanes, ())  # type: ignore[arg-type]
    assert bell is None
    assert least <= pause < most


def test_others_are_looked_at_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LOOK", 0.05)
    assert seconds_of(Pauses(), 0.0) >= module.SHORTEST_LOOK
    assert 0.04 < seconds_of(Pauses(), LONG) < LONG / 2


@pytest.mark.parametrize("rings", [False, True])
@pytest.mark.parametrize("idle", [0, 1, 3])
def test_steps_of_one_lane_do_not_wait_for_looks_at_others(
    idle: int, rings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a look takes at most is made so long that a single step that waited for it would be seen. Rows
    come a moment after the answer; those of the first step with the announcement.
    """
    monkeypatch.setattr(module, "LONGEST_LOOK", LONG)

    def begin(request: moe_pb2.ForwardRequest, ended: Callable[..., None]) -> None:
        step = Step(request, ended)
        threading.Timer(0.005, step.answer).start()

    regions = Regions(RegionLimits(max_bytes=1 << 20))
    model = LaneModel("tiny", 8, 4, 2, (3,))
    lanes = DeviceLanes(regions, model, DeviceLaneLimits(lanes=4), lambda peer: begin)
    try:
        for at in range(1 + idle):
            lanes.attach(
                moe_pb2.AttachLaneRequest(
                    name=f"lane-{at}", device="cpu", dtype=moe_pb2.DTYPE_FP32, rows=4, stages=1
                ),
                "tester",
            )
        busy, *others = (attached.lane for attached in lanes._lanes.values())
        for other in others:
            other.stirred_at, other._box[m.BELL] = -1e9, int(rings)
        box, out, layout = busy._box, busy._out, busy.memory.layout

        def ring() -> None:
            if rings:
                Words(box).write(m.BELL, box[m.BELL] + 1)

        ring()
        time.sleep(0.05)  # all have been looked at
        box[m.STEPS], box[m.STAGES], box[m.FLAGS], box[m.LAYERS] = 1, 1, m.STANDING, 3
        box[m.ANNOUNCED] = 1
        began = time.monotonic()
        for step in range(20):
            head, tag = layout.header(0), tag_of(1, step)
            for word, value in {m.LAYER: 3, m.STAGE: 0, m.COUNT: 2, m.KIND: m.CHOICE, m.TAG: tag}.items():
                box[head + word] = value
            ring()
            while out[layout.answer_header(0)] != tag:
                assert time.monotonic() - began < LONG / 2, f"step {step} was not answered"
                time.sleep(0.001)
            time.sleep(0.001)
    finally:
        monkeypatch.setattr(module, "LONGEST_LOOK", 0.002)
        lanes.close()
        regions.close()
