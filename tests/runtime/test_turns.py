"""Steps of several callers' GPUs in turns, on a device whose time is counted: who waits for whom."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from mail_callers import AHEAD, PATIENCE, WORDS_ALONE, Caller

from moeserve.dispatch.mail.kernels import ABORT, MISFIT, YIELD
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import tag_of
from moeserve.runtime.doors.passes.mail_pass import EARLY_TURNS, MISSED_STEPS, UnderWay
from moeserve.runtime.doors.passes.turns import RECENT, Company, Turns
from moeserve.runtime.doors.payloads import RegionLimits, Regions
from moeserve.runtime.rank.runs.runs import Run, Told

LAYERS = [3, 5, 3, 5]
EMPTY, HOME, LAUNCH, TOLD = 2, 1, 4, 3  # ticks: a step without rows, rows and answers on their way, the host


@pytest.fixture
def regions() -> Iterator[Regions]:
    made = Regions(RegionLimits(max_bytes=1 << 20))
    yield made
    made.close()


def together(
    regions: Regions, many: int, flags: int = m.ANY_WEIGHTS, layers: Sequence[int] = LAYERS
) -> list[Caller]:
    """Callers of one rank, none of which is alone."""
    turns, callers = Turns(), [Caller(regions) for _ in range(many)]
    for caller in callers:
        caller.lane.turns, caller.lane.company = turns, lambda: Company.LANES
        caller.standing(list(layers), flags=flags)
    return callers


def both_begun(regions: Regions, count: int = 2) -> list[Caller]:
    """Two callers whose first steps are launched, one behind the other's, of so many rows."""
    callers = together(regions, 2)
    for caller in callers:
        caller.bring(0, 0, count=count)
        assert caller.look()
    return callers


def answered(caller: Caller, steps: int) -> None:
    caller.lane.ran(Told(0, (steps, 0), 1), 1)


def left_for(two: Caller, one: Caller) -> None:
    """Two's rows are there and one's, whose turn it is, are not: one is left, and its first step ends so."""
    answered(one, 1)
    answered(two, 1)
    two.bring(0, 1)
    two.look()
    Turns.leave([one.lane, two.lane])
    assert one.mail.lane.abort[0] == YIELD and not two.aborted
    one.lane.ran(Told(MISFIT, (1, 0)), 1)


def test_the_next_step_lies_behind_the_others_before_its_rows_are_there(regions: Regions) -> None:
    one, two = together(regions, 2)
    one.bring(0, 0, count=5)
    assert one.look() and not one.look(), "nobody else has launched since"
    two.bring(0, 0, count=9)
    assert two.look()
    assert one.look()
    run, _ = one.begun[1]
    assert (run.steps, run.rows, run.least, run.begins) == (((5, 0),), 8, 5, 0)
    assert two.look() and one.look() and two.look() and not one.look() and not two.look()
    assert [len(caller.begun) for caller in (one, two)] == [1 + EARLY_TURNS] * 2
    Turns.leave([one.lane, two.lane])
    assert not one.aborted and not two.aborted, "the first steps run, and nobody's rows have to wait"
    answered(one, 1)
    one.bring(0, 1, count=5)
    assert one.look(), "two's third lies behind its own"
    Turns.leave([one.lane, two.lane])
    assert two.mail.lane.abort[0] == 0, "the first of two's runs"
    answered(two, 1)
    answered(one, 2)
    assert [run.steps[0][0] for run, _ in one.begun] == LAYERS and not one.look(), "it may rest then"


def test_what_was_launched_in_several_turns_is_left_together(regions: Regions) -> None:
    one, two = both_begun(regions)
    assert one.look() and two.look() and one.look() and two.look()
    left_for(two, one)
    one.bring(0, 1)
    assert not one.look() and one.aborted, "its other step is under way, and computes nothing"
    answered(two, 2)
    one.lane.ran(Told(MISFIT, (1, 0)), 1)
    assert one.look() and not one.aborted
    run, _ = one.begun[-1]
    assert (run.steps, run.again, run.least) == (((5, 0),), True, 0)


def test_a_pass_whose_weights_nobody_knows_has_one_run(regions: Regions) -> None:
    one, two = together(regions, 2, flags=0)
    one.bring(0, 0)
    two.bring(0, 0)
    assert one.look() and two.look() and not one.look() and not two.look()
    answered(one, 1)
    assert one.look()


