"""A client that was made before a fork: its parent's answers stay its parent's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from houses import Alone, house_config

from moeserve.proto.client import AsyncMoeClient, MoeClient
from moeserve.proto.errors import InvalidArgument, MoeError
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.runtime.launch.local_cluster import LocalCluster


@pytest.fixture(scope="module")
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(checkpoint_path)) as cluster:
        yield cluster


def said_by_a_child(act: Callable[[], object]) -> str:
    """How it ended in a process that is forked now: the name of what was raised, or `answered`."""
    mine, child = os.pipe(), os.fork()
    if not child:
        try:
            act()
            said = "answered"
        except BaseException as error:
            said = type(error).__name__
        os.write(mine[1], said.encode())
        os._exit(0)
    os.close(mine[1])
    with os.fdopen(mine[0], "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("transport", ["auto", "shared_memory", "inline"])
def test_a_forked_child_is_told_so_and_its_parent_goes_on(
    house: LocalCluster, alone: Alone, transport: str
) -> None:
    one, other = alone.batch(7, seed=1), alone.batch(7, seed=2)
    with MoeClient(house.address, timeout=10.0, transport=transport) as client:
        for _ in range(4):
            client.forward(0, *one)
        for _ in range(3):
            assert said_by_a_child(lambda: client.forward(0, *other)) == "RuntimeError"
            torch.testing.assert_close(client.forward(0, *one), alone.forward(0, *one), rtol=1e-4, atol=1e-4)


def test_tensors_of_a_lane_are_their_makers(house: LocalCluster, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(7, seed=1)
    with MoeClient(house.address, timeout=10.0) as client:
        placed, output = (client.allocate(0, hidden.shape, "fp32") for _ in range(2))
        placed.tensor.copy_(hidden)
        for _ in range(3):
            client.forward(0, placed, experts, weights, output=output)
        ask = lambda: client.forward(0, placed, experts, weights, output=output)  # noqa: E731
        assert said_by_a_child(ask) == "RuntimeError"
        found = client.forward(0, placed, experts, weights, output=output)
        torch.testing.assert_close(
            torch.as_tensor(found), alone.forward(0, hidden, experts, weights), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("transport", ["shared_memory", "inline"])
def test_an_asynchronous_client_is_of_one_process(house: LocalCluster, alone: Alone, transport: str) -> None:
    one, other = alone.batch(7, seed=1), alone.batch(7, seed=2)

    async def act() -> None:
        async with AsyncMoeClient(house.address, timeout=10.0, transport=transport) as client:
            for _ in range(3):
                await client.forward(0, *one)

            def child() -> None:
                asyncio.events._set_running_loop(None)
                loop = asyncio.new_event_loop()
                loop.run_until_complete(client.forward(0, *other))

            assert said_by_a_child(child) == "RuntimeError"
            found = await client.forward(0, *one)
            torch.testing.assert_close(found, alone.forward(0, *one), rtol=1e-4, atol=1e-4)

    asyncio.run(act())


def test_rows_and_answer_in_one_place_are_refused_by_name(house: LocalCluster, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(7, seed=1)
    for kind in (MoeClient, LaneClient):
        with kind(house.address, timeout=10.0) as client:
            placed = client.allocate(0, hidden.shape, "fp32")
            placed.tensor.copy_(hidden)
            with pytest.raises(InvalidArgument, match="lie over the rows"):
                client.forward(0, placed, experts, weights, output=placed)
            assert torch.equal(placed.tensor, hidden)


def test_a_closed_client_says_so_whatever_it_is_asked(house: LocalCluster) -> None:
    client = MoeClient(house.address, timeout=10.0)
    client.status()
    client.close()
    for ask in (client.status, client.model, client.topology, client.rebalance, client.health):
        with pytest.raises(MoeError, match="is closed; make another one") as told:
            ask()
        assert told.value.reason == "client_closed"

    async def act() -> None:
        other = AsyncMoeClient(house.address, timeout=10.0)
        await other.status()
        await other.close()
        for ask in (other.status, other.topology, other.rebalance, other.health):
            with pytest.raises(MoeError, match="is closed; make another one"):
                await ask()

    asyncio.run(act())
