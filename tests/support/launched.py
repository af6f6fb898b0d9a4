"""Workers for the launcher's own tests."""

import os
import time

import torch
import torch.distributed as dist
from parallel import group


def add_up(rank: int, world: int, base: int) -> tuple[int, int]:
    """(rank, sum over ranks of base + rank)."""
    total = torch.tensor([base + rank])
    dist.all_reduce(total, group=group())
    return rank, int(total)


def fail_on_one(rank: int, world: int) -> None:
    """Rank 1 raises while the others wait for it."""
    if rank == 1:
        raise ValueError("lost my way")
    dist.barrier(group=group())


def die(rank: int, world: int) -> None:
    """Rank 1 ends without a result."""
    if rank == 1:
        os._exit(3)
    dist.barrier(group=group())


def hang(rank: int, world: int) -> None:
    """Never finishes by itself."""
    time.sleep(600)
