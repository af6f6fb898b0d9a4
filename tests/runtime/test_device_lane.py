"""A device lane beside steps that are begun by hand: when a pass ends, and what it tells."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Thread, current_thread
from typing import Any

import grpc
import pytest
from begun_steps import Step
from lane_words import LaneWords

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import MailboxLayout, Status, tag_of
from moeserve.proto.tensors import TensorError
from moeserve.runtime.doors.device_errors import LanesTaken, NameTaken, UnknownLane
from moeserve.runtime.doors.lane_door import LaneDoor
from moeserve.runtime.doors.passes.announced import LaneModel, LaneTerms
from moeserve.runtime.doors.passes.asked import DeviceLaneLimits
from moeserve.runtime.doors.passes.device_lane import DeviceLane
from moeserve.runtime.doors.passes.device_lanes import DeviceLanes
from moeserve.runtime.doors.passes.service import DeviceLaneDoor, begin_at
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.doors.payloads import RegionLimits, Regions
from moeserve.runtime.rank.lanes.lane_call import LaneCall

LAYOUT = MailboxLayout.of((4, 2), (8, 4, 2), "fp32", buffers=2)
PATIENCE = 5.0


@dataclass
class Caller(LaneWords):
    """A lane with the caller's words."""

    regions: Regions
    steps: list[Step] = field(default_factory=list)
    observed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        memory = self.memory_of(self.regions, LAYOUT)
        terms = LaneTerms(frozenset({3, 5}), PATIENCE, 9.0, self.observed.append)
        self.lane: DeviceLane = DeviceLane(memory, terms, self.begin)

    def begin(self, request: moe_pb2.ForwardRequest, ended: Callable[..., None]) -> Step:
        self.steps.append(Step(request, ended))
        return self.steps[-1]

    def post(self, stage: int, step: int, layer: int, count: int = 2, buffer: int = 0) -> None:
        head = LAYOUT.header(stage)
        values = {m.LAYER: layer, m.STAGE: stage, m.COUNT: count, m.KIND: m.CHOICE, m.BUFFER: buffer}
        for at, value in (values | {m.TAG: tag_of(self.number, step)}).items():
            self.box[head + at] = value

    def answered(self, stage: int, step: int) -> bool:
        return bool(self.out[LAYOUT.answer_header(stage)] == tag_of(self.number, step))


@pytest.fixture
def caller() -> Iterator[Caller]:
    regions = Regions(RegionLimits(max_bytes=1 << 20))
    yield Caller(regions)
    regions.close()


def test_steps_begin_by_their_tags_and_are_answered_by_the_same(caller: Caller) -> None:
    caller.announce([3, 5], stages=2)
    assert not caller.look() and not caller.steps
    caller.post(1, 0, 3)
    assert caller.look() and not caller.look()
    (step,) = caller.steps
    asked = step.request
    assert (asked.layer, asked.hidden.shape, asked.choice.ids.shape) == (3, [2, 8], [2, 2])
    assert asked.hidden.region.offset == LAYOUT.columns(1)[0] and asked.output.offset == LAYOUT.answer(1)
    step.answer()
    assert caller.answered(1, 0) and not caller.answered(0, 0) and caller.ended is None
    caller.post(1, 1, 5)
    caller.look()
    caller.steps[-1].answer()
    for step_number, layer in enumerate((3, 5)):
        caller.post(0, step_number, layer)
        caller.look()
        caller.steps[-1].answer()
    assert caller.ended == (Status.OK, "")
    assert (caller.lane.counts.passes, caller.lane.counts.steps) == (1, 4) and caller.observed == ["ok"]


