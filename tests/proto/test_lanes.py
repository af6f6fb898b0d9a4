"""Which lane a call begins at: one after another at the same, at the same time at different ones."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moeserve.proto import moe_pb2
from moeserve.proto.client.lanes import WHOLE, Lanes
from moeserve.proto.errors import NotFound


def lanes_of(count: int) -> Lanes[str]:
    lanes = Lanes(lambda address, most: address)
    there = [moe_pb2.Lane(rank=at, address=f"lane-{at}") for at in range(count)]
    lanes.found(moe_pb2.GetTopologyReply(lanes=there, serving=True))
    return lanes


def test_calls_one_after_another_go_to_one_lane() -> None:
    lanes = lanes_of(4)
    starts = set()
    for _ in range(20):
        starts.add(start := lanes.begin())
        lanes.end(start)
    assert len(starts) == 1 and starts < set(range(4))


def test_calls_at_the_same_time_spread_evenly_and_come_back_to_their_lanes() -> None:
    lanes = lanes_of(3)
    under_way = [lanes.begin() for _ in range(9)]
    assert Counter(under_way) == {0: 3, 1: 3, 2: 3}
    for _ in range(50):  # each caller has its answer, and calls at once
        done = under_way.pop(random.Random(7).randrange(len(under_way)))
        lanes.end(done)
        under_way.append(lanes.begin())
        assert under_way[-1] == done, "the lane with the fewest calls is the one that has just answered"


def test_clients_begin_at_different_lanes() -> None:
    assert {lanes_of(2).begin() for _ in range(64)} == {0, 1}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_client_begins_where_the_front_door_says(count: int) -> None:
    for at in range(count):
        lanes = Lanes(lambda address, most: address)
        there = [moe_pb2.Lane(rank=one, address=f"lane-{one}") for one in range(count)]
        begin_at = (at * WHOLE + count - 1) // count
        found = moe_pb2.GetTopologyReply(lanes=there, serving=True, begin_at=begin_at)
        lanes.found(found)
        assert lanes.begin() == at
        assert lanes.current is not None and not lanes.current.HasField("begin_at")
        lanes.end(at)
        current = lanes.current
        lanes.found(moe_pb2.GetTopologyReply(lanes=there, serving=True, begin_at=0))
        assert lanes.begin() == at and lanes.current is current, "it is asked again, and stays"


def test_a_lane_that_gave_no_answer_is_not_the_next_ones_first() -> None:
    lanes = lanes_of(3)
    start = lanes.begin()
    lanes.shun(start)
    lanes.end(start)
    other = lanes.begin()
    assert other == (start + 1) % 3
    lanes.shun(start)  # by a call that began before: the others have left that lane already
    lanes.end(other)
    assert lanes.begin() == other


def test_calls_that_began_before_lanes_were_known_go_where_others_do() -> None:
    lanes = Lanes(lambda address, most: address)
    first, second = lanes.begin(), lanes.begin()
    there = [moe_pb2.Lane(rank=at, address=f"lane-{at}") for at in range(5)]
    lanes.found(moe_pb2.GetTopologyReply(lanes=there, serving=True, begin_at=WHOLE // 2))
    assert lanes.current is not None
    assert lanes.pick(lanes.current, None, first) == there[2]
    assert lanes.pick(lanes.current, None, first + 1) == there[3], "its second part, or attempt"
    lanes.end(first)
    assert lanes.begin() == 2
    lanes.shun(second)
    lanes.end(second)
    lanes.end(2)
    assert lanes.begin() == 3


def test_calls_spread_while_lanes_are_asked_for_anew() -> None:
    lanes = lanes_of(2)
    lanes.doubt(lanes.current)
    assert {lanes.begin(), lanes.begin()} == {0, 1}


def test_lanes_that_go_and_come_change_no_count() -> None:
    lanes = lanes_of(4)
    under_way = [lanes.begin() for _ in range(8)]
    lanes.found(moe_pb2.GetTopologyReply(lanes=[moe_pb2.Lane(rank=0, address="lane-0")], serving=True))
    assert lanes.begin() == 0
    for start in (*under_way, 0):
        lanes.end(start)
    with pytest.raises(KeyError):
        lanes.end(0)


def test_clients_spread_anew_when_a_lane_is_back() -> None:
    clients = [lanes_of(1) for _ in range(64)]
    for one in clients:
        one.end(one.begin())
    there = [moe_pb2.Lane(rank=at, address=f"lane-{at}") for at in range(2)]
    for one in clients:
        one.found(moe_pb2.GetTopologyReply(lanes=there, serving=True))
    found = {one.begin() for one in clients}
    assert found == {0, 1}


def test_a_lane_that_is_not_there_is_named() -> None:
    lanes = lanes_of(2)
    assert lanes.current is not None
    with pytest.raises(NotFound, match=r"lane 7 is not one of the lanes \[0, 1\]"):
        lanes.pick(lanes.current, 7, 0)
