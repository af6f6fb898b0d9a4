"""The sequencer's rules, without threads or clocks."""

import math

import pytest

from moeserve.dispatch.members import Member, Members
from moeserve.runtime.ordering.sequencer import Sequencer, StepPace
from moeserve.runtime.step import FIRST_NUMBER, Announcement

PACE = StepPace(lane_rows=8, step_rows=16, gather=4.0, due=100.0)


def job(
    number: int, lane: int = 0, layer: int = 0, rows: int = 1, deadline: float = math.inf
) -> Announcement:
    return Announcement(lane, number, layer, rows, deadline)


def made(*jobs: Announcement) -> Sequencer:
    sequencer = Sequencer(2, PACE)
    for at, one in enumerate(jobs):
        sequencer.announce(one, float(at))
    return sequencer


def test_jobs_of_one_layer_share_a_step_and_idle_lanes_take_part() -> None:
    step = made(job(1), job(2, rows=3), job(3, layer=1)).next_step(epoch=5, now=9.0)
    assert step is not None
    assert (step.layer, step.epoch, step.jobs, step.lane_rows) == (0, 5, (((1, 1), (2, 3)), ()), (4, 0))
    members = Members.of_ranks(2)
    assert step.seats(members) == (0, 1)
    assert step.header(members.at(0)).jobs == ((1, 1), (2, 3))
    assert step.header(members.at(1)).jobs == ()


def test_steps_are_numbered_in_order() -> None:
    sequencer = made(job(1), job(2, layer=1))
    assert [sequencer.next_step(1, 0.0).number for _ in range(2)] == [FIRST_NUMBER, FIRST_NUMBER + 1]
    assert sequencer.next_step(1, 0.0) is None


def test_the_earliest_deadline_goes_first() -> None:
    sequencer = made(job(1, layer=0), job(2, layer=1, deadline=50.0), job(3, layer=2, deadline=40.0))
    assert [sequencer.next_step(1, 9.0).layer for _ in range(3)] == [2, 1, 0]


def test_a_job_without_a_deadline_does_not_wait_behind_all_that_have_one() -> None:
    sequencer, served = Sequencer(2, PACE), list[int]()
    sequencer.announce(job(1000, layer=0), 0.0)
    for number in range(300):  # a job with a deadline comes for each that is served
        now = float(number)
        sequencer.announce(job(number, layer=1, deadline=now + 20.0), now)
        step = sequencer.next_step(1, now)
        assert step is not None
        served += [one for one, _ in step.jobs[0]]
    assert served.index(1000) == 80, "it is due at 100, as is what comes at 80, after it"


def test_jobs_of_one_layer_without_a_deadline_get_their_turn() -> None:
    sequencer = made(job(1, rows=8), job(2, rows=8, deadline=500.0))
    assert sequencer.next_step(1, now=9.0).jobs[0] == ((1, 8),), "it came first, and no deadline is near"


def test_withdrawn_jobs_are_in_no_step() -> None:
    sequencer = made(job(1), job(2, lane=1), job(2), job(3, layer=4), job(4))
    sequencer.withdraw(0, {2, 3, 4, 77})
    assert sequencer.queued == 2
    assert sequencer.next_step(1, now=9.0).jobs == (((1, 1),), ((2, 1),))
    assert sequencer.next_step(1, now=9.0) is None


def test_a_lane_takes_no_more_than_its_rows() -> None:
    sequencer = made(job(1, rows=5), job(2, rows=5), job(3, rows=3))
    assert sequencer.next_step(1, 9.0).jobs[0] == ((1, 5), (3, 3))
    assert sequencer.next_step(1, 9.0).jobs[0] == ((2, 5),)


def test_a_step_takes_no_more_than_its_tokens() -> None:
    sequencer = Sequencer(3, PACE)
    for lane in range(3):
        sequencer.announce(job(lane, lane=lane, rows=8), 0.0)
    assert sequencer.next_step(1, 9.0).lane_rows == (8, 8, 0)
    assert sequencer.next_step(1, 9.0).lane_rows == (0, 0, 8)


def test_expired_jobs_are_dropped() -> None:
    sequencer = made(job(1, deadline=5.0), job(2, deadline=100.0))
    assert sequencer.next_step(1, now=9.0).jobs[0] == ((2, 1),)
    assert sequencer.queued == 0


def test_only_layers_that_are_asked_for_are_taken() -> None:
    sequencer = made(job(1, layer=0), job(2, layer=1))
    assert sequencer.next_step(1, 9.0, {1}).layer == 1
    assert sequencer.next_step(1, 9.0, {1}) is None
    assert sequencer.layers == [0]


def test_a_layer_is_full_with_the_rows_of_a_lane_or_of_a_step() -> None:
    assert not made(job(1, rows=7)).full(0)
    assert made(job(1, rows=7), job(2, rows=1)).full(0)
    assert made(job(1, rows=7), job(2, rows=7, lane=1), job(3, rows=2, lane=1)).full(0)
    sequencer = made(job(1, rows=7), job(2, rows=1), job(3, rows=6), job(4, rows=6, deadline=5.0))
    sequencer.withdraw(0, {2})
    assert sequencer.full(0)
    assert sequencer.next_step(1, 9.0).jobs[0] == ((1, 7),), "4 is too late"
    assert not sequencer.full(0), "6 rows are left"


@pytest.mark.parametrize("rows", [9, 0])
def test_a_job_over_the_lanes_rows_or_without_any_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"job 1 of lane 0 has {rows} rows; a lane takes 1 to 8"):
        made(job(1, rows=rows))


def test_a_job_of_a_lane_that_there_is_no_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="job 1 is of lane 2; there are 2 lanes"):
        made(job(1, lane=2))


def test_a_step_is_of_owners_and_of_the_lanes_that_it_names() -> None:
    members = Members(
        (Member(0, lane=0), Member(1, lane=1), Member(4, owner=0), Member(5, lane=3, owner=1)), 4, 2
    )
    sequencer = Sequencer(members.max_lanes, PACE)
    sequencer.announce(job(1, lane=1, rows=3), 0.0)
    step = sequencer.next_step(epoch=5, now=9.0)
    assert step is not None and step.lane_rows == (0, 3, 0, 0)
    assert step.seats(members) == (1, 4, 5)
    headers = {seat: step.header(members.at(seat)) for seat in members.seats}
    assert {seat: header.jobs for seat, header in headers.items()} == {0: (), 1: ((1, 3),), 4: (), 5: ()}
    assert {header.lane_rows for header in headers.values()} == {step.lane_rows}


def test_clear_forgets_everything() -> None:
    sequencer = made(job(1), job(2, layer=3))
    sequencer.clear()
    assert sequencer.queued == 0
    assert sequencer.layers == []
