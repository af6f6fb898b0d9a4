"""What the head knows of a member that is alone in its group and orders its own steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_members import FakeMember, form_again, head_of, serving, until

from moeserve.dispatch.members import Member, Members
from moeserve.runtime.control.reached import Phase, Reached
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.generations import blame
from moeserve.runtime.head.generations.patience import Patience
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.step import FIRST_NUMBER

ONE = Members.of_ranks(1)
LATE = 0.8


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with head_of(Epoch.first(Mesh(1, 1, 1), layers=2, experts=4), layers=(0, 1)) as made:
        made.generations.patience = Patience(late=LATE)
        yield made


def say(member: FakeMember, at: int, **more: Any) -> None:
    figures = {"steps": 0, "jobs": 0, "queued": 0, "running": 0, "number": FIRST_NUMBER, "went_on": 1.0}
    member.say("ordered", **figures | {"turn": at, "active": True, "held": False, "ended": ()} | more)


def test_a_lone_member_is_told_to_order_its_steps_and_others_are_not(coordinator: Coordinator) -> None:
    told = FakeMember(coordinator, 0)
    told.entry("prepare")
    told.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    assert told.entry("join")["orders"] == FIRST_NUMBER
    with head_of() as two:
        for one in serving_entries(two):
            assert one["orders"] == 0


def serving_entries(coordinator: Coordinator) -> list[dict[str, Any]]:
    members = [FakeMember(coordinator, seat) for seat in (0, 1)]
    for one in members:
        one.entry("prepare")
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    return [one.entry("join") for one in members]


def test_a_lone_member_without_a_lane_has_nothing_to_order() -> None:
    members = Members((Member(1, owner=0),), 1, 1)
    epoch = Epoch.first(Mesh(1, 1, 1), layers=2, experts=4)
    with head_of(epoch) as coordinator:
        assert coordinator._lone.joins(members, 7) == 0
        assert coordinator._lone.under_way == 0


def test_what_it_counts_is_the_services(coordinator: Coordinator) -> None:
    seen = list[tuple[int, float]]()
    coordinator.observe_steps(lambda layer, seconds: seen.append((layer, seconds)))
    member = serving(coordinator, ONE)[0]
    say(member, 1)
    say(member, 2, steps=3, jobs=9, queued=2, running=1, ended=[(1, 0.25), (0, 0.5)])
    until(lambda: coordinator.progress().steps == 3)
    found = coordinator.progress()
    assert (found.jobs, found.queued, found.in_flight) == (9, 2, 1)
    assert seen == [(1, 0.25), (0, 0.5)]
    say(member, 1, steps=1, queued=50)  # on its way for long
    until(lambda: coordinator.progress().steps == 4)
    assert coordinator.progress().queued == 2


def test_what_was_counted_until_a_generations_end_counts(coordinator: Coordinator) -> None:
    member = serving(coordinator, ONE)[0]
    with coordinator._lock:
        coordinator.generations.abort("a test")
    member.until("abort")
    member.generation -= 1 if member.generation == coordinator.generation else 0
    say(member, 5, steps=2, queued=9, running=1)
    until(lambda: coordinator.progress().steps == 2)
    assert (coordinator.progress().queued, coordinator.progress().in_flight) == (0, 0)


@pytest.mark.parametrize("says", ["that one does not go on", "nothing", "the same again and again"])
def test_a_member_whose_steps_stand_still_is_given_up(coordinator: Coordinator, says: str) -> None:
    member = serving(coordinator, ONE)[0]
    member.reached = Reached(FIRST_NUMBER, Phase.DISPATCH)
    started = time.monotonic()
    say(member, 1, running=0 if says == "nothing" else 1)
    turn = 2
    while time.monotonic() - started < 8 * LATE:
        if says == "the same again and again":
            say(member, turn, running=1)
            turn += 1
        time.sleep(0.05)
        if not coordinator.seats():
            break
    assert LATE <= time.monotonic() - started < 8 * LATE
    assert "step" in coordinator.progress().reason


def test_a_member_whose_steps_go_on_or_that_rests_is_left_alone(coordinator: Coordinator) -> None:
    member = serving(coordinator, ONE)[0]
    for turn in range(1, 25):
        say(member, turn, running=1, went_on=float(turn))
        time.sleep(0.05)
    say(member, 30, active=False)
    time.sleep(2.5 * LATE)
    assert coordinator.progress().state == "serving" and coordinator.seats()


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": -1},
        {"ended": [(7, 0.1)]},
        {"ended": [(0, float("nan"))]},
        {"ended": [(0, 0.1)] * 5000},
        {"ended": [(0, -0.1)]},
        {"steps": 1 << 40},
        {"running": 1 << 33},
        {"number": 1 << 60},
        {"went_on": "soon"},
        {"turn": None},
    ],
)
def test_what_no_member_says_ends_it(coordinator: Coordinator, wrong: dict[str, Any]) -> None:
    member = serving(coordinator, ONE)[0]
    say(member, 1, **wrong)
    member.until("closed")
    assert coordinator.progress().steps == 0


def test_it_begins_no_step_while_another_is_about_to_join(coordinator: Coordinator) -> None:
    member = serving(coordinator, ONE)[0]
    say(member, 1, running=1)
    until(lambda: coordinator.progress().in_flight == 1)
    turnover = coordinator.generations.turnover
    turnover.turn = lambda now: None  # type: ignore[method-assign]  # it waits for the other
    with coordinator._lock:
        turnover._turning_since = time.monotonic()
        assert turnover.running() == 1
    assert member.until("steady")["steady"] is False
    say(member, 2, running=0)  # on its way before it heard of that
    until(lambda: coordinator.progress().in_flight == 0)
    with coordinator._lock:
        assert turnover.running() == 1, "it may have begun one since"
    say(member, 3, running=0, held=True)
    until(lambda: turnover.running() == 0)
    with coordinator._lock:
        turnover._turning_since = None
    assert member.until("steady")["steady"] is True
    with coordinator._lock:
        assert turnover.running() == 1


def test_numbers_rise_from_those_that_a_member_has_given(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "BLAME_SECONDS", 0.01)
    member = serving(coordinator, ONE)[0]
    member.say("failed", reason="a test")
    member.until("prepare")
    member.say("prepared", bytes_read=0, weight_bytes=0, lacks=[], number=FIRST_NUMBER + 70)
    assert member.until("join")["orders"] == FIRST_NUMBER + 70
    member.say("joined")
    coordinator.wait_serving(5.0)


@pytest.mark.parametrize("number", [-1, 1 << 60, "many"])
def test_a_number_that_cannot_be_ends_its_member(coordinator: Coordinator, number: object) -> None:
    member = FakeMember(coordinator, 0)
    member.entry("prepare")
    member.say("prepared", bytes_read=0, weight_bytes=0, lacks=[], number=number)
    member.until("closed")


def test_jobs_that_it_announces_all_the_same_are_ordered_here(coordinator: Coordinator) -> None:
    member = serving(coordinator, ONE)[0]
    member.announce(1, 2)
    assert member.until("step")["number"] == FIRST_NUMBER
    member.say("done", step=FIRST_NUMBER)
    until(lambda: coordinator.progress().in_flight == 0)


def test_a_group_that_is_whole_again_is_ordered_by_the_head(coordinator: Coordinator) -> None:
    """After the loss of its process a lone seat has another one, which is told anew."""
    member = serving(coordinator, ONE)[0]
    say(member, 1, running=1, steps=4)
    until(lambda: coordinator.progress().steps == 4)
    member.stream.close()
    until(lambda: not coordinator.seats())
    again = FakeMember(coordinator, 0)
    form_again([again])
    until(lambda: coordinator.progress().state == "serving")
    found = coordinator.progress()
    assert (found.steps, found.in_flight) == (4, 0)
