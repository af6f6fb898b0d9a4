"""The local launcher's lanes listen on loopback, whatever the front door listens on; exporters beside it."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from houses import house_config
from listeners import beyond_loopback, listeners

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch import local_cluster
from moeserve.runtime.launch.rank_process import RankSpec


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::1"])
def test_lanes_and_control_streams_are_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    config = house_config(tmp_path, server__host=host, server__metrics_port=-1, keys__allow_plaintext=True)
    cluster = local_cluster.LocalCluster(config)
    started: list[RankSpec] = []

    class Process:
        pid = 1

        def __init__(self, args: tuple[RankSpec], **named: object) -> None:
            started.extend(args)

        def start(self) -> None: ...

        def is_alive(self) -> bool:
            return True

    monkeypatch.setattr(cluster.ranks._context, "Process", Process)
    try:
        cluster.ranks._spawn(0)
        assert started[0].host == "127.0.0.1" and started[0].metrics_host == host
        assert cluster.head.streams.startswith("127.0.0.1:")
    finally:
        cluster.head.stop()


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True)])
def test_a_front_door_beyond_loopback_is_said_to_have_no_lanes_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    host: str,
    warned: bool,
) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    config = house_config(tmp_path, server__host=host, server__metrics_port=-1, keys__allow_plaintext=True)
    service = local_cluster.LocalService(config)
    for part, name in ((service.head, "start"), (service.ranks, "start")):
        monkeypatch.setattr(part, name, lambda: None)
    monkeypatch.setattr(service.head, "wait_serving", lambda seconds: None)
    with caplog.at_level("WARNING"):
        service.start()
    service.head.stop()
    assert ("a MoeClient of another host" in caplog.text) == warned


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("[::]", "127.0.0.1"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
    ],
)
def test_doors_exporters_and_probes_are_at_the_host_that_was_said(
    tmp_path: Path, host: str, reached: str
) -> None:
    if ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"this host has no IPv6: {error}")
    make_checkpoint("qwen3_moe", tmp_path)
    said = {"server__host": host, "server__metrics_port": 0, "server__health_port": 0}
    config = house_config(tmp_path, keys__allow_plaintext=True, **said)
    service = local_cluster.LocalService(config)
    try:
        service.start()
        with MoeClient(service.address) as client:
            assert service.address.startswith(f"{reached}:") and client.status().state == "serving"
        for target in (*service.metrics_targets(), service.probes_address()):
            assert target.startswith(f"{reached}:")
            with urllib.request.urlopen(f"http://{target}/livez", timeout=10) as answer:
                assert answer.status == 200
        exporter = int(service.metrics_targets()[1].rpartition(":")[2])
        beyond = {exporter} if reached == "127.0.0.1" else set()
        assert {port for _, port in beyond_loopback(listeners(service.pid(0)))} == beyond
    finally:
        service.stop()
