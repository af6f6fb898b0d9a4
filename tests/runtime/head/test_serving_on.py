"""A head whose members are lost while it serves: it goes on without them, and they join between two steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from fake_members import SECONDS, FakeMember, form_again, head_of, serving, until

from moeserve.dispatch.members import Members
from moeserve.experts.placement import EMPTY
from moeserve.runtime.control.messages import epoch_from
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.generations import parted
from moeserve.runtime.head.generations.returning import Returning
from moeserve.runtime.mesh import Mesh

MEMBERS = Members.of_ranks(3)
NOTHING = {"bytes_read": 0, "weight_bytes": 0}


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    # six experts in nine slots on three owners: any two hold all of them
    first = Epoch.first(Mesh(3, 1, 3), layers=2, experts=6, redundant=3)
    with head_of(first, layers=(0, 1)) as made:
        made.generations.turnover.serve_on = True
        yield made


def formed(members: list[FakeMember], lacks: dict[int, list[int]] | None = None) -> Epoch:
    """These prepare and join a generation; each lacks the layers that `lacks` says. Its epoch."""
    for one in members:
        epoch = epoch_from(one.entry("prepare")["epoch"])
        one.say("prepared", **NOTHING, lacks=(lacks or {}).get(one.seat, []))
    for at, one in enumerate(members):
        joining = one.entry("join")
        assert (joining["position"], joining["size"]) == (at, len(members))
        one.say("joined")
    return epoch


def without_last(coordinator: Coordinator, lacks: dict[int, list[int]] | None = None) -> list[FakeMember]:
    """The two members that are left of three, and serve."""
    members = serving(coordinator, MEMBERS)
    members[2].stream.close()
    left = [members[0], members[1]]
    for one in left:
        assert one.entry("abort")["back"], "lanes hold their jobs"
    epoch = formed(left, lacks)
    assert epoch.members.seats == (0, 1) and epoch.number == 2
    assert all(set(row.tolist()) >= set(range(6)) for row in epoch.placement.slots[:, :6])
    coordinator.wait_serving(SECONDS)
    return left


def loaded(coordinator: Coordinator) -> FakeMember:
    """The last member's new process, which has loaded."""
    back = FakeMember(coordinator, 2, pid=300)
    back.entry("load")
    back.say("loaded", **NOTHING)
    return back


def test_the_group_goes_on_and_the_lost_member_loads_before_it_joins(coordinator: Coordinator) -> None:
    before = coordinator.epoch.placement.slots[:, 6:]
    left = without_last(coordinator)
    assert coordinator.progress().reason == "ranks [2] are away, and others serve their experts"
    assert [member.seat for member in coordinator.view.away()] == [2]
    assert coordinator.view.belonging() == (MEMBERS, [0, 1]), "a dashboard shows that one is missing"
    back = FakeMember(coordinator, 2, pid=300)
    load = epoch_from(back.entry("load")["epoch"])
    assert load.members == MEMBERS and np.array_equal(load.placement.slots[:, 6:], before)
    assert coordinator.progress().state == "serving" and 2 in coordinator.seats()
    assert coordinator.view.belonging() == (MEMBERS, [0, 1, 2]), (
        "it loads, maybe for minutes, and is connected"
    )
    back.say("here", reached=[0, 0])
    back.say("loaded", **NOTHING)
    for one in (*left, back):
        assert one.entry("abort")["reason"] == "ranks [2] join"
    epoch = formed([*left, back])
    assert epoch.members == MEMBERS and np.array_equal(epoch.placement.slots[:, 6:], before)
    coordinator.wait_serving(SECONDS)
    assert coordinator.progress().reason == "" and coordinator.view.away() == []


def lose(coordinator: Coordinator, waits: tuple[int, ...] = ()) -> list[FakeMember]:
    """The two that are left of three members that serve: the last one is lost, and nobody sees its end."""
    coordinator.generations.parted.is_gone = lambda process: False
    members = serving(coordinator, MEMBERS, waits=waits)
    members[2].stream.close()
    left = [members[0], members[1]]
    for one in left:
        one.entry("abort")
    return left


