"""Who is to blame where nothing goes on: who does not answer, or is behind; never who waits."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
from fake_members import SECONDS, TOKEN, FakeMember, serving, until

from moeserve.dispatch.members import Members
from moeserve.runtime.control.reached import Phase, Reached
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.generations import blame, rendezvous
from moeserve.runtime.head.generations.inquiry import Inquiry, Standstill
from moeserve.runtime.head.generations.patience import Patience
from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.ordering.sequencer import StepPace

ABOUT = Standstill("step 9", 100.0, 10.0, "step.late_seconds")
STANDS = "step 9 does not go on within step.late_seconds = 10"
WAITS, BEHIND = Reached(9, Phase.COMBINE), Reached(9, Phase.EXPERTS)


def asked(first: dict[int, Reached], second: dict[int, Reached], seats: int = 3) -> Inquiry:
    inquiry = Inquiry(ABOUT, range(seats))
    for now, answers in ((103.0, first), (110.0, second)):
        inquiry.asked(now)
        for seat, reached in answers.items():
            inquiry.answered(seat, reached)
    return inquiry


def test_members_are_asked_early_and_at_the_bound() -> None:
    inquiry = Inquiry(ABOUT, (0, 1))
    dues = []
    for _ in range(2):
        dues.append(inquiry.due())
        inquiry.asked(inquiry.due())
    assert [*dues, inquiry.due()] == [103.0, 110.0, 110.5]
    assert inquiry.complete


def test_who_answered_before_has_longer_at_the_bound_than_an_interpreter_is_held_up() -> None:
    inquiry = asked(dict.fromkeys(range(3), WAITS), {0: WAITS, 2: WAITS})
    assert inquiry.due() == 117.0
    inquiry.answered(1, WAITS)
    assert inquiry.due() == 110.5


def test_one_member_after_another_that_is_held_up_is_nobodys_fault() -> None:
    """Rank 0 for 6 s, and from the fifth on rank 1: nobody finished the step for 11 s, and yet it went on."""
    inquiry = Inquiry(ABOUT, range(3))
    inquiry.asked(103.0)
    for seat, reached in ((1, WAITS), (2, WAITS), (0, BEHIND)):
        inquiry.answered(seat, reached)
    inquiry.asked(110.0)
    for seat in (2, 0, 1):
        assert not inquiry.went_on or seat == 1
        inquiry.answered(seat, WAITS)
    assert inquiry.complete and inquiry.went_on
    inquiry.again(111.0)
    assert (inquiry.complete, inquiry.went_on, inquiry.due()) == (False, False, 114.0)


def test_a_question_that_a_failure_asks_counts_as_the_last_one_only_near_the_bound() -> None:
    inquiry = Inquiry(ABOUT, (0, 1))
    inquiry.asked(103.0)
    inquiry.asked(108.9)
    assert not inquiry.complete
    inquiry.asked(109.1)
    assert inquiry.complete


def test_who_is_behind_is_to_blame() -> None:
    verdict = asked({}, {0: WAITS, 1: BEHIND, 2: WAITS}).verdict()
    assert verdict.reason == f"rank 1 is late: {STANDS}, and it is behind; step 9: it is in its experts"
    assert list(verdict.guilty) == [1]
    a_step_behind = {0: Reached(9, Phase.BEGUN), 1: Reached(8, Phase.DONE), 2: Reached(10, Phase.DISPATCH)}
    assert list(asked({}, a_step_behind).verdict().guilty) == [1]


def test_who_never_answers_is_to_blame_and_not_who_waits_for_it() -> None:
    """Rank 0 waits for rank 1, and rank 2, which needs nothing of it, has gone on."""
    answers = {0: WAITS, 2: Reached(10, Phase.DISPATCH)}
    assert list(asked(answers, answers).verdict().guilty) == [1]


def test_who_is_held_up_at_the_bound_alone_is_not_to_blame_for_another() -> None:
    verdict = asked(dict.fromkeys(range(3), WAITS), {0: WAITS, 2: BEHIND}).verdict()
    assert list(verdict.guilty) == [2]
    verdict = asked(dict.fromkeys(range(3), WAITS), {0: WAITS, 2: WAITS}).verdict()
    assert list(verdict.guilty) == [1], "all others are known to wait"


def test_who_has_said_that_it_waited_is_not_waited_for() -> None:
    inquiry = asked({}, {0: WAITS, 1: WAITS, 2: WAITS})
    for seat in (0, 2):
        inquiry.failed(seat)
    assert list(inquiry.verdict().guilty) == [1]


def test_nobody_is_named_where_all_are_equally_far() -> None:
    verdict = asked({}, dict.fromkeys(range(3), WAITS)).verdict()
    assert verdict.guilty == {}
    assert verdict.reason == f"{STANDS}, and all ranks are equally far; step 9: it is in combine"
    assert list(asked({}, {0: BEHIND}, seats=1).verdict().guilty) == [0], "it waits for nobody"


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(rendezvous, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(blame, "BLAME_SECONDS", 0.1)
    made = Coordinator(
        Epoch.first(Mesh(3, 1, 3), layers=1, experts=6), (0,), StepPace(8, 16), "127.0.0.1", TOKEN
    )
    made.generations.patience = Patience(late=0.4)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def stepping(coordinator: Coordinator) -> tuple[dict[int, FakeMember], int]:
    """Members that have all been sent a step, and its number."""
    members = serving(coordinator, Members.of_ranks(3))
    members[0].announce(job=1, rows=2)
    numbers = {one.entry("step")["number"] for one in members.values()}
    return members, numbers.pop()


def test_a_step_that_stands_still_ends_and_who_holds_it_up_is_killed_and_replaced(
    coordinator: Coordinator,
) -> None:
    killed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    coordinator.generations.parted.on_given_up = lambda process: killed.put(process[:2])
    members, number = stepping(coordinator)
    for seat, one in members.items():
        one.reached = Reached(number, Phase.EXPERTS if seat == 2 else Phase.COMBINE)
    assert members[2].entry("stop") and members[2].entry("closed")
    assert killed.get(timeout=SECONDS) == (2, 102)
    reason = members[0].entry("abort")["reason"]
    assert reason.startswith(f"rank 2 is late: step {number} does not go on within step.late_seconds = 0.4")
    again = FakeMember(coordinator, 2, pid=202)
    for one in (members[0], members[1], again):
        one.entry("abort") if one is members[1] else None
        one.entry("prepare")
    assert killed.empty()


def test_a_step_that_goes_on_slowly_is_nobodys_fault(coordinator: Coordinator) -> None:
    members, number = stepping(coordinator)
    generation = coordinator.progress().generation
    for one in members.values():
        one.reached = Reached(number, Phase.EXPERTS)
        with pytest.raises(queue.Empty):
            one.entries.get(timeout=0.3)  # in all 0.9 s, and never 0.4 s without one that finishes
        one.say("done", step=number)
    until(lambda: coordinator.progress().in_flight == 0)
    with pytest.raises(queue.Empty):
        members[0].entries.get(timeout=0.8)  # nor is there anything to wait for while none is under way
    assert coordinator.progress().generation == generation


def test_who_says_that_it_waited_too_long_is_not_given_up_but_the_one_it_waited_for(
    coordinator: Coordinator,
) -> None:
    """What a dispatcher over peer memory does: its own bound is the same, and it is told first."""
    members, number = stepping(coordinator)
    for one in members.values():
        one.reached = Reached(number, Phase.DISPATCH)
    members[2].reached = Reached(number, Phase.BEGUN)
    with pytest.raises(queue.Empty):
        members[0].entries.get(timeout=0.38)
    members[0].say("failed", reason="rank 0: step failed: PeersLate: no rows of ranks [2]")
    assert members[2].entry("stop")
    reason = members[0].entry("abort")["reason"]
    assert reason.startswith("rank 2 is late: ") and reason.endswith("no rows of ranks [2]")


def test_a_process_that_is_given_up_from_outside_is_named_and_its_heir_left_alone(
    coordinator: Coordinator,
) -> None:
    members = serving(coordinator, Members.of_ranks(3))
    coordinator.given_up(RankProcess(1, 999, "here"), "of another process")
    coordinator.given_up(RankProcess(1, 101, "there"), "of another host's process of that id")
    assert coordinator.progress().state == "serving"
    coordinator.given_up(RankProcess(1, 101, "here"), "it is stopped (state T) for 1.5 s")
    assert members[1].entry("stop")
    told = members[0].entry("abort")["reason"]
    assert told == "rank 1 (pid 101) is given up: it is stopped (state T) for 1.5 s"


def test_who_has_ended_is_named_before_who_noticed(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream may be read later than what others say of it."""
    monkeypatch.setattr(blame, "BLAME_SECONDS", 1.0)  # in which members that run have said so
    coordinator.generations.parted.is_gone = lambda process: process.pid == 101
    members = serving(coordinator, Members.of_ranks(3))
    members[0].say("failed", reason="rank 0: step failed: Connection closed by peer")
    told = members[0].entry("abort")["reason"]
    assert told == "rank 1 (pid 101) has ended; rank 0: step failed: Connection closed by peer"
