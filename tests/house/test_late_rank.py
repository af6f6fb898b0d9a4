"""Ranks that share memory: one that stands still is named within a bound, a dead one is not waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest
import torch
from failures import stand_still
from houses import Alone, house_config, request_of

from moeserve.proto import moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

LATE_SECONDS = 1.0
PATIENT_SECONDS = 60.0
STILL = 1  # the rank that stands still


@pytest.mark.timed
def test_a_rank_that_stands_still_is_named_and_replaced(checkpoint_path: Path, alone: Alone) -> None:
    config = house_config(
        checkpoint_path,
        parallel__data_parallel_size=3,
        parallel__enable_expert_parallel=True,
        plan__all2all_backend="nvlink_ll",
        step__lane_rows=16,
        step__late_seconds=LATE_SECONDS,
        members__hold_seconds=0.0,  # and callers hear of it
        cluster__stopped_seconds=0.0,  # it is found by the steps that it holds up alone
        server__metrics_port=-1,
    )
    batch = alone.batch(6, seed=1)
    with LocalCluster(config) as house, MoeClient(house.address, timeout=30) as client:
        wanted = client.forward(0, *batch)
        torch.testing.assert_close(wanted, alone.forward(0, *batch))
        others = [lane.address for lane in client.topology().lanes if lane.rank != STILL]
        before = [house.pid(rank) for rank in range(3)]
        stand_still(before[STILL])
        seconds = heard(others, batch)
        assert LATE_SECONDS <= seconds < 6 * LATE_SECONDS
        assert torch.equal(client.forward(0, *batch), wanted)
        after = [house.pid(rank) for rank in range(3)]
        assert [rank for rank in range(3) if after[rank] != before[rank]] == [STILL]
        assert not Path(f"/proc/{before[STILL]}").exists()


@pytest.mark.parametrize("dispatcher", ["nvlink_ll", "nvlink_ht"])
def test_nobody_waits_for_a_dead_rank(dispatcher: str, checkpoint_path: Path, alone: Alone) -> None:
    config = house_config(
        checkpoint_path,
        parallel__data_parallel_size=2,
        parallel__enable_expert_parallel=True,
        plan__all2all_backend=dispatcher,
        step__lane_rows=16,
        step__late_seconds=PATIENT_SECONDS,
        cluster__stopped_seconds=0.0,
        server__metrics_port=-1,
    )
    batch = alone.batch(6, seed=1)
    with LocalCluster(config) as house, MoeClient(house.address, timeout=60) as client:
        wanted = client.forward(0, *batch)
        stand_still(house.pid(STILL))  # a step begins that it never comes to
        waiting = threading.Thread(target=client.forward, args=(0, *batch), daemon=True)
        waiting.start()
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(house.pid(STILL), signal.SIGKILL)
        waiting.join(PATIENT_SECONDS)
        assert torch.equal(client.forward(0, *batch), wanted)
        assert time.monotonic() - began < PATIENT_SECONDS / 2


def heard(addresses: list[str], batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
    """Seconds until the callers of these lanes were told who was late; each calls once."""
    began = time.monotonic()
    channels = [grpc.insecure_channel(address) for address in addresses]
    try:
        calls = [
            moe_pb2_grpc.LaneServiceStub(channel).Forward.future(request_of(0, batch), timeout=20)
            for channel in channels
        ]
        for call in calls:
            assert call.code() == grpc.StatusCode.UNAVAILABLE, call.details()
            assert f"no rows of ranks [{STILL}] within 1 s" in call.details()
    finally:
        for channel in channels:
            channel.close()
    return time.monotonic() - began
