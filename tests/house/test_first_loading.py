"""The head dies before the service ever served: another follows it, and ranks keep what they have read."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from houses import Alone, house_config

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalService
from moeserve.runtime.sections import ClusterConfig

SECONDS = 60.0
HELD_UP = 0.5
"""For which one of the ranks stands still, so that the other has what the head told both."""

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}


def listens(service: LocalService) -> bool:
    return bool(service.address)


def is_loading(service: LocalService) -> bool:
    return service.state()[0] == "preparing"


def is_joining(service: LocalService) -> bool:
    return service.state()[0] == "joining"


@pytest.mark.parametrize("moment", [listens, is_loading, is_joining])
def test_a_head_that_dies_before_it_ever_served_is_replaced(
    checkpoint_path: Path, alone: Alone, moment: Callable[[LocalService], bool]
) -> None:
    config = house_config(
        checkpoint_path, cluster__start_timeout_seconds=SECONDS, cluster__stopped_seconds=0.0, **EP2
    )
    service, killed = LocalService(config), list[int]()

    def kill() -> None:
        until = time.monotonic() + SECONDS
        while not moment(service):
            if time.monotonic() > until or service.state()[0] == "serving":
                return
            time.sleep(0.001)
        held_up = [] if moment is listens else [service.pid(1)]
        for pid in held_up:
            os.kill(pid, signal.SIGSTOP)
        killed.append(service.head.pid)
        os.kill(killed[0], signal.SIGKILL)
        time.sleep(HELD_UP)
        for pid in held_up:
            os.kill(pid, signal.SIGCONT)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        with service:
            killing.join()
            if not killed:
                pytest.skip("this host has started all of it between two looks")
            assert service.head.pid != killed[0]
            hidden, ids, weights = alone.batch(5, seed=1)
            with MoeClient(service.address) as client:
                for layer in alone.checkpoint.layers:
                    answer = client.forward(layer, hidden, ids, weights)
                    expected = alone.forward(layer, hidden, ids, weights)
                    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)
                ranks = client.status().ranks
            experts = sum(alone.checkpoint.expert_nbytes(layer) for layer in alone.checkpoint.layers)
            whole = experts * alone.checkpoint.num_experts
            assert [rank.bytes_read for rank in ranks] == [whole // 2] * 2, "each has read its experts once"
    finally:
        killing.join()


def test_a_head_that_dies_before_it_listens_ends_the_start(checkpoint_path: Path) -> None:
    """Who started it hears of it at once; nothing is left."""
    service = LocalService(house_config(checkpoint_path, **EP2))

    def kill() -> None:
        until = time.monotonic() + SECONDS
        while not service.head.pid and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(service.head.pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the head ended with -9 before it listened"):
        service.start()
    killing.join()
    assert time.monotonic() - began < ClusterConfig().start_timeout_seconds