def joining(members: list[FakeMember]) -> list[int]:
    """These form a generation; those in which somebody may still be."""
    for one in members:
        one.entry("prepare")
        one.say("prepared", **NOTHING, lacks=[])
    parting = [one.entry("join")["parting"] for one in members]
    assert parting == [parting[0]] * len(members)
    for one in members:
        one.say("joined")
    return parting[0]


def ended(coordinator: Coordinator, pid: int) -> None:
    """The launcher says that it has seen the end of this process."""
    coordinator.generations.parted.is_gone = lambda process: process.pid == pid
    coordinator.processes_told()


def test_those_that_go_on_do_not_wait_for_the_end_of_one_that_can_do_them_no_harm(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parted, "GONE_REPORT_SECONDS", 0.1)
    left = lose(coordinator)
    was = left[0].generation
    assert joining(left) == [was], "it may still write to the memory of that generation"
    coordinator.wait_serving(SECONDS)
    stale = FakeMember(coordinator, 2)  # the very process, which has not ended
    assert stale.entry("stop") and stale.entry("closed")
    said = "processes [102], given up, have not ended"
    until(lambda: said in coordinator.progress().reason)
    ended(coordinator, 102)
    until(lambda: said not in coordinator.progress().reason)
    heir = loaded(coordinator)
    for one in (*left, heir):
        assert one.entry("abort")["reason"] == "ranks [2] join"
    assert joining([*left, heir]) == []


def test_those_that_go_on_wait_for_an_end_where_one_of_them_says_so(coordinator: Coordinator) -> None:
    left = lose(coordinator, waits=(1,))
    with pytest.raises(queue.Empty):
        left[0].entries.get(timeout=0.3)
    ended(coordinator, 102)
    formed(left)


def test_a_group_that_did_not_form_before_an_end_is_tried_again(coordinator: Coordinator) -> None:
    left = lose(coordinator)
    was = left[0].generation
    for one in left:
        one.entry("prepare")
    left[1].say("failed", reason="rank 1: 'prepare' failed: no room beside the memory of pid 102")
    for one in left:
        one.entry("abort")
    assert joining(left) == [was]
    coordinator.wait_serving(SECONDS)


def test_a_step_that_fails_beside_a_process_that_never_ends_stops_nobody(coordinator: Coordinator) -> None:
    left = lose(coordinator)
    was = left[0].generation
    joining(left)
    coordinator.wait_serving(SECONDS)
    for one in left:
        one.say("failed", reason=f"rank {one.seat}: 'step' failed: RuntimeError: no room")
    for one in left:
        one.entry("abort")
    assert joining(left) == [was], "it was in no later one"
    coordinator.wait_serving(SECONDS)


def test_who_is_lost_after_it_has_said_that_it_cannot_go_on_may_still_write(coordinator: Coordinator) -> None:
    coordinator.generations.parted.is_gone = lambda process: False
    members = serving(coordinator, MEMBERS, waits=())
    was = members[0].generation
    members[2].say("failed", reason="rank 2: 'step' failed: RuntimeError: no room")
    for one in members.values():
        one.entry("abort")
    members[2].stream.close()
    left = [members[0], members[1]]
    for one in left:
        assert "rank 2 (pid 102) is lost" in one.until("abort")["reason"]
    assert joining(left) == [was]
    coordinator.wait_serving(SECONDS)


def test_a_member_that_connects_again_may_yet_have_to_leave_its_generation(coordinator: Coordinator) -> None:
    coordinator.generations.parted.is_gone = lambda process: False
    members = serving(coordinator, MEMBERS, waits=())
    was = members[0].generation
    again = FakeMember(coordinator, 2)  # the same process, whose stream broke for it alone
    left = [members[0], members[1]]
    for one in left:
        one.entry("abort")
    assert joining(left) == [was]
    again.until("load")
    again.say("loaded", **NOTHING)
    for one in (*left, again):
        one.until("abort")
    assert joining([*left, again]) == [], "it has left to prepare"


