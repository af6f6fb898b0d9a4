"""A large tensor rearranged a few rows at a time, so that what is made on the way stays small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch import Tensor

PIECE_BYTES = 1 << 16


def pieces(stored: Tensor, step: int) -> Iterator[tuple[tuple[int, ...], slice]]:
    """The rows of each matrix of `stored [..., n, k]`, a multiple of `step` at a time, about 64 KiB.

    Yields the matrix' index and the rows; nothing for a tensor without storage or elements.
    """
    if stored.device.type == "meta" or stored.numel() == 0:
        return
    row = max(1, stored.shape[-1] * stored.dtype.itemsize)
    many = max(1, PIECE_BYTES // (row * step)) * step
    for matrix in product(*(range(size) for size in stored.shape[:-2])):
        for start in range(0, stored.shape[-2], many):
            yield matrix, slice(start, min(start + many, stored.shape[-2]))
