"""When a caller looks for an answer: simulated, with a clock of the test's own."""

from __future__ import annotations

import pytest

from moeserve.proto.passes import expected as module
from moeserve.proto.passes.expected import EARLY_SECONDS, LONGEST_SLEEP, LOOKS, Expected

WOKEN_LATER = 60e-6  # by the system, than was asked for
LOOK = 2e-6
AWAKE = 5e-4


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def awaited(
    expected: Expected, clock: Clock, takes: float, later: float = WOKEN_LATER, rows: int = 1
) -> tuple[float, float]:
    """A step whose answer takes so long, waited for from its rows on: how late it was found, and how long
    its caller was awake.
    """
    expected.sent(rows)
    there, awake, looks, slept = clock.now + takes, 0.0, 0, 0.0
    while clock.now < there:
        looks += 1
        slept = expected.sleep(clock.now, looks)
        clock.now += slept + later if slept else LOOK
        awake += 0.0 if slept else LOOK
    expected.came(awaited=looks > 0, slept=slept > 0)
    return clock.now - there, awake


@pytest.mark.parametrize("takes", [200e-6, 600e-6, 3e-3, 50e-3])
def test_answers_that_take_as_long_as_the_last_are_found_awake(clock: Clock, takes: float) -> None:
    expected = Expected(AWAKE)
    for _ in range(12):
        awaited(expected, clock, takes)
    for _ in range(10):
        late, awake = awaited(expected, clock, takes)
        assert late <= LOOK
        assert awake <= LOOKS * LOOK + EARLY_SECONDS + 2 * LOOK


def test_the_first_answer_is_found_within_an_eighth_of_its_time(clock: Clock) -> None:
    late, _ = awaited(Expected(AWAKE), clock, 8e-4)
    assert late <= 8e-4 / 8 + WOKEN_LATER


def test_it_follows_answers_that_take_longer_or_less_long(clock: Clock) -> None:
    expected = Expected(AWAKE)
    for takes in (2e-3, 2e-3, 5e-4, 5e-4, 4e-3, 4e-3):
        for _ in range(12):
            awaited(expected, clock, takes)
        late, _ = awaited(expected, clock, takes)
        assert late <= LOOK


def test_an_answer_that_does_not_come_is_waited_for_asleep(clock: Clock) -> None:
    expected = Expected(AWAKE)
    for _ in range(5):
        awaited(expected, clock, 1e-3)
    _, awake = awaited(expected, clock, 1.0)
    assert awake < 2e-3
    expected.sent(1)
    clock.now += 2.0
    assert expected.sleep(clock.now, 60) == LONGEST_SLEEP


def test_a_caller_that_comes_late_for_its_answer_learns_no_longer_time(clock: Clock) -> None:
    expected = Expected(AWAKE)
    for _ in range(8):
        awaited(expected, clock, 1e-3)
    before = expected.seconds
    expected.sent(1)
    clock.now += 0.2
    expected.came(awaited=False, slept=False)
    assert expected.seconds == before


def test_who_is_not_to_be_awake_sleeps_all_the_time(clock: Clock) -> None:
    expected = Expected(0.0)
    for _ in range(20):
        late, awake = awaited(expected, clock, 8e-4)
        assert late <= 8e-4 / 8 + WOKEN_LATER
        assert not awake


@pytest.mark.parametrize("awake", [0.0, AWAKE])
@pytest.mark.parametrize("later", [20e-6, 120e-6, 200e-6])
@pytest.mark.parametrize("takes", [200e-6, 300e-6, 8e-4, 5e-3])
def test_who_is_woken_late_does_not_come_later_and_later(
    clock: Clock, awake: float, later: float, takes: float
) -> None:
    expected = Expected(awake)
    for first in (takes, 6e-3, takes):
        awaited(expected, clock, first, later)
    for _ in range(30):
        awaited(expected, clock, takes, later)
    late = [awaited(expected, clock, takes, later)[0] for _ in range(30)]
    assert sum(late) / len(late) <= takes / 8 + 1.2 * later


def test_steps_of_few_rows_and_of_many_are_expected_apart(clock: Clock) -> None:
    expected = Expected(AWAKE)
    for _ in range(12):
        awaited(expected, clock, 2e-4, rows=1)
        awaited(expected, clock, 5e-3, rows=512)
    for rows, takes in ((1, 2e-4), (512, 5e-3)):
        late, _ = awaited(expected, clock, takes, rows=rows)
        assert late <= LOOK