def test_a_second_loss_while_the_group_forms_waits_for_no_end_either() -> None:
    # each of four owners could hold all experts
    first = Epoch.first(Mesh(4, 1, 4), layers=1, experts=4, redundant=12)
    with head_of(first) as coordinator:
        coordinator.generations.turnover.serve_on = True
        coordinator.generations.parted.is_gone = lambda process: False
        members = serving(coordinator, Members.of_ranks(4), waits=())
        was = members[0].generation
        members[3].stream.close()
        for seat in (0, 1, 2):
            members[seat].entry("abort")
            members[seat].entry("prepare")
        members[2].stream.close()
        left = [members[0], members[1]]
        for one in left:
            one.entry("abort")
        assert joining(left) == [was]
        coordinator.wait_serving(SECONDS)


def test_layers_of_which_a_member_lacks_experts_wait_and_others_are_served(coordinator: Coordinator) -> None:
    left = without_last(coordinator, lacks={1: [1]})
    assert "1 layers are being restored by ranks [1]" in coordinator.progress().reason
    for job, layer in ((1, 1), (2, 0)):
        left[0].say("announce", job=job, layer=layer, rows=1, left=None)
    step = left[0].entry("step")
    assert step["layer"] == 0, "layer 1 is not whole"
    assert left[1].entry("step")["number"] == step["number"]
    for one in left:
        one.say("done", step=step["number"])
    left[1].say("restored", layer=1, why_not="no such disk")
    until(lambda: "rank 1, layer 1 in order: no such disk" in coordinator.progress().reason)
    assert coordinator.progress().queued == 1
    until(lambda: all(one.open_layers == [False] for one in left))
    left[1].say("restored", layer=1, why_not="")
    until(lambda: all(one.open_layers == [False, True] for one in left))
    assert left[0].entry("step")["layer"] == 1
    assert coordinator.progress().reason == "ranks [2] are away, and others serve their experts"


def test_who_changes_experts_waits_until_layers_are_restored(coordinator: Coordinator) -> None:
    left = without_last(coordinator, lacks={1: [0, 1]})
    started = time.monotonic()
    coordinator.wait_turned(0.2)
    assert time.monotonic() - started >= 0.2 and coordinator.generations.layers.closed
    waits = threading.Thread(target=coordinator.wait_turned, args=(SECONDS,))
    waits.start()
    for layer in (0, 1):
        assert waits.is_alive()
        left[1].say("restored", layer=layer, why_not="")
    waits.join(SECONDS)
    assert not waits.is_alive() and not coordinator.generations.layers.closed


def test_nobody_joins_while_layers_are_restored_or_experts_move(coordinator: Coordinator) -> None:
    moving = [True]
    coordinator.generations.turnover.busy = lambda: moving[0]
    left = without_last(coordinator, lacks={1: [0, 1]})
    loaded(coordinator)
    until(lambda: coordinator.generations.turnover.returning.ready(time.monotonic()) == [2])
    for layer in (0, 1):
        left[1].say("restored", layer=layer, why_not="")
    until(lambda: not coordinator.generations.layers.closed)
    generation = coordinator.progress().generation
    with pytest.raises(AssertionError):
        until(lambda: coordinator.progress().generation != generation)
    moving[0] = False
    for one in left:
        assert one.entry("abort")["reason"] == "ranks [2] join"


