"""A client that was made before a fork: its parent's answers stay its parent's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from houses import Alone, house_config

from moeserve.proto.client import AsyncMoeClient, Choice, MoeClient
from moeserve.proto.errors import InvalidArgument, MoeError
from moeserve.proto.integrations.attached_service import AttachedService
from moeserve.proto.integrations.settings import Settings as EngineSettings
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.torch import MoeExperts, Settings, connect


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


def test_a_pass_is_of_one_process(house: LocalCluster, alone: Alone) -> None:
    hidden, ids, weights = alone.batch(4, seed=1)
    other = alone.batch(4, seed=2)
    wanted_lane = Wanted("forks", rows=4, dtype="fp32")
    with AttachedLane.attach(house.address, wanted_lane) as lane, lane.begin([0, 1]) as run:
        for act in (
            lambda: run.post(0, other[0], Choice(*other[1:])),
            lambda: run.send(0, 4),
            lambda: lane.begin([0]),
        ):
            assert said_by_a_child(act) == "RuntimeError"
        for act in (run.give_up, run.leave, lambda: lane.rest(0.1), lane.close):
            assert said_by_a_child(act) == "answered"
        for layer in (0, 1):
            run.post(0, hidden, Choice(ids, weights))
            found = torch.from_numpy(run.take(0))
            wanted = alone.forward(layer, hidden, ids, weights)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_attached_way_is_of_one_process(house: LocalCluster, alone: Alone) -> None:
    """A child asked for another lane by the parent's name: over gRPC, which may never answer there."""
    batch = alone.batch(4, seed=1)
    way = connect(Settings("attached", house.address, name="way", rows=4, dtype="fp32", timeout=10.0))
    experts, other = MoeExperts(way, 0), EngineSettings(house.address, mode="attached", timeout=10.0)
    service, ticket = AttachedService(other), experts.submit(*batch)
    service.call(0, batch[0], Choice(*batch[1:]))
    for act in (
        lambda: experts(*batch),
        lambda: experts.wait(ticket),
        lambda: service.call(0, batch[0], Choice(*batch[1:])),
    ):
        assert said_by_a_child(act) == "RuntimeError"
    torch.testing.assert_close(experts.wait(ticket), alone.forward(0, *batch), rtol=1e-4, atol=1e-4)
    service.close()
    way.close()


CALLER_WITH_A_CHILD = """
import os, sys, time
from moeserve.proto.passes.attached import AttachedLane, Wanted
lane = AttachedLane.attach(sys.argv[1], Wanted("orphan", rows=4, dtype="fp32", rank=0))
if os.fork():
    print("attached", flush=True)
time.sleep(30)
"""


def test_a_lane_ends_with_its_caller_though_a_child_of_it_lives(house: LocalCluster) -> None:
    asks = [sys.executable, "-c", CALLER_WITH_A_CHILD, house.address]
    caller = subprocess.Popen(asks, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert caller.stdout is not None
    try:
        assert caller.stdout.readline() == "attached\n"
        with pytest.raises(MoeError, match="device lane named 'orphan' is attached"):
            AttachedLane.attach(house.address, Wanted("orphan", rows=4, dtype="fp32", rank=0))
        os.kill(caller.pid, signal.SIGKILL)
        until = time.monotonic() + 5
        while True:
            try:
                AttachedLane.attach(house.address, Wanted("orphan", rows=4, dtype="fp32", rank=0)).close()
                break
            except MoeError:
                assert time.monotonic() < until, "the child keeps the lane"
                time.sleep(0.05)
    finally:
        os.killpg(caller.pid, signal.SIGKILL)
        caller.wait()
        caller.stdout.close()


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
