"""The checkpoint is deleted, or written over, while its ranks serve, and then one of them is lost."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import torch
from checkpoints import make_checkpoint
from houses import Alone, house_config

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

SECONDS = 30.0
WHOLE_EACH = {  # either rank has room for all eight experts
    "parallel__data_parallel_size": 2,
    "parallel__enable_expert_parallel": True,
    "balance__redundant_experts": 8,
}


def answers_are_right(client: MoeClient, alone: Alone) -> None:
    hidden, ids, weights = alone.batch(5, seed=1)
    for layer in alone.checkpoint.layers:
        answer = client.forward(layer, hidden, ids, weights)
        torch.testing.assert_close(answer, alone.forward(layer, hidden, ids, weights), rtol=1e-4, atol=1e-4)


def test_the_others_read_a_lost_ranks_experts_where_the_checkpoint_is_deleted(tmp_path: Path) -> None:
    """It was opened; the lost rank cannot come back, and why stands in the status."""
    path = tmp_path / "served"
    make_checkpoint("qwen3_moe", path, shards=3)
    alone = Alone(path)
    with LocalCluster(house_config(path, **WHOLE_EACH)) as cluster, MoeClient(cluster.address) as client:
        shutil.rmtree(path)
        os.kill(cluster.pid(1), signal.SIGKILL)
        until, reason = time.monotonic() + SECONDS, ""
        while "rank 1 cannot start" not in reason:
            assert time.monotonic() < until, reason
            time.sleep(0.05)
            reason = client.status().reason
        assert f"cannot read {path / 'config.json'}: No such file or directory" in reason
        assert cluster.state()[0] == "serving"
        answers_are_right(client, alone)


def test_files_that_were_written_over_are_named_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "served"
    make_checkpoint("qwen3_moe", path, shards=3)
    alone = Alone(path)
    config = house_config(path, cluster__others_first_seconds=3 * SECONDS, **WHOLE_EACH)
    with LocalCluster(config) as cluster, MoeClient(cluster.address) as client:
        answers_are_right(client, alone)
        for file in path.glob("*.safetensors"):
            about = file.stat()
            os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
        os.kill(cluster.pid(1), signal.SIGKILL)
        until, reason = time.monotonic() + SECONDS, ""
        while "has changed since this process read its header" not in reason:
            assert time.monotonic() < until, reason
            time.sleep(0.05)
            reason = client.status().reason
        assert str(path) in reason and cluster.state()[0] == "serving"
