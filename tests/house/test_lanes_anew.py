"""Clients learn of lanes that come, or come back: no call fails by those."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from houses import Alone, house_config

from moeserve.proto import moe_pb2
from moeserve.proto.client import MoeClient, lanes
from moeserve.proto.client.aio import AsyncMoeClient
from moeserve.proto.client.lanes import Lanes
from moeserve.proto.errors import NotFound
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SECONDS = 30.0
EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}


@pytest.fixture(scope="module")
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(checkpoint_path, **EP2)) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "ANEW_SECONDS", 0.2)


def lone() -> moe_pb2.GetTopologyReply:
    """What the front door says while one of two ranks is away."""
    return moe_pb2.GetTopologyReply(serving=True, lanes=[moe_pb2.Lane(rank=0, address="127.0.0.1:9")])


@pytest.mark.timeout(90)
def test_a_rank_that_is_back_gets_calls_again(house: LocalCluster, alone: Alone) -> None:
    batch = alone.batch(20, seed=1)
    wanted = alone.forward(1, *batch)
    with MoeClient(house.address, timeout=SECONDS) as client:
        client.forward(1, *batch)
        pid = house.pid(1)
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + SECONDS
        while len(client.topology().lanes) < 2 or house.pid(1) == pid:
            assert time.monotonic() < until
            torch.testing.assert_close(client.forward(1, *batch), wanted, **CLOSE)
        known: set[str] = set()
        while known != {lane.address for lane in client.topology().lanes}:
            assert time.monotonic() < until
            torch.testing.assert_close(client.forward(1, *batch), wanted, **CLOSE)
            current = client._core.lanes.current
            known = set() if current is None else {lane.address for lane in current.lanes}
        with ThreadPoolExecutor(4) as pool:  # one caller alone would stay at a lane
            while set(client._core.lanes._links) != known:
                assert time.monotonic() < until
                for found in pool.map(lambda _: client.forward(1, *batch), range(8)):
                    torch.testing.assert_close(found, wanted, **CLOSE)


def test_an_asynchronous_client_asks_again_too(house: LocalCluster, alone: Alone) -> None:
    batch = alone.batch(20, seed=1)
    wanted = alone.forward(1, *batch)

    async def calls() -> None:
        async with AsyncMoeClient(house.address, timeout=SECONDS) as client:
            found = await client.topology()
            client._core.lanes.found(moe_pb2.GetTopologyReply(serving=True, lanes=found.lanes[:1]))
            until = time.monotonic() + SECONDS
            while client._core.lanes.current != found:
                assert time.monotonic() < until
                torch.testing.assert_close(await client.forward(1, *batch), wanted, **CLOSE)
                await asyncio.sleep(0.01)

    asyncio.run(calls())


def test_a_head_that_does_not_answer_leaves_what_is_known(
    house: LocalCluster, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = alone.batch(20, seed=1)
    with MoeClient(house.address, timeout=SECONDS) as client:
        client.forward(1, *batch)
        known = client._core.lanes.current
        asked = list[float]()
        real = client._door.front.GetTopology.future

        class Fails:
            """A question of which nothing comes."""

            @staticmethod
            def future(request: moe_pb2.GetTopologyRequest, timeout: float) -> object:
                asked.append(timeout)
                return real(request, timeout=1e-6)

        monkeypatch.setattr(client._door.front, "GetTopology", Fails)
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            torch.testing.assert_close(client.forward(1, *batch), alone.forward(1, *batch), **CLOSE)
        assert 2 <= len(asked) <= 4 and set(asked) == {lanes.ASK_SECONDS}
        assert client._core.lanes.current is known
    client._find_anew()  # of a client that is closed: nothing comes of it


def test_one_of_all_callers_asks_and_the_same_answer_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Lanes[str](lambda address, most: address)
    assert not made.due(), "nothing was found yet: a call asks and waits"
    first = lone()
    assert made.found(first) == [] and not made.due()
    assert made.link(first, first.lanes[0]) == "127.0.0.1:9"
    time.sleep(0.25)
    assert [made.due(), made.due()] == [True, False]
    assert made.found(lone()) == [] and made.current is first
    assert made.found(moe_pb2.GetTopologyReply(serving=True)) == ["127.0.0.1:9"]
    made.clear()
    time.sleep(0.25)
    assert not made.due()


@pytest.mark.parametrize("kind", [MoeClient, LaneClient])
def test_a_lane_that_is_away_is_waited_for_by_who_asks_for_no_other(
    checkpoint_path: Path, alone: Alone, kind: type[MoeClient]
) -> None:
    values = {"parallel__data_parallel_size": 3, "parallel__enable_expert_parallel": True}
    batch = alone.batch(5, seed=1)
    with LocalCluster(house_config(checkpoint_path, balance__redundant_experts=9, **values)) as house:
        with kind(house.address, lane=1, timeout=60.0) as client:
            client.forward(1, *batch)
            os.kill(house.pid(1), signal.SIGKILL)
            time.sleep(0.02)
            assert list(client.topology().away) in ([1], []), "it may be back"
            found = client.forward(1, *batch)
            torch.testing.assert_close(found, alone.forward(1, *batch), rtol=1e-4, atol=1e-4)
        with kind(house.address, lane=7, timeout=60.0) as client, pytest.raises(NotFound, match="lane 7"):
            client.forward(1, *batch)


def test_a_lane_that_was_scaled_away_is_none(checkpoint_path: Path, alone: Alone) -> None:
    values = {"parallel__data_parallel_size": 3, "parallel__enable_expert_parallel": True}
    batch = alone.batch(5, seed=1)
    with (
        LocalCluster(house_config(checkpoint_path, balance__redundant_experts=9, **values)) as house,
        MoeClient(house.address, lane=2, timeout=20.0) as client,
    ):
        client.forward(1, *batch)
        assert client.scale(2).outcome == "scaled"
        assert not client.topology().away
        began = time.monotonic()
        with pytest.raises(NotFound, match="lane 2 is not one of the lanes"):
            client.forward(1, *batch)
        assert time.monotonic() - began < 5.0
