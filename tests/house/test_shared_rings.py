"""A service whose head and ranks share rings, and one whose streams stay on TCP: both answer alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from houses import Alone, house_config

from moeserve.proto.client import MoeClient
from moeserve.runtime.control.ring import supported
from moeserve.runtime.launch.local_cluster import LocalCluster

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}


def rings_of(pid: int) -> int:
    """How many pairs of rings a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:moeserve-ring" in line for line in maps)


@pytest.mark.skipif(not supported(), reason="rings need x86-64 Linux")
@pytest.mark.parametrize("nbytes", [0, 1 << 16])
def test_a_service_answers_over_rings_and_over_tcp(checkpoint_path: Path, alone: Alone, nbytes: int) -> None:
    config = house_config(checkpoint_path, **EP2, cluster__ring_bytes=nbytes)
    with LocalCluster(config) as house, MoeClient(house.address, timeout=60) as client:
        for seed in range(20):
            batch = alone.batch(5, seed=seed)
            torch.testing.assert_close(
                client.forward(1, *batch), alone.forward(1, *batch), rtol=1e-4, atol=1e-4
            )
        assert [rings_of(house.pid(rank)) for rank in range(2)] == [int(nbytes > 0)] * 2