@pytest.mark.parametrize("buffer", [2, 1 << 32, (1 << 64) - 1])
def test_an_answer_is_wanted_in_a_buffer_that_there_is(caller: Caller, buffer: int) -> None:
    caller.announce([3, 5], stages=2)
    for stage in (0, 1):
        caller.post(stage, 0, 3, buffer=stage)
    caller.look()
    places = [step.request.output.offset for step in caller.steps]
    assert places == [LAYOUT.answer(0), LAYOUT.answer(1, 1)]
    assert len({LAYOUT.answer(stage, which) for stage in (0, 1) for which in (0, 1)}) == 4
    assert LAYOUT.answer(1, 1) + 4 * 8 * 4 <= LAYOUT.answers_bytes
    for step in caller.steps:
        step.answer()
    caller.post(1, 1, 5, buffer=buffer)
    caller.look()
    assert len(caller.steps) == 2 and caller.ended is not None
    assert caller.ended == (
        Status.REFUSED,
        f"bad_step: answer buffer {buffer} of a step; this lane was attached with 2",
    )


def test_all_steps_have_the_weights_of_the_first_unless_any_will_do(caller: Caller) -> None:
    for flags, demanded in ((0, 7), (m.ANY_WEIGHTS, 0)):
        caller.announce([3, 5], flags=flags)
        caller.post(0, 0, 3)
        caller.look()
        caller.steps[-1].answer(version=7)
        caller.post(0, 1, 5)
        caller.look()
        assert caller.steps[-1].request.weights_version == demanded
        caller.steps[-1].answer(version=7)
        assert caller.ended == (Status.OK, "")


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        (14, "not_serving", Status.LOST),
        (13, "internal", Status.LOST),
        (5, "unknown_region", Status.DETACHED),
        (5, "not_served", Status.REFUSED),
        (9, "wrong_version", Status.OTHER_WEIGHTS),
        (3, "bad_tensor", Status.REFUSED),
    ],
)
def test_a_step_that_fails_ends_its_pass_and_no_other(
    caller: Caller, code: int, reason: str, status: Status
) -> None:
    caller.announce([3])
    caller.post(0, 0, 3)
    caller.look()
    caller.steps[-1].fail(code, reason)
    gone = status is Status.DETACHED
    assert caller.ended == (status, "its caller's lease ended" if gone else f"{reason}: so it is")
    caller.announce([5])
    caller.post(0, 0, 5)
    caller.look()
    caller.steps[-1].answer()
    assert caller.ended == (Status.OK, "")


def test_a_pass_has_ended_only_when_nothing_writes_its_answers_any_more(caller: Caller) -> None:
    caller.announce([3], stages=2)
    for stage in range(2):
        caller.post(stage, 0, 3)
    caller.look()
    first, second = caller.steps
    first.fail(3, "bad_tensor")
    assert second.given_up and caller.ended is None
    caller.number += 1
    caller.box[m.ANNOUNCED] = caller.number  # the caller may not wait, and begins another
    assert not caller.look()
    caller.number -= 1
    second.answer()  # that could not be given up any more
    assert caller.ended == (Status.REFUSED, "bad_tensor: so it is") and not caller.answered(1, 0)


def test_a_step_without_room_is_tried_again_and_not_for_ever(caller: Caller) -> None:
    caller.announce([3])
    caller.post(0, 0, 3)
    caller.look()
    caller.steps[-1].fail(8, "overloaded", pushback=6000)
    assert not caller.look() and not caller.look(later=PATIENCE + 0.1), "its rows are there: it is not late"
    assert caller.look(later=6.1) and len(caller.steps) == 2 and caller.ended is None
    caller.steps[-1].fail(8, "overloaded", pushback=20_000)
    caller.look(later=9.1)
    assert caller.ended == (Status.LOST, "overloaded: no room for stage 0 within 9 s")


def test_a_caller_that_rings_is_relied_on_where_it_alone_has_something_to_say(caller: Caller) -> None:
    lane = caller.lane
    assert not lane.rings, "a client of before never does"
    caller.box[m.BELL] = 1
    assert lane.rings and lane.bell()[1:] == (m.BELL, 1)
    caller.announce([3], stages=2)
    assert lane.rings and lane.pause(time.monotonic()) < PATIENCE
    caller.post(0, 0, 3)
    caller.look()
    caller.post(1, 0, 3)
    caller.look()
    assert lane.pause(time.monotonic()) == math.inf, "until one of the two steps ends"
    caller.steps[0].fail(8, "overloaded", pushback=20)
    assert not lane.rings, "the step is to be tried again"
    caller.look(later=0.05)
    caller.steps[-1].answer()
    assert lane.rings
    caller.box[m.GIVEN_UP] = caller.number
    caller.look()
    assert caller.ended is None and not lane.rings, "the other step is given up, and has yet to end"
    caller.steps[1].answer()
    assert caller.ended == (Status.OK, "") and lane.rings


