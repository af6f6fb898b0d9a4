"""Which calls a lane takes, by rows, deadline and pace: a lane that serves so many rows a second, in turn."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest

from moeserve.runtime.doors.calls.pace import FRESH_SECONDS, Pace
from moeserve.runtime.doors.calls.rows import Held, Leave, RowAdmission, RowLimits
from moeserve.runtime.errors import LaneFull

ROWS_A_SECOND = 1000.0


class Lane:
    """Serves the most urgent call first, so many rows a second, by a clock of its own."""

    def __init__(self, **limits: float) -> None:
        self.now = 0.0
        self.limits = RowLimits(**limits)  # type: ignore[arg-type]
        self.admission = RowAdmission(self.limits, lambda: self.now)
        self.queue: list[tuple[float, int, str, int, float, Leave]] = []
        self.free_at = 0.0  # since when it serves the call that it serves
        self._numbers = itertools.count()

    def ask(self, peer: str, rows: int, seconds: float = math.inf) -> LaneFull | None:
        try:
            leave = self.admission.enter(peer, rows, self.now + seconds)
        except LaneFull as full:
            return full
        urgency = self.now + min(seconds, self.limits.due)
        if not self.queue:
            self.free_at = max(self.now, self.free_at)
        heapq.heappush(self.queue, (urgency, next(self._numbers), peer, rows, self.now + seconds, leave))
        return None

    def go_on(self, seconds: float) -> list[tuple[str, bool]]:
        """Who was answered meanwhile, and whether in time."""
        until, served = self.now + seconds, []
        while self.queue:
            ends = self.free_at + self.queue[0][3] / ROWS_A_SECOND
            if ends > until:
                break
            self.now = self.free_at = ends
            _, _, peer, _, deadline, leave = heapq.heappop(self.queue)
            leave("OK")
            served.append((peer, self.now <= deadline))
        self.now = until
        return served

    def learn(self) -> None:
        for _ in range(20):
            self.ask("first", 10)
            self.ask("first", 10)
            self.go_on(1.0)


def test_what_cannot_be_answered_in_time_is_refused_at_once() -> None:
    lane = Lane()
    lane.learn()
    assert lane.ask("a", 10, 0.05) is None
    assert lane.ask("a", 10, 0.05) is None
    refused = lane.ask("a", 10, 0.05)
    assert refused is not None and "20 rows are served before" in str(refused)
    assert refused.pushback > 0
    assert lane.ask("a", 10, 0.03) is None, "it is served before those that have more time"
    assert lane.ask("a", 10, 0.5) is None


def test_calls_that_end_at_their_deadline_in_a_standstill_tell_nothing_of_the_pace() -> None:
    """Those who come later wait for the group, too, and are not told of a pace that a lane without it had."""
    lane = Lane()
    lane.admission.stand_still()
    for _ in range(3):
        leave = lane.admission.enter("a", 30, lane.now + 2.0)
        lane.now += 2.0
        leave("DEADLINE_EXCEEDED")
    for _ in range(4):
        assert lane.ask("b", 30, 3.0) is None


def test_the_pace_is_learned_of_calls_that_are_answered_while_layers_are_read() -> None:
    """Other layers are served for as long as that takes: of their calls too many are refused, as ever."""
    lane = Lane()
    lane.admission.stand_still()
    lane.learn()
    assert lane.ask("a", 10, 0.05) is None
    assert lane.ask("a", 10, 0.05) is None
    assert lane.ask("a", 10, 0.05) is not None


def test_what_a_standstill_took_tells_nothing_of_the_pace() -> None:
    """A member is lost, and the group serves on without it 2.6 s later: no call is refused for that."""
    lane = Lane()
    lane.learn()
    assert lane.ask("a", 10) is None
    lane.now += 1.5  # until the group ends
    lane.admission.stand_still()
    assert lane.ask("b", 10) is None
    lane.now += 9.0  # while it comes together, calls come and are kept
    assert lane.ask("a", 20) is None
    lane.admission.go_on()
    lane.free_at = lane.now
    assert lane.ask("b", 10) is None, "nobody is slow: all that waited have waited for the group"
    lane.go_on(1.0)
    assert lane.ask("a", 10, 0.5) is None
    assert lane.ask("b", 10, 0.5) is None
    lane.go_on(1.0)
    for _ in range(2):
        assert lane.ask("a", 10, 0.05) is None
    assert lane.ask("a", 10, 0.05) is not None, "the pace is the one from before"


def test_of_five_times_too_many_calls_those_let_in_are_answered_in_time_and_the_lane_is_busy() -> None:
    lane, answered = Lane(), []
    for _ in range(300):
        lane.ask("a", 50, 0.5)
        lane.go_on(0.01)  # not a pace is known when the first of them come
    for _ in range(6000):
        lane.ask("a", 50, 0.5)  # each 10 ms; the lane needs 50
        answered += lane.go_on(0.01)
    late = sum(not in_time for _, in_time in answered)
    assert len(answered) >= 0.95 * 60 * ROWS_A_SECOND / 50
    assert late <= 0.01 * len(answered)


@pytest.mark.parametrize("their_seconds", [0.5, 5.0, math.inf])
def test_a_caller_that_asks_without_a_pause_leaves_a_polite_one_half(their_seconds: float) -> None:
    _leaves_half(their_seconds)


@pytest.mark.parametrize("seed", [5, 25, 33, 38, 64])
def test_what_a_full_lane_took_does_not_keep_out_a_call_that_is_served_before_it(seed: int) -> None:
    """With these draws the polite one pauses until even the quickest call has waited for too long."""
    random.seed(seed)
    _leaves_half(math.inf)


def _leaves_half(their_seconds: float) -> None:
    """A minute of a caller that asks without a pause, beside a polite one: that one gets half of its half."""
    lane, served, comes = Lane(), {"polite": 0, "rude": 0}, [0.0] * 8
    draw = random.Random(0)
    for _ in range(12000):
        for _ in range(3):
            lane.ask("rude", 10, their_seconds)
        for at in range(len(comes)):
            if comes[at] <= lane.now:
                refused = lane.ask("polite", 10, 0.5)
                comes[at] = lane.now + (refused.pushback if refused else 0.5 * draw.random())
        for peer, _ in lane.go_on(0.005):
            served[peer] += 1
    wanted = 8 / 0.25  # calls a second that the polite one would send if none were refused
    fair = min(wanted, ROWS_A_SECOND / 10 / 2)
    assert served["polite"] >= 0.5 * fair * 60
    assert sum(served.values()) >= 0.9 * 60 * ROWS_A_SECOND / 10


def test_nobody_is_refused_for_a_guess() -> None:
    lane = Lane()
    assert lane.ask("a", 10, 0.05) is None
    assert lane.ask("a", 1, 0.001) is None, "nothing is known yet"
    lane.go_on(1.0)
    lane.learn()
    assert lane.ask("a", 10) is None
    assert lane.ask("a", 4000, 1.0) is None, "so large a call was never seen"
    lane.go_on(10.0)
    assert lane.ask("a", 10) is None
    assert lane.ask("a", 1, 0.001) is None, "what was known is old"


def test_an_idle_lane_takes_any_call_and_learns_that_it_has_become_quicker() -> None:
    pace = Pace()
    for at in range(50):
        pace.note(10, 9.0, float(at))
    assert pace.foretold(10, 50.0) >= 9.0
    assert pace.foretold(10, 50.0 + FRESH_SECONDS) == 0.0
    for at in range(400):
        pace.note(10, 0.01, 50 + at / 100)
    assert pace.foretold(10, 54.0) <= 0.05


def test_rows_are_limited_but_for_a_single_call() -> None:
    lane = Lane(rows=100)
    assert lane.ask("a", 500) is None
    refused = lane.ask("b", 1)
    assert refused is not None and "500 are under way, and server.max_held_rows is 100" in str(refused)
    lane.go_on(10.0)
    assert lane.admission.rows == 0
    assert lane.ask("b", 60) is None
    assert lane.ask("c", 41) is not None
    assert lane.ask("c", 40) is None


def test_a_call_waits_no_longer_than_the_lane_allows_whatever_its_deadline() -> None:
    lane = Lane(seconds=2.0)
    lane.learn()
    queued = []
    for _ in range(3000):
        lane.ask("a", 10)
        lane.go_on(0.005)
        queued.append(lane.admission.rows / ROWS_A_SECOND)
    assert 1.0 <= max(queued[2000:]) <= 2.2


@pytest.mark.parametrize("rows", [4900, 8000, 20000])
def test_a_call_whose_own_rows_take_long_finds_its_turn_while_others_come_and_go(rows: int) -> None:
    """Alone it takes longer than the half of 10 s for which a call may wait: that is no wait for others."""
    lane = Lane()
    for _ in range(3):
        assert lane.ask("large", rows) is None
        lane.go_on(rows / ROWS_A_SECOND + 1.0)
    began, comes, let_in, others = lane.now, lane.now + 1.0, math.inf, 0
    while lane.now < began + 20.0 and let_in == math.inf:
        while len(lane.queue) < 7:
            others += lane.ask("small", 30, 60.0) is None
        if lane.now >= comes:
            refused = lane.ask("large", rows, 60.0)
            comes, let_in = (lane.now + refused.pushback, math.inf) if refused else (comes, lane.now)
        lane.go_on(0.01)
    assert let_in < began + 5.0 and others > 7
    answered = lane.go_on(rows / ROWS_A_SECOND + 2.0)
    assert ("large", True) in answered and all(in_time for _, in_time in answered)


def test_calls_whose_own_rows_take_long_wait_for_others_no_longer_than_the_lane_allows() -> None:
    lane = Lane(seconds=2.0)
    for _ in range(3):
        assert lane.ask("a", 3000) is None
        lane.go_on(4.0)
    assert lane.ask("a", 900, 60.0) is None and lane.ask("b", 3000, 60.0) is None
    refused = lane.ask("c", 3000, 60.0)
    assert refused is not None and str(refused) == (
        "3900 rows are served before: at this lane's pace a call of 3000 rows would take 6.90 s, and should "
        "take 4.00 s, half of server.queue_seconds = 2 for others, and what its own take; come back, or "
        "raise that"
    )
    refused = lane.ask("d", 3000, 6.0)
    assert refused is not None and str(refused).endswith(
        "and should take 3.00 s, half of the 6.00 s that it has; give it a longer timeout, or fewer rows"
    )


def test_a_call_larger_than_its_caller_s_share_comes_in_beside_small_ones_of_it() -> None:
    """As of one client with several threads, while others were refused for want of time."""
    lane = Lane()
    for _ in range(3):
        assert lane.ask("a", 4000) is None
        lane.go_on(5.0)
    assert lane.ask("b", 30) is None and lane.ask("a", 30) is None
    assert lane.ask("b", 30, 0.01) is not None, "others want more than they get"
    assert lane.ask("a", 4000, 60.0) is None
    refused = lane.ask("a", 4000, 60.0)
    assert refused is not None and str(refused) == (
        "this caller has 4030 rows under way, 4000 more are asked, and its share of 312 rows, as many as the "
        "one with the least time has time for, among 2 callers is 156; come back"
    )


@pytest.mark.parametrize("way", [0.0, 0.3, 0.45])
def test_answers_are_in_time_for_callers_whose_way_is_long(way: float) -> None:
    """Five times what the lane serves comes for 15 s; callers wait for `way` s before it sees their calls."""
    lane, rows, wait = Lane(), 50, 1.0
    lane.learn()
    started, good, every = lane.now, 0, rows / ROWS_A_SECOND / 5
    begun: dict[str, float] = {}
    for at in range(int(15.0 / every)):
        good += sum(lane.now - begun[peer] <= wait for peer, _ in lane.go_on(every))
        peer = f"caller {at}"
        begun[peer] = lane.now - way
        lane.ask(peer, rows, wait)
    assert good >= 0.9 * (lane.now - started) * ROWS_A_SECOND / rows


def test_what_few_rows_took_says_little_of_calls_of_many() -> None:
    lane = Lane()
    for _ in range(20):
        lane.ask("a", 8)
        lane.now += 0.08  # as long as a step takes, whatever its rows
        lane.queue.pop()[-1]("OK")
    assert lane.ask("a", 400) is None
    assert lane.ask("b", 400) is None
    assert lane.ask("c", 8) is None, "800 rows before it, and no call of so many has ended yet"


def test_how_long_few_rows_have_waited_says_little_of_many() -> None:
    lane = Lane()
    for _ in range(20):
        lane.ask("a", 400)
        lane.go_on(0.5)
    assert lane.ask("b", 8) is None
    lane.now += 0.3  # the machine does something else
    assert lane.ask("c", 400) is None, "8 rows have waited 0.3 s, and 408 need not wait 15 s for that"
    lane.now += 5.0
    assert lane.ask("d", 8) is not None, "but nothing ends here any more"


@pytest.mark.parametrize("seed", range(6))
def test_what_is_ahead_is_the_same_however_it_is_summed(seed: int) -> None:
    """Where nobody who is held comes later and the pace is known for all, nothing is summed anew."""
    numbers, now = random.Random(seed), [0.0]
    quick, slow = (RowAdmission(RowLimits(rows=4000), lambda: now[0]) for _ in range(2))
    held: list[tuple[Leave, Leave]] = []
    let_in = 0
    for _ in range(3000):
        now[0] += numbers.random() * 0.01
        if held and numbers.random() < 0.5:
            code = numbers.choice(["OK", "OK", "DEADLINE_EXCEEDED", "CANCELLED"])
            for leave in held.pop(0 if seed % 2 else numbers.randrange(len(held))):
                leave(code)
        asked = f"unix:{numbers.randrange(5)}", numbers.choice([1, 16, 16, 16, 400 if seed > 2 else 32])
        deadline = now[0] + numbers.choice([math.inf, math.inf, 30.0, 0.2 if seed > 1 else 2.0])
        slow._latest = math.inf  # as if somebody came later
        answers: list[Leave | str] = []
        for admission in (quick, slow):
            try:
                answers.append(admission.enter(*asked, deadline))
            except LaneFull as full:
                answers.append(str(full))
        first, second = answers
        assert isinstance(first, str) == isinstance(second, str) and (first == second or callable(first))
        if callable(first) and callable(second):
            held.append((first, second))
            let_in += 1
        assert [one.ahead for one in quick._held] == [one.ahead for one in slow._held]
        assert quick.rows == slow.rows and quick._latest < math.inf
    assert let_in > 1000


class _Twice:
    """The same calls at two lanes: those of one moment let in together, and one by one."""

    def __init__(self, limits: RowLimits) -> None:
        self.now = 100.0
        self.together, self.alone = (RowAdmission(limits, lambda: self.now) for _ in range(2))
        self.held: list[tuple[Held, Held]] = []

    def enter(self, calls: list[tuple[str, int, float]]) -> list[bool]:
        """Whether each was let in; what both lanes note of it is the same."""
        found = self.together.enter_all(calls)
        others = [self.alone.enter_all([call])[0] for call in calls]
        for one, other in zip(found, others, strict=True):
            if isinstance(one, Held) and isinstance(other, Held):
                assert self._noted(one) == self._noted(other)
                self.held.append((one, other))
            else:
                assert isinstance(one, LaneFull) and isinstance(other, LaneFull)
                assert str(one) == str(other)  # when to come back is drawn by chance
        assert self.together.rows == self.alone.rows
        return [isinstance(one, Held) for one in found]

    @staticmethod
    def _noted(held: Held) -> tuple[object, ...]:
        caller = held.caller
        about = caller.peer, caller.calls, caller.held, caller.room
        return held.rows, held.ahead, held.urgency, held.entered, held.seconds, about

    def leave(self, count: int) -> None:
        ended, self.held = self.held[:count], self.held[count:]
        self.together.leave_all([one for one, _ in ended], "OK")
        for _, other in ended:
            self.alone.leave_all([other], "OK")


@pytest.mark.parametrize("seed", range(8))
def test_calls_of_one_moment_are_let_in_as_if_one_came_after_the_other(seed: int) -> None:
    """Of few and many callers, some with several calls, some in a hurry, with and without room for all."""
    draw = random.Random(seed)
    twice, let_in = _Twice(RowLimits(rows=draw.choice([200, 4000, 60000]), seconds=2.0)), list[bool]()
    most_together = 0
    for _ in range(300):
        peers = [f"unix:{draw.randrange(draw.choice([4, 40]))}" for _ in range(draw.randrange(9))]
        seconds = draw.choice([0.2, 2.0, math.inf])
        calls = [(peer, draw.choice([1, 16, 16, 256]), twice.now + seconds) for peer in peers]
        fit = len(calls) > 1 and twice.together._all_fit(calls, twice.now)
        entered = twice.enter(calls)
        assert all(entered) or not fit
        most_together = max(most_together, len(calls) if fit else 0)
        let_in += entered
        twice.now += draw.choice([0.0, 0.001, 0.02])
        twice.leave(draw.randrange(10))
    assert most_together > 3, "this test tries what is let in at one look"
    assert any(let_in)