def test_who_does_not_come_in_its_turn_is_left_when_others_have(regions: Regions) -> None:
    one, two = both_begun(regions)
    assert one.look() and two.look()
    left_for(two, one)
    assert not one.look() and not one.aborted, "it is launched when its rows are there"
    for step in range(1, 1 + MISSED_STEPS):
        one.bring(0, step)
        assert one.look() and one.begun[-1][0].again is (step == 1)
        answered(one, step + 1)
        two.look()
        two.lane.turns.launched(two.lane)
        assert one.look() is (step == MISSED_STEPS and (step + 1) % len(LAYERS) != 0)


@pytest.mark.parametrize("why", ["calls", "rests", "other members", "no graph", "memory", "no ahead"])
def test_no_step_is_launched_in_its_turn_where_others_might_wait(regions: Regions, why: str) -> None:
    one, two = together(regions, 2)
    one.alone, one.graphs, one.retired = why != "other members", why != "no graph", int(why == "memory")
    if why == "calls":
        one.lane.company = lambda: Company.CALLS
    if why == "no ahead":
        one.lane._terms = type(one.lane._terms)(**(vars(one.lane._terms) | {"ahead": 0.0}))
    first = 3 if why == "rests" else 0
    for step in range(first):
        one.bring(0, step)
        one.look()
        answered(one, step + 1)
    one.bring(0, first)
    assert one.look()
    two.bring(0, 0)
    assert two.look() and not one.look()


def test_calls_and_a_long_rest_end_a_wait(regions: Regions) -> None:
    for ends in ("calls", "rest"):
        one, _ = both_begun(regions)
        assert one.look()
        answered(one, 1)
        one.lane.yield_steps(Company.LANES)
        assert not one.aborted
        if ends == "calls":
            one.lane.yield_steps(Company.CALLS)
        else:
            one.look(AHEAD * 1.5)
        assert one.mail.lane.abort[0] == YIELD


def test_who_is_left_as_its_rows_come_waits_in_later_turns(regions: Regions) -> None:
    one, two = both_begun(regions)
    assert one.look()
    answered(one, 1)
    one.lane.leave_turn()
    assert one.mail.lane.abort[0] == YIELD and not one.lane._pass.missed  # type: ignore[union-attr]
    one.bring(0, 1)
    two.look()
    assert one.look() and not one.aborted, "it was not too late"
    assert one.begun[-1][0].least, "another in its turn"


def test_a_stage_that_is_never_used_takes_no_turn(regions: Regions) -> None:
    turns, callers = Turns(), [Caller(regions) for _ in range(2)]
    for caller in callers:
        caller.lane.turns, caller.lane.company = turns, lambda: Company.LANES
        caller.standing(LAYERS, stages=2, flags=m.ANY_WEIGHTS)
    one, two = callers
    for caller in callers:
        caller.bring(1, 0, count=5)
        assert caller.look()
    assert one.look()
    run, _ = one.begun[-1]
    assert (run.steps, run.rows, run.least) == (((5, 1),), 8, 5)
    answered(one, 0)
    one.bring(0, 0, count=5)
    assert one.look() and one.lane.ready_turn > one.lane.waiting_turn > 0
    Turns.leave([one.lane, two.lane])
    assert one.mail.lane.abort[0] == YIELD, "its other stage came first"


def test_who_was_interrupted_is_not_told_to_wait_again(regions: Regions) -> None:
    one, _ = together(regions, 2)
    one.mail.interrupted = True
    one.mail.say(YIELD)
    assert one.mail.lane.abort[0] == ABORT
    one.mail.say(0)
    assert one.mail.lane.abort[0] == ABORT
    one.standing(LAYERS)
    one.box[m.GIVEN_UP] = 1
    one.look()
    one.look()
    assert one.lane.in_pass and not one.aborted


def test_a_step_of_other_rows_than_the_last_is_launched_anew(regions: Regions) -> None:
    one, _ = both_begun(regions, count=5)
    assert one.look() and one.begun[-1][0].rows == 8
    answered(one, 1)
    one.bring(0, 1, count=30)
    one.lane.ran(Told(MISFIT, (1, 0)), 1)
    assert one.look()
    run, _ = one.begun[-1]
    assert (run.rows, run.again, run.least, one.ended) == (32, True, 0, None)


def test_a_lane_that_has_gone_is_not_kept_for_its_turn() -> None:
    class Lane:
        pass

    turns, lane = Turns(), Lane()
    gone = weakref.ref(lane)
    turns.launched(lane)
    del lane
    gc.collect()
    assert gone() is None
    other, third = Lane(), Lane()
    turns.launched(other)
    turns.launched(third)
    assert not turns.follows(third)
    for _ in range(RECENT):
        turns.launched(other)
    assert turns.follows(third) and not turns.follows(other), "it launches no more, and nobody waits for it"


