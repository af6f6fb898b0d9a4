"""Runs beside steps, as the head orders them: numbers, turns, bounds, and members that are lost in one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
from fake_members import SECONDS, FakeMember, form_again, head_of, serving, until

from moeserve.dispatch.members import Member, Members
from moeserve.runtime.control.run_messages import MOST_ASKED, AskedRun, OrderedRun
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.ordering.in_flight import MOST, StepsInFlight
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.ordering.step_order import COMPANY_SECONDS
from moeserve.runtime.step import FIRST_NUMBER, Announcement

MEMBERS = Members.of_ranks(2)
PACE = StepPace(lane_rows=8, step_rows=16)
LAYERS = (0, 1, 0)


def run(seat: int = 0, number: int = 1, layers: tuple[int, ...] = LAYERS) -> AskedRun:
    return AskedRun(seat, number, layers, 4)


def waiting(*layers: int) -> StepsInFlight:
    """Two ranks, and a job at 0.0 for each of `layers`."""
    steps = StepsInFlight(2, PACE)
    for number, layer in enumerate(layers):
        steps.announce(Announcement(0, number, layer, 1, math.inf), 0.0)
    return steps


def test_a_run_takes_as_many_numbers_as_it_has_steps() -> None:
    steps = waiting(0)
    steps.ask(run())
    assert steps.start_run(7, 1.0, MEMBERS) == OrderedRun(run(), FIRST_NUMBER, 7)
    step = steps.start(7, 1.0, MEMBERS)
    assert step is not None and step.number == FIRST_NUMBER + len(LAYERS)
    assert steps.steps == len(LAYERS) + 1


def test_a_run_counts_as_one_of_those_under_way_until_all_have_done_it() -> None:
    steps = waiting(0)
    for number in range(MOST + 1):
        steps.ask(run(number=number))
    step = steps.start(1, 1.0, MEMBERS)
    assert step is not None
    first = steps.start_run(1, 1.0, MEMBERS)
    assert first is not None and steps.running == MOST
    assert steps.start_run(1, 1.0, MEMBERS) is None and steps.due(9.0) is None
    assert steps.finish(0, first.number, 2.0) is None and steps.running == MOST
    assert steps.finish(1, first.number, 2.5) is None and steps.running == MOST - 1
    assert steps.finish(1, first.number, 2.5) is None
    assert steps.start_run(1, 3.0, MEMBERS) is not None


def test_runs_and_steps_take_turns_where_both_wait() -> None:
    steps, order = waiting(0, 1, 0, 1), ""
    for number in range(4):
        steps.ask(run(number=number))
    while steps.queued or steps._runs:
        ordered = steps.start_run(1, 1.0, MEMBERS)
        step = steps.start(1, 1.0, MEMBERS) if ordered is None else None
        order += "r" if ordered else "s" if step else "-"
        found = ordered or step
        assert found is not None
        for seat in range(2):
            steps.finish(seat, found.number, 1.0)
    assert order == "rsrsrr", "a step takes all jobs of its layer"


def test_only_those_are_waited_for_who_take_part() -> None:
    members = Members((Member(0, lane=0), Member(1, lane=1), Member(3, owner=0)), 2, 2)
    steps = StepsInFlight(2, PACE)
    steps.ask(run(seat=1))
    ordered = steps.start_run(1, 1.0, members)
    assert ordered is not None
    steps.finish(3, ordered.number, 2.0)
    steps.finish(0, ordered.number, 2.0)
    assert steps.running == 1
    steps.finish(1, ordered.number, 3.0)
    assert steps.running == 0


def test_a_run_tells_nothing_of_how_long_steps_take() -> None:
    steps = waiting()
    for number in range(40):  # callers who take a second each
        steps.ask(run(number=number))
        ordered = steps.start_run(1, float(number), MEMBERS)
        assert ordered is not None
        assert [steps.finish(seat, ordered.number, number + 1.0) for seat in range(2)] == [None, None]
    assert not steps._gathering.costs.known


def test_whose_runs_others_wait_behind() -> None:
    steps = StepsInFlight(2, PACE)
    steps.ask(run(seat=1))
    steps.start_run(1, 5.0, MEMBERS)
    assert steps.shared_runs() == []
    steps.ask(run(seat=1, number=2))
    assert steps.shared_runs() == [], "its own next run is no company"
    assert steps.shared_runs(held=True) == [(run(seat=1), 5.0)], "members are to join, or to leave"
    steps.ask(run(seat=0))
    assert steps.shared_runs() == [(run(seat=1), 5.0)]
    steps.clear()
    assert steps.shared_runs() == [] and steps.start_run(1, 6.0, MEMBERS) is None
    steps.ask(run(seat=0))
    steps.start_run(1, 7.0, MEMBERS)
    steps.announce(Announcement(1, 1, 0, 1, math.inf), 7.0)
    assert steps.shared_runs() == [(run(seat=0), 7.0)]


def test_a_callers_own_step_that_ends_late_elsewhere_is_no_company() -> None:
    steps = StepsInFlight(2, PACE)
    steps.announce(Announcement(0, 1, 0, 1, math.inf), 1.0)  # by lane 0, of seat 0
    own = steps.start(1, 1.0, MEMBERS)
    assert own is not None
    steps.finish(0, own.number, 2.0)  # its caller has the answer, and goes on over a device lane
    steps.ask(run(seat=0))
    ordered = steps.start_run(1, 2.1, MEMBERS)
    assert ordered is not None and steps.running == 2
    assert steps.shared_runs() == []
    steps.finish(1, own.number, 2.2)
    assert steps.shared_runs() == []
    steps.announce(Announcement(0, 2, 0, 1, math.inf), 3.0)
    later = steps.start(1, 9.0, MEMBERS)
    assert later is not None and not steps.queued
    assert steps.shared_runs() == [(run(seat=0), 2.1)], "who calls now waits behind the run"
    for seat in range(2):
        steps.finish(seat, later.number, 9.1)
    assert steps.shared_runs() == []


def test_a_step_of_another_lane_is_company_also_before_a_run() -> None:
    steps = StepsInFlight(2, PACE)
    steps.announce(Announcement(1, 1, 0, 1, math.inf), 1.0)
    assert steps.start(1, 1.0, MEMBERS) is not None
    steps.ask(run(seat=0))
    assert steps.start_run(1, 2.0, MEMBERS) is not None
    assert steps.shared_runs() == [(run(seat=0), 2.0)], "its caller is likely to come again"


def test_runs_of_layers_that_are_read_are_taken_out() -> None:
    steps = StepsInFlight(2, PACE)
    steps.ask(run(number=1))
    steps.ask(run(number=2, layers=(0,)))
    steps.closed = frozenset({1})
    assert steps.refuse_runs() == [run(number=1)] and steps.refuse_runs() == []
    ordered = steps.start_run(1, 1.0, MEMBERS)
    assert ordered is not None and ordered.asked.run == 2


def test_no_member_has_more_runs_wait_than_may() -> None:
    steps = StepsInFlight(2, PACE)
    for number in range(MOST_ASKED):
        steps.ask(run(number=number))
    with pytest.raises(ValueError, match="seat 0 has 256 runs that wait, and asks for one more"):
        steps.ask(run(number=MOST_ASKED))
    steps.ask(run(seat=1))


# -- with members' streams ----------------------------------------------------------------------------------


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with head_of(Epoch.first(Mesh(2, 1, 2), layers=2, experts=4), layers=(0, 1)) as made:
        yield made


def ask(member: FakeMember, number: int = 1, layers: tuple[int, ...] = LAYERS, rows: int = 4) -> None:
    member.say("run", run=number, layers=layers, rows=rows)


def test_all_members_are_told_of_a_run_in_one_order_with_steps(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    ask(members[1], 5)
    for one in members.values():
        told = one.entry("run")
        assert (told["seat"], told["run"], told["number"], told["epoch"]) == (1, 5, FIRST_NUMBER, 1)
        assert (tuple(told["layers"]), told["rows"], told["why_not"]) == (LAYERS, 4, "")
    members[0].announce(1, 2)
    number = FIRST_NUMBER + len(LAYERS)
    assert members[0].entry("step")["number"] == members[1].entry("step")["number"] == number
    assert members[1].entry("company"), "it is to leave what waits for its caller"
    for one in members.values():
        one.say("done", step=FIRST_NUMBER)
        one.say("done", step=number)
    until(lambda: coordinator.progress().in_flight == 0)
    assert coordinator.progress().steps == len(LAYERS) + 1


def test_a_member_hears_of_company_at_once_and_then_now_and_again(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    ask(members[0], 1)
    members[0].entry("run")
    ask(members[1], 1)
    members[0].until("company")
    members[1].until("company")
    for one in members.values():
        for number in range(2):
            one.say("done", step=FIRST_NUMBER + number * len(LAYERS))
    number, heard = FIRST_NUMBER + 2 * len(LAYERS), 0
    began = time.monotonic()
    for turn in range(20):  # single steps beside the other's: one by one
        ask(members[0], 10 + turn, layers=(0,))
        ask(members[1], 10 + turn, layers=(0,))
        for _ in range(2):
            while (told := members[0].entries.get(timeout=SECONDS))["kind"] != "run":
                heard += 1
            members[1].until("run")
            for one in members.values():
                one.say("done", step=told["number"])
            number += 1
    assert heard <= 2 + 2 * (time.monotonic() - began) / COMPANY_SECONDS, heard
    assert coordinator.progress().steps == number - FIRST_NUMBER
    time.sleep(COMPANY_SECONDS)
    ask(members[0], 50)
    ask(members[1], 50)
    members[0].until("company")


def test_a_member_whose_run_is_under_way_hears_of_company_while_nothing_may_begin(
    coordinator: Coordinator,
) -> None:
    """Members that are to join wait for the run, and it for its caller."""
    members = serving(coordinator, MEMBERS)
    ask(members[0])
    members[0].entry("run")
    with coordinator._lock:
        coordinator.generations.turnover._turning_since = time.monotonic()
        coordinator._steps.begin()
        coordinator.generations.turnover._turning_since = None
    members[0].entry("company")


def test_a_member_lost_in_a_run_ends_the_generation_and_the_run(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    ask(members[0])
    ask(members[1])
    for one in members.values():
        one.until("run")
    members[1].stream.close()
    members[0].until("abort")
    assert coordinator.progress().in_flight == 0
    again = FakeMember(coordinator, 1)
    form_again([members[0], again])
    ask(members[0], 9)
    told = members[0].until("run")
    assert told["run"] == 9 and told["number"] >= FIRST_NUMBER + len(LAYERS), "numbers rise"


def test_a_run_of_an_older_generation_is_not_ordered(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    members[0].generation -= 1
    ask(members[0], 1)
    members[0].generation += 1
    ask(members[0], 2)
    assert members[0].entry("run")["run"] == members[1].entry("run")["run"] == 2


@pytest.mark.parametrize(
    "wrong", [{"layers": ()}, {"layers": (0,) * 5000}, {"layers": (0, 7)}, {"rows": 0}, {"rows": 9}]
)
def test_a_run_that_cannot_be_ends_its_member(coordinator: Coordinator, wrong: dict[str, object]) -> None:
    members = serving(coordinator, MEMBERS)
    ask(members[0], **wrong)  # type: ignore[arg-type]
    members[0].until("closed")


def test_a_run_of_a_layer_that_is_read_is_refused_to_whoever_asked(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    with coordinator._lock:
        coordinator._steps.close_layers([1])
    ask(members[0], 1)
    told = members[0].entry("run")
    assert (told["run"], told["number"], told["why_not"]) == (1, 0, "layer 1 is being restored")
    ask(members[1], 2, layers=(0,))
    assert members[0].entry("run")["run"] == members[1].entry("run")["run"] == 2
