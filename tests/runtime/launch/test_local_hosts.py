"""The local launcher's lanes listen on loopback, whatever the front door listens on."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from houses import house_config

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
        assert started[0].host == "127.0.0.1"
        assert cluster.head.streams.startswith("127.0.0.1:")
    finally:
        cluster.head.stop()
