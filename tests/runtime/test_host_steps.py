"""Steps of lanes in host memory that are begun together, at a rank's lane whose steps are run by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from begun_steps import Step
from lane_words import LaneWords

from moeserve.proto import moe_pb2
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import MailboxLayout, Status, tag_of
from moeserve.runtime.doors.calls.rows import RowAdmission, RowLimits
from moeserve.runtime.doors.passes.announced import LaneTerms
from moeserve.runtime.doors.passes.device_lane import DeviceLane
from moeserve.runtime.doors.passes.host_steps import MOST_UNDER_WAY, HostSteps
from moeserve.runtime.doors.payloads import RegionLimits, Regions
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.together import Together
from moeserve.runtime.rank.member.steps import wanted_in
from moeserve.runtime.step import Announcement, Job, Stamp, joined_rows

HIDDEN, EXPERTS, TOP_K, CAPACITY = 8, 4, 2, 16
LAYOUT = MailboxLayout.of((8, 2), (HIDDEN, EXPERTS, TOP_K), "fp32")


class Ranked:
    """A rank's lane: jobs that were announced are run by `step`, which doubles their rows."""

    def __init__(self) -> None:
        self.lane = Lane(0, CAPACITY, 8)
        self.announced = list[Announcement]()
        self.withdrawn = list[int]()
        self.observed = list[str]()
        self.stopping = ""
        self.wakes = 0
        self.admission = RowAdmission(RowLimits())
        self.lane.announce, self.lane.withdraw = self.announced.append, self.withdrawn.extend
        self.lane.open(1)
        self.steps = HostSteps(
            self.lane,
            (torch.float32, EXPERTS, 30.0),
            lambda: self.admission,
            lambda: self.stopping,
            lambda method, transport, code, seconds: self.observed.append(code),
        )
        self.steps.ended = self._woken

    def _woken(self) -> None:
        self.wakes += 1

    def take(self, version: int = 1) -> list[tuple[int, Job | None]]:
        """The jobs of the next step, of all that were announced."""
        named = tuple((job.job, job.rows) for job in self.announced)
        self.announced.clear()
        jobs = [wanted_in(job, version) for job in self.lane.take(named)]
        return list(zip((rows for _, rows in named), jobs, strict=True))

    def finish(self, parts: list[tuple[int, Job | None]], version: int = 1) -> None:
        """Their answers are there."""
        for _, job in parts:
            if job is not None:
                job.finish(2 * joined_rows(job), Stamp(3, version))

    def step(self, version: int = 1) -> list[int]:
        """Runs what was announced; the rows of each part."""
        parts = self.take(version)
        self.finish(parts, version)
        return [rows if job is not None else -rows for rows, job in parts]


