"""A group that loses a member serves on without it, and has it back: no call fails on a living lane."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
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
        self.times: dict[int, list[tuple[float, float]]] = {lane: [] for lane in lanes}
        self._over = threading.Event()
        self._asking = [threading.Thread(target=self._ask, args=(lane, addresses[lane])) for lane in lanes]

    def _ask(self, lane: int, address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            stub, turn = moe_pb2_grpc.LaneServiceStub(channel), 0
            while not self._over.is_set():
                at, began = turn % len(self.requests), time.monotonic()
                turn += 1
                try:
                    reply = stub.Forward(self.requests[at], timeout=SECONDS)
                    found = as_torch(reply.hidden.data, spec_of(reply.hidden, "x", rank=2, dtypes=("fp32",)))
                    torch.testing.assert_close(found, self.right[at], **CLOSE)
                except (grpc.RpcError, AssertionError) as failed:
                    self.failed.append(f"lane {lane}: {failed}")
                self.times[lane].append((began, time.monotonic()))

    def __enter__(self) -> Raw:
        for one in self._asking:
            one.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        for one in self._asking:
            one.join(SECONDS)
            assert not one.is_alive()

    def gap(self, lane: int, since: float) -> float:
        """The longest time from one answer to the next, of answers after `since`."""
        ends = [ended for _, ended in self.times[lane]]
        return max(after - before for before, after in itertools.pairwise(ends) if after > since)


def until(true: object, what: str = "") -> None:
    limit = time.monotonic() + SECONDS
    while not true():  # type: ignore[operator]
        assert time.monotonic() < limit, what
        time.sleep(0.02)


@pytest.fixture
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    # qwen's tiny model has 8 experts: 16 slots on four owners hold all of them on any three
    with LocalCluster(house_config(checkpoint_path, balance__redundant_experts=8, **EP4)) as made:
        yield made


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_member_costs_no_call_and_comes_back(house: LocalCluster, alone: Alone, how: str) -> None:
    with Raw(house, alone, [0, 1, 3]) as raw:
        time.sleep(1.0)
        pid = house.pid(2)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL) if how == "killed" else stand_still(pid)
        until(lambda: house.head.coordinator.epoch.members.seats == (0, 1, 3), "it goes on without rank 2")
        until(lambda: house.state() == ("serving", "ranks [2] are away, and others serve their experts"))
        until(lambda: house.head.coordinator.epoch.members.seats == (0, 1, 2, 3), "rank 2 is back")
        until(lambda: house.state() == ("serving", ""))
        time.sleep(1.0)
    assert raw.failed == []
    print({lane: round(raw.gap(lane, began), 3) for lane in raw.times})
    assert house.pid(2) != pid
    with MoeClient(house.address) as client:
        assert [lane.rank for lane in client.topology().lanes] == [0, 1, 2, 3]