def test_late_rows_end_a_pass_but_not_while_its_answers_are_awaited(caller: Caller) -> None:
    caller.announce([3, 5])
    caller.post(0, 0, 3)
    caller.look()
    assert not caller.look(later=10 * PATIENCE), "the caller waits for us"
    caller.steps[-1].answer()
    assert not caller.look(later=PATIENCE - 0.5)
    assert caller.look(later=PATIENCE + 0.5)
    ended = caller.ended
    assert ended is not None and ended[0] is Status.LATE
    assert ended[1] == "late: stage 0 brought no rows of layer 5 within passes.patience_seconds = 5"


def test_a_step_whose_rows_follow_their_tag_begins_when_all_are_there(caller: Caller) -> None:
    filled = LAYOUT.header(0) + m.FILLED
    caller.announce([3, 5])
    caller.box[filled] = 1
    caller.post(0, 0, 3)
    assert not caller.look()
    caller.box[filled] = 2
    assert not caller.look() and not caller.steps
    caller.box[filled] = 3
    assert caller.look()
    answered = LAYOUT.answer_header(0) + m.ANSWERED
    caller.out[answered] = 77
    caller.steps[0].answer()
    assert caller.answered(0, 0) and caller.out[answered] == 0
    caller.box[filled] = 2
    caller.post(0, 1, 5)
    assert caller.look(later=PATIENCE + 0.5)
    ended = caller.ended
    assert ended is not None and ended[0] is Status.LATE


def test_a_standing_pass_rests_between_its_rounds_only(caller: Caller) -> None:
    caller.announce([3, 5], flags=m.STANDING)
    for step in range(4):
        assert (step % 2 == 1) or not caller.look(later=10 * PATIENCE)
        caller.post(0, step, (3, 5)[step % 2])
        caller.look()
        caller.steps[-1].answer()
    assert caller.ended is None
    caller.box[m.GIVEN_UP] = caller.number
    assert caller.look()
    assert caller.ended == (Status.OK, "")


def test_a_detached_lane_ends_its_pass_and_begins_none(caller: Caller) -> None:
    caller.announce([3])
    caller.post(0, 0, 3)
    caller.look()
    caller.lane.detach("it was detached")
    assert caller.steps[-1].given_up and caller.lane.in_pass and caller.ended is None
    caller.steps[-1].fail(1, "caller_left")
    assert caller.ended == (Status.DETACHED, "it was detached") and not caller.lane.in_pass
    caller.announce([3])
    assert caller.ended is None and not caller.lane.in_pass


def test_a_step_that_ends_while_it_is_begun_is_no_special_case(caller: Caller) -> None:
    def begin(request: moe_pb2.ForwardRequest, ended: Callable[..., None]) -> None:
        Step(request, ended).answer()

    caller.lane._begin = begin
    caller.announce([3, 5])
    for step, layer in enumerate((3, 5)):
        caller.post(0, step, layer, count=0)
        caller.look()
    assert caller.ended == (Status.OK, "")


def test_a_step_is_begun_once_though_it_ends_while_the_lane_is_looked_at(caller: Caller) -> None:
    caller.announce([3, 5])
    caller.post(0, 0, 3)
    caller.look()
    answered = caller.lane._answered

    def looked_at(*given: Any) -> None:
        looks = Thread(target=caller.look)
        looks.start()
        looks.join(0.2)
        answered(*given)

    caller.lane._answered = looked_at  # type: ignore[method-assign]
    caller.steps[-1].answer()
    time.sleep(0.05)
    assert len(caller.steps) == 1 and not caller.answered(0, 1)


