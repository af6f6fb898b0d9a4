"""The checkpoint is deleted, or written over, while its ranks serve, and then one of them is lost."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from houses import Alone, house_config

from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.runtime.launch.local_cluster import LocalCluster, LocalService

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


OTHERS = "its experts are not those that weights version 1 began with"


def write_over(path: Path, *, other: bool) -> None:
    """Writes the files of a checkpoint, in place: as they are, or with other weights."""
    for file in path.glob("*.safetensors"):
        held = file.read_bytes()
        half = len(held) // 2  # of weights
        file.write_bytes(held[:half] + bytes(byte ^ 1 for byte in held[half:]) if other else held)


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


@pytest.mark.parametrize("other", [False, True])
def test_files_that_were_written_over_are_read_where_they_hold_the_same(
    tmp_path: Path, *, other: bool
) -> None:
    path = tmp_path / "served"
    make_checkpoint("qwen3_moe", path, shards=3)
    alone = Alone(path)
    config = house_config(path, cluster__others_first_seconds=3 * SECONDS, **WHOLE_EACH)
    with LocalCluster(config) as cluster, MoeClient(cluster.address) as client:
        answers_are_right(client, alone)
        write_over(path, other=other)
        os.kill(cluster.pid(1), signal.SIGKILL)
        until, reason = time.monotonic() + SECONDS, ""
        while other and OTHERS not in reason:
            assert time.monotonic() < until, reason
            time.sleep(0.05)
            reason = client.status().reason
        assert not other or str(path) in reason
        if not other:
            answers_are_right(client, alone)
        assert cluster.state()[0] == "serving"


def test_a_head_that_starts_again_keeps_what_a_version_began_with(tmp_path: Path) -> None:
    """It opens the checkpoint anew, which holds others by then."""
    path = tmp_path / "served"
    make_checkpoint("qwen3_moe", path, shards=3)
    with LocalService(house_config(path, **WHOLE_EACH)) as service, MoeClient(service.address) as client:
        write_over(path, other=True)
        head = service.head.pid
        os.kill(head, signal.SIGKILL)
        until, reason = time.monotonic() + SECONDS, ""
        while service.head.pid == head or service.state()[0] != "serving":
            assert time.monotonic() < until, service.state()
            time.sleep(0.05)
        os.kill(service.pid(1), signal.SIGKILL)
        while OTHERS not in reason:
            assert time.monotonic() < until, reason
            time.sleep(0.05)
            with suppress(MoeError):  # until the new head answers
                reason = client.status().reason