def of_both_tracks(regions: Regions) -> tuple[Caller, Caller]:
    """One of few rows and one of more, of a rank whose steps of up to 8 rows have a track of their own."""
    few, many = together(regions, 2)
    few.lane.turns.flows = [True, True]
    for caller, rows in ((few, 3), (many, 30)):
        caller.short_rows = 8
        caller.bring(0, 0, count=rows)
        assert caller.look()
    return few, many


def test_lanes_of_two_tracks_do_not_take_turns_with_each_other(regions: Regions) -> None:
    few, many = of_both_tracks(regions)
    assert [caller.begun[0][0].short for caller in (few, many)] == [True, False]
    for caller in (few, many, few, many):
        assert caller.look(), "nobody else has launched on its track"
    for caller in (few, many):
        first, *others = [run for run, _ in caller.begun]
        assert all(run.beside and run.least and run.short is caller.lane.short for run in others), (
            "room is left"
        )
        assert [run.steps[0][0] for run in (first, *others)] == LAYERS[:3] and not caller.look()
        assert first.beside


def test_who_waits_for_rows_beside_the_other_track_keeps_nobody_there_waiting(regions: Regions) -> None:
    few, many = of_both_tracks(regions)
    assert many.look() and many.lane.beside
    answered(many, 1)
    answered(few, 1)
    few.bring(0, 1, count=3)
    few.look()
    assert few.lane.ready_turn > many.lane.waiting_turn > 0
    Turns.leave([few.lane, many.lane])
    assert not many.aborted, "it leaves room for the other's steps"
    few.lane._pass.under_way.append(UnderWay(99, None, False, beside=True))  # type: ignore[union-attr]
    Turns.leave([few.lane, many.lane])
    assert not many.aborted
    few.lane._pass.under_way[-1].beside = False  # type: ignore[union-attr]
    Turns.leave([few.lane, many.lane])
    assert many.mail.lane.abort[0] == YIELD, "what lies behind it needs the whole device"
    many.mail.say(0)
    few.lane._pass.under_way.pop()  # type: ignore[union-attr]
    many.lane._pass.under_way[0].beside = False  # type: ignore[union-attr]
    Turns.leave([few.lane, many.lane])
    assert many.mail.lane.abort[0] == YIELD, "as was launched before anybody had another track"


def test_a_caller_changes_tracks_when_nothing_of_it_is_under_way(regions: Regions) -> None:
    few, _ = of_both_tracks(regions)
    few.bring(0, 1, count=20)
    assert not few.look() and len(few.begun) == 1, "its first step is under way on the other track"
    answered(few, 1)
    assert few.look() and not few.begun[-1][0].short and few.begun[-1][0].rows == 32


def test_a_track_on_which_no_steps_flow_is_nobodys() -> None:
    turns, lane = Turns(), object()
    turns.flows = [True, False]
    assert turns.apart(short=True) and turns.follows(lane, short=True)
    assert not turns.apart(short=False) and not turns.follows(lane)
    turns.flows = [False, True]
    assert not turns.apart(short=True) and not turns.follows(lane, short=True)
    assert turns.apart(short=False), "large ones leave room for it"


def alone_on_its_track(regions: Regions, rows: int, company: Company = Company.BESIDE) -> Caller:
    """A caller whose first rows are there; steps of up to 8 rows have a track of their own."""
    (caller,) = together(regions, 1)
    caller.lane.company = lambda: company
    caller.short_rows = 8
    caller.bring(0, 0, count=rows)
    return caller


@pytest.mark.parametrize("rows", [3, 30])
def test_a_lane_that_has_its_track_for_itself_has_forward_passes_launched_ahead(
    regions: Regions, rows: int
) -> None:
    caller = alone_on_its_track(regions, rows)
    assert caller.look()
    run, _ = caller.begun[0]
    assert [layer for layer, _ in run.steps] == LAYERS and run.beside and run.short is (rows == 3)
    caller.lane.yield_steps(Company.BESIDE)
    assert not caller.aborted, "it leaves the other track what that needs"
    caller.lane.yield_steps(Company.LANES)
    assert caller.aborted, "others of its track do not wait for this caller"


