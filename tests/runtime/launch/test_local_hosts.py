"""The local launcher's lanes listen on loopback, whatever the front door listens on; exporters beside it."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from houses import house_config
from listeners import beyond_loopback, listeners

from moeserve.runtime.launch import local_cluster
from moeserve.runtime.launch.rank_process import RankSpec


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
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


def test_exporters_of_ranks_listen_where_that_of_the_head_does(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    config = house_config(
        tmp_path, server__host="0.0.0.0", server__metrics_port=0, keys__allow_plaintext=True
    )
    with local_cluster.LocalCluster(config) as cluster:
        for target in cluster.metrics_targets():
            assert target.startswith("127.0.0.1:")
            with urllib.request.urlopen(f"http://{target}/livez", timeout=10) as answer:
                assert answer.status == 200
        port = int(target.rpartition(":")[2])
        assert {bound for _, bound in beyond_loopback(listeners(cluster.pid(0)))} == {port}
