"""Topology and status: where callers may call, and what every member of the group is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from fake_members import TOKEN, FakeMember, serving, until
from houses import house_config

from moeserve.cli.status import text
from moeserve.dispatch.members import Member, Members
from moeserve.proto import moe_pb2
from moeserve.proto.client.lanes import WHOLE
from moeserve.runtime.doors.front_door import FrontDoor
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.served import served_from

MEMBERS = Members((Member(0, lane=2), Member(1, owner=0), Member(5, lane=0, owner=2)), 4, 3)
"""A lane, an owner, and a rank that is both; two lanes and an owner's place are reserved."""


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    epoch = Epoch.first(Mesh(2, 1, 2), layers=2, experts=8, members=MEMBERS)
    made = Coordinator(epoch, (0, 1), StepPace(8, 16), "127.0.0.1", TOKEN)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def front(coordinator: Coordinator, tmp_path: Path) -> Iterator[FrontDoor]:
    make_checkpoint("qwen3_moe", tmp_path)
    door = FrontDoor("m", served_from(house_config(tmp_path)), coordinator, 1 << 20, lambda *call: None)
    try:
        yield door
    finally:
        door.close()


def told(members: Any) -> list[tuple[int | None, ...]]:
    """Seat, lane, owner, position, slots and generation of each, None for a place that it has not."""
    return [
        (
            one.seat,
            one.lane if one.HasField("lane") else None,
            one.owner if one.HasField("owner") else None,
            one.position,
            one.slots,
            one.generation,
        )
        for one in members
    ]


def everyone(generation: int) -> list[tuple[int | None, ...]]:
    return [(0, 2, None, 0, 0, generation), (1, None, 0, 1, 4, generation), (5, 0, 2, 2, 4, generation)]


def test_callers_are_told_of_lanes_and_everybody_of_members(
    coordinator: Coordinator, front: FrontDoor
) -> None:
    serving(coordinator, MEMBERS)
    topology = front.GetTopology(moe_pb2.GetTopologyRequest(), None)  # type: ignore[arg-type]
    assert [(lane.lane, lane.rank, lane.address) for lane in topology.lanes] == [
        (2, 0, "door 0"),
        (0, 5, "door 5"),
    ]
    assert told(topology.members) == everyone(generation=1) and topology.serving
    assert (topology.max_lanes, topology.max_owners) == (4, 3)


@pytest.mark.parametrize("asks", [1, 2, 3])
@pytest.mark.parametrize("lanes", [2, 3, 8])
def test_callers_begin_at_all_lanes_alike(
    coordinator: Coordinator, front: FrontDoor, lanes: int, asks: int
) -> None:
    """asks: of each caller, who goes by the first answer."""
    serving(coordinator, MEMBERS)
    found = [
        front.GetTopology(moe_pb2.GetTopologyRequest(), None).begin_at  # type: ignore[arg-type]
        for _ in range(16 * lanes * asks)
    ]
    callers = Counter(lanes * begin_at // WHOLE for begin_at in found[::asks])
    assert min(callers.values()) >= 14 and max(callers.values()) <= 18 and len(callers) == lanes
    first = Counter(lanes * begin_at // WHOLE for begin_at in found[: lanes * asks : asks])
    assert max(first.values()) <= 2, "also of the first few"


def test_status_tells_of_members_that_are_away_too(coordinator: Coordinator, front: FrontDoor) -> None:
    members = serving(coordinator, MEMBERS)
    members[1].stream.close()
    members[0].entry("abort")
    status = front.GetStatus(moe_pb2.GetStatusRequest(), None)  # type: ignore[arg-type]
    assert [(rank.rank, rank.up) for rank in status.ranks] == [(0, True), (1, False), (5, True)]
    away = everyone(generation=1)
    away[1] = (*away[1][:-1], 0)
    assert told(rank.member for rank in status.ranks) == away
    assert (status.state, status.max_lanes, status.max_owners) == ("forming", 4, 3)
    _, table, *_ = text(status).split("\n\n")
    ranks = [line.split()[:5] for line in table.splitlines()]
    assert ranks[-3:] == [
        ["0", "2", "-", "0", "yes"],
        ["1", "-", "0", "4", "no"],
        ["5", "0", "2", "4", "yes"],
    ]


def test_lanes_that_are_away_take_no_calls(coordinator: Coordinator, front: FrontDoor) -> None:
    assert not front.GetTopology(moe_pb2.GetTopologyRequest(), None).lanes  # type: ignore[arg-type]
    only = FakeMember(coordinator, 5)
    until(lambda: 5 in coordinator.seats())
    topology = front.GetTopology(moe_pb2.GetTopologyRequest(), None)  # type: ignore[arg-type]
    assert [lane.rank for lane in topology.lanes] == [5] and not topology.serving
    only.stream.close()


def test_status_says_that_the_service_stops(coordinator: Coordinator, front: FrontDoor) -> None:
    context: Any = None
    coordinator.stopping.reason = "the service is stopping"
    assert front.GetTopology(moe_pb2.GetTopologyRequest(), context).reason == "the service is stopping"
    status = front.GetStatus(moe_pb2.GetStatusRequest(), context)
    assert (status.state, status.reason) == ("stopping", "the service is stopping")
    coordinator.stop("that is all")
    assert front.GetStatus(moe_pb2.GetStatusRequest(), context).state == "stopped"
