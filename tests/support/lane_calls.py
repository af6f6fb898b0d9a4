"""For tests of clients of lanes: answers that are compared, and which calls went another way."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch
from houses import Alone

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Ordinary:
    """How many calls were made as `MoeClient` makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        real = MoeClient.call

        def call(client: MoeClient, *given: Any, **options: Any) -> Any:
            self.calls += 1
            return real(client, *given, **options)

        monkeypatch.setattr(MoeClient, "call", call)


def check(client: LaneClient, alone: Alone, layer: int, rows: int, seed: int) -> None:
    batch = alone.batch(rows, seed=seed)
    torch.testing.assert_close(client.forward(layer, *batch), alone.forward(layer, *batch), **CLOSE)


def in_threads(count: int, call: Callable[[int], object]) -> None:
    """Calls `call` in so many threads at once, each with its number. Raises the first's error."""
    with ThreadPoolExecutor(count) as pool:
        for _ in pool.map(call, range(count), timeout=60.0):
            pass


def requests(house: LocalCluster, **labels: str) -> int:
    """Calls that the ranks have answered with these labels."""
    return counted(house, "moe_requests_total", **labels)


def counted(house: LocalCluster, name: str, **labels: str) -> int:
    """The ranks' counters of this name and with these labels, added up."""
    found = 0
    for target in house.metrics_targets()[1:]:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            for line, value in re.findall(rf"{name}\{{(.*)\}} (\S+)", answer.read().decode()):
                if labels.items() <= dict(re.findall(r'(\w+)="(\w+)"', line)).items():
                    found += int(float(value))
    return found


def line_of(client: LaneClient) -> Any:
    """The lane of a client that has one."""
    (line,) = client._idle
    return line


def lanes_at(address: str, rank: int) -> list[moe_pb2.DeviceLaneInfo]:
    """The device lanes that are attached to a rank of the service at `address`."""
    with MoeClient(address, timeout=20.0) as client:
        (lane,) = [lane.address for lane in client.topology().lanes if lane.rank == rank]
    with grpc.insecure_channel(lane) as channel:
        stub = moe_pb2_grpc.DeviceLaneServiceStub(channel)
        return list(stub.ListDeviceLanes(moe_pb2.ListDeviceLanesRequest(), timeout=20.0).lanes)