def test_what_leaves_the_other_track_no_room_is_left_when_that_flows(regions: Regions) -> None:
    caller = alone_on_its_track(regions, 30, Company.NONE)
    assert caller.look() and not caller.begun[0][0].beside
    caller.lane.company = lambda: Company.BESIDE
    caller.lane.yield_steps(Company.BESIDE)
    assert caller.mail.lane.abort[0] == YIELD
    caller.lane.ran(Told(MISFIT, (1, 0)), 1)
    assert not caller.look(), "within a forward pass its steps come one by one"
    caller.bring(0, 1, count=30)
    assert caller.look() and not caller.aborted
    run, _ = caller.begun[1]
    assert (run.steps, run.beside, run.flows) == (((5, 0),), True, True)


def test_who_changes_tracks_is_among_those_of_the_new_one(regions: Regions) -> None:
    caller = alone_on_its_track(regions, 3)
    lane = caller.lane
    lane.company = lambda: Company.BESIDE if lane.short else Company.LANES
    assert caller.look() and len(caller.begun[0][0].steps) == len(LAYERS)
    answered(caller, len(LAYERS))
    caller.bring(0, len(LAYERS), count=30)
    assert caller.look()
    run, _ = caller.begun[1]
    assert len(run.steps) == 1 and not run.short, "others take turns there"


def test_who_is_alone_leaves_room_for_what_still_lies_on_the_other_track(regions: Regions) -> None:
    caller = alone_on_its_track(regions, 30, Company.NONE)
    caller.lane.turns.flows = [True, True]
    assert caller.look()
    run, _ = caller.begun[0]
    assert [layer for layer, _ in run.steps] == LAYERS and run.beside


def test_within_a_forward_pass_steps_beside_others_are_launched_in_turn(regions: Regions) -> None:
    caller = alone_on_its_track(regions, 30, Company.LANES)
    caller.lane.turns.flows = [True, True]
    assert caller.look() and len(caller.begun[0][0].steps) == 1
    caller.lane.company = lambda: Company.BESIDE
    assert caller.look(), "nobody else has launched on its track"
    run, _ = caller.begun[1]
    assert (run.steps, run.least > 0, run.beside, run.flows) == (((5, 0),), True, True, True)


@pytest.mark.parametrize("company", [Company.NONE, Company.BESIDE])
@pytest.mark.parametrize("standing", [True, False])
def test_rows_of_one_stage_do_not_wait_for_those_of_another_that_had_more(
    regions: Regions, company: Company, standing: bool
) -> None:
    caller = Caller(regions)
    caller.short_rows = 8
    flags = m.ANY_WEIGHTS | (m.STANDING if standing else 0)
    caller.announce([3, 5], 2, flags)
    for stage in (0, 1):
        caller.bring(stage, 0, 5 - stage)
    caller.lane.company = lambda: company
    assert caller.look() and len(caller.begun[0][0].steps) == 4
    caller.lane.ran(Told(0, (2, 2), 4), 1)
    first = 2 if standing else 0
    if not standing:
        caller.announce([3, 5], 2, flags)
    caller.lane.company = lambda: Company.CALLS
    for at in (first, first + 1):
        for stage, count in enumerate((5, 9)):
            caller.bring(stage, at, count)
            assert caller.look()
            caller.lane.ran(Told(0, (at + 1, at + stage), 1), 1)
    caller.lane.company = lambda: company
    if not standing:
        caller.announce([3, 5], 2, flags)
    caller.bring(0, 2 * first, 5)  # its second stage comes when this one has its answer
    count = len(caller.begun)
    assert caller.look() or caller.look(0.01)
    run, _ = caller.begun[count]
    assert run.steps == ((3, 0),) and run.short


@dataclass
class Timed:
    """A caller whose steps, attention and rests take so many ticks."""

    caller: Caller
    step_ticks: int
    attention: Sequence[int]
    brings_at: int = 0
    brought: int = 0
    waits: list[int] = field(default_factory=list)  # from its rows to its answers
    overtaken: list[int] = field(default_factory=list)  # steps of others that began meanwhile

    def bring(self, now: int) -> None:
        if self.brings_at == now and self.brought < 40:
            self.caller.bring(0, self.brought, count=5)
            self.brought, self.since = self.brought + 1, now
            self.overtaken.append(0)

    def answer(self, now: int) -> None:
        self.waits.append(now - self.since)
        self.brings_at = now + HOME + self.attention[self.brought % len(self.attention)]


