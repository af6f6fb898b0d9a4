"""Five times the calls that a lane can serve: those let in are answered in time, and the lane is busy.

The lane takes what waits into a step, as the sequencer does: a step takes `base` seconds and `slope` for each
row. A rude caller asks all the time, and the workers of a polite one come back when they are told to.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from moeserve.runtime.doors.calls.pace import Pace
from moeserve.runtime.doors.calls.rows import Leave, RowAdmission, RowLimits
from moeserve.runtime.errors import LaneFull

ROWS, WORKERS, TIMES = 16, 24, 5
SECONDS = 60.0


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Refused callers come back at random."""
    random.seed(0)


@dataclass(frozen=True)
class Steps:
    """How long steps take, and how many rows one has at most."""

    base: float
    slope: float
    lane_rows: int = 256
    noise: float = 0.0  # up to such a part longer, by chance

    def capacity(self) -> float:
        """Calls a second that as many waiting workers get served."""
        rows = min(WORKERS * ROWS, self.lane_rows)
        return rows / ROWS / (self.base + self.slope * rows) / (1 + self.noise / 2)


@dataclass(eq=False)
class Call:
    peer: str
    rows: int
    entered: float
    deadline: float
    leave: Leave
    over: bool = False
    ended: float = 0.0


@dataclass
class Lane:
    """One lane by a clock of its own; `answered` and `late` are its calls that ended."""

    steps: Steps
    now: float = 0.0
    slower: float = 1.0
    waiting: list[Call] = field(default_factory=list)
    step: list[Call] = field(default_factory=list)
    ends: float = math.inf
    answered: list[Call] = field(default_factory=list)
    late: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = RowAdmission(RowLimits(), lambda: self.now)
        self._draw = random.Random(0)

    def ask(self, peer: str, deadline: float) -> LaneFull | None:
        try:
            leave = self.admission.enter(peer, ROWS, self.now + deadline)
        except LaneFull as full:
            return full
        self.waiting.append(Call(peer, ROWS, self.now, self.now + deadline, leave))
        if not self.step:
            self._begin()
        return None

    def go_on(self, until: float) -> None:
        while self.ends <= until:
            self._expire(self.ends)
            self.now = self.ends
            for call in self.step:
                if not call.over:
                    call.leave("OK")
                    call.ended = self.now
                    self.answered.append(call)
            self._begin()
        self._expire(until)
        self.now = until

    def learn(self, calls: int, deadline: float) -> None:
        """One call after the other, each alone."""
        for _ in range(calls):
            assert self.ask("ipv4:1:first", deadline) is None
            self.go_on(self.ends)
            self.go_on(self.now + 0.1)
        self.answered.clear()

    def _begin(self) -> None:
        most = self.steps.lane_rows // ROWS
        waiting = [call for call in self.waiting if not call.over]
        self.step, self.waiting = waiting[:most], waiting[most:]
        rows = sum(call.rows for call in self.step)
        takes = (self.steps.base + self.steps.slope * rows) * (1 + self.steps.noise * self._draw.random())
        self.ends = self.now + self.slower * takes if self.step else math.inf

    def _expire(self, until: float) -> None:
        for call in [*self.step, *self.waiting]:
            if not call.over and call.deadline <= until:
                self.now, call.over = max(self.now, call.deadline), True
                call.leave("DEADLINE_EXCEEDED")
                self.late.append(call)


@dataclass
class Seen:
    """What became of calls in the seconds of overload."""

    goodput: float  # of the capacity, which falls with the pace
    late: int
    polite: float  # calls answered, of a rude caller's