def test_a_step_that_failed_is_not_begun_again_before_its_pass_has_ended(caller: Caller) -> None:
    caller.announce([3], stages=2)
    for stage in range(2):
        caller.post(stage, 0, 3)
    caller.look()
    caller.steps[0].fail(3, "bad_tensor")
    assert caller.steps[1].given_up
    caller.look()
    caller.steps[1].fail(1, "caller_left")
    caller.look()
    assert len(caller.steps) == 2


def test_the_end_of_one_pass_is_none_of_the_next(caller: Caller) -> None:
    """The thread that answers the last step may say so late: the caller has left, and begun another pass."""
    caller.announce([3])
    caller.post(0, 0, 3)
    caller.look()
    answered = caller.lane._answered

    def overtaken(*given: Any) -> None:
        answered(*given)
        caller.box[m.GIVEN_UP] = caller.number

    caller.lane._answered = overtaken  # type: ignore[method-assign]
    late, caller.lane._lock = caller.lane._lock, _Overtaken(caller.lane._lock, caller)  # type: ignore[assignment]
    caller.steps[-1].answer()
    caller.lane._lock = late
    caller.look()
    assert caller.lane.in_pass and caller.ended is None and caller.number == 2


class _Overtaken:
    """A lock whose first holder is overtaken as it lets go of it: the caller begins its next pass."""

    def __init__(self, lock: Any, caller: Caller) -> None:
        self._lock, self._caller = lock, caller

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
        caller = self._caller
        if caller.lane._lock is self:
            caller.lane._lock = self._lock
            caller.look()
            caller.announce([3])


def test_a_pass_has_ended_only_when_no_device_can_write_its_answers(caller: Caller) -> None:
    """A step that is given up ends for its caller at once, and its copy may be queued on a device."""
    caller.announce([3], stages=2)
    caller.post(0, 0, 3)
    caller.look()
    caller.quiet = False
    caller.box[m.GIVEN_UP] = caller.number
    caller.look()
    caller.steps[-1].fail(1, "caller_left")
    assert caller.ended is None and caller.lane.in_pass
    caller.look()
    assert caller.ended is None
    caller.quiet = True
    caller.look()
    assert caller.ended == (Status.OK, "")


def test_a_step_that_cannot_be_begun_leaves_no_stage_busy(caller: Caller) -> None:
    def begin(request: moe_pb2.ForwardRequest, ended: Callable[..., None]) -> None:
        raise OSError("no more descriptors")

    caller.announce([3], stages=2)
    caller.lane._begin = begin
    for stage in range(2):
        caller.post(stage, 0, 3)
    with pytest.raises(OSError):
        caller.look()
    caller.lane.detach("the rank could not read it")
    assert caller.ended == (Status.DETACHED, "the rank could not read it") and not caller.lane.in_pass


def asked(name: str) -> moe_pb2.AttachLaneRequest:
    return moe_pb2.AttachLaneRequest(name=name, device="cpu", dtype=moe_pb2.DTYPE_FP32, rows=4, stages=1)


def test_lanes_come_and_go_with_their_memory() -> None:
    regions = Regions(RegionLimits(max_bytes=1 << 20))
    model = LaneModel("tiny", 8, 4, 2, (3, 5))
    lanes = DeviceLanes(regions, model, DeviceLaneLimits(lanes=2), lambda peer: lambda *step: None)
    try:
        one, two = (lanes.attach(asked(name), "tester") for name in ("one", "two"))
        with pytest.raises(NameTaken, match="a device lane named 'one' is attached here"):
            lanes.attach(asked("one"), "tester")
        with pytest.raises(LanesTaken, match="2 device lanes are attached, and passes"):
            lanes.attach(asked("three"), "tester")
        rounded = asked("three")
        rounded.rows_wire = "fp8_group128"
        with pytest.raises(TensorError, match="'fp8_group128' is of a GPU's rows"):
            lanes.attach(rounded, "tester")
        handed = asked("three")
        handed.answers_handle = b"\x01" * 64
        with pytest.raises(TensorError, match="answers_handle: it is of a GPU's memory"):
            lanes.attach(handed, "tester")
        assert [lane.name for lane in lanes.attached()] == ["one", "two"] and len(regions.list()) == 4
        lanes.detach(one.mailbox)
        with pytest.raises(UnknownLane):
            lanes.detach(one.mailbox)
        regions.release(two.answers)  # as when its lease has ended
        until = time.monotonic() + 5
        while regions.list() and time.monotonic() < until:
            time.sleep(0.01)
        assert not regions.list() and regions.bytes == 0 and not lanes.attached()
    finally:
        lanes.close()
        regions.close()