def test_a_member_joins_whose_experts_another_cannot_read(coordinator: Coordinator) -> None:
    """It alone can open their layer."""
    left = without_last(coordinator, lacks={1: [0, 1]})
    assert set(coordinator.epoch.placement.slots[1, 3:6].tolist()) & {4, 5}, "it took over some"
    back = loaded(coordinator)
    left[1].say("restored", layer=1, why_not="no such disk")
    until(lambda: coordinator.generations.layers.unread == {1: [1]})
    assert coordinator.progress().state == "serving", "layer 0 is still being read"
    left[1].say("restored", layer=0, why_not="")
    for one in (*left, back):
        assert one.entry("abort")["reason"] == "ranks [2] join"
    placement = formed([*left, back]).placement
    read, unread = placement.slots[:, 3:6].tolist()
    assert set(range(6)) <= set(placement.slots[1].tolist()) and EMPTY in unread
    assert EMPTY not in read, "what it has read it keeps"
    held_by_others = {*placement.slots[1, :3].tolist(), *placement.slots[1, 6:].tolist()}
    assert not held_by_others & set(unread) - {EMPTY}


def test_a_step_under_way_ends_before_a_member_joins(coordinator: Coordinator) -> None:
    left = without_last(coordinator)
    left[0].say("announce", job=1, layer=0, rows=1, left=None)
    number = left[0].entry("step")["number"]
    left[1].entry("step")
    loaded(coordinator)
    until(lambda: coordinator.generations.turning)
    left[0].say("announce", job=2, layer=0, rows=1, left=None)
    assert left[0].entries.empty(), "no further step begins"
    for one in left:
        one.say("done", step=number)
        assert one.entry("abort")["reason"] == "ranks [2] join"


def test_who_loads_and_is_lost_again_or_silent_disturbs_nobody(coordinator: Coordinator) -> None:
    coordinator.generations.turnover.returning.silent_seconds = 0.5
    left = without_last(coordinator)
    generation = coordinator.progress().generation
    first = FakeMember(coordinator, 2, pid=300)
    first.entry("load")
    first.stream.close()
    until(lambda: 2 not in coordinator.seats())
    second = FakeMember(coordinator, 2, pid=301)
    second.entry("load")
    assert second.entry("stop") and second.entry("closed"), "it says nothing for too long"
    third = FakeMember(coordinator, 2, pid=302)
    third.entry("load")
    fourth = FakeMember(coordinator, 2, pid=303)
    assert third.entry("stop") and third.entry("closed")
    fourth.entry("load")
    fourth.say("failed", reason="rank 2: 'load' failed: no memory")
    assert fourth.entry("stop") and fourth.entry("closed")
    fifth = FakeMember(coordinator, 2, pid=304)
    fifth.entry("load")
    fifth.say("joined")
    assert fifth.entry("closed"), "it has no right to say so"
    assert coordinator.progress().generation == generation and left[0].entries.empty()


def test_without_slots_the_group_waits_for_all_who_are_away(coordinator: Coordinator) -> None:
    left = without_last(coordinator)
    left[1].stream.close()
    assert left[0].entry("abort")["back"]
    assert coordinator.progress().state == "forming"
    assert coordinator.epoch.members == MEMBERS, "it is to be whole again"
    again = [FakeMember(coordinator, seat, pid=300 + seat) for seat in (1, 2)]
    assert formed([left[0], *again]).members == MEMBERS
    coordinator.wait_serving(SECONDS)


def test_a_member_that_was_reloaded_past_loads_again(coordinator: Coordinator) -> None:
    left = without_last(coordinator)
    back = FakeMember(coordinator, 2, pid=300)
    assert epoch_from(back.entry("load")["epoch"]).versions == ()
    with coordinator._lock:  # as a reload's commits do
        epoch = coordinator.epoch.with_weights("other")
        coordinator._group.epoch = epoch.reloaded(0, 2).reloaded(1, 2)
    back.say("loaded", **NOTHING)
    assert epoch_from(back.entry("load")["epoch"]).versions == (2, 2)
    back.say("loaded", **NOTHING)
    assert left[0].entry("abort")["reason"] == "ranks [2] join"


