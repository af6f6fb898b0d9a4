"""Lanes and owners at the head: who is told of a step, who is waited for, who votes on a change."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from fake_members import SECONDS, FakeMember, head_of, serving, until

from moeserve.dispatch.members import Member, Members
from moeserve.experts.placement import Placement
from moeserve.runtime.control.messages import order_from
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head import group_view
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.placing.changes import rebalance
from moeserve.runtime.head.placing.pending_change import Outcome
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.step import FIRST_NUMBER

MEMBERS = Members((Member(0, lane=0), Member(1, lane=1), Member(4, owner=0), Member(6, owner=1)), 4, 3)
"""Two lanes and two owners; two lanes and an owner's place are reserved."""
LANES, OWNERS = (0, 1), (4, 6)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    epoch = Epoch.first(Mesh(2, 1, 2), layers=1, experts=4, redundant=2, members=MEMBERS)
    with head_of(epoch) as made:
        yield made


def nothing_came(*members: FakeMember) -> bool:
    return all(one.entries.empty() for one in members)


def test_a_step_is_sent_to_owners_and_named_lanes_and_waits_for_them_only(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    timed: queue.SimpleQueue[int] = queue.SimpleQueue()
    coordinator.observe_steps(lambda layer, seconds: timed.put(layer))
    members[1].announce(job=7, rows=3)
    for seat in (1, *OWNERS):
        header = members[seat].entry("step")
        assert (header["number"], header["sizes"]) == (FIRST_NUMBER, [0, 3, 0, 0])
        assert header["jobs"] == ([[7, 3]] if seat == 1 else [])
        members[seat].say("done", step=header["number"])
    assert timed.get(timeout=SECONDS) == 0  # nobody waited for lane 0
    assert coordinator.progress().in_flight == 0 and nothing_came(*members.values())
    members[0].announce(job=1, rows=2)  # and the next step, which lane 1 has no part in, has a larger number
    for seat in (0, *OWNERS):
        header = members[seat].entry("step")
        assert (header["number"], header["sizes"]) == (FIRST_NUMBER + 1, [2, 0, 0, 0])
    assert nothing_came(*members.values())


def test_jobs_of_one_message_go_into_one_step(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    members[1].say("announce", job=7, layer=0, rows=3, left=None, more=[[8, 0, 1, None], [9, 0, 2, 60.0]])
    header = members[1].entry("step")
    assert header["sizes"] == [0, 6, 0, 0] and sorted(header["jobs"]) == [[7, 3], [8, 1], [9, 2]]
    assert coordinator.progress().jobs == 3


def test_a_withdrawn_job_is_in_no_step(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    members[0].announce(job=1, rows=1)
    first = members[0].entry("step")
    members[1].announce(job=1, rows=2)
    second = members[1].entry("step")
    for job in (5, 6):
        members[0].announce(job=job, rows=1)  # they wait: as many steps run as may
    until(lambda: coordinator.progress().queued == 2)
    members[1].say("withdraw", jobs=[5])  # of another lane
    members[0].say("withdraw", jobs=[5, 1])  # and one whose step has begun: it goes on
    until(lambda: coordinator.progress().queued == 1)
    for seat in OWNERS:
        for header in (first, second):
            assert members[seat].entry("step")["number"] == header["number"]
            members[seat].say("done", step=header["number"])
    members[0].say("done", step=first["number"])
    members[1].say("done", step=second["number"])
    assert members[0].entry("step")["jobs"] == [[6, 1]]


def test_a_member_without_a_lane_announces_no_job(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    members[4].announce(job=3, rows=1)
    assert members[4].entry("closed")
    reason = members[0].entry("abort")["reason"]
    assert "rank 4 (pid 104) is lost" in reason and "seat 4 has no lane, and announced job 3" in reason


@pytest.mark.parametrize("seat", [2, 3, 5])
def test_a_reserved_seat_is_refused(
    coordinator: Coordinator, seat: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert FakeMember(coordinator, seat).entry("closed")
    refused = f"seat {seat} is vacant: the members of this group have seats [0, 1, 4, 6]"
    until(lambda: refused in caplog.text)
    assert not coordinator.seats()


def moved(coordinator: Coordinator) -> tuple[Placement, queue.SimpleQueue[Outcome]]:
    """Has experts 0 and 3 change places between the owners; what the change comes to."""
    change, *more = rebalance(coordinator.epoch, swapped(coordinator.epoch.placement), staging_slots=2)
    assert not more
    ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    threading.Thread(target=lambda: ended.put(coordinator.change(change, SECONDS)), daemon=True).start()
    return change.epoch.placement, ended


def swapped(placement: Placement) -> Placement:
    slots = placement.slots.copy()
    first, last = (int(np.flatnonzero(slots[0] == expert)[0]) for expert in (0, 3))
    slots[0, [first, last]] = 3, 0
    return placement.with_slots(slots)


def test_an_expert_moves_between_owners_and_lanes_adopt_it(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    placement, ended = moved(coordinator)
    stride = placement.slots_per_owner
    for seat, one in members.items():
        order = order_from(one.entry("stage"))
        assert order.peers == {0: ("weights 4", "here"), 1: ("weights 6", "here")}
        assert order.owner == MEMBERS.at(seat).owner
        copies = {(copy.expert, copy.source[0]) for copy in order.copies}
        assert copies == {0: {(3, 1)}, 1: {(0, 0)}, None: set()}[order.owner]
        assert all(0 <= copy.slot < stride for copy in order.copies)
        staged = [[copy.slot, copy.expert, "sum", "stream", 8, 0.1, 0] for copy in order.copies]
        assert ended.empty(), "everybody votes"
        one.say("voted", change=order.change, staged=staged, refused="")
    for one in members.values():
        commit = one.entry("commit")
        assert commit["slots"] == placement.slots[0].tolist()
        assert ended.empty(), "everybody adopts it"
        one.say("adopted", change=commit["change"])
    outcome = ended.get(timeout=SECONDS)
    assert (outcome.abandoned, sorted(copy.expert for copy in outcome.staged)) == ("", [0, 3])
    assert coordinator.epoch.placement == placement and coordinator.epoch.members == MEMBERS


def test_a_lane_that_cannot_take_a_change_abandons_it(coordinator: Coordinator) -> None:
    members = serving(coordinator, MEMBERS)
    before, (_, ended) = coordinator.epoch, moved(coordinator)
    order = order_from(members[1].entry("stage"))
    members[1].say("voted", change=order.change, staged=[], refused="its weights cannot be read")
    assert ended.get(timeout=SECONDS).abandoned == "rank 1: its weights cannot be read"
    assert coordinator.epoch is before


def test_a_lost_lane_ends_the_generation_until_it_is_back(
    coordinator: Coordinator,
) -> None:
    members = serving(coordinator, MEMBERS)
    members.pop(0).stream.close()
    for one in members.values():
        assert "rank 0 (pid 100) is lost" in one.entry("abort")["reason"]
    assert coordinator.progress().state == "forming"
    members[0] = FakeMember(coordinator, 0)
    for one in members.values():
        one.entry("prepare")
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    for one in members.values():
        one.entry("join")
        one.say("joined")
    coordinator.wait_serving(SECONDS)
    assert {seat: one.generation for seat, one in coordinator.seats().items()} == {
        seat: members[seat].generation for seat in MEMBERS.seats
    }


def test_steps_do_not_wait_until_a_report_is_unpacked(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = serving(coordinator, MEMBERS)
    begun, may_go = threading.Event(), threading.Event()

    def unpacked(message: Message, shape: tuple[int, int, int]) -> np.ndarray:
        begun.set()
        assert may_go.wait(SECONDS)
        return np.full(shape, 2.0)

    monkeypatch.setattr(group_view, "load_from", unpacked)
    members[0].say("report", steps=3, expert_rows=5, load="")
    assert begun.wait(SECONDS)
    members[1].announce(job=7, rows=3)
    assert members[1].entry("step")["jobs"] == [[7, 3]]
    may_go.set()
    until(lambda: coordinator.seats()[0].steps == 3)
    assert coordinator.view.load_by_phase().max() == 2.0
    members[0].generation -= 1
    members[0].say("report", steps=99, expert_rows=5, load="")  # of an aborted one
    members[0].generation += 1
    members[0].announce(job=8, rows=1)  # a stream is read in order
    assert members[0].entry("step") and coordinator.seats()[0].steps == 3
