"""Seats that are filled and emptied on purpose: who is told what, and what becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from fake_members import SECONDS, FakeMember, form_again, head_of, serving, until
from houses import house_config

from moeserve.dispatch.members import Member, Members
from moeserve.proto import moe_pb2
from moeserve.runtime.control.messages import epoch_from
from moeserve.runtime.doors.front_door import FrontDoor
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.generations.resizing import free_seats
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.served import served_from

RANKS = Members.of_ranks(3, 4, 4)
"""Three ranks, and room for a fourth."""


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """Each owner has four slots; there are six experts."""
    epoch = Epoch.first(Mesh(3, 1, 3), layers=1, experts=6, redundant=6, members=RANKS)
    with head_of(epoch) as made:
        made.generations.turnover.serve_on = True
        yield made


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begins `work`; what is returned waits for what it returns."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(SECONDS)
        return found[0]

    return result


def form(members: dict[int, FakeMember]) -> None:
    """All have heard of an abort, and join the next generation."""
    for one in members.values():
        one.entry("abort")
    for one in members.values():
        one.entry("prepare")
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    for one in members.values():
        one.entry("join")
        one.say("joined")


def grown(coordinator: Coordinator, members: dict[int, FakeMember]) -> None:
    """Rank 3 comes, loads and joins."""
    coordinator.resizing.expect([3])
    assert coordinator.resizing.wanted == {0, 1, 2, 3}
    members[3] = FakeMember(coordinator, 3)
    members[3].entry("load")
    members[3].say("loaded", bytes_read=0, weight_bytes=0)
    form(members)
    until(lambda: coordinator.progress().state == "serving")


def test_why_a_rank_cannot_load_is_said_until_it_has(coordinator: Coordinator) -> None:
    """A reload was cut off, and the folder that a layer's weights are of is gone, for example."""
    why = "rank 3: 'load' failed: CheckpointError: cannot read its config.json"
    members = serving(coordinator, RANKS)
    coordinator.resizing.expect([3])
    for _ in range(2):
        members[3] = FakeMember(coordinator, 3)
        members[3].entry("load")
        members[3].say("failed", reason=why, for_good=False)
        until(lambda: coordinator.progress().reason == f"ranks [3] are to join; {why}")
        members[3].until("closed")
    assert why in coordinator.resizing.wait_joined([3], 0.01)
    members[3] = FakeMember(coordinator, 3)
    members[3].entry("load")
    assert why in coordinator.progress().reason, "it has yet to show that it can"
    members[3].say("loaded", bytes_read=0, weight_bytes=0)
    form(members)
    until(lambda: coordinator.progress().state == "serving")
    assert coordinator.progress().reason == ""


def test_why_a_rank_cannot_start_now_is_said_until_it_does(coordinator: Coordinator) -> None:
    """Its port is taken, for example: the launcher tries again."""
    why = "rank 3 cannot start: its port is taken"
    members = serving(coordinator, RANKS)
    coordinator.resizing.expect([3])
    FakeMember(coordinator, 3, refused=why, for_good=False).entry("closed")
    assert coordinator.progress().reason == f"ranks [3] are to join; {why}"
    said = coordinator.resizing.wait_joined([3], 0.01)
    assert said == f"ranks [3] have not joined within 0.01 s: ranks [3] are to join; {why}"
    members[3] = FakeMember(coordinator, 3)
    members[3].entry("load")
    assert coordinator.progress().reason == "ranks [3] are to join"


def test_a_rank_that_is_expected_loads_and_then_joins(coordinator: Coordinator) -> None:
    members = serving(coordinator, RANKS)
    coordinator.resizing.expect([3])
    joined = beside(lambda: coordinator.resizing.wait_joined([3], SECONDS))
    assert coordinator.epoch.members == RANKS and coordinator.progress().state == "serving"
    members[3] = FakeMember(coordinator, 3)
    loaded = epoch_from(members[3].entry("load")["epoch"])
    assert loaded.members.at(3) == Member(3, 3, 3) and loaded.placement.room == (4, 4, 4, 4)
    members[3].say("loaded", bytes_read=0, weight_bytes=0)
    form(members)
    assert joined() == "" and coordinator.resizing.settle([3]) == [3]
    assert np.array_equal(coordinator.epoch.placement.slots, loaded.placement.slots)


