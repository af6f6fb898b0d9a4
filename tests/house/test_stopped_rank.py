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

EP3 = {"parallel__data_parallel_size": 3, "parallel__enable_expert_parallel": True}


def runs(pid: int) -> bool:
    """Whether a process of that id is there and no zombie."""
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("moment", ["in a step", "forming"])
def test_a_stopped_rank_is_named_killed_and_replaced(
    checkpoint_path: Path, alone: Alone, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    config = house_config(checkpoint_path, **EP3, cluster__answer_seconds=2.0, step__timeout_seconds=3.0)
    with LocalCluster(config) as house:
        before = [house.pid(rank) for rank in range(3)]
        generation = serve_again(house.address)
        stand_still(before[1])
        if moment == "forming":
            os.kill(before[2], signal.SIGKILL)
        batch = alone.batch(10, seed=3)
        with MoeClient(house.address, timeout=60) as client:
            torch.testing.assert_close(
                client.forward(1, *batch), alone.forward(1, *batch), rtol=1e-4, atol=1e-4
            )
        assert serve_again(house.address) > generation
        after = [house.pid(rank) for rank in range(3)]
        assert not runs(before[1]), "who is given up is killed"
        assert (after[0] == before[0]) and (after[1] != before[1]), "the one that waited is left alone"
        assert all(runs(pid) for pid in after)
        named = f"rank 1 (pid {before[1]}) is given up: it did not answer within cluster.answer_seconds = 2"
        assert named in caplog.text
        assert f"rank 0 (pid {before[0]}) is given up" not in caplog.text
        if moment == "in a step":
            assert f"aborts: no answer from rank 1 (pid {before[1]}); " in caplog.text
    until = time.monotonic() + 5.0
    while any(runs(pid) for pid in after):
        assert time.monotonic() < until
        time.sleep(0.05)
