"""What the stand-ins share: everything to everyone, and memory that holds what it held before."""

import random
from typing import Any

import torch
import torch.distributed as dist
from parallel import group
from torch import Tensor

STALE = 0xA5
"""Every byte of memory that nothing was written to."""


def everyones(value: Any) -> list[Any]:
    """What every rank brought, by rank. Collective."""
    values: list[Any] = [None] * group().size()
    dist.all_gather_object(values, value, group=group())
    return values


def stale(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of old bytes."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((nbytes,), STALE, dtype=torch.uint8).view(dtype).view(shape)


def shuffled(rows: list[Any], seed: int) -> list[Any]:
    """The rows in an order that is no caller's, the same for the same seed."""
    return random.Random(seed).sample(rows, len(rows))


def needed(slots: list[int], rank: int, held: int) -> bool:
    """Whether a row with these slots has one among the `held` slots of `rank`."""
    return any(slot >= 0 and slot // held == rank for slot in slots)


def check(condition: bool, what: str) -> None:
    """Fails as a library does: with an assertion of its own."""
    if not condition:
        raise AssertionError(what)
