"""A service on loopback listens nowhere else: doors, streams, metrics, weights, gloo, and where groups meet.
Nobody without the token reaches the store of a group.
"""

from __future__ import annotations

import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from houses import EP4, Alone, house_config
from listeners import beyond_loopback, listeners
from parallel import parallel_launch
from ports import free_ports
from torch.distributed import TCPStore
from torchrun_store import met_on_loopback

from moeserve.proto.client import MoeClient
from moeserve.runtime.control.stream import StreamClosed, connect
from moeserve.runtime.launch.local_cluster import LocalCluster

SECONDS = 2.0  # that a stranger waits for an answer


@pytest.mark.parametrize(
    ("family", "address", "expected"),
    [
        (socket.AF_INET, "127.0.0.1", False),
        (socket.AF_INET, "0.0.0.0", True),
        (socket.AF_INET6, "::1", False),
        (socket.AF_INET6, "::", True),
    ],
)
def test_a_socket_that_listens_is_found(family: socket.AddressFamily, address: str, expected: bool) -> None:
    try:
        made = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"this host has no {address}: {error}")
    with made:
        found = listeners(os.getpid())
        assert (address, made.getsockname()[1]) in found
        assert ((address, made.getsockname()[1]) in beyond_loopback(found)) == expected


def test_a_service_on_loopback_listens_nowhere_else(checkpoint_path: Path) -> None:
    before = listeners(os.getpid())
    with LocalCluster(house_config(checkpoint_path, **EP4)) as house:
        head = listeners(os.getpid()) - before
        ranks = {rank: listeners(house.pid(rank)) for rank in range(4)}
    assert len(head) >= 3 and all(len(found) >= 4 for found in ranks.values())  # the scan sees what there is
    assert beyond_loopback(head) == set()
    assert {rank: found for rank, found in ranks.items() if beyond_loopback(found)} == {}


def test_no_port_of_a_service_takes_a_strangers_keys(checkpoint_path: Path, alone: Alone) -> None:
    before = listeners(os.getpid())
    with LocalCluster(house_config(checkpoint_path, **EP4)) as house:
        found = listeners(os.getpid()) - before
        ranks = set().union(*(listeners(house.pid(rank)) for rank in range(4)))
        with ThreadPoolExecutor(16) as strangers:
            taken = strangers.map(takes_a_key, [port for _, port in found | ranks])
            assert not any(taken)
        stranger = connect(house.head.streams, 5.0)
        key = {"kind": "store", "generation": 1, "call": 1, "what": "set", "keys": ["k"], "values": ["v"]}
        stranger.send(key)  # and no hello
        with pytest.raises(StreamClosed):
            stranger.receive()
        batch = alone.batch(9, seed=3)
        with MoeClient(house.address, timeout=30) as client:
            torch.testing.assert_close(client.forward(0, *batch), alone.forward(0, *batch))


def takes_a_key(port: int) -> bool:
    """Whether what listens at a port keeps a key for whoever comes, as torch's TCPStore does."""
    key, value = (struct.pack("<Q", len(text)) + text for text in (b"/a stranger's", b"key"))
    spoken = b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x01" + key + value + b"\x03" + key  # set, and get
    try:
        with socket.create_connection(("127.0.0.1", port), SECONDS) as made:
            made.sendall(spoken)
            made.settimeout(SECONDS)
            return made.recv(100).endswith(b"key")
    except OSError:  # it accepts nobody, or says nothing
        return False


def test_a_port_that_takes_keys_is_found() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert takes_a_key(store.port) and store.get("a stranger's") == b"key"


def test_ranks_that_the_environment_has_meet_on_loopback_listen_nowhere_else() -> None:
    for found in parallel_launch(2, met_on_loopback, free_ports()):
        assert found and beyond_loopback(found) == set()