def overload(
    lane: Lane,
    deadline: float,
    slower_at: float = math.inf,
    seconds: float = SECONDS,
    workers: int = WORKERS,
) -> Seen:
    """Offers five times the capacity of its steps; after `slower_at` seconds they take twice as long."""
    capacity, began = lane.steps.capacity(), lane.now
    asked, comes, offered = 0, [lane.now] * workers, TIMES * capacity
    waits: dict[int, float] = {}  # worker -> when its call entered
    while (passed := lane.now - began) < seconds:
        lane.slower = 2.0 if passed >= slower_at else 1.0
        while asked / offered <= passed:
            lane.ask("ipv4:1:rude", deadline)
            asked += 1
        for worker, at in enumerate(comes):
            if at <= lane.now:
                refused = lane.ask("ipv4:1:polite", deadline)
                comes[worker] = math.inf if refused is None else lane.now + refused.pushback
                if refused is None:
                    waits[worker] = lane.now
        ended = len(lane.answered), len(lane.late)
        lane.go_on(lane.now + 0.25 / offered)
        for call in [*lane.answered[ended[0] :], *lane.late[ended[1] :]]:
            if call.peer.endswith("polite"):
                worker = next(one for one, at in waits.items() if at == call.entered)
                del waits[worker]
                comes[worker] = lane.now
    slow = max(0.0, seconds - slower_at)
    polite = sum(call.peer.endswith("polite") for call in lane.answered)
    return Seen(
        len(lane.answered) / (capacity * (seconds - slow / 2)),
        len(lane.late),
        polite / max(1, len(lane.answered) - polite),
    )


HEAVY = Steps(0.16, 0.0083)  # the layer of bench/service/overload.py on two cores
LIGHT = Steps(0.08, 0.001, lane_rows=4096)
UNEVEN = Steps(0.08, 0.001, lane_rows=4096, noise=0.5)
EVEN = Steps(0.0001, 0.001, lane_rows=64)  # no rows, no time
LATENT = Steps(0.5, 0.0001)  # as long with few rows as with many


@pytest.mark.parametrize(("steps", "deadline"), [(HEAVY, 8.0), (LIGHT, 4.0), (UNEVEN, 4.0), (EVEN, 4.0)])
@pytest.mark.parametrize("learned", [0, 40])
def test_whoever_is_let_in_is_answered_in_time_and_the_lane_is_busy(
    steps: Steps, deadline: float, learned: int
) -> None:
    lane = Lane(steps)
    lane.learn(learned, deadline)
    seen = overload(lane, deadline)
    assert seen.late == 0
    assert seen.goodput >= 0.9


def test_a_lane_that_is_as_quick_with_many_rows_finds_out() -> None:
    lane = Lane(LATENT)
    lane.learn(40, 4.0)
    began = lane.now
    assert overload(lane, 4.0, seconds=2 * SECONDS).late == 0
    then = sum(call.ended >= began + SECONDS for call in lane.answered)
    assert then >= 0.9 * LATENT.capacity() * SECONDS


@pytest.mark.parametrize(("steps", "deadline"), [(HEAVY, 8.0), (LIGHT, 4.0), (EVEN, 4.0)])
def test_steps_that_suddenly_take_twice_as_long_make_no_call_late(steps: Steps, deadline: float) -> None:
    lane = Lane(steps)
    lane.learn(40, deadline)
    seen = overload(lane, deadline, slower_at=20.0)
    assert seen.late == 0
    assert seen.goodput >= 0.85


@pytest.mark.parametrize(("steps", "deadline"), [(HEAVY, 8.0), (LIGHT, 4.0), (UNEVEN, 4.0)])
def test_a_polite_caller_is_answered_half_as_often_as_a_rude_one(steps: Steps, deadline: float) -> None:
    lane = Lane(steps)
    lane.learn(40, deadline)
    seen = overload(lane, deadline, workers=2 * WORKERS)  # as many as may have half of what is served
    assert seen.polite >= 0.5


def test_a_call_that_had_too_little_time_says_nothing_of_the_pace() -> None:
    pace = Pace()
    for at in range(10):
        pace.note(16, 0.5, float(at))
    for at in range(10, 30):
        pace.note(16, 0.001, float(at), ended=False)
    pace.note(16, 0.5, 30.0)
    assert pace.foretold(16, 30.0) == pytest.approx(0.5, rel=0.02)
    pace.note(16, 4.0, 31.0, ended=False)
    assert pace.foretold(16, 31.0) > 0.55
