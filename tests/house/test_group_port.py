"""Strangers at every TCP port of a rank leave nothing behind, gloo's included: it lets nobody in any more."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import torch
from houses import Alone, house_config
from listeners import listeners

from moeserve.dispatch.fence import close_to_strangers
from moeserve.dispatch.fence import listeners as own_listeners
from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

STRANGERS = 40  # at each port
EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}


def test_strangers_at_every_port_of_a_rank_leave_no_descriptor(checkpoint_path: Path, alone: Alone) -> None:
    with LocalCluster(house_config(checkpoint_path, **EP2)) as house, MoeClient(house.address) as client:
        batch = alone.batch(9, seed=3)
        client.forward(0, *batch)
        pid = house.pid(1)
        before, shut = descriptors(pid), 0
        for _, port in listeners(pid):
            for number in range(STRANGERS):
                try:
                    with socket.create_connection(("127.0.0.1", port), 0.5) as stranger:
                        stranger.sendall(b"\x00" * 100)
                except TimeoutError:  # later ones may find a queue full
                    shut += number == 0
                    break
        assert shut == 1, "one port of a rank, gloo's, lets nobody in"
        end = time.monotonic() + 20.0
        while descriptors(pid) > before + 4:
            assert time.monotonic() < end, f"{descriptors(pid)} descriptors, {before} before"
            time.sleep(0.1)
        torch.testing.assert_close(client.forward(0, *batch), alone.forward(0, *batch))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_port_is_closed_to_those_who_come_and_open_to_who_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        before = own_listeners()
        with socket.create_server(("127.0.0.1", 0)) as made:
            there = socket.create_connection(made.getsockname(), 2.0)
            accepted, _ = made.accept()
            with there, accepted:
                assert close_to_strangers(but=before) == 1
                there.sendall(b"still there")
                assert accepted.recv(100) == b"still there"
                with contextlib.suppress(TimeoutError):
                    socket.create_connection(made.getsockname(), 0.3).close()
                    raise AssertionError("a stranger was let in")
            with socket.create_connection(other.getsockname(), 2.0):
                other.accept()[0].close()
