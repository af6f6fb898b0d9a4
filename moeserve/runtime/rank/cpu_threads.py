"""How many threads compute a step on a CPU: a small one is computed by the thread that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_ELEMENTS = 1 << 15
"""Elements of a step's hidden states up to which torch itself uses one thread in its simple operations."""

SMALL_BYTES = 1 << 20
"""Bytes of a layer's experts that one thread reads in about the time that it takes to wake another."""


def is_small(elements: int, weight_bytes: int) -> bool:
    """Whether one thread does for a step of so many elements of hidden states over experts of these bytes."""
    return elements <= SMALL_ELEMENTS and weight_bytes <= SMALL_BYTES


@contextmanager
def alone() -> Iterator[None]:
    """A context in which the calling thread computes alone.

    The threads of OpenMP look for more work for some time after they have had some. On a host of few cores
    that time is taken from the doors, the head and callers.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
