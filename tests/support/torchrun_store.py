"""Ranks whose environment says where they meet, as a program that starts them without torchrun sets it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from listeners import listeners

from moeserve.runtime.launch.torchrun import _meeting


def met_on_loopback(rank: int, world: int, port: int) -> set[tuple[str, int]]:
    """Worker: meets the others, forms the program's default group at the same port; where it listens."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    store = _meeting(20.0)
    store.set(f"from {rank}", str(rank))
    assert [int(store.get(f"from {at}")) for at in range(world)] == list(range(world))
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == world
    found = listeners(os.getpid())
    dist.barrier()
    dist.destroy_process_group()
    return found
