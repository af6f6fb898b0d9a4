"""When launchers start a rank again that has ended, on a clock of the test's."""

from __future__ import annotations

import pytest

from moeserve.runtime.launch.restarts import Restarts


def test_a_rank_that_cannot_start_is_started_ever_more_rarely() -> None:
    restarts, now, starts = Restarts(0.5, draw=lambda: 1.0), 0.0, list[float]()
    while now < 25.0:  # each process ends at once
        restarts.ended(3, now)
        if restarts.due(3, now):
            starts.append(now)
        now += 0.1
    assert len(starts) == 8, starts  # at most: the pauses sum to 22.7 s
    restarts.ended(3, now)
    assert restarts.failures(3) == 9


def test_a_rank_that_had_joined_is_started_at_once_and_its_failures_are_forgotten() -> None:
    restarts = Restarts(0.5, draw=lambda: 1.0)
    assert restarts.ended(0, 0.0) == 0.1
    assert restarts.ended(0, 0.05) is None
    assert not restarts.due(0, 0.05)
    assert restarts.due(0, 0.1)
    restarts.joined(0)
    assert restarts.failures(0) == 0
    assert restarts.ended(0, 9.0, "forming") == 0.0, "the group waits for it"
    assert restarts.due(0, 9.0)
    assert restarts.ended(0, 9.1) == 0.1, "the next process has not joined"
    assert restarts.ended(1, 9.1) == 0.1, "ranks are apart"


@pytest.mark.parametrize("state", ["preparing", "joining", "serving"])
def test_others_that_go_on_come_first(state: str) -> None:
    restarts = Restarts(0.5, draw=lambda: 1.0)
    restarts.joined(0)
    assert restarts.ended(0, 5.0, state) == 0.5
    assert not restarts.due(0, 5.0) and restarts.due(0, 5.5)
    assert restarts.ended(0, 6.0, state) == 0.1, "the next process has not joined"
