"""A group that loses a member serves on without it, and has it back: no call fails on a living lane."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from changes import Changes
from failures import stand_still
from houses import EP4, Alone, house_config, request_of

from moeserve.proto import moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.proto.tensors import as_torch, spec_of
from moeserve.runtime.launch.local_cluster import LocalCluster

SECONDS = 60.0
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Raw:
    """One caller of each lane that repeats nothing: what it fails with is what the lane failed with."""

    def __init__(self, house: LocalCluster, alone: Alone, lanes: list[int]) -> None:
        self.batches = [alone.batch(6, seed=seed) for seed in range(4)]
        self.right = [alone.forward(1, *batch) for batch in self.batches]
        self.requests = [request_of(1, batch) for batch in self.batches]
        with MoeClient(house.address) as client:
            addresses = {lane.rank: lane.address for lane in client.topology().lanes}
        self.failed: list[str] = []
        self._over = threading.Event()
        self._asking = [threading.Thread(target=self._ask, args=(lane, addresses[lane])) for lane in lanes]

    def _ask(self, lane: int, address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            stub, turn = moe_pb2_grpc.LaneServiceStub(channel), 0
            while not self._over.is_set():
                at = turn % len(self.requests)
                turn += 1
                try:
                    reply = stub.Forward(self.requests[at], timeout=SECONDS)
                    found = as_torch(reply.hidden.data, spec_of(reply.hidden, "x", rank=2, dtypes=("fp32",)))
                    torch.testing.assert_close(found, self.right[at], **CLOSE)
                except (grpc.RpcError, AssertionError) as failed:
                    self.failed.append(f"lane {lane}: {failed}")

    def __enter__(self) -> Raw:
        for one in self._asking:
            one.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        for one in self._asking:
            one.join(SECONDS)
            assert not one.is_alive()


def lost(house: LocalCluster, rank: int, how: str = "killed") -> None:
    pid = house.pid(rank)
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
    else:
        stand_still(pid)


def until(true: Callable[[], bool], what: str = "") -> None:
    limit = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


def seats(house: LocalCluster) -> tuple[int, ...]:
    return house.head.coordinator.epoch.members.seats


def whole(house: LocalCluster) -> None:
    until(lambda: seats(house) == (0, 1, 2, 3) and house.state() == ("serving", ""), "all members are back")


@pytest.fixture
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    # qwen's tiny model has 8 experts: 16 slots on four owners hold all of them on any three
    with LocalCluster(house_config(checkpoint_path, balance__redundant_experts=8, **EP4)) as made:
        yield made


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_member_costs_no_call_and_comes_back(house: LocalCluster, alone: Alone, how: str) -> None:
    with Raw(house, alone, [0, 1, 3]) as raw:
        time.sleep(1.0)
        pid, changes = house.pid(2), Changes(house)
        lost(house, 2, how)
        changes.until(lambda was: was.seats == (0, 1, 3), "it goes on without rank 2")
        said = "ranks [2] are away, and others serve their experts"
        changes.until(lambda was: was[1:] == ("serving", said), "and says so")
        whole(house)
        time.sleep(0.5)
    assert raw.failed == []
    assert house.pid(2) != pid
    with MoeClient(house.address) as client:
        assert [lane.rank for lane in client.topology().lanes] == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("dispatcher", ["nvlink_ll", "nvlink_ht"])
def test_over_peer_memory_no_answer_lacks_what_a_lost_member_had(
    checkpoint_path: Path, alone: Alone, dispatcher: str, how: str
) -> None:
    """There the end of a group ends all waiting, and the step under way goes on without the lost rows."""
    given = EP4 | {"plan__all2all_backend": dispatcher, "balance__redundant_experts": 8}
    with LocalCluster(house_config(checkpoint_path, **given)) as house:
        with Raw(house, alone, [0, 3]) as raw:
            for rank in (2, 1):
                time.sleep(0.5)
                changes = Changes(house)
                lost(house, rank, how)
                changes.until(lambda was, gone=rank: gone not in was.seats)
                whole(house)
            time.sleep(0.5)
        assert raw.failed == []


@pytest.mark.parametrize("dispatcher", ["naive", "nvlink_ll"])
def test_nobody_waits_for_the_end_of_a_process_that_harms_nobody(
    checkpoint_path: Path, alone: Alone, dispatcher: str
) -> None:
    """A killed process of a GPU ends some 0.3 s after its connections have, and one may never end."""
    given = EP4 | {"plan__all2all_backend": dispatcher, "balance__redundant_experts": 8}
    with LocalCluster(house_config(checkpoint_path, **given)) as house:
        parted = house.head.coordinator.generations.parted
        seen, undead = parted.is_gone, house.pid(2)
        assert seen is not None
        parted.is_gone = lambda process: process.pid != undead and seen(process)
        with Raw(house, alone, [0, 1, 3]) as raw:
            time.sleep(0.5)
            changes = Changes(house)
            lost(house, 2)
            changes.until(lambda was: was[:2] == ((0, 1, 3), "serving"), "it goes on")
            assert [one.pid for one in parted._processes] == [undead]
            time.sleep(0.5)
            parted.is_gone = seen
            house.head.coordinator.processes_told()
            assert not parted._processes
            whole(house)
            time.sleep(0.5)
        assert raw.failed == []


def test_two_members_are_lost_at_once(checkpoint_path: Path, alone: Alone) -> None:
    with LocalCluster(house_config(checkpoint_path, balance__redundant_experts=24, **EP4)) as house:
        with Raw(house, alone, [0, 3]) as raw:
            time.sleep(0.5)
            changes = Changes(house)
            lost(house, 1)
            lost(house, 2)
            changes.until(lambda was: was[:2] == ((0, 3), "serving"), "it goes on without both")
            whole(house)
            time.sleep(0.5)
        assert raw.failed == []


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_where_nobody_has_slots_calls_wait_until_the_member_is_back(
    checkpoint_path: Path, alone: Alone, how: str
) -> None:
    with LocalCluster(house_config(checkpoint_path, **EP4)) as house:
        with Raw(house, alone, [0, 1, 3]) as raw:
            time.sleep(0.5)
            generation = house.head.coordinator.progress().generation
            lost(house, 2, how)
            until(lambda: house.head.coordinator.progress().generation > generation)
            whole(house)
            time.sleep(0.5)
        assert raw.failed == []
        assert house.head.coordinator.epoch.number == 1


def test_a_second_loss_for_which_nobody_has_slots_has_the_group_wait_for_both(
    house: LocalCluster, alone: Alone
) -> None:
    with Raw(house, alone, [0, 3]) as raw:
        time.sleep(0.5)
        changes = Changes(house)
        lost(house, 1)
        changes.until(lambda was: was.seats == (0, 2, 3))
        lost(house, 2)
        whole(house)
        time.sleep(0.5)
    assert raw.failed == []


def test_the_last_but_one_is_lost(checkpoint_path: Path, alone: Alone) -> None:
    two = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
    with LocalCluster(house_config(checkpoint_path, balance__redundant_experts=8, **two)) as house:
        with Raw(house, alone, [0]) as raw:
            time.sleep(0.5)
            changes = Changes(house)
            lost(house, 1)
            changes.until(lambda was: was[:2] == ((0,), "serving"), "one serves alone")
            until(lambda: seats(house) == (0, 1) and house.state() == ("serving", ""))
            time.sleep(0.5)
        assert raw.failed == []


def test_experts_move_and_weights_are_reloaded_while_a_member_is_away(
    house: LocalCluster, alone: Alone, checkpoint_path: Path
) -> None:
    with Raw(house, alone, [0, 1, 3]) as raw, MoeClient(house.address, timeout=SECONDS) as client:
        lost(house, 2)
        until(lambda: seats(house) == (0, 1, 3) and house.state()[0] == "serving")
        client.reload(str(checkpoint_path))
        client.rebalance()
        whole(house)
        client.rebalance()
        time.sleep(0.5)
    assert raw.failed == []
    assert house.head.coordinator.epoch.weights_version == 2


def test_calls_are_held_no_longer_than_configured(checkpoint_path: Path, alone: Alone) -> None:
    held = {"members__hold_seconds": 1.0, "cluster__stopped_seconds": 0.0}
    with (
        LocalCluster(house_config(checkpoint_path, **EP4, **held)) as house,
        MoeClient(house.address) as client,
    ):
        address = client.topology().lanes[0].address
        still = house.pid(3)
        stand_still(still)  # no group forms without it
        began = time.monotonic()
        lost(house, 2)
        with grpc.insecure_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as failed:
                request = request_of(1, alone.batch(2, seed=1))
                moe_pb2_grpc.LaneServiceStub(channel).Forward(request, timeout=SECONDS)
            assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "members.hold_seconds = 1" in str(failed.value.details())
            assert 1.0 <= time.monotonic() - began < 10.0
        assert not client.topology().serving
        os.kill(still, signal.SIGCONT)
        whole(house)
