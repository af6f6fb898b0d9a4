"""A service that is told to stop answers the calls that are under way, and takes no other."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from failures import stand_still
from houses import EP4, Alone, house_config, request_of

from moeserve.proto import moe_pb2_grpc
from moeserve.proto.client import MoeClient, Patience
from moeserve.proto.errors import Unavailable
from moeserve.proto.tensors import as_torch, spec_of
from moeserve.runtime.launch.local_cluster import LocalCluster

SECONDS = 20.0


def test_calls_under_way_are_answered_and_no_other_is_taken(checkpoint_path: Path, alone: Alone) -> None:
    config = house_config(checkpoint_path, server__drain_seconds=SECONDS, cluster__stopped_seconds=0.0, **EP4)
    batch = alone.batch(8, seed=3)
    with LocalCluster(config) as house, MoeClient(house.address) as client, ThreadPoolExecutor(8) as pool:
        lane = client.topology().lanes[0].address
        client.forward(1, *batch)
        slow = house.pid(3)
        stand_still(slow)
        with grpc.insecure_channel(lane) as channel, grpc.insecure_channel(house.address) as front:
            stubs = moe_pb2_grpc.LaneServiceStub(channel), moe_pb2_grpc.FrontServiceStub(front)
            asked = [stub.Forward.future(request_of(1, batch), timeout=SECONDS) for stub in stubs]
            called = pool.submit(client.forward, 1, *batch)
            until = time.monotonic() + SECONDS
            while house.head.coordinator.progress().jobs < 4 and time.monotonic() < until:
                time.sleep(0.01)
            stopping = threading.Thread(target=house.stop)
            stopping.start()
            while not house.head.coordinator.stopping.reason and time.monotonic() < until:
                time.sleep(0.01)
            with (
                MoeClient(house.address, timeout=Patience(SECONDS, attempts=1)) as late,
                pytest.raises(Unavailable, match="is stopping"),
            ):
                late.forward(1, *batch)
            assert client.topology().lanes == []
            os.kill(slow, signal.SIGCONT)
            expected = alone.forward(1, *batch)
            for reply in (call.result(SECONDS) for call in asked):
                found = as_torch(reply.hidden.data, spec_of(reply.hidden, "x", rank=2, dtypes=("fp32",)))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(called.result(SECONDS), expected, rtol=1e-4, atol=1e-4)
            stopping.join(SECONDS)
            assert not stopping.is_alive()


def test_calls_on_their_way_when_the_service_is_told_to_stop_are_answered(
    checkpoint_path: Path, alone: Alone
) -> None:
    config = house_config(checkpoint_path, server__leaving_seconds=3.0, **EP4)
    house, batch = LocalCluster(config).start(), alone.batch(8, seed=3)
    try:
        with MoeClient(house.address) as client:
            lane = client.topology().lanes[0].address
        with grpc.insecure_channel(lane) as channel, grpc.insecure_channel(house.address) as front:
            stubs = moe_pb2_grpc.LaneServiceStub(channel), moe_pb2_grpc.FrontServiceStub(front)
            stopping = threading.Thread(target=house.stop)
            stopping.start()
            until = time.monotonic() + SECONDS
            while not house.head.coordinator.stopping.reason and time.monotonic() < until:
                time.sleep(0.01)
            expected = alone.forward(1, *batch)
            for stub in stubs:
                reply = stub.Forward(request_of(1, batch), timeout=SECONDS)
                found = as_torch(reply.hidden.data, spec_of(reply.hidden, "x", rank=2, dtypes=("fp32",)))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            stopping.join(SECONDS)
            assert not stopping.is_alive()
    finally:
        house.stop()


def test_an_idle_service_does_not_wait(checkpoint_path: Path) -> None:
    config = house_config(checkpoint_path, server__drain_seconds=60.0, **EP4)
    house = LocalCluster(config).start()
    began = time.monotonic()
    house.stop()
    assert time.monotonic() - began < 20
