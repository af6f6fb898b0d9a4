"""A rank that is stopped for ever: it is named, killed and replaced, and the group serves again by itself."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from failures import serve_again, stand_still
from houses import Alone, house_config

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

FOUND_SECONDS = 2.0
EP3 = {"parallel__data_parallel_size": 3, "parallel__enable_expert_parallel": True}


def runs(pid: int) -> bool:
    """Whether a process of that id is there and no zombie."""
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timed
@pytest.mark.parametrize("moment", ["idle", "in a step", "forming"])
def test_a_stopped_rank_is_named_killed_and_replaced_within_seconds(
    checkpoint_path: Path, alone: Alone, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With every bound of its own at its default: what the process does has no part in it."""
    caplog.set_level(logging.WARNING)
    with LocalCluster(house_config(checkpoint_path, **EP3)) as house, MoeClient(house.address) as client:
        before = [house.pid(rank) for rank in range(3)]
        generation = serve_again(house.address)
        stand_still(before[1])
        began = time.monotonic()
        if moment == "forming":
            os.kill(before[2], signal.SIGKILL)
        if moment == "in a step":
            batch = alone.batch(10, seed=3)
            with MoeClient(house.address, timeout=60) as caller:
                torch.testing.assert_close(
                    caller.forward(1, *batch), alone.forward(1, *batch), rtol=1e-4, atol=1e-4
                )
        while f"rank 1 (pid {before[1]}) is killed" not in caplog.text:
            assert time.monotonic() - began < FOUND_SECONDS, caplog.text
            time.sleep(0.01)
        while client.status().generation == generation:
            time.sleep(0.01)
        serve_again(house.address)
        after = [house.pid(rank) for rank in range(3)]
        assert not runs(before[1]), "who is given up is killed"
        assert (after[0] == before[0]) and (after[1] != before[1]), "the one that waited is left alone"
        assert all(runs(pid) for pid in after)
        assert f"rank 1 (pid {before[1]}) is given up: it is stopped (state T) for 1." in caplog.text
        assert f"rank 0 (pid {before[0]}) is given up" not in caplog.text
    until = time.monotonic() + 5.0
    while any(runs(pid) for pid in after):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_rank_that_stops_before_it_comes_to_the_head_is_replaced(
    checkpoint_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with LocalCluster(house_config(checkpoint_path, **EP3)) as house:
        first = house.pid(2)
        os.kill(first, signal.SIGKILL)
        while house.pid(2) == first:
            time.sleep(0.001)
        second = house.pid(2)
        stand_still(second)
        assert 2 not in house.head.coordinator.seats(), "it is still starting"
        serve_again(house.address)
        assert f"rank 2 (pid {second}) is given up: it is stopped (state T)" in caplog.text
        assert not runs(second)


def test_a_rank_whose_stream_ends_is_killed_and_replaced(checkpoint_path: Path) -> None:
    """It may live on, and write to what others read; two of it are one too many."""
    with LocalCluster(house_config(checkpoint_path, **EP3, cluster__stopped_seconds=0.0)) as house:
        before = [house.pid(rank) for rank in range(3)]
        generation = serve_again(house.address)
        stand_still(before[1])  # it does not see its stream end
        house.head.coordinator.seats()[1].stream.close()
        while house.head.coordinator.progress().generation == generation:
            time.sleep(0.01)
        assert serve_again(house.address) > generation
        assert not runs(before[1])
        assert [house.pid(rank) == before[rank] for rank in range(3)] == [True, False, True]
