"""Steps in flight, without threads or clocks: how many run at once, when one ends, what is counted."""

import math

import pytest

from moeserve.dispatch.members import Member, Members
from moeserve.runtime.ordering.in_flight import MOST, StepsInFlight
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.step import FIRST_NUMBER, Announcement

MEMBERS = Members.of_ranks(2)


def waiting(*layers: int) -> StepsInFlight:
    """Two ranks, and a job at 0.0 for each of `layers`."""
    steps = StepsInFlight(2, StepPace(lane_rows=8, step_rows=16))
    for number, layer in enumerate(layers):
        steps.announce(Announcement(0, number, layer, 1, math.inf), 0.0)
    return steps


def test_only_so_many_steps_run_at_once() -> None:
    steps = waiting(*range(MOST + 1))
    started = [steps.start(1, 1.0, MEMBERS) for _ in range(MOST)]
    assert None not in started
    assert (steps.steps, steps.jobs, steps.running, steps.queued) == (MOST, MOST + 1, MOST, 1)
    assert steps.due(9.0) is None
    for rank in range(2):
        steps.finish(rank, FIRST_NUMBER, 2.0)
    due = steps.due(9.0)
    assert due is not None and due <= 9.0


def test_a_step_ends_with_its_last_rank_and_took_what_the_group_spent_on_it() -> None:
    steps = waiting(3, 5)
    assert [step and step.layer for step in (steps.start(1, 1.0, MEMBERS), steps.start(1, 2.0, MEMBERS))] == [
        3,
        5,
    ]
    assert steps.finish(0, FIRST_NUMBER, 4.0) is None and steps.finish(0, FIRST_NUMBER, 4.5) is None
    assert steps.finish(1, FIRST_NUMBER, 5.0) == (3, 4.0)
    assert steps.finish(1, FIRST_NUMBER, 5.0) is None, "it has ended"
    steps.finish(1, FIRST_NUMBER + 1, 6.0)
    assert steps.finish(0, FIRST_NUMBER + 1, 7.0) == (5, 2.0), "it waited until the step before it ended"


def test_a_group_that_ends_takes_its_steps_along() -> None:
    steps = waiting(0, 1)
    steps.start(1, 1.0, MEMBERS)
    steps.clear()
    assert (steps.running, steps.queued, steps.steps, steps.jobs) == (0, 0, 1, 2)
    assert (
        steps.finish(0, FIRST_NUMBER, 2.0) is None
        and steps.due(9.0) is None
        and steps.start(1, 9.0, MEMBERS) is None
    )


def test_nobody_waits_for_a_lane_that_a_step_does_not_name() -> None:
    members = Members((Member(0, lane=0), Member(1, lane=1), Member(3, owner=0)), 2, 2)
    steps = StepsInFlight(2, StepPace(lane_rows=8, step_rows=16))
    steps.announce(Announcement(1, 1, 5, 2, math.inf), 0.0)
    assert steps.start(1, 1.0, members) is not None
    assert steps.finish(3, FIRST_NUMBER, 2.0) is None
    assert steps.finish(0, FIRST_NUMBER, 2.5) is None, "it had no part in it, and ends nothing"
    assert (steps.finish(1, FIRST_NUMBER, 3.0), steps.running) == ((5, 2.0), 0)


def gathered(lane: int, number: int) -> Announcement:
    return Announcement(lane, number, 0, 1, math.inf, gathered=True)


def after_some_steps() -> StepsInFlight:
    """Steps take 1.0 each, and callers 0.001 to come back: who comes alone while one runs is waited for."""
    steps = StepsInFlight(2, StepPace(lane_rows=8, step_rows=16))
    for at in range(20):
        steps.announce(Announcement(0, at, 0, 1, math.inf), float(at))
        step = steps.start(1, float(at), MEMBERS)
        assert step is not None
        for rank in range(2):
            steps.finish(rank, step.number, at + 0.999)
    steps.announce(Announcement(0, 50, 0, 1, math.inf), 20.0)
    steps.start(1, 20.0, MEMBERS)
    return steps


def test_a_job_whose_lane_has_gathered_its_callers_waits_for_no_company() -> None:
    steps = after_some_steps()
    steps.announce(Announcement(0, 51, 0, 1, math.inf), 20.1)
    due = steps.due(20.1)
    assert due is not None and due > 20.5, "a call waits for others"
    steps = after_some_steps()
    steps.announce(gathered(0, 51), 20.1)
    assert steps.due(20.1) == 20.1
    steps._called = 20.09
    due = steps.due(20.1)
    assert due is not None and due > 20.5, "whose call was there a moment ago may call again"
    steps._called = 0.0
    steps.announce(Announcement(0, 52, 0, 1, math.inf), 20.1)
    due = steps.due(20.1)
    assert due is not None and due > 20.5, "one of them is a call"


@pytest.mark.parametrize(("ago", "waits"), [(0.01, True), (1.0, False)])
def test_where_other_lanes_gather_too_they_are_waited_for_as_calls_are(ago: float, waits: bool) -> None:
    steps = after_some_steps()
    steps._gathers[1] = 20.1 - ago
    steps.announce(gathered(0, 51), 20.1)
    due = steps.due(20.1)
    assert due is not None and (due > 20.5) is waits
