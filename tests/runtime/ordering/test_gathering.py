"""When steps start: callers in a closed loop get what the members can give, and nobody waits for a timer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeserve.runtime.ordering.gathering import Gathering, Last, Returns, StepCosts
from moeserve.runtime.ordering.in_flight import StepsInFlight
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.step import FIRST_NUMBER, Announcement
from tests.support.closed_loop import MEMBERS, ClosedLoop, World

PACE = StepPace(lane_rows=1 << 20, step_rows=1 << 30)
HOST = World()
WORLDS = {
    "a CPU": HOST,
    "callers back at once": replace(HOST, think=(50e-6, 50e-6)),
    "callers back late": replace(HOST, think=(300e-6, 500e-6)),
    "2 ms": replace(HOST, base=2e-3),
    "7 ms": replace(HOST, base=7e-3),
    "rows cost": replace(HOST, base=50e-6, row=10e-6),
    "a GPU": World(200e-6, 0.5e-6, header=150e-6, launch=400e-6, done=150e-6, think=(300e-6, 500e-6)),
    "a slow GPU": World(800e-6, 0.5e-6, launch=300e-6, reply=50e-6),
    "uneven": replace(HOST, base=1e-3, noise=0.2),
    "slow at first": replace(HOST, base=1e-3, noise=0.1, first=30e-3),
}


def lasting(world: World, callers: int) -> float:
    """Seconds of some 200 steps: of as many calls as a test has time for."""
    return max(
        0.1, 40 * world.first / 3, 200 * (world.step(16 * callers) + world.trips) * (4 / callers) ** 0.5
    )


@pytest.mark.parametrize("callers", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_callers_in_a_closed_loop_get_what_the_members_can_give(world: World, callers: int) -> None:
    made = ClosedLoop(world, callers, 16, PACE).run(lasting(world, callers), lasting(world, callers))
    ideal = world.ideal(callers, 16) / (1 + 0.6 * world.noise)
    assert made.rate >= 0.9 * ideal, f"{made.rate:.0f} of {ideal:.0f} jobs a second"


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("callers", [4, 16])
def test_callers_who_go_through_layers_in_turn_stay_together(world: World, callers: int) -> None:
    made = ClosedLoop(world, callers, 4, PACE, layers=4).run(lasting(world, 16), lasting(world, 16))
    ideal = world.ideal(callers, 4) / (1 + 0.6 * world.noise)
    assert made.rate >= 0.8 * ideal, f"{made.rate:.0f} of {ideal:.0f} jobs a second"


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_a_lone_caller_never_waits(world: World) -> None:
    made = ClosedLoop(replace(world, noise=0.0, first=0.0), 1, 16, PACE).run(0.1, warm_up=0.1)
    alone = world.header + world.launch + world.step(16) + world.reply
    assert made.p(50) == pytest.approx(alone) and max(made.latencies) == pytest.approx(alone)


@pytest.mark.parametrize("callers", [2, 4, 16, 64])
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_no_call_waits_for_longer_than_steps_take(world: World, callers: int) -> None:
    quiet = replace(world, noise=0.0, first=0.0)
    made = ClosedLoop(quiet, callers, 16, PACE).run(lasting(quiet, callers), warm_up=0.2)
    step = quiet.step(16 * callers) + quiet.reply * callers
    most = 3 * (step + quiet.trips) + quiet.think[1]  # the step under way, one step of waiting, its own
    assert made.p(100) <= most, f"{made.p(100) * 1e6:.0f} us of {most * 1e6:.0f}"


def test_a_caller_who_leaves_is_not_waited_for_again_and_again() -> None:
    loop = ClosedLoop(replace(HOST, base=2e-3), 8, 16, PACE)
    loop.leaves(0.3, callers=3)
    made = loop.run(0.5, warm_up=0.35)
    assert made.rate >= 0.9 * loop.world.ideal(5, 16)


def test_callers_who_come_later_join_the_others() -> None:
    loop = ClosedLoop(replace(HOST, base=2e-3), 4, 16, PACE)
    loop.joins(0.3, callers=12)
    made = loop.run(0.5, warm_up=0.35)
    assert made.rate >= 0.9 * loop.world.ideal(16, 16)


@pytest.mark.parametrize("world", [WORLDS["a CPU"], WORLDS["7 ms"], WORLDS["a slow GPU"], WORLDS["2 ms"]])
@pytest.mark.parametrize("callers", [8, 16])
def test_one_word_that_comes_late_does_not_cost_throughput_for_good(world: World, callers: int) -> None:
    usual = ClosedLoop(world, callers, 2, PACE).run(0.5, warm_up=0.5)
    odd = ClosedLoop(world, callers, 2, PACE)
    odd.delays(0.3)
    assert odd.run(0.5, warm_up=0.5).rate >= 0.95 * min(usual.rate, world.ideal(callers, 2))


@pytest.mark.parametrize("odd", [5e-6, 0.5])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_odd_observation_counts_for_nothing(odd: float, ahead: bool) -> None:
    costs = StepCosts()
    for rows in (4, 32) * 20:
        costs.observe(rows, 1e-3, ahead=False)
    for rows in (4, 32, 500):
        costs.observe(rows, odd, ahead=ahead)
        costs.observe(4, 1e-3, ahead=False)
    assert costs.seconds(32) == pytest.approx(1e-3, rel=0.1) and costs.trips < 1e-4


def test_costs_that_have_changed_are_learned_anew() -> None:
    costs = StepCosts()
    for seconds in (1e-3, 8e-3, 0.5e-3):
        for _ in range(40):
            costs.observe(32, seconds, ahead=False)
        assert costs.seconds(32) == pytest.approx(seconds, rel=0.05)


def test_what_is_not_seen_any_more_is_forgotten() -> None:
    costs = StepCosts()
    costs.observe(32, 1e-3, ahead=False)
    for _ in range(1000):
        costs.fade()
    assert not costs.known


def test_another_generation_begins_without_costs() -> None:
    steps = StepsInFlight(1, PACE)
    for number in range(8):
        steps.announce(Announcement(0, number, 0, 1, deadline=9.0), 0.0)
        step = steps.start(1, number, MEMBERS)
        assert step is not None
        steps.finish(0, step.number, number + 0.5)
    assert steps._gathering.costs.known
    steps.clear()
    assert not steps._gathering.costs.known and steps._gathering.returns.seconds is None


def test_callers_who_are_in_different_layers_lose_nothing_by_waiting() -> None:
    for layers, callers in ((4, 4), (16, 4), (4, 16), (16, 16)):
        for world in (WORLDS["a GPU"], WORLDS["a CPU"], WORLDS["uneven"]):
            waits, never = (
                ClosedLoop(world, callers, 1, pace, layers, spread=True).run(0.5, warm_up=0.3)
                for pace in (PACE, replace(PACE, gather=0.0))
            )
            assert waits.rate >= 0.98 * never.rate, (layers, callers, world)


def test_nobody_is_waited_for_without_a_time_to_gather() -> None:
    never = ClosedLoop(replace(HOST, base=2e-3), 2, 16, replace(PACE, gather=0.0)).run(0.5)
    assert set(never.steps) == {1}, "their steps take turns"
    both = ClosedLoop(replace(HOST, base=2e-3), 2, 16, PACE).run(0.5)
    assert both.steps.count(2) >= 0.9 * len(both.steps)


def test_a_full_step_waits_for_nobody() -> None:
    """Eight callers of 16 rows, and a lane takes 64: two full steps, which take turns."""
    made = ClosedLoop(replace(HOST, base=2e-3), 8, 16, replace(PACE, lane_rows=64)).run(0.5)
    assert set(made.steps) == {4}
    assert made.rate >= 0.95 * 4 / (2e-3 + 64e-6)


def test_costs_are_told_from_steps_of_several_sizes() -> None:
    costs = StepCosts()
    for rows in (1, 16, 256):
        for _ in range(20):
            costs.observe(rows, 1e-3 + rows * 1e-6 + 3e-4, ahead=False)
            costs.observe(rows, 1e-3 + rows * 1e-6, ahead=True)
    assert (costs.base, costs.row, costs.trips) == pytest.approx((1e-3, 1e-6, 3e-4), rel=0.1)


def test_first_steps_that_take_long_are_forgotten() -> None:
    costs = StepCosts()
    for rows in (1, 16, 256):
        costs.observe(rows, 0.1, ahead=rows > 1)
    for _ in range(3):
        costs.observe(32, 1e-3, ahead=False)
    assert costs.seconds(32) <= 1e-3


def test_no_part_of_a_cost_is_negative() -> None:
    costs = StepCosts()
    costs.observe(1, 5e-3, ahead=True)
    costs.observe(1000, 1e-3, ahead=True)
    costs.observe(100, 1e-4, ahead=False)
    assert min(costs.base, costs.row, costs.trips) >= 0.0 and costs.seconds(1000) > 0.0


def returned(*seconds: float, callers: int = 1) -> Returns:
    """A step of `callers` at 0, 10, 20 s and so on; the last of them is back after each of `seconds`."""
    returns = Returns(most=1.0)
    for at, back in enumerate(seconds):
        returns.answered(0, callers, 10.0 * at)
        for _ in range(callers):
            returns.announced(0, 10.0 * at + back)
    return returns


def test_how_long_callers_stay_away_is_told_by_the_last_of_a_step() -> None:
    assert returned(*[0.3] * 40, callers=3).seconds == pytest.approx(0.3, rel=0.01)
    assert returned().seconds is None


def test_callers_who_do_not_come_back_are_not_waited_for() -> None:
    returns = returned(*[0.3] * 10)
    for at in range(100, 130, 10):
        returns.answered(0, 4, at)
    for at in range(200, 240, 10):
        returns.answered(0, 4, at)
        returns.forget(at + 9.0)
    assert returns.seconds is None
    assert returns.expected(0) is None


def test_callers_who_take_longer_than_before_are_waited_for_in_time() -> None:
    returns = returned(*[0.1] * 40, *[0.3] * 60)
    assert returns.seconds == pytest.approx(0.3, rel=0.05)


def test_one_who_has_left_does_not_make_the_others_late() -> None:
    returns = returned(*[0.1] * 10, callers=3)
    returns.answered(0, 3, 200.0)
    for at in (200.05, 200.1):
        returns.announced(0, at)
    for at in (201.0, 202.0, 203.0):
        returns.answered(0, 2, at)
        returns.announced(0, at + 0.05)
        returns.announced(0, at + 0.1)
        assert returns.expected(0) is None, "both are back"
    assert returns.seconds is not None and returns.seconds < 0.15


def test_who_comes_before_the_last_member_has_finished_is_not_expected_twice() -> None:
    returns = returned(*[0.1] * 10)
    returns.ending()
    returns.announced(0, 199.0)
    returns.answered(0, 1, 200.0)
    assert returns.expected(0) is None


def test_callers_are_expected_for_the_layer_that_they_came_back_for() -> None:
    returns = Returns(most=1.0)
    returns.answered(3, 1, 0.0)
    returns.announced(4, 0.1)
    returns.answered(3, 1, 1.0)
    assert returns.expected(4) == 1.0 and returns.expected(3) is None
    assert returns.leads(3, 4) and not returns.leads(4, 3)


def test_nothing_is_waited_for_before_anything_was_seen() -> None:
    assert Gathering(0.004).start_at(0, Last(0, 16, 1.0, running=True), 0.5, 2.0) == 2.0


def test_jobs_that_are_too_late_hold_up_no_others() -> None:
    steps = StepsInFlight(1, PACE)
    steps.announce(Announcement(0, 1, 0, 1, deadline=1.0), 0.0)
    steps.announce(Announcement(0, 2, 5, 1, deadline=9.0), 0.0)
    step = steps.start(1, 2.0, MEMBERS)
    assert step is not None and (step.number, step.layer) == (FIRST_NUMBER, 5)