class Device:
    """Runs of several callers, one after another, as kernels and an owner's host would have them."""

    def __init__(self, sides: list[Timed]) -> None:
        self.sides, self.queue = sides, deque[tuple[int, Timed, Run]]()  # with when it is on the device
        self.told = deque[tuple[int, Timed, Told]]()
        self.ends_at, self.running = 0, False
        self.answers = {id(side): 0 for side in sides}
        self.ended: set[int] = set()  # lanes whose last run was left
        self.seen = {id(side): 0 for side in sides}
        self.away = range(0)  # ticks in which the host does nothing

    def tick(self, now: int) -> None:
        for side in self.sides:
            side.bring(now)
        self._device(now)
        while self.told and self.told[0][0] <= now:
            _, side, told = self.told.popleft()
            side.caller.lane.ran(told, 1)
        if now in self.away:
            return
        for side in self.sides:
            side.caller.look(now * 1e-6)
            for run, _ in side.caller.begun[self.seen[id(side)] :]:
                self.queue.append((now + LAUNCH, side, run))
            self.seen[id(side)] = len(side.caller.begun)
        Turns.leave([side.caller.lane for side in self.sides])

    def _device(self, now: int) -> None:
        if self.running and now == self.ends_at:
            self.running = False
            _, side, run = self.queue.popleft()
            if id(side) in self.ended:
                told = Told(MISFIT, (self.answers[id(side)], 0))
            else:
                self.answers[id(side)] += 1
                told = Told(0, (self.answers[id(side)], 0), 1)
                side.answer(now)
            self.told.append((now + TOLD, side, told))
        if self.running or not self.queue or self.queue[0][0] > now:
            return
        _, side, run = self.queue[0]
        if run.again:
            self.ended.discard(id(side))
        caller, at = side.caller, self.answers[id(side)]
        there = caller.box[WORDS_ALONE.header(0) + m.TAG] == tag_of(caller.number, at)
        if id(side) not in self.ended and not there:
            if not caller.aborted:
                return
            self.ended.add(id(side))
        empty = id(side) in self.ended
        self.running, self.ends_at = True, now + (EMPTY if empty else side.step_ticks)
        if not empty:
            for other in self.sides:
                if other is not side and other.brought > self.answers[id(other)]:
                    other.overtaken[-1] += 1


@pytest.mark.parametrize("many", [2, 3])
@pytest.mark.parametrize("attention", [(0,), (15,), (0, 90, 3), (60, 0, 0, 0)])
def test_all_steps_are_answered_and_nobody_is_overtaken_twice(
    regions: Regions, many: int, attention: tuple[int, ...]
) -> None:
    callers = together(regions, many)
    sizes = (10, 40, 25)[:many]
    sides = [
        Timed(caller, ticks, attention[at:] + attention[:at])
        for at, (caller, ticks) in enumerate(zip(callers, sizes, strict=True))
    ]
    device, now = Device(sides), 0
    while any(len(side.waits) < 40 for side in sides):
        device.tick(now)
        now += 1
        assert now < 40_000, [len(side.waits) for side in sides]
    for side in sides:
        assert side.caller.ended is None
        rest = [found for at, found in enumerate(side.overtaken) if at % len(LAYERS)]
        assert max(rest) <= 2 * (many - 1), "in a turn that it has missed others go twice"
    if attention == (0,):
        small = [waited for at, waited in enumerate(sides[0].waits) if at > 8 and at % len(LAYERS) > 1]
        assert max(small) <= sum(sizes) + many * HOME, "no host is between two steps"


def test_a_host_may_be_away_for_more_than_two_rounds(regions: Regions) -> None:
    callers = together(regions, 2, layers=LAYERS * 10)
    sides = [Timed(caller, ticks, (0,)) for caller, ticks in zip(callers, (10, 40), strict=True)]
    device, now = Device(sides), 0
    device.away = range(500, 640)
    while any(len(side.waits) < 40 for side in sides):
        device.tick(now)
        now += 1
        assert now < 40_000
    assert max(sides[0].waits[8:]) <= 50 + 2 * HOME, "steps of three rounds lay on the device"


def test_callers_of_any_pace_are_answered(regions: Regions) -> None:
    chance = random.Random(7)
    for _ in range(12):
        callers = together(regions, 3)
        sides = [
            Timed(caller, chance.randrange(3, 50), [chance.choice((0, 0, 5, 30, 200)) for _ in range(7)])
            for caller in callers
        ]
        device, now = Device(sides), 0
        while any(len(side.waits) < 40 for side in sides):
            device.tick(now)
            now += 1
            assert now < 80_000 and now * 1e-6 < PATIENCE
