"""When a thread looks for what a connection brings: simulated, with a clock of the test's own."""

from __future__ import annotations

import pytest

from moeserve.proto.transports import awake as module
from moeserve.proto.transports.awake import LONGEST_SECONDS, MOST_AWAKE_SECONDS, Awake

WOKEN_LATER = 60e-6  # by the system
LOOK = 2e-6
THERE = [(7, 1)]


class Clock:
    """Of monotonic time, and of a connection to which something comes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.comes, self.looked, self.slept = 0.0, 0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + (WOKEN_LATER if seconds else 0.0)

    def poll(self, limit: float | None) -> list[tuple[int, int]]:
        """As of FinePoll."""
        if limit == 0:
            self.looked += 1
            self.now += LOOK
        elif self.now < self.comes:
            until = self.now + 1e9 if limit is None else self.now + limit / 1000
            self.slept += 1
            self.now = min(self.comes, until) + WOKEN_LATER
        return THERE if self.now >= self.comes else []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def used_to(clock: Clock, takes: float) -> Awake:
    """One whose other end has taken so long some times."""
    awake = Awake(MOST_AWAKE_SECONDS)
    for _ in range(8):
        late(awake, clock, takes)
    return awake


def late(awake: Awake, clock: Clock, takes: float) -> float:
    """By how much something is found later than it comes, which takes so long; how long it was looked for
    again and again stands in the clock.
    """
    awake.begins()
    clock.comes, clock.looked, clock.slept = clock.now + takes, 0, 0
    assert awake.wait(clock.poll, None) == THERE
    return clock.now - clock.comes


@pytest.mark.parametrize("takes", [50e-6, 300e-6, 1.7e-3, 4e-3])
def test_what_takes_as_long_as_before_is_found_awake(clock: Clock, takes: float) -> None:
    awake = used_to(clock, takes)
    for _ in range(10):
        assert late(awake, clock, takes) <= LOOK
        assert clock.looked * LOOK <= MOST_AWAKE_SECONDS + 2 * LOOK


@pytest.mark.parametrize("before", [7e-4, 1.5e-3, 4e-3])
def test_what_comes_sooner_than_before_is_found_at_once_and_then_awake(clock: Clock, before: float) -> None:
    awake = used_to(clock, before)
    assert late(awake, clock, 4e-4) == pytest.approx(WOKEN_LATER)
    for _ in range(10):
        assert late(awake, clock, 4e-4) <= LOOK


def test_what_takes_long_is_waited_for_asleep(clock: Clock) -> None:
    awake = used_to(clock, 2 * LONGEST_SECONDS)
    assert late(awake, clock, 2 * LONGEST_SECONDS) > LOOK
    assert clock.looked == 1 and clock.slept == 1


def test_one_that_takes_long_is_waited_for_asleep_and_changes_little(clock: Clock) -> None:
    awake = used_to(clock, 3e-4)
    late(awake, clock, 2.0)
    assert clock.looked * LOOK <= MOST_AWAKE_SECONDS + 2 * LOOK and clock.slept == 1
    assert late(awake, clock, 3e-4) <= LOOK


@pytest.mark.parametrize("takes", [7e-4, 1.4e-3, 2.9e-3, 4.9e-3])
def test_nobody_is_awake_for_longer_than_said(clock: Clock, takes: float) -> None:
    awake = used_to(clock, takes)
    for later in (0.0, 5e-5, 3e-4, 1e-3, 0.1):
        late(awake, clock, takes + later)
        assert clock.looked * LOOK <= MOST_AWAKE_SECONDS + 2 * LOOK


def test_a_caller_that_rests_is_soon_waited_for_asleep(clock: Clock) -> None:
    awake = Awake(MOST_AWAKE_SECONDS)
    late(awake, clock, 5e-5)
    for _ in range(40):
        late(awake, clock, 0.1)
    assert clock.looked == 1


def test_who_is_not_to_be_awake_never_is(clock: Clock) -> None:
    awake = Awake(0.0)
    for _ in range(8):
        late(awake, clock, 3e-4)
        assert clock.looked == 1


@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0, 3.0, 30.0])
@pytest.mark.parametrize("takes", [3e-4, 2e-3, 4.9e-3])
def test_no_wait_is_longer_than_its_limit(clock: Clock, takes: float, limit: float) -> None:
    awake = used_to(clock, takes)
    awake.begins()
    clock.comes, began = clock.now + 10.0, clock.now
    assert awake.wait(clock.poll, limit) == []
    assert clock.now - began <= limit / 1000 + 2 * WOKEN_LATER + 3 * LOOK


def test_nothing_is_found_where_nothing_comes(clock: Clock) -> None:
    awake = used_to(clock, 3e-4)
    awake.begins()
    clock.comes, began = clock.now + 10.0, clock.now
    assert awake.wait(clock.poll, 250.0) == []
    assert clock.now - began < 0.26
