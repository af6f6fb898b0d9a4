"""Inline calls over device lanes of their rank: right answers, and another way where a lane gives none."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from failures import standing_still
from houses import Alone, house_config
from lane_calls import in_threads, lanes_at, requests

from moeserve.proto import moe_pb2
from moeserve.proto.client import Choice, Logits, MoeClient
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, MoeError, NotFound
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.proto.tensors import describe_into, plain
from moeserve.proto.transports.data_connections import LET_IN
from moeserve.proto.transports.frames import frame_of
from moeserve.runtime.doors.calls.connection_lane import ALONE_SECONDS, FEWEST_CALLS
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SECONDS = 20.0
ROWS = 40  # whose bytes lie beside their message
EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
OVER_LANES = {"passes__connections": "always", "passes__lanes": 6, "cluster__stopped_seconds": 0.0}


@pytest.fixture(scope="module")
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(checkpoint_path, **EP2, **OVER_LANES)) as cluster:
        yield cluster


@pytest.fixture
def client(house: LocalCluster) -> Iterator[MoeClient]:
    with MoeClient(house.address, timeout=SECONDS, transport="inline", lane=0) as made:
        yield made
    until(lambda: not lanes_of(house))


def lanes_of(house: LocalCluster, rank: int = 0) -> list[moe_pb2.DeviceLaneInfo]:
    """Those of data connections that are attached to a rank."""
    return [lane for lane in lanes_at(house.address, rank) if lane.name.startswith("connection-")]


def until(true: object, seconds: float = 5.0) -> None:
    limit = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < limit
        time.sleep(0.01)


def check(client: MoeClient, alone: Alone, rows: int, seed: int, **options: int) -> None:
    batch = alone.batch(rows, seed=seed)
    found = client.forward(seed % 2, *batch, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, alone.forward(seed % 2, *batch), **CLOSE)


def warmed(client: MoeClient, alone: Alone, rows: int = ROWS) -> None:
    """Each of its connections has a lane: no other has called lately."""
    for turn in range(2 * FEWEST_CALLS + 6):
        check(client, alone, rows, turn)
        if turn == 2:
            time.sleep(1.2 * ALONE_SECONDS)


def test_calls_of_a_connection_go_over_a_lane_of_their_rank(
    house: LocalCluster, client: MoeClient, alone: Alone
) -> None:
    check(client, alone, ROWS, 1)
    time.sleep(1.2 * ALONE_SECONDS)
    for seed in range(FEWEST_CALLS - 2):
        check(client, alone, ROWS, seed)
    assert not lanes_of(house), "a lane is not worth a few calls"
    before = requests(house, method="DataConnection"), requests(house, method="DeviceLane")
    for seed in range(30):
        check(client, alone, ROWS, seed)
    (lane,) = lanes_of(house)
    assert (lane.rows, lane.device, lane.steps) == (64, "cpu", 30)
    for seed, rows in enumerate((1, 33, 64, 65, 130, 20, 64, 900, 1, 17)):
        check(client, alone, rows, seed)
    (lane,) = lanes_of(house)
    assert lane.rows == 1024, "for more rows it goes for another one"
    after = requests(house, method="DataConnection"), requests(house, method="DeviceLane")
    assert after[0] == before[0] + 40, "each is counted as what it is"
    assert after[1] - before[1] >= 35
    client.close()
    until(lambda: not lanes_of(house))


def test_routes_of_any_kind_and_errors_are_those_of_other_calls(
    house: LocalCluster, client: MoeClient, alone: Alone
) -> None:
    warmed(client, alone)
    hidden, experts, weights = alone.batch(ROWS, seed=5)
    logits = torch.randn(ROWS, alone.checkpoint.num_experts, generator=torch.Generator().manual_seed(1))
    with MoeClient(house.address, timeout=SECONDS, transport="shared_memory") as near:
        wanted = near.call(1, hidden, Logits(logits))
        for _ in range(3):
            found = client.call(1, hidden, Logits(logits))
            torch.testing.assert_close(found.hidden, wanted.hidden, **CLOSE)
            assert (found.epoch, found.weights_version) == (wanted.epoch, wanted.weights_version)
    right = alone.forward(0, hidden, experts, weights)
    loose = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(client.forward(0, hidden, experts.long(), weights), right, **CLOSE)
    for route in (Choice(experts, weights.bfloat16()), Choice(experts.long(), weights.half())):
        torch.testing.assert_close(client.call(0, hidden, route).hidden, right, **loose)
    torch.testing.assert_close(
        client.forward(0, hidden.half(), experts, weights).float(),  # type: ignore[union-attr]
        right,
        **loose,
    )
    for _ in range(2):
        with pytest.raises(NotFound, match="layer 77"):
            client.forward(77, hidden, experts, weights)
        with pytest.raises(InvalidArgument, match=r"choice\.ids: id \d+ is out of range"):
            client.forward(0, hidden, experts + 1000, weights)
        with pytest.raises(InvalidArgument, match="out of range"):
            client.forward(0, hidden, experts.long() + (1 << 33), weights)
        with pytest.raises(InvalidArgument, match=r"choice\.weights"):
            client.forward(0, hidden, experts, weights[:, :1])
        with pytest.raises(InvalidArgument, match="hidden"):
            client.forward(0, hidden[:, :-1], experts, weights)
        with pytest.raises(MoeError, match="wrong_version"):
            client.forward(0, hidden, experts, weights, weights_version=9)
        check(client, alone, ROWS, 2)
        check(client, alone, ROWS, 3, weights_version=1)
    assert len(lanes_of(house)) == 1


def test_half_of_the_lanes_stay_others(house: LocalCluster, alone: Alone) -> None:
    clients = [MoeClient(house.address, timeout=SECONDS, transport="inline", lane=0) for _ in range(5)]
    for each in clients:
        warmed(each, alone)
    assert len(lanes_of(house)) == 3
    with LaneClient(house.address, timeout=SECONDS, lane=0) as near:
        check(near, alone, ROWS, 1)
        assert len(near._idle) == 1

    def call(number: int) -> None:
        for turn in range(25):
            check(clients[number], alone, 20 + (number + turn) % 40, number + turn)

    before = requests(house, method="DeviceLane")
    in_threads(5, call)
    assert requests(house, method="DeviceLane") < before + 20, "several callers go another way"
    for each in clients:
        each.close()
    until(lambda: not lanes_of(house))


def test_callers_of_two_lanes_of_a_group_are_not_alone(
    house: LocalCluster, client: MoeClient, alone: Alone
) -> None:
    warmed(client, alone)
    assert len(lanes_of(house)) == 1
    with MoeClient(house.address, timeout=SECONDS, transport="inline", lane=1) as other:
        before = requests(house, method="DeviceLane")
        for seed in range(40):
            check(client, alone, ROWS, seed)
            check(other, alone, ROWS, seed + 1)
        assert requests(house, method="DeviceLane") < before + 10, (
            "steps of one would wait behind the other's"
        )
        assert not lanes_of(house, 1)
        time.sleep(1.2 * ALONE_SECONDS)
        before = requests(house, method="DeviceLane")
        for seed in range(10):
            check(client, alone, ROWS, seed)
        assert requests(house, method="DeviceLane") >= before + 9, "it is alone again"


def test_a_caller_that_goes_in_a_call_leaves_no_lane_and_holds_up_nobody(
    house: LocalCluster, client: MoeClient, alone: Alone
) -> None:
    warmed(client, alone)
    (link,) = client._core.lanes._links.values()
    time.sleep(1.2 * ALONE_SECONDS)
    made = link._ask_connection(SECONDS)
    hidden, experts, weights = alone.batch(ROWS, seed=1)
    asked = moe_pb2.ForwardRequest(layer=1)
    describe_into(asked.hidden, plain(hidden, "hidden").spec)
    for message, tensor in ((asked.choice.ids, experts), (asked.choice.weights, weights)):
        describe_into(message, plain(tensor, "route").spec)
        message.data = plain(tensor, "route").storage.tobytes()
    data = plain(hidden, "hidden").storage.data.cast("B")
    frame = b"".join(frame_of(asked.SerializeToString(), data))
    with socket.create_connection(("127.0.0.1", made.port), 5.0) as one:
        one.sendall(made.secret)
        assert one.recv(1) == LET_IN
        for turn in range(FEWEST_CALLS + 2):
            one.sendall(frame)
            assert one.recv(1 << 20)
            time.sleep(0.02 if turn else 1.2 * ALONE_SECONDS)
        assert len(lanes_of(house)) == 2
        one.sendall(frame)
    for seed in range(20):
        check(client, alone, ROWS, seed)
    until(lambda: len(lanes_of(house)) == 1)


def test_a_deadline_over_a_lane_is_kept_and_the_next_call_is_right(
    house: LocalCluster, client: MoeClient, alone: Alone
) -> None:
    warmed(client, alone)
    batch = alone.batch(ROWS, seed=1)
    with standing_still(house.pid(1)):  # the group's other member, without which no step ends
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.forward(1, *batch, timeout=0.5)
        assert time.monotonic() - began < 3.0
    for seed in range(20):
        check(client, alone, ROWS, seed)


@pytest.mark.timeout(120)
def test_calls_go_on_when_ranks_are_killed_and_weights_are_reloaded(
    checkpoint_path: Path, alone: Alone
) -> None:
    with LocalCluster(house_config(checkpoint_path, **EP2, **OVER_LANES)) as house:
        for kills_its_own in (True, False):
            with MoeClient(house.address, timeout=60.0, transport="inline") as client:
                warmed(client, alone)
                (own,) = [rank for rank in (0, 1) if lanes_of(house, rank)]
                os.kill(house.pid(own if kills_its_own else 1 - own), signal.SIGKILL)
                for seed in range(40):
                    check(client, alone, ROWS, seed)
            until(lambda: not lanes_of(house, 0) and not lanes_of(house, 1))
        with MoeClient(house.address, timeout=60.0, transport="inline", lane=0) as client:
            warmed(client, alone)
            assert client.reload(str(checkpoint_path)).outcome == "reloaded"
            for seed in range(10):
                check(client, alone, ROWS, seed, weights_version=2)