def test_a_lane_is_named_once_it_has_joined(coordinator: Coordinator, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    door = FrontDoor("m", served_from(house_config(tmp_path)), coordinator, 1 << 20, lambda *call: None)

    def lanes() -> list[int]:
        found = door.GetTopology(moe_pb2.GetTopologyRequest(), None)  # type: ignore[arg-type]
        assert found.serving
        return [lane.rank for lane in found.lanes]

    members = serving(coordinator, RANKS)
    coordinator.resizing.expect([3])
    members[3] = FakeMember(coordinator, 3)
    members[3].entry("load")
    members[3].say("loaded", bytes_read=0, weight_bytes=0)
    for one in members.values():
        one.entry("abort")
    until(lambda: 3 in coordinator.epoch.members.seats)
    assert lanes() == [0, 1, 2], "rank 3 does not take calls before its first generation serves"
    for one in members.values():
        one.entry("prepare")
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    for one in members.values():
        one.entry("join")
        one.say("joined")
    until(lambda: lanes() == [0, 1, 2, 3])
    coordinator.resizing.leave([1])
    assert lanes() == [0, 2, 3]
    door.close()


def test_a_rank_that_cannot_start_is_given_up_with_its_reason(coordinator: Coordinator) -> None:
    serving(coordinator, RANKS)
    coordinator.resizing.expect([3])
    FakeMember(coordinator, 3, refused="rank 3 cannot start: no such GPU", for_good=True)
    assert coordinator.resizing.wait_joined([3], SECONDS) == "rank 3 cannot start: no such GPU"
    assert coordinator.resizing.settle([3]) == []
    assert coordinator.resizing.wanted == {0, 1, 2} and coordinator.progress().reason == ""


def test_a_rank_that_does_not_come_in_time_is_expected_no_more(coordinator: Coordinator) -> None:
    serving(coordinator, RANKS)
    coordinator.resizing.expect([3])
    late = FakeMember(coordinator, 3)
    late.entry("load")
    why = coordinator.resizing.wait_joined([3], 0.1)
    assert why.startswith("ranks [3] have not joined within 0.1 s")
    assert coordinator.resizing.settle([3]) == [] and coordinator.resizing.wanted == {0, 1, 2}
    late.entry("stop")


def test_a_rank_that_retires_is_told_to_stop_and_the_others_go_on(coordinator: Coordinator) -> None:
    members = serving(coordinator, RANKS)
    grown(coordinator, members)
    drained = beside(lambda: coordinator.resizing.drain([3], SECONDS, "why"))
    assert members[3].entry("drain")["reason"] == "why"
    members[3].say("drained")
    drained()
    retired = beside(lambda: coordinator.resizing.retire([3], SECONDS))
    leaving = members.pop(3)
    leaving.entry("stop")
    leaving.stream.close()
    form(members)
    assert retired() == "" and coordinator.epoch.members.seats == (0, 1, 2)
    assert coordinator.resizing.wanted == {0, 1, 2}
    assert set(range(6)) <= set(coordinator.epoch.placement.slots[0].tolist())


def test_a_rank_that_is_to_come_back_to_a_seat_is_drained_anew(coordinator: Coordinator) -> None:
    members = serving(coordinator, RANKS)
    for _ in range(2):
        grown(coordinator, members)
        drained = beside(lambda: coordinator.resizing.drain([3], SECONDS, "why"))
        members[3].entry("drain")
        members[3].say("drained")
        drained()
        retired = beside(lambda: coordinator.resizing.retire([3], SECONDS))
        leaving = members.pop(3)
        leaving.entry("stop")
        leaving.stream.close()
        form(members)
        assert retired() == ""


def test_a_rank_that_is_lost_while_it_drains_is_wanted_no_more(coordinator: Coordinator) -> None:
    members = serving(coordinator, RANKS)
    drained = beside(lambda: coordinator.resizing.drain([2], SECONDS, "why"))
    members[2].entry("drain")
    members.pop(2).stream.close()
    drained()
    retired = beside(lambda: coordinator.resizing.retire([2], SECONDS))
    form_again(members.values())
    assert retired() == ""
    assert coordinator.resizing.wanted == {0, 1} and coordinator.progress().reason == ""


def test_a_drain_lasts_though_another_member_is_lost(coordinator: Coordinator) -> None:
    """Its lane holds the call under way, which has an answer in the next generation."""
    members = serving(coordinator, RANKS)
    members[2].announce(1, 1)
    for one in members.values():
        one.entry("step")
    over: list[bool] = []
    drained = beside(lambda: (coordinator.resizing.drain([2], SECONDS, "why"), over.append(True)))
    members[2].entry("drain")
    members.pop(0).stream.close()
    form_again(members.values())
    coordinator.wait_serving(SECONDS)
    assert not over
    members[2].say("drained")
    drained()
    assert over


def test_the_epoch_without_those_who_go_is_made_once(coordinator: Coordinator) -> None:
    """The head looks every two milliseconds whether a step is still under way."""
    members, made = serving(coordinator, RANKS), []

    def without(epoch: Epoch, seats: list[int]) -> Epoch:
        made.append(seats)
        return epoch.without(seats)

    members[0].announce(1, 1)
    for one in members.values():
        one.entry("step")
    coordinator.generations.turnover.without = without
    retired = beside(lambda: coordinator.resizing.retire([2], SECONDS))
    members[0].until("abort")  # that step has not ended within a second
    members.pop(2)
    form_again(members.values())
    assert retired() == "" and made == [[2]]


def test_what_a_lane_said_of_an_earlier_scale_does_not_count_when_the_service_stops(
    coordinator: Coordinator,
) -> None:
    members = serving(coordinator, RANKS)
    turnover = coordinator.generations.turnover
    turnover.without = lambda epoch, seats: (refusing if turnover.retiring else Epoch.without)(epoch, seats)
    drained = beside(lambda: coordinator.resizing.drain([2], SECONDS, "why"))
    members[2].entry("drain")
    members[2].say("drained")
    drained()
    assert coordinator.resizing.retire([2], SECONDS).startswith("ranks [2] stay")
    members.pop(2).entry("stop")
    form_again(members.values())
    members[2] = FakeMember(coordinator, 2, pid=300)
    members[2].entry("load")
    members[2].say("loaded", bytes_read=0, weight_bytes=0)
    form_again(members.values())
    coordinator.wait_serving(SECONDS)
    stopped = beside(lambda: coordinator.stopping.drain(1.0))
    for seat in (0, 1):
        members[seat].until("drain")
        members[seat].say("drained")
    assert stopped() is False, "lane 2 has not said that its calls are over"


def test_ranks_that_alone_hold_experts_stay_and_are_started_again(coordinator: Coordinator) -> None:
    members = serving(coordinator, RANKS)
    coordinator.generations.turnover.without = refusing
    why = beside(lambda: coordinator.resizing.retire([2], SECONDS))()
    assert why == "ranks [2] stay: layer 0: 1 experts lost their last replica"
    members[2].entry("stop")
    assert coordinator.epoch.members == RANKS
    assert (
        coordinator.generations.turnover.leaving == frozenset()
        and coordinator.generations.turnover.retiring == ()
    )


def test_a_group_whose_dispatchers_serve_it_whole_alone_keeps_its_ranks(coordinator: Coordinator) -> None:
    """Without one of them, no generation would ever form."""
    members, why = serving(coordinator, RANKS), "deepep_ll serves groups whose ranks are all there"
    coordinator.generations.turnover.why_whole = lambda: why
    with pytest.raises(ValueError, match=why):
        coordinator.resizing.epoch_without([2])
    assert coordinator.resizing.retire([2], SECONDS) == f"ranks [2] stay: {why}"
    assert coordinator.epoch.members == RANKS
    members[2].entry("stop")


def test_ranks_that_have_left_are_not_said_to_stay(coordinator: Coordinator) -> None:
    members = serving(coordinator, RANKS)
    retired = beside(lambda: coordinator.resizing.retire([2], 0.5))
    members[2].entry("stop")
    assert retired().startswith("ranks [2] have left, and the group does not serve yet")


def refusing(epoch: Epoch, seats: list[int]) -> Epoch:
    """No other member has room."""
    raise ValueError("layer 0: 1 experts lost their last replica")


def test_a_seat_is_free_where_its_lane_and_its_owners_place_are() -> None:
    assert free_seats(RANKS, 1) == [3]
    with pytest.raises(ValueError, match="room for 4 lanes and 4 owners"):
        free_seats(RANKS, 2)
    mixed = Members((Member(0, lane=1), Member(5, lane=3, owner=0)), 5, 5)
    assert free_seats(mixed, 2) == [2, 4]
