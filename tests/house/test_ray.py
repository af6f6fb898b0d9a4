"""The house on Ray: actors in a placement group, a killed actor restarted, several nodes, too few CPUs.

Ray takes longer to start than most of what is tested here: tests share one of three nodes. The first test has
its own, and comes before: where another Ray has begun and ended, one that was there is not found again.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import ray
import torch
from checkpoints import make_checkpoint
from failures import HEARD_SECONDS, Callers, break_connections, serve_again, stand_still
from houses import DP2_TP2, EP4, Alone, house_config, request_of
from listeners import beyond_loopback, listeners
from made_certificates import Authority
from patient import PatientCallers
from ray.cluster_utils import Cluster
from ray.util import placement_group, placement_group_table

from moeserve.proto import moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.runtime.config import Config
from moeserve.runtime.launch.on_ray import ray_cluster
from moeserve.runtime.launch.on_ray.ray_cluster import RayCluster
from moeserve.runtime.launch.watch import stat_of
from moeserve.runtime.sections import ConfigError

pytestmark = pytest.mark.ray

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
FOUND_SECONDS = 2.0
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


def on(nodes: Cluster, checkpoint: Path, **values: Any) -> Config:
    """A configuration for tests, of a service on that Ray."""
    return house_config(checkpoint, cluster__ray_address=nodes.address, **values)


def test_a_ray_of_its_own_listens_on_loopback_only(checkpoint_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    mine = listeners(os.getpid())
    with RayCluster(house_config(checkpoint_path, **EP4)) as house:
        started = {process.pid for process in psutil.Process().children(recursive=True)} - before
        found = {pid: listeners(pid) for pid in started} | {os.getpid(): listeners(os.getpid()) - mine}
        assert started >= {house.pid(rank) for rank in range(4)}
    assert len([pid for pid in found if found[pid]]) > 4  # Ray's own, the head's and the ranks'
    assert {pid: beyond_loopback(ports) for pid, ports in found.items() if beyond_loopback(ports)} == {}


def test_actors_come_and_go_and_no_call_fails(nodes: Cluster, checkpoint_path: Path, alone: Alone) -> None:
    room = {"members__max_lanes": 3, "members__max_owners": 3, "balance__redundant_experts": 8}
    with (
        RayCluster(on(nodes, checkpoint_path, **EP2, **room)) as house,
        MoeClient(house.address) as client,
        PatientCallers(house.address, alone, [None]) as callers,
    ):
        grown = client.scale(3)
        assert (grown.outcome, list(grown.joined)) == ("scaled", [2]), grown.reason
        pid = house.pid(2)
        assert stat_of(pid) is not None and len(client.topology().lanes) == 3
        shrunk = client.scale(2)
        assert (shrunk.outcome, list(shrunk.left)) == ("scaled", [2]), shrunk.reason
        until = time.monotonic() + 30.0
        while stat_of(pid) is not None:
            assert time.monotonic() < until, f"process {pid} of the rank that left runs on"
            time.sleep(0.05)
        with pytest.raises(MoeError, match="room for 3 lanes and 3 owners"):
            client.scale(4)
    assert callers.failed == [] and callers.answers[None] > 0


def test_a_killed_actor_is_heard_of_restarted_and_serves_again(
    nodes: Cluster, checkpoint_path: Path, alone: Alone
) -> None:
    with RayCluster(on(nodes, checkpoint_path, members__hold_seconds=0.0, **EP4)) as house:
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
        assert house.pid(2) not in (0, victim)
        with MoeClient(house.address, timeout=60) as client:
            torch.testing.assert_close(client.forward(1, *batch), alone.forward(1, *batch), **CLOSE)


def test_ranks_spread_over_several_nodes(nodes: Cluster, checkpoint_path: Path, alone: Alone) -> None:
    with (
        RayCluster(on(nodes, checkpoint_path, **DP2_TP2)) as house,
        grpc.insecure_channel(house.address) as channel,
    ):
        used = set(placement_group_table(house.group)["bundles_to_node_id"].values())
        assert len(used) >= 2
        batch = alone.batch(5, seed=2)
        reply = moe_pb2_grpc.FrontServiceStub(channel).Forward(request_of(0, batch), timeout=60)
        answer = torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32).view(*reply.hidden.shape)
        torch.testing.assert_close(answer, alone.forward(0, *batch), **CLOSE)


def test_fewer_cpus_than_ranks_is_said_at_once(nodes: Cluster, checkpoint_path: Path) -> None:
    many = {"parallel__data_parallel_size": 8, "parallel__enable_expert_parallel": True}
    with pytest.raises(ConfigError, match="8 ranks need 8 CPUs, and the Ray cluster has 6"):
        RayCluster(on(nodes, checkpoint_path, **many)).start()


@pytest.mark.parametrize("listens", [False, True], ids=["nobody", "something else"])
def test_a_ray_that_is_not_there_is_waited_for_no_longer_than_was_said(
    checkpoint_path: Path, listens: bool
) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        if listens:
            other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        config = house_config(
            checkpoint_path, cluster__ray_address=address, cluster__start_timeout_seconds=2.0, **EP4
        )
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=rf"no Ray answers at .*{address}.* within .*_seconds = 2;"):
            RayCluster(config).start()
        assert time.monotonic() - began < 10
        assert not ray.is_initialized()


def test_an_address_of_rays_own_variable_is_named_so(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    config = house_config(checkpoint_path, cluster__start_timeout_seconds=1.0, **EP4)
    with pytest.raises(TimeoutError, match=r"no Ray answers at .* \(RAY_ADDRESS = 127.0.0.1:1\)"):
        RayCluster(config).start()


def test_a_cluster_that_others_hold_is_waited_for_once_and_named(
    nodes: Cluster, checkpoint_path: Path
) -> None:
    ray.init(address=nodes.address)
    try:
        others = placement_group([{"CPU": 1.0}] * 6)
        ray.get(others.ready(), timeout=30)
        config = house_config(checkpoint_path, cluster__start_timeout_seconds=2.0, **EP4)
        with pytest.raises(
            TimeoutError, match=r"not place 4 ranks \(CPU 1 each\) within .* = 2:.*CPU 0 free"
        ):
            RayCluster(config).start()
    finally:
        ray.shutdown()


def test_a_ray_that_speaks_tls_is_found_by_rays_own_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, "ours")
    certificate, key = authority.sign("ray", "127.0.0.1")
    files = (Path(key).read_bytes(), Path(certificate).read_bytes())
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials([files], Path(authority.path).read_bytes(), require_client_auth=True),
    )
    server.start()
    try:
        address = f"ray://127.0.0.1:{port}"
        with pytest.raises(TimeoutError, match="no Ray answers"):
            ray_cluster._wait_there(address, 1.0)
        shown = {"CA_CERT": authority.path, "SERVER_CERT": certificate, "SERVER_KEY": key}
        monkeypatch.setenv("RAY_USE_TLS", "1")
        for name, path in shown.items():
            monkeypatch.setenv(f"RAY_TLS_{name}", path)
        ray_cluster._wait_there(address, 10.0)
    finally:
        server.stop(0)


def runs(pid: int) -> bool:
    """Whether a process of that id is there and no zombie."""
    return stat_of(pid) is not None


@pytest.mark.timed
def test_a_stopped_actor_is_named_killed_and_replaced(
    nodes: Cluster, checkpoint_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of its interpreter runs, and Ray's own kill does not reach it."""
    with RayCluster(on(nodes, checkpoint_path, **EP2)) as house:
        before = [house.pid(rank) for rank in range(2)]
        generation = serve_again(house.address)
        stand_still(before[1])
        began = time.monotonic()
        while runs(before[1]):
            assert time.monotonic() - began < FOUND_SECONDS
            time.sleep(0.01)
        with MoeClient(house.address) as client:
            while (status := client.status()).generation == generation:
                time.sleep(0.01)
        assert f"rank 1 (pid {before[1]}) is given up: it is stopped (state T) for 1." in status.reason
        serve_again(house.address)
        after = [house.pid(rank) for rank in range(2)]
        assert after[0] == before[0] and after[1] not in (0, before[1])
        assert all(runs(pid) for pid in after)
        assert "(failed starts in a row: 0)" in caplog.text
    until = time.monotonic() + 10.0
    while any(runs(pid) for pid in after):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_an_actor_whose_stream_breaks_is_ended_and_replaced(nodes: Cluster, checkpoint_path: Path) -> None:
    """It was alive for ever, and nothing came back."""
    with RayCluster(on(nodes, checkpoint_path, **EP2)) as house:
        before = [house.pid(rank) for rank in range(2)]
        generation = serve_again(house.address)
        break_connections(before[1], house.head.streams)
        with MoeClient(house.address) as client:
            until = time.monotonic() + 20.0
            while client.status().generation == generation:
                assert time.monotonic() < until
                time.sleep(0.01)
        assert serve_again(house.address) > generation
        assert not runs(before[1])
        assert house.pid(0) == before[0] and house.pid(1) not in (0, before[1])