def lanes_of(regions: Regions, most: int = 2) -> DeviceLanes:
    model = LaneModel("tiny", 8, 4, 2, (3, 5))
    return DeviceLanes(regions, model, DeviceLaneLimits(lanes=most), lambda peer: lambda *step: None)


def test_who_hears_that_others_wait_behind_its_runs_is_not_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceLane, "ahead", True)  # as a lane of a GPU is
    regions = Regions(RegionLimits(max_bytes=1 << 20))
    lanes = lanes_of(regions)
    try:
        lanes.attach(asked("one"), "tester")
        (attached,) = lanes._lanes.values()
        left: list[Company] = []
        attached.lane.yield_steps = lambda company: left.append(company)  # type: ignore[method-assign]
        assert lanes.looking.company_of(attached.lane) is Company.NONE
        time.sleep(0.02)
        assert not left
        lanes.looking.company()
        wait_for(lambda: Company.CALLS in left)
        assert lanes.looking.company_of(attached.lane) is Company.CALLS
    finally:
        lanes.close()
        regions.close()


def test_a_lane_that_has_not_wanted_a_step_for_long_is_left_for_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceLane, "ahead", True)  # as a lane of a GPU is
    regions = Regions(RegionLimits(max_bytes=1 << 20))
    lanes = lanes_of(regions)
    try:
        left: list[Company] = []
        for name in ("one", "two"):
            lanes.attach(asked(name), "tester")
        one, two = (attached.lane for attached in lanes._lanes.values())
        one.yield_steps = lambda company: left.append(company)  # type: ignore[method-assign]
        time.sleep(0.02)
        assert not left
        two.active_at = time.monotonic()
        wait_for(lambda: Company.CALLS in left)
        assert one.active_at < 0
    finally:
        lanes.close()
        regions.close()


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not true():
        assert time.monotonic() < until, "it did not come to be"
        time.sleep(0.005)


def test_memory_that_the_caller_gives_back_at_the_same_time_ends_no_other_lane() -> None:
    class Overtaken(Regions):
        def release(self, name: str) -> None:
            if "-" in name and name in self:
                super().release(name)  # the handover thread was first
            super().release(name)

    regions = Overtaken(RegionLimits(max_bytes=1 << 20))
    lanes = lanes_of(regions)
    try:
        one, _ = (lanes.attach(asked(name), "tester") for name in ("one", "two"))
        lanes.detach(one.mailbox)
        wait_for(lambda: len(regions.list()) == 2)
        lanes.attach(asked("three"), "tester")
        time.sleep(0.05)
        assert lanes._thread.is_alive()
        assert [lane.name for lane in lanes.attached()] == ["two", "three"]
    finally:
        lanes.close()
        regions.close()


def test_others_are_looked_at_while_the_memory_of_a_lane_is_made() -> None:
    making, made = Event(), Event()

    class Slow(Regions):
        def create(self, size: int, maker: str = "") -> tuple[str, int]:
            if maker == "slow":
                making.set()
                assert made.wait(5)
            return super().create(size, maker)

    regions = Slow(RegionLimits(max_bytes=1 << 20))
    lanes = lanes_of(regions)
    try:
        lanes.attach(asked("one"), "tester")
        slow = Thread(target=lanes.attach, args=(asked("two"), "slow"))
        slow.start()
        assert making.wait(5)
        looks = []
        (attached,) = lanes._lanes.values()
        attached.lane.look = lambda now: bool(looks.append(now))  # type: ignore[method-assign]
        wait_for(lambda: len(looks) > 3)
        with pytest.raises(NameTaken):
            lanes.attach(asked("two"), "tester")
        with pytest.raises(LanesTaken):
            lanes.attach(asked("three"), "tester")
        made.set()
        slow.join(5)
        assert [lane.name for lane in lanes.attached()] == ["one", "two"]
    finally:
        made.set()
        lanes.close()
        regions.close()