def test_a_dispatcher_that_serves_whole_groups_alone_has_the_group_wait(coordinator: Coordinator) -> None:
    coordinator.generations.turnover.why_whole = lambda: "deepep_ll serves groups whose ranks are all there"
    members = serving(coordinator, MEMBERS)
    members[2].stream.close()
    members[0].entry("abort")
    until(lambda: coordinator.progress().state == "forming")
    assert coordinator.epoch.members == MEMBERS
    FakeMember(coordinator, 2, pid=300)
    assert epoch_from(members[0].entry("prepare")["epoch"]).members == MEMBERS


def test_who_ends_again_and_again_soon_after_it_joined_is_let_in_later_each_time() -> None:
    """Whenever it joins, all others pause."""
    returning, epoch = Returning(60.0), Epoch.first(Mesh(3, 1, 3), layers=2, experts=6, redundant=3)
    now, waits = 1000.0, []
    for _ in range(12):
        returning.leave(epoch, [2], now)
        returning.sit_down(2, cast(Any, object()), epoch, now)
        returning.heard(2, now, loaded=True)
        began = now
        while not returning.ready(now):
            now += 0.05
        waits.append(now - began)
        returning.join([2], lambda number, seat: None, now)
        now += 1.0
    assert waits[0] == 0.0, "the first loss is nobody's habit"
    assert 0.1 <= waits[1] < 0.2 and waits[4] > 2 * waits[1] and 5.0 <= waits[-1] <= 10.1
    now += 60.0
    returning.leave(epoch, [2], now)
    returning.sit_down(2, cast(Any, object()), epoch, now)
    returning.heard(2, now, loaded=True)
    assert returning.ready(now) == [2], "it had served for long"


def test_a_service_that_is_told_to_stop_while_a_member_is_lost_finishes_its_calls(
    coordinator: Coordinator,
) -> None:
    members = serving(coordinator, MEMBERS)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(coordinator.stopping.drain(30.0)))
    stopping.start()
    for one in members.values():
        one.entry("drain")
    members[0].say("drained")
    members[2].stream.close()
    left = [members[0], members[1]]
    for one in left:
        one.entry("abort")
    formed(left)
    assert stopping.is_alive(), "a call of lane 1 is still under way"
    members[1].stream.send({"kind": "drained", "generation": 1})  # of the generation in which it was told
    stopping.join(SECONDS)
    assert stopped == [True]


def test_steps_go_on_where_the_member_that_was_to_join_is_lost_meanwhile(coordinator: Coordinator) -> None:
    left = without_last(coordinator)
    left[0].say("announce", job=1, layer=0, rows=1, left=None)
    number = left[0].entry("step")["number"]
    left[1].entry("step")
    back = loaded(coordinator)
    until(lambda: coordinator.generations.turning)
    back.stream.close()
    until(lambda: 2 not in coordinator.seats())
    for one in left:
        one.say("done", step=number)
    left[0].say("announce", job=2, layer=0, rows=1, left=None)
    assert left[0].entry("step")["number"] == number + 1
    assert coordinator.progress().state == "serving"


def test_who_has_loaded_and_cannot_join_is_left_out_again(coordinator: Coordinator) -> None:
    left = without_last(coordinator)
    back = loaded(coordinator)
    back.until("prepare")
    back.say("failed", reason="rank 2: 'prepare' failed: out of memory")
    back.entry("stop")
    for one in left:
        one.until("prepare")
        assert "out of memory" in one.until("abort")["reason"]
    assert form_again(left).members.seats == (0, 1)
    coordinator.wait_serving(SECONDS)
    assert [member.seat for member in coordinator.view.away()] == [2]


def test_a_process_that_loads_is_told_to_stop_with_the_service(coordinator: Coordinator) -> None:
    without_last(coordinator)
    back = FakeMember(coordinator, 2, pid=300)
    back.entry("load")
    coordinator.stop()
    assert back.entry("stop") and back.entry("closed")
