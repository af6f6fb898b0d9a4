"""A rank that is lost under Ray starts in a spare: an actor that has imported all, and holds no weights."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from failures import serve_again, stand_still
from houses import Alone, house_config

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.on_ray import ray_cluster
from moeserve.runtime.launch.on_ray.ray_cluster import RayCluster
from moeserve.runtime.launch.watch import stat_of

pytestmark = pytest.mark.ray

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
WARM_SECONDS = 60.0
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    """A Ray on this machine, as a service without an address would start it: for all tests here."""
    with ray_cluster._on_loopback():
        ray.init(address="local", num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


def warm(house: RayCluster, *, besides: int = 0) -> int:
    """Waits until the one spare, another than `besides`, is warm; returns its process."""
    until = time.monotonic() + WARM_SECONDS
    while not (found := [pid for pid in house.spares() if pid != besides]):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert len(found) == 1
    return found[0]


def test_a_lost_rank_starts_in_a_spare_and_another_one_is_made(checkpoint_path: Path, alone: Alone) -> None:
    with RayCluster(house_config(checkpoint_path, cluster__spares=1, **EP2)) as house:
        batch, generation = alone.batch(20, seed=1), serve_again(house.address)
        taken, seen = list[int](), [house.pid(rank) for rank in range(2)]
        for rank in (1, 0):
            spare = warm(house)
            os.kill(house.pid(rank), signal.SIGKILL)
            until = time.monotonic() + WARM_SECONDS
            while house.pid(rank) != spare:
                assert time.monotonic() < until
                time.sleep(0.01)
            while serve_again(house.address) == generation:
                time.sleep(0.01)
            generation = serve_again(house.address)
            taken.append(spare)
        with MoeClient(house.address) as client:
            torch.testing.assert_close(client.forward(0, *batch), alone.forward(0, *batch), **CLOSE)
            assert sorted(one.pid for one in client.status().ranks) == sorted(taken)
        left = [*seen, *taken, warm(house)]
    until = time.monotonic() + WARM_SECONDS
    while any(stat_of(pid) is not None for pid in left):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_a_spare_that_dies_or_is_stopped_is_replaced(checkpoint_path: Path) -> None:
    with RayCluster(house_config(checkpoint_path, cluster__spares=1, **EP2)) as house:
        generation = serve_again(house.address)
        first = warm(house)
        os.kill(first, signal.SIGKILL)
        second = warm(house, besides=first)
        stand_still(second)
        assert warm(house, besides=second) not in (first, second)
        assert stat_of(second) is None, "a stopped one is killed"
        assert serve_again(house.address) == generation, "ranks saw nothing of it"