def test_a_lane_whose_caller_left_before_it_was_there_is_detached_at_once() -> None:
    making, made = Event(), Event()

    class Slow(Regions):
        def create(self, size: int, maker: str = "") -> tuple[str, int]:
            making.set()
            assert made.wait(10)
            return super().create(size, maker)

    contexts = list[grpc.ServicerContext]()

    class Door(DeviceLaneDoor):
        def AttachLane(
            self, request: moe_pb2.AttachLaneRequest, context: grpc.ServicerContext
        ) -> moe_pb2.AttachLaneReply:
            contexts.append(context)
            return super().AttachLane(request, context)

    regions = Slow(RegionLimits(max_bytes=1 << 20))
    lanes = lanes_of(regions)
    server = grpc.server(ThreadPoolExecutor(2))
    moe_pb2_grpc.add_DeviceLaneServiceServicer_to_server(Door(lanes), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = moe_pb2_grpc.DeviceLaneServiceStub(channel)
            left = stub.AttachLane.future(asked("left"), timeout=10)
            assert making.wait(10)
            left.cancel()
            wait_for(lambda: not contexts[0].is_active())
            made.set()
            wait_for(lambda: not lanes._coming and not lanes.attached() and not regions.list())
            assert stub.AttachLane(asked("left"), timeout=10).mailbox, "the name is free"
    finally:
        made.set()
        server.stop(0).wait(5)
        lanes.close()
        regions.close()


def test_a_lane_that_leaves_when_the_rank_stops_gives_its_memory_back() -> None:
    regions = Regions(RegionLimits(max_bytes=1 << 20))
    lanes = lanes_of(regions)
    for name in ("one", "two"):
        lanes.attach(asked(name), "tester")
    lanes.close()
    assert not regions.list() and not regions.bytes and not lanes._thread.is_alive()
    with pytest.raises(LanesTaken, match="no device lane is attached any more"):
        lanes.attach(asked("three"), "tester")
    assert not regions.list()
    regions.close()


@pytest.mark.parametrize("heavy", [True, False])
def test_what_takes_long_to_begin_is_begun_beside_the_thread_that_looks(heavy: bool) -> None:
    begun, left, may, kept = list[str](), list[str](), Event(), list[LaneCall]()

    class Door(LaneDoor):
        def __init__(self) -> None:
            self._aside = ThreadPoolExecutor(1, "aside")

        def _heavy(self, request: moe_pb2.ForwardRequest) -> bool:
            return heavy

        def begin(self, *given: Any) -> LaneCall:
            begun.append(current_thread().name)
            assert not heavy or may.wait(5)
            kept.append(LaneCall())  # as a lane keeps it
            return kept[-1]

        def leave(self, call: LaneCall) -> None:
            left.append(current_thread().name)

    door = Door()
    call = begin_at(door)("tester")(moe_pb2.ForwardRequest(), lambda reply: None)
    assert call is not None
    call.give_up()  # perhaps before it has begun
    may.set()
    door._aside.shutdown()
    assert begun == ["aside_0" if heavy else current_thread().name] and len(left) == 1


def test_a_step_that_could_not_be_begun_ends_all_the_same() -> None:
    class Door(LaneDoor):
        def __init__(self) -> None:
            self._aside = ThreadPoolExecutor(1, "aside")

        def _heavy(self, request: moe_pb2.ForwardRequest) -> bool:
            return True

        def begin(self, *given: Any) -> LaneCall:
            raise MemoryError("no room")

    door, replies = Door(), list[moe_pb2.ForwardStreamReply]()
    begin_at(door)("tester")(moe_pb2.ForwardRequest(), replies.append)
    door._aside.shutdown()
    assert replies[0].error.reason == "internal" and "no room" in replies[0].error.message
