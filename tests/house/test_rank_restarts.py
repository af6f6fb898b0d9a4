"""A rank that cannot start: it backs off, the status says why, and the service comes by itself, or back."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, rewrite
from failures import serve_again
from houses import Alone, house_config
from ports import free_ports
from quantized import PRODUCERS, write
from torch import Tensor

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
FAILED_STARTS = 4  # of one rank, with pauses of 0.1 to 0.8 s between them; three were the end once


def test_a_rank_that_cannot_start_backs_off_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    checkpoint, away = tmp_path / "served", tmp_path / "away"
    checkpoint.mkdir()
    make_checkpoint("qwen3_moe", checkpoint)
    with LocalCluster(house_config(checkpoint, **EP2)) as house, MoeClient(house.address) as client:
        generation = serve_again(house.address)
        checkpoint.rename(away)
        began = time.monotonic()
        os.kill(house.pid(1), signal.SIGKILL)
        until = began + 60.0
        while f"failed starts in a row: {FAILED_STARTS})" not in caplog.text:
            assert time.monotonic() < until, caplog.text
            time.sleep(0.05)
        assert time.monotonic() - began > 0.05 + 0.1 + 0.2, "the pauses between the failed starts, at least"
        status = client.status()
        assert status.state == "forming" and "rank 1 cannot start: " in status.reason, status
        away.rename(checkpoint)
        assert serve_again(house.address) > generation


def test_a_rank_that_cannot_start_at_first_is_started_again_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The port of its exporter is another's, until that one leaves."""
    caplog.set_level(logging.WARNING)
    make_checkpoint("qwen3_moe", tmp_path)
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first + 2)) as other:  # rank 1's, behind those of head and rank 0
        config = house_config(tmp_path, server__metrics_port=first, **EP2)
        cluster = LocalCluster(config)
        starting = threading.Thread(target=cluster.start)
        starting.start()
        try:
            until = time.monotonic() + 60.0
            while f"failed starts in a row: {FAILED_STARTS})" not in caplog.text:
                assert time.monotonic() < until and starting.is_alive(), caplog.text
                time.sleep(0.05)
            with MoeClient(cluster.address) as client:
                status = client.status()
            assert status.state == "forming" and "rank 1 cannot start: " in status.reason, status
            other.close()
            assert serve_again(cluster.address) > 0
            starting.join(60.0)
            assert not starting.is_alive()
        finally:
            cluster.stop()
            starting.join(60.0)


def spoil(path: Path) -> None:
    """One scale of the experts is none."""

    def spoiled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[min(name for name in tensors if name.endswith("weight_scale_inv"))].fill_(float("nan"))
        return tensors

    rewrite(path, spoiled)


def test_experts_that_no_rank_can_read_end_a_first_start_at_once(tmp_path: Path) -> None:
    """They are as wrong when they are read again."""
    write(tmp_path, PRODUCERS["fp8 block"])
    spoil(tmp_path)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"CheckpointError: .*weight_scale_inv"):
        LocalCluster(house_config(tmp_path, **EP2)).start()
    assert time.monotonic() - began < 60.0, "a tenth of cluster.start_timeout_seconds"


def test_a_service_that_has_served_waits_for_experts_that_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, PRODUCERS["fp8 block"])
    file = tmp_path / "model.safetensors"
    good = file.read_bytes()
    with LocalCluster(house_config(tmp_path, **EP2)) as house, MoeClient(house.address) as client:
        generation = serve_again(house.address)
        spoil(tmp_path)
        for rank in (0, 1):
            os.kill(house.pid(rank), signal.SIGKILL)
        until = time.monotonic() + 30.0
        while "CheckpointError" not in (status := client.status()).reason:
            assert time.monotonic() < until, status
            time.sleep(0.05)
        assert status.state != "failed", status
        file.write_bytes(good)  # in place: a rank keeps the files that it has opened
        assert serve_again(house.address) > generation


def test_no_rank_serves_experts_that_were_put_in_the_place_of_those_that_others_hold(
    tmp_path: Path,
) -> None:
    """A trainer writes its next checkpoint over the one that is served, and a rank is lost."""
    make_checkpoint("qwen3_moe", tmp_path)
    file, alone = tmp_path / "model.safetensors", Alone(tmp_path)
    good, batch = file.read_bytes(), alone.batch(24, seed=1)
    expected = alone.forward(1, *batch)
    with LocalCluster(house_config(tmp_path, **EP2)) as house, MoeClient(house.address) as client:
        generation = serve_again(house.address)
        rewrite(tmp_path, lambda tensors: {name: tensor + 0.1 for name, tensor in tensors.items()})
        assert torch.allclose(client.forward(1, *batch), expected, rtol=1e-4, atol=1e-4)
        os.kill(house.pid(1), signal.SIGKILL)
        until = time.monotonic() + 30.0
        while "are not those that weights version 1 began with" not in (status := client.status()).reason:
            assert time.monotonic() < until, status
            time.sleep(0.05)
        file.write_bytes(good)
        assert serve_again(house.address) > generation
        assert torch.allclose(client.forward(1, *batch), expected, rtol=1e-4, atol=1e-4)
