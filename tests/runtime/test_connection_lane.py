"""The lane of a data connection beside steps that end by hand: what it takes, and what comes of that."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from begun_steps import Step

from moeserve.proto import moe_pb2
from moeserve.proto.passes import refusals
from moeserve.proto.passes.called_lane import LONG_STEPS
from moeserve.runtime.doors.calls import connection_lane
from moeserve.runtime.doors.calls.connection_lane import FEWEST_CALLS, ConnectionLane, OwnLanes
from moeserve.runtime.doors.passes.announced import LaneModel
from moeserve.runtime.doors.passes.asked import DeviceLaneLimits
from moeserve.runtime.doors.passes.device_lanes import DeviceLanes
from moeserve.runtime.doors.payloads import RegionLimits, Regions
from moeserve.runtime.errors import DeadlinePassed, GroupUnavailable

HIDDEN, EXPERTS, TOP_K = 64, 8, 2
MODEL = LaneModel("moe", HIDDEN, EXPERTS, TOP_K, (3, 5))
LIMITS = DeviceLaneLimits(lanes=3, rows=128)
MOST = 1 << 20


@dataclass
class Rank:
    """Lanes of a rank whose steps the test ends."""

    regions: Regions = field(default_factory=lambda: Regions(RegionLimits(max_bytes=MOST)))
    steps: list[Step] = field(default_factory=list)
    stopping: str = ""

    def __post_init__(self) -> None:
        self.lanes = DeviceLanes(self.regions, MODEL, LIMITS, lambda peer: self.begin)
        self.own = OwnLanes(
            self.lanes.attach,
            self.lanes.detach,
            MODEL.name,
            frozenset(MODEL.layers),
            (HIDDEN, EXPERTS, TOP_K),
            "fp32",
            LIMITS.rows,
            self.regions,
            threading.BoundedSemaphore(1),
            lambda: self.stopping,
            lambda *ended: None,
            launched=False,
        )

    def begin(
        self, request: moe_pb2.ForwardRequest, ended: Callable[[moe_pb2.ForwardStreamReply], None]
    ) -> Step:
        self.steps.append(Step(request, ended))
        return self.steps[-1]

    def step(self, number: int) -> Step:
        """The step that was begun as so-manieth, from 1; with an answer of twice its rows."""
        until(lambda: len(self.steps) >= number)
        asked = self.steps[number - 1].request
        with self.regions.hold(asked.hidden.region.name, 0, asked.hidden.region.offset + 4) as memory:
            first = np.frombuffer(memory[asked.hidden.region.offset :], np.float32)[0]
        place = asked.output
        with self.regions.hold(place.name, place.offset, place.size) as memory:
            np.frombuffer(memory, np.float32)[:] = 2 * first
        return self.steps[number - 1]


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.lanes.close()
    until(lambda: not made.regions.bytes)
    made.regions.close()


@pytest.fixture
def lane(rank: Rank) -> Iterator[ConnectionLane]:
    made = ConnectionLane(rank.own, "ipv4:1.2.3.4:5")
    yield made
    made.close()
    assert rank.own.rooms.acquire(blocking=False), "a lane that is closed is room for another"


def until(true: Callable[[], object], seconds: float = 5.0) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.002)


def request(rows: int = 20, **fields: object) -> moe_pb2.ForwardRequest:
    """Of a call whose rows come behind it."""
    asked = moe_pb2.ForwardRequest(layer=3, timeout_ms=5000)
    asked.hidden.dtype = moe_pb2.DTYPE_FP32
    asked.hidden.shape.extend((rows, HIDDEN))
    for tensor, dtype, values in (
        (asked.choice.ids, moe_pb2.DTYPE_INT32, np.ones((rows, TOP_K), np.int32)),
        (asked.choice.weights, moe_pb2.DTYPE_FP32, np.ones((rows, TOP_K), np.float32)),
    ):
        tensor.dtype, tensor.data = dtype, values.tobytes()
        tensor.shape.extend(values.shape)
    for name, value in fields.items():
        setattr(asked, name, value)
    return asked


def room(lane: ConnectionLane, asked: moe_pb2.ForwardRequest) -> memoryview | None:
    return lane.room(asked, 4 * int(np.prod(asked.hidden.shape)))


def warmed(lane: ConnectionLane, rows: int = 20) -> None:
    for _ in range(FEWEST_CALLS - 1):
        assert room(lane, request(rows)) is None and not lane.held
    assert room(lane, request(rows)) is not None and lane.held


def begun(
    lane: ConnectionLane,
    asked: moe_pb2.ForwardRequest,
    value: float,
    there: Callable[[], bool] = lambda: True,
) -> Future[moe_pb2.ForwardReply | None]:
    """A call whose rows have this value, under way."""
    memory = room(lane, asked)
    assert memory is not None and lane.takes
    np.frombuffer(memory, np.float32)[:] = value
    pool = ThreadPoolExecutor(1)
    found = pool.submit(lane.answered, asked, there)
    pool.shutdown(wait=False)
    return found


def test_rows_and_answers_lie_in_the_lane(rank: Rank, lane: ConnectionLane) -> None:
    warmed(lane)
    for number, (rows, value) in enumerate(((20, 3.0), (1, 5.0), (32, 7.0)), 1):
        found = begun(lane, request(rows), value)
        rank.step(number).answer()
        reply = found.result(5.0)
        assert reply is not None and (reply.epoch, reply.weights_version) == (3, 1)
        assert list(reply.hidden.shape) == [rows, HIDDEN] and reply.hidden.dtype == moe_pb2.DTYPE_FP32
        assert (np.frombuffer(lane.answer(), np.float32) == 2 * value).all()
    assert len(rank.lanes.attached()) == 1 and rank.lanes.attached()[0].rows == 32


def test_it_takes_what_its_rank_takes_without_a_word(rank: Rank, lane: ConnectionLane) -> None:
    warmed(lane)
    wrong = [request(layer=4), request(model="other"), request(0), request(129), request()]
    wrong[-1].output.name = "region-1"
    for change in (
        lambda asked: setattr(asked.hidden, "dtype", moe_pb2.DTYPE_BF16),
        lambda asked: asked.hidden.shape.append(1),
        lambda asked: setattr(asked.choice.ids, "dtype", moe_pb2.DTYPE_FP16),
        lambda asked: setattr(asked.choice.ids, "data", b"1234"),
        lambda asked: setattr(asked.choice.weights, "dtype", moe_pb2.DTYPE_BF16),
        lambda asked: asked.choice.weights.shape.append(1),
        lambda asked: asked.ClearField("choice"),
        lambda asked: asked.choice.ids.region.SetInParent(),
    ):
        asked = request()
        change(asked)
        wrong.append(asked)
    for asked in wrong:
        assert room(lane, asked) is None and not lane.takes, asked
    assert lane.room(request(), 4) is None, "as many bytes as rows take"
    rank.stopping = "the lane is stopping"
    assert room(lane, request(model="moe")) is None
    rank.stopping = ""
    assert room(lane, request(model="moe")) is not None
    narrowed = request()
    narrowed.choice.ids.dtype = moe_pb2.DTYPE_INT64
    narrowed.choice.ids.data = np.ones((20, TOP_K), np.int64).tobytes()
    assert room(lane, narrowed) is not None
    narrowed.choice.ids.data = np.full((20, TOP_K), 1 << 33, np.int64).tobytes()
    assert room(lane, narrowed) is None
    logits = request()
    logits.logits.dtype, logits.logits.data = moe_pb2.DTYPE_FP32, bytes(4 * 20 * EXPERTS)
    logits.logits.shape.extend((20, EXPERTS))
    assert room(lane, logits) is not None
    assert ConnectionLane(None, "").room(request(), 4 * 20 * HIDDEN) is None


def test_a_step_without_an_answer_is_made_another_way_from_the_same_memory(
    rank: Rank, lane: ConnectionLane
) -> None:
    warmed(lane)
    asked = request()
    found = begun(lane, asked, 4.0)
    rank.step(1).fail(3, "bad_tensor")
    assert found.result(5.0) is None
    lane.place(asked)
    first = rank.steps[0].request
    assert (asked.hidden.region, asked.output) == (first.hidden.region, first.output)
    assert lane.holds(asked.output) and not lane.holds(asked.hidden.region)
    assert (np.frombuffer(lane.answer(), np.float32) == 8.0).all()
    again = begun(lane, request(), 5.0)
    rank.step(2).answer()
    assert again.result(5.0) is not None


def test_rows_of_a_lane_that_has_ended_go_in_the_message(rank: Rank, lane: ConnectionLane) -> None:
    warmed(lane)
    asked = request()
    found = begun(lane, asked, 4.0)
    rank.step(1)
    (attached,) = rank.lanes._lanes
    rank.lanes.detach(attached)
    rank.steps[0].fail(14, "left")
    assert found.result(5.0) is None
    until(lambda: not rank.regions.list())
    lane.place(asked)
    assert (np.frombuffer(asked.hidden.data, np.float32) == 4.0).all() and not asked.HasField("output")
    assert not lane.held and room(lane, request()) is not None, "the next call has another lane"


def test_a_deadline_ends_a_call_and_its_lane_serves_the_next(rank: Rank, lane: ConnectionLane) -> None:
    warmed(lane)
    found = begun(lane, request(timeout_ms=60), 1.0)
    late = rank.step(1)
    until(lambda: late.given_up)
    late.fail(1, "left")
    with pytest.raises(DeadlinePassed, match="layer 3: no answer within the deadline"):
        found.result(5.0)
    again = begun(lane, request(), 2.0)
    rank.step(2).answer()
    assert again.result(5.0) is not None and (np.frombuffer(lane.answer(), np.float32) == 4.0).all()


def test_a_lane_whose_step_does_not_end_is_not_used_again(
    rank: Rank, lane: ConnectionLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_lane, "LEAVE_SECONDS", 0.05)
    warmed(lane)
    found = begun(lane, request(timeout_ms=60), 1.0)
    stuck = rank.step(1)
    with pytest.raises(GroupUnavailable, match="has not ended"):
        found.result(5.0)
    assert not lane.held
    again = begun(lane, request(), 2.0)
    rank.step(2).answer()
    assert again.result(5.0) is not None
    stuck.answer()
    assert (np.frombuffer(lane.answer(), np.float32) == 4.0).all()


def test_a_caller_that_leaves_is_seen_while_its_step_is_under_way(
    rank: Rank, lane: ConnectionLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_lane, "LOOK_SECONDS", 0.02)
    warmed(lane)
    there = [True]
    found = begun(lane, request(), 1.0, lambda: there[0])
    step = rank.step(1)
    time.sleep(0.1)
    assert not found.done()
    there[0] = False
    until(lambda: step.given_up)
    step.fail(1, "left")
    with pytest.raises(ConnectionAbortedError, match="left, or sent more"):
        found.result(5.0)


def test_a_lane_is_asked_for_again_after_a_while(
    rank: Rank, lane: ConnectionLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "REFUSED_SECONDS", 0.1)
    monkeypatch.setattr(connection_lane, "ALONE_SECONDS", 0.0)
    other = ConnectionLane(rank.own, "")
    warmed(other)
    for _ in range(FEWEST_CALLS + 3):
        assert room(lane, request()) is None, "another connection has the only one"
    other.close()
    assert room(lane, request()) is None, "not at once"
    time.sleep(0.15)
    assert room(lane, request()) is not None
    taken = rank.regions.create(MOST // 2)[0]
    assert room(lane, request(120)) is None, "half of the regions' bytes stays others'"
    rank.regions.release(taken)
    time.sleep(0.15)
    assert room(lane, request(120)) is not None
    refuses = ConnectionLane(replace(rank.own, launched=True, rooms=threading.BoundedSemaphore(1)), "")
    for _ in range(2 * FEWEST_CALLS):
        assert room(refuses, request()) is None, "its steps would be calls"
    assert len(rank.lanes.attached()) == 1


def test_the_first_pass_of_a_lane_goes_over_the_layers_of_the_calls_before(
    rank: Rank, lane: ConnectionLane
) -> None:
    for call in range(FEWEST_CALLS - 1):
        assert room(lane, request(layer=(3, 5)[call % 2])) is None
    found = begun(lane, request(layer=(3, 5)[(FEWEST_CALLS - 1) % 2]), 2.0)
    rank.step(1).answer()
    assert found.result(5.0) is not None
    assert lane._line is not None and (run := lane._line._run) is not None
    assert lane._line._goes_on and run.layers[:2] == ((5, 3) if FEWEST_CALLS % 2 == 0 else (3, 5))
    assert len(run.layers) == LONG_STEPS and run.status is None


def test_no_lane_is_attached_for_a_call_that_has_no_time_for_it(rank: Rank, lane: ConnectionLane) -> None:
    for _ in range(2 * FEWEST_CALLS):
        assert room(lane, request(timeout_ms=100)) is None and not lane.held
    assert room(lane, request(timeout_ms=300)) is not None
    assert room(lane, request(timeout_ms=100)) is not None, "it is there"


def test_calls_beside_others_count_for_a_lane(
    rank: Rank, lane: ConnectionLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_lane, "ALONE_SECONDS", 0.1)
    other = ConnectionLane(rank.own, "")
    for _ in range(FEWEST_CALLS):
        assert room(other, request()) is None and room(lane, request()) is None
    time.sleep(0.15)
    found = begun(lane, request(), 2.0)
    rank.step(1).answer()
    assert found.result(5.0) is not None, "it calls alone now"


def test_the_memory_of_lanes_goes_with_them_and_waits_for_no_collection(rank: Rank) -> None:
    gc.collect()
    gc.disable()
    before = {file for file in Path("/proc/self/fd").iterdir() if of_region(file)}
    try:
        for number in range(1, 4):
            rank.own.alone._last = None
            lane = ConnectionLane(rank.own, "")
            warmed(lane)
            found = begun(lane, request(), 1.0)
            rank.step(number).answer()
            assert found.result(5.0) is not None
            lane.close()
        del lane, found
        rank.steps.clear()
        until(lambda: not {file for file in Path("/proc/self/fd").iterdir() if of_region(file)} - before)
    finally:
        gc.enable()


def of_region(file: Path) -> bool:
    with suppress(FileNotFoundError):
        return "moeserve-region" in str(file.readlink())
    return False


def test_only_a_connection_that_calls_alone_uses_its_lane(
    rank: Rank, lane: ConnectionLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_lane, "ALONE_SECONDS", 0.1)
    warmed(lane)
    found = begun(lane, request(), 1.0)
    rank.step(1).answer()
    assert found.result(5.0) is not None
    others = [ConnectionLane(rank.own, ""), ConnectionLane(rank.own, "")]
    for _ in range(FEWEST_CALLS):
        for one in (lane, *others):
            assert room(one, request()) is None or one is lane
    assert room(lane, request()) is None and lane.held and not any(one.held for one in others)
    time.sleep(0.15)
    found = begun(lane, request(), 2.0)
    rank.step(2).answer()
    assert found.result(5.0) is not None, "it is alone again"
    seen = [time.monotonic()]
    monkeypatch.setattr(rank.own.alone, "_others_at", lambda: seen[0])
    assert room(lane, request()) is None and lane.held, "another lane of the group brings rows"
    seen = [-math.inf]
    assert room(lane, request()) is not None
    monkeypatch.setattr(lane, "_rest_seconds", 0.05)
    time.sleep(0.1)
    assert room(others[0], request()) is None and room(lane, request()) is None
    assert not lane.held, "others may have it"