@dataclass
class Caller(LaneWords):
    """One of several callers."""

    regions: Regions
    ranked: Ranked
    named: int
    calls: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        memory = self.memory_of(self.regions, LAYOUT)
        self.held = memory.held
        terms = LaneTerms(frozenset({3, 5}), 5.0, 9.0, lambda status: None)
        self.lane: DeviceLane = DeviceLane(memory, terms, self.begin)
        self.lane.steps, self.lane.peer = self.ranked.steps, f"caller {self.named}"

    def begin(self, request: moe_pb2.ForwardRequest, ended: object) -> Step:
        self.calls.append(Step(request, ended))  # type: ignore[arg-type]
        return self.calls[-1]

    def column(self, stage: int, at: int, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
        place = LAYOUT.columns(stage)[at]
        size = shape[0] * shape[1] * dtype.itemsize
        return torch.frombuffer(self.held[0].memory[place : place + size], dtype=dtype).view(shape)

    def post(
        self, step: int = 0, layer: int = 3, count: int = 2, *, stage: int = 0, kind: int = m.CHOICE
    ) -> None:
        if count:
            self.column(stage, 0, torch.float32, (count, HIDDEN)).fill_(self.named + 10 * step)
            self.column(stage, 1, torch.int32, (count, TOP_K)).fill_(1)
            self.column(stage, 2, torch.float32, (count, TOP_K)).fill_(0.5)
        head = LAYOUT.header(stage)
        values = {m.LAYER: layer, m.STAGE: stage, m.COUNT: count, m.KIND: kind}
        for at, value in (values | {m.TAG: tag_of(self.number, step)}).items():
            self.box[head + at] = value

    def answer(self, step: int = 0, count: int = 2, *, stage: int = 0) -> float | None:
        """What all numbers of an answer are; None: it is not there."""
        if self.out[LAYOUT.answer_header(stage)] != tag_of(self.number, step):
            return None
        place = LAYOUT.answer(stage)
        rows = torch.frombuffer(self.held[1].memory[place : place + 4 * count * HIDDEN], dtype=torch.float32)
        assert (rows == rows[0]).all()
        return float(rows[0])


class Room:
    """Callers of one rank."""

    def __init__(self) -> None:
        self.regions = Regions(RegionLimits(max_bytes=1 << 20))
        self.ranked = Ranked()
        self.callers = [Caller(self.regions, self.ranked, 1 + at) for at in range(4)]

    def look(self) -> None:
        for caller in self.callers:
            caller.look()
        self.ranked.steps.begin()


@pytest.fixture
def room() -> Iterator[Room]:
    found = Room()
    yield found
    assert not found.ranked.lane.in_flight and not found.ranked.admission.rows, "something is held"
    found.regions.close()


def test_steps_of_one_layer_are_one_job_and_each_caller_has_its_rows(room: Room) -> None:
    ranked = room.ranked
    for caller, count in zip(room.callers, (2, 3, 1, 2), strict=True):
        caller.announce([3, 5], flags=m.STANDING)
        caller.post(count=count)
    room.look()
    (job,) = ranked.announced
    assert (job.layer, job.rows, ranked.lane.in_flight) == (3, 8, 4)
    assert not any(caller.calls for caller in room.callers) and ranked.admission.rows == 8
    assert ranked.step() == [8] and ranked.wakes == 1
    for caller, count in zip(room.callers, (2, 3, 1, 2), strict=True):
        assert caller.answer(count=count) == 2 * caller.named
        assert caller.out[LAYOUT.answer_header(0) + m.EPOCH] == 3
        assert caller.out[LAYOUT.answer_header(0) + m.VERSION] == 1
    assert ranked.observed == ["OK"] * 4 and not ranked.withdrawn
    for caller, layer in zip(room.callers, (5, 5, 5, 5), strict=True):
        caller.post(1, layer, 1)
    room.look()
    assert ranked.step() == [4] and room.callers[2].answer(1, 1) == 2 * 13


def test_steps_of_other_layers_and_beyond_what_the_lane_takes_are_jobs_of_their_own(room: Room) -> None:
    for caller, layers in zip(room.callers, ([3], [5], [3], [3]), strict=True):
        caller.announce(layers)
        caller.post(layer=layers[0], count=8)
    room.look()
    assert [(job.layer, job.rows) for job in room.ranked.announced] == [(3, 16), (3, 8), (5, 8)]
    assert room.ranked.step() == [16, 8, 8]
    assert all(caller.ended == (Status.OK, "") for caller in room.callers)


def test_of_one_layer_two_jobs_are_under_way_and_who_comes_later_is_in_the_next(room: Room) -> None:
    ranked = room.ranked
    for caller in room.callers:
        caller.announce([3], flags=m.STANDING)
    for caller in room.callers[:MOST_UNDER_WAY]:
        caller.post()
        room.look()
    for caller in room.callers[MOST_UNDER_WAY:]:
        caller.post()
        room.look()
    assert [job.rows for job in ranked.announced] == [2, 2], "no third"
    assert room.callers[3].lane.pause(time.monotonic()) == float("inf"), "a step has to end first"
    first, second = ranked.take(), list[tuple[int, Job | None]]()
    first, second = first[:1], first[1:]
    ranked.finish(first)
    assert ranked.wakes == 1 and room.callers[0].answer() == 2.0
    room.look()
    assert [job.rows for job in ranked.announced] == [4], "both who waited, together"
    ranked.finish(second)
    assert ranked.step() == [4] and room.callers[3].answer() == 8.0


def test_a_wrong_choice_ends_the_pass_of_its_caller_alone(room: Room) -> None:
    for caller in room.callers[:2]:
        caller.announce([3])
        caller.post()
    room.callers[0].column(0, 1, torch.int32, (2, TOP_K))[1, 0] = EXPERTS
    room.look()
    assert room.callers[0].ended == (
        Status.REFUSED,
        "bad_tensor: choice.ids: id 4 is out of range: experts are 0 to 3, -1 is none",
    )
    assert room.ranked.step() == [2] and room.callers[1].answer() == 4.0


def test_a_choice_that_changes_after_it_was_checked_is_not_seen(room: Room) -> None:
    room.callers[0].announce([3])
    room.callers[0].post()
    room.look()
    room.callers[0].column(0, 1, torch.int32, (2, TOP_K)).fill_(99)
    room.callers[0].column(0, 2, torch.float32, (2, TOP_K)).fill_(99.0)
    ((_, job),) = parts = room.ranked.take()
    assert job is not None and job.experts.max() == 1 and job.weights.max() == 0.5
    room.ranked.finish(parts)


@pytest.mark.parametrize(("kind", "count"), [(m.LOGITS, 2), (m.CHOICE, 0)])
def test_logits_and_no_rows_are_calls(room: Room, kind: int, count: int) -> None:
    room.callers[0].announce([3])
    room.callers[0].post(count=count, kind=kind)
    room.look()
    assert len(room.callers[0].calls) == 1 and not room.ranked.announced
    room.callers[0].calls[0].answer()
    assert room.callers[0].ended == (Status.OK, "")


def test_rows_of_another_dtype_are_calls(room: Room) -> None:
    room.ranked.steps._dtype = torch.bfloat16
    room.callers[0].announce([3])
    room.callers[0].post()
    room.look()
    assert len(room.callers[0].calls) == 1
    room.callers[0].calls[0].answer()


def test_who_leaves_before_the_step_takes_no_part_in_it_and_the_others_go_on(room: Room) -> None:
    for caller in room.callers[:2]:
        caller.announce([3])
        caller.post()
    room.look()
    room.callers[0].lane.detach("it was detached")
    assert room.callers[0].ended == (Status.DETACHED, "it was detached")
    ((_, job),) = parts = room.ranked.take()
    assert job is not None and job.experts.tolist() == [[-1, -1]] * 2 + [[1, 1]] * 2, "without experts"
    room.ranked.finish(parts)
    assert room.callers[1].answer() == 4.0 and room.callers[0].answer() is None


@pytest.mark.parametrize("count", [1, 2])
def test_who_leaves_in_a_step_has_its_memory_kept_until_the_device_is_done(room: Room, count: int) -> None:
    with_others = room.callers[:count]
    for caller in with_others:
        caller.announce([3])
        caller.post()
    room.look()
    parts = room.ranked.take()
    job = parts[0][1]
    assert job is not None and job.lent is not None and job.lent.memory.use(), "a copy is under way"
    room.callers[0].lane.detach("it was detached")
    room.callers[0].look()
    assert room.callers[0].ended is None, "a copy may read its rows, and write its answer"
    room.ranked.finish(parts)
    room.callers[0].look()
    assert room.callers[0].ended is None, "a copy may write its answer yet"
    job.lent.memory.done()
    room.callers[0].look()
    assert room.callers[0].ended == (Status.DETACHED, "it was detached")
    assert [caller.answer() for caller in with_others] == [None, 4.0][:count]


def test_a_job_that_all_callers_have_left_is_withdrawn(room: Room) -> None:
    for caller in room.callers[:2]:
        caller.announce([3])
        caller.post()
    room.look()
    (job,) = room.ranked.announced
    for caller in room.callers[:2]:
        caller.lane.detach("it was detached")
    assert room.ranked.withdrawn == [job.job] and room.ranked.wakes == 1


def test_who_leaves_between_the_look_and_the_beginning_begins_nothing(room: Room) -> None:
    caller = room.callers[0]
    caller.announce([3])
    caller.post()
    caller.look()
    caller.lane.detach("it was detached")
    assert caller.ended is None
    room.ranked.steps.begin()
    assert caller.ended == (Status.DETACHED, "it was detached") and not room.ranked.announced


def test_other_weights_end_the_pass_that_demands_them(room: Room) -> None:
    room.callers[0].announce([3], version=2)
    room.callers[1].announce([3])
    for caller in room.callers[:2]:
        caller.post()
    room.look()
    assert room.ranked.step(version=1) == [-2, 2]
    assert room.callers[0].ended is not None and room.callers[0].ended[0] is Status.OTHER_WEIGHTS
    assert room.callers[1].ended == (Status.OK, "")


def test_a_full_lane_has_the_steps_tried_again(room: Room) -> None:
    room.ranked.lane._queue_limit = 0
    for caller in room.callers[:2]:
        caller.announce([3])
        caller.post()
    room.look()
    assert not room.ranked.announced and room.ranked.observed == ["RESOURCE_EXHAUSTED"] * 2
    assert all(caller.ended is None for caller in room.callers[:2])
    room.ranked.lane._queue_limit = 8
    for caller in room.callers[:2]:
        assert caller.look(later=3.0)
    room.ranked.steps.begin()
    assert room.ranked.step() == [4] and room.callers[0].ended == (Status.OK, "")


def test_of_more_callers_than_the_lane_takes_those_begin_that_it_has_room_for(room: Room) -> None:
    """Together they would be refused each time that they come, whatever the lane holds."""
    ranked = room.ranked
    ranked.lane._queue_limit = 3
    for caller in room.callers:
        caller.announce([3])
        caller.post()
    room.look()
    assert [job.rows for job in ranked.announced] == [6], "three callers of two rows; the fourth is refused"
    assert ranked.observed == ["RESOURCE_EXHAUSTED"] and ranked.step() == [6]
    assert room.callers[3].ended is None and room.callers[3].look(later=3.0)
    ranked.steps.begin()
    assert ranked.step() == [2] and all(caller.ended == (Status.OK, "") for caller in room.callers)


def test_callers_who_come_to_a_lane_that_is_nearly_full_are_not_all_refused(room: Room) -> None:
    ranked = room.ranked
    ranked.lane._queue_limit = 3
    for caller in room.callers:
        caller.announce([3])
    room.callers[3].post()
    room.look()
    for caller in room.callers[:3]:
        caller.post()
    room.look()
    assert [job.rows for job in ranked.announced] == [2, 4], "two of the three find room"
    assert ranked.observed == ["RESOURCE_EXHAUSTED"] and ranked.step() == [2, 4]
    assert room.callers[2].look(later=3.0)
    ranked.steps.begin()
    assert ranked.step() == [2] and all(caller.ended == (Status.OK, "") for caller in room.callers)


@pytest.mark.parametrize("how", ["stopping", "closed", "fails", "held for too long"])
def test_a_lane_that_serves_nobody_loses_the_passes(room: Room, how: str) -> None:
    ranked, caller = room.ranked, room.callers[0]
    caller.announce([3])
    caller.post()
    if how == "stopping":
        ranked.stopping = "the service is stopping"
    elif how == "closed":
        ranked.lane.close("rank 1 is lost")
    room.look()
    if how == "fails":
        ranked.lane.close("rank 1 is lost")
    elif how == "held for too long":
        ranked.lane.expire(time.monotonic() + 60.0)
    ended = caller.ended
    assert ended is not None and ended[0] is Status.LOST
    assert ("stopping" if how == "stopping" else "deadline" if "held" in how else "rank 1") in ended[1]


def test_a_lane_that_is_held_announces_again_those_that_have_no_answer(room: Room) -> None:
    for caller in room.callers[:2]:
        caller.announce([3])
        caller.post()
    room.look()
    room.ranked.announced.clear()
    room.ranked.lane.hold("rank 1 is lost")
    room.callers[0].lane.detach("it was detached")
    room.ranked.lane.open(2)
    (job,) = room.ranked.announced
    assert (job.rows, job.generation) == (4, 2)
    assert room.ranked.step() == [4] and room.callers[1].answer() == 4.0


def test_an_announcement_that_fails_ends_the_steps(room: Room) -> None:
    def gone(job: Announcement) -> None:
        raise ConnectionError("the head is gone")

    room.ranked.lane.announce = gone
    room.callers[0].announce([3])
    room.callers[0].post()
    room.look()
    ended = room.callers[0].ended
    assert ended is not None and ended[0] is Status.LOST and "the head is gone" in ended[1]


def test_rows_that_are_not_admitted_are_tried_again_and_others_go_on(room: Room) -> None:
    """`server.max_held_rows` holds for steps of lanes as for calls."""
    room.ranked.admission = RowAdmission(RowLimits(rows=3))
    for caller in room.callers[:2]:
        caller.announce([3])
        caller.post()
    room.look()
    assert [job.rows for job in room.ranked.announced] == [2]
    assert room.ranked.observed == ["RESOURCE_EXHAUSTED"] and room.callers[1].ended is None
    room.ranked.step()
    assert room.callers[1].look(later=3.0)
    room.ranked.steps.begin()
    assert room.ranked.step() == [2] and room.callers[1].answer() == 4.0


def test_rows_that_were_there_when_their_pass_was_seen_are_looked_at_next(room: Room) -> None:
    """Their caller has rung once for both."""
    caller, now = room.callers[0], time.monotonic()
    caller.lane.look(now)
    caller.announce_unseen([3])
    caller.post()
    caller.box[m.BELL] = 7
    assert caller.lane.stirs(now) and caller.lane.look(now) and not room.ranked.announced
    assert caller.lane.stirs(now), "its rows may be there"
    assert caller.lane.look(now)
    room.ranked.steps.begin()
    assert room.ranked.step() == [2]


def test_a_caller_that_has_not_rung_is_passed_over_for_a_moment(room: Room) -> None:
    caller, now = room.callers[0], time.monotonic()
    caller.announce([3])
    caller.box[m.BELL] = 7
    assert caller.lane.stirs(now) and not caller.lane.look(now)
    assert not caller.lane.stirs(now + 0.001) and caller.lane.stirs(now + 0.0021)
    caller.box[m.BELL] = 8
    assert caller.lane.stirs(now + 0.0022)


def test_rows_that_wait_for_another_step_to_end_are_looked_at_and_are_lost_in_the_end(room: Room) -> None:
    for caller in room.callers[:3]:
        caller.announce([3])
    for caller in room.callers[:MOST_UNDER_WAY]:
        caller.post()
        room.look()
    caller, now = room.callers[2], time.monotonic()
    caller.post()
    caller.box[m.BELL] = 7
    for _ in range(3):
        assert caller.lane.stirs(now) and caller.lane.look(now) and not caller.lane.rings
    assert caller.look(later=10.0)
    assert caller.ended == (Status.LOST, "overloaded: no step of layer 3 for stage 0 within 9 s")
    assert caller.lane.rings, "the next pass rings"
    room.ranked.step()


def test_an_answer_is_due_so_long_after_its_rows_were_seen(room: Room) -> None:
    caller = room.callers[0]
    caller.announce([3])
    caller.post()
    before = time.monotonic()
    room.look()
    (job,) = room.ranked.announced
    assert before + 29.9 < job.deadline < time.monotonic() + 30.0
    room.ranked.step()


def test_steps_that_cannot_be_let_in_fail_and_leave_no_rows_behind(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong with the second of two rows takes those of the first out again."""
    ranked, callers = room.ranked, room.callers[:2]
    for caller in callers:
        caller.announce([3])
        caller.post()
    known = ranked.admission._callers.of

    def of(peer: str) -> object:
        if peer == callers[1].lane.peer:
            raise RuntimeError("unknown")
        return known(peer)

    monkeypatch.setattr(ranked.admission._callers, "of", of)
    room.look()
    assert not ranked.announced and not ranked.admission.rows
    for caller in callers:
        assert caller.ended is not None and caller.ended[0] is Status.LOST
    monkeypatch.undo()
    callers[1].announce([3])
    callers[1].post()
    room.look()
    assert ranked.step() == [2] and callers[1].answer() == 4.0


def test_an_answer_that_cannot_be_brought_home_tells_nothing_of_the_pace(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring(*given: object) -> None:
        raise RuntimeError("no way home")

    ranked, noted = room.ranked, list[object]()
    monkeypatch.setattr(ranked.admission._pace, "note", lambda *given, **more: noted.append(given))
    monkeypatch.setattr(Together, "_bring_home", bring)
    for caller in room.callers[:2]:
        caller.announce([3])
        caller.post()
    room.look()
    assert ranked.step() == [4]
    assert not noted and ranked.observed == ["INTERNAL"] * 2
    assert all(caller.ended is not None and caller.ended[0] is Status.LOST for caller in room.callers[:2])


def test_a_pass_that_another_thread_has_concluded_leaves_its_lane_quiet(room: Room) -> None:
    caller = room.callers[0]
    caller.box[m.BELL] = 1
    caller.announce([3])
    run = caller.lane._pass
    assert run is not None
    caller.box[m.GIVEN_UP] = caller.number
    caller.look()
    assert caller.ended == (Status.OK, "")
    caller.lane._end(run, Status.LATE, "a look that had begun before")
    assert caller.ended == (Status.OK, "") and caller.lane.rings


@pytest.mark.parametrize("gathers", [False, True])
def test_the_head_is_told_that_a_job_has_all_callers_who_were_there(room: Room, gathers: bool) -> None:
    room.ranked.steps.gathers = gathers
    for caller in room.callers[:2]:
        caller.announce([3])
        caller.post()
    room.look()
    assert [one.gathered for one in room.ranked.announced] == [gathers]
    assert room.ranked.step() == [4]


@pytest.mark.parametrize("where", ["stopping", "admission"])
def test_steps_that_were_found_have_failed_where_none_could_be_begun(room: Room, where: str) -> None:
    """Their stages would be busy for ever, and the error is for whoever looks."""

    def fail() -> Any:
        raise RuntimeError("no answer to that")

    steps, callers = room.ranked.steps, room.callers[:2]
    for caller in callers:
        caller.announce([3])
        caller.post()
    before = getattr(steps, f"_{where}")
    setattr(steps, f"_{where}", fail)
    with pytest.raises(RuntimeError, match="no answer to that"):
        room.look()
    setattr(steps, f"_{where}", before)
    for caller in callers:
        caller.look()
        assert caller.ended is not None and caller.ended[0] is Status.LOST
    assert not room.ranked.announced