def test_an_actor_that_cannot_start_backs_off_and_is_reported(
    nodes: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, away = tmp_path / "served", tmp_path / "away"
    checkpoint.mkdir()
    make_checkpoint("qwen3_moe", checkpoint)
    with RayCluster(on(nodes, checkpoint, **EP2)) as house, MoeClient(house.address) as client:
        generation = serve_again(house.address)
        checkpoint.rename(away)
        os.kill(house.pid(1), signal.SIGKILL)
        until = time.monotonic() + 90.0
        while "failed starts in a row: 3)" not in caplog.text:
            assert time.monotonic() < until, caplog.text
            time.sleep(0.1)
        status = client.status()
        assert status.state == "forming" and "rank 1 cannot start: " in status.reason, status
        away.rename(checkpoint)
        assert serve_again(house.address) > generation


def test_ranks_of_a_node_that_dies_come_back_on_another(nodes: Cluster, checkpoint_path: Path) -> None:
    with RayCluster(on(nodes, checkpoint_path, **DP2_TP2)) as house:
        generation = serve_again(house.address)
        used = placement_group_table(house.group)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        away = next(node for node in nodes.list_all_nodes() if node.node_id in set(used.values()) - {here})
        left = [rank for rank, node in used.items() if node != away.node_id]
        before = {rank: house.pid(rank) for rank in range(4)}
        nodes.remove_node(away, allow_graceful=False)
        try:
            with MoeClient(house.address) as client:
                until = time.monotonic() + 60.0
                while client.status().generation == generation:
                    assert time.monotonic() < until
                    time.sleep(0.05)
            assert serve_again(house.address) > generation
            after = {rank: house.pid(rank) for rank in range(4)}
            assert [rank for rank in range(4) if after[rank] == before[rank]] == left
            assert all(runs(pid) for pid in after.values())
        finally:
            nodes.add_node(num_cpus=2)
