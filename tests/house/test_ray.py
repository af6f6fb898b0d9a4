"""The house on Ray: actors in a placement group, a killed actor restarted, several nodes, too few CPUs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import ray
import torch
from failures import HEARD_SECONDS, Callers, serve_again
from houses import DP2_TP2, EP4, Alone, house_config, request_of
from listeners import beyond_loopback, listeners
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from moeserve.proto import moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.runtime.config import ConfigError
from moeserve.runtime.launch.ray_cluster import RayCluster

pytestmark = pytest.mark.ray

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A Ray cluster of three fake nodes with two CPUs each, on this machine."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_killed_actor_is_heard_of_restarted_and_serves_again(checkpoint_path: Path, alone: Alone) -> None:
    with RayCluster(house_config(checkpoint_path, **EP4)) as house:
        batch = alone.batch(40, seed=1)
        with MoeClient(house.address, timeout=60) as client:
            torch.testing.assert_close(client.forward(0, *batch), alone.forward(0, *batch), **CLOSE)
        generation = serve_again(house.address)
        callers = Callers(house.address, alone)
        time.sleep(0.5)
        victim, killed = house.pid(2), time.monotonic()
        os.kill(victim, signal.SIGKILL)
        callers.join()
        assert sorted(callers.failures) == [0, 1, 2, 3]
        for when, code, text in callers.failures.values():
            assert code == "UNAVAILABLE", text
            assert when - killed < HEARD_SECONDS
        assert serve_again(house.address) > generation
        assert house.pid(2) != victim
        with MoeClient(house.address, timeout=60) as client:
            torch.testing.assert_close(client.forward(1, *batch), alone.forward(1, *batch), **CLOSE)


def test_a_ray_of_its_own_listens_on_loopback_only(checkpoint_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    mine = listeners(os.getpid())
    with RayCluster(house_config(checkpoint_path, **EP4)) as house:
        started = {process.pid for process in psutil.Process().children(recursive=True)} - before
        found = {pid: listeners(pid) for pid in started} | {os.getpid(): listeners(os.getpid()) - mine}
        assert started >= {house.pid(rank) for rank in range(4)}
    assert len([pid for pid in found if found[pid]]) > 4  # Ray's own, the head's and the ranks'
    assert {pid: beyond_loopback(ports) for pid, ports in found.items() if beyond_loopback(ports)} == {}


def test_ranks_spread_over_several_nodes(nodes: Cluster, checkpoint_path: Path, alone: Alone) -> None:
    config = house_config(checkpoint_path, cluster__ray_address=nodes.address, **DP2_TP2)
    with RayCluster(config) as house, grpc.insecure_channel(house.address) as channel:
        used = set(placement_group_table(house.group)["bundles_to_node_id"].values())
        assert len(used) >= 2
        batch = alone.batch(5, seed=2)
        reply = moe_pb2_grpc.FrontServiceStub(channel).Forward(request_of(0, batch), timeout=60)
        answer = torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32).view(*reply.hidden.shape)
        torch.testing.assert_close(answer, alone.forward(0, *batch), **CLOSE)


def test_fewer_cpus_than_ranks_is_said_at_once(nodes: Cluster, checkpoint_path: Path) -> None:
    many = {"parallel__data_parallel_size": 8, "parallel__enable_expert_parallel": True}
    config = house_config(checkpoint_path, cluster__ray_address=nodes.address, **many)
    with pytest.raises(ConfigError, match="8 ranks need 8 CPUs, and the Ray cluster has 6"):
        RayCluster(config).start()
