"""`DeviceSplitter`, tables that turn experts into slots by GPU kernels, in one launch or two."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.device.machine import kernels_serve
from moeserve.experts.routing.replicas import Size, Split, transport, waterfill

SPLITS: dict[Split, str] = {transport: "lp", waterfill: "waterfill"}  # as the kernels name them
MOST_SPARE, MOST_RANKS = 128, 64  # a split [X, N] of as many fits the registers of a program
MOST_ROWS = 1 << 17  # K T of a split; the kernels count 256ths of a row in int32


def served_on(device: torch.device | str, size: Size) -> bool:
    """Whether the kernels serve tables of this size there: on CUDA, with the package triton."""
    fits = size.slots - size.experts <= MOST_SPARE and size.ranks <= MOST_RANKS
    return fits and kernels_serve(torch.device(device))


def splitter_on(
    device: torch.device | str, size: Size, split: Split | None, lane: int
) -> DeviceSplitter | None:
    """Tables for a split, or for any choice where no expert can have a second slot; None: left to torch."""
    if not served_on(device, size) or (split is None and size.slots > size.experts):
        return None
    return DeviceSplitter(size, split or transport, lane, device)


class DeviceSplitter:
    """Tables that turn experts into slots by a split of `SPLITS`: allocated once, rewritten in place.

    Rows of a rank are as many as the split of `replicas` gives it, for `waterfill`; `lp`
    rounds in another way and ends within a row or two of that. `lane` turns the ranks round as there.
    `warps` is the width of a program.
    """

    def __init__(self, size: Size, split: Split, lane: int, device: torch.device | str) -> None:
        spare = size.slots - size.experts
        replicated = _power_of_two(max(spare, 8)) if spare else 0
        ranks = _power_of_two(max(size.ranks, 4))
        self.size, self.split, self.lane = size, SPLITS[split], lane
        self.warps = 4 if replicated * ranks <= 1024 else 8
        padded = -(-size.experts // 16) * 16  # every layer starts aligned, so one compiled kernel serves all
        # an expert's slot where that is its only one, else -1 - x: it is replicated expert x
        self.home = torch.zeros((size.layers, padded), dtype=torch.int32, device=device)
        # the slot of replicated expert x on a rank, counted from `lane` on; -1: none
        self.cells = torch.full((size.layers, replicated, ranks), -1, dtype=torch.int32, device=device)

    @property
    def splits(self) -> bool:
        """Whether an expert can have a second slot, so that which one a row goes to depends on the others."""
        return self.cells.shape[1] > 0

    def serves(self, shape: tuple[int, ...]) -> bool:
        """Whether the kernels take ids of `shape [T, K]`."""
        return not self.splits or math.prod(shape) <= MOST_ROWS

    def update_layer(self, layer: int, slots: NDArray[np.int32]) -> None:
        """Rewrites a layer's tables for its `slots [S]`."""
        size, held = self.size, slots.astype(np.int64)
        taken = np.flatnonzero(held >= 0)[::-1]  # of an expert's slots on one rank the first stays
        copies = np.bincount(held[taken], minlength=size.experts)
        home = np.zeros(self.home.shape[1], dtype=np.int32)
        home[held[taken]] = taken
        several = np.flatnonzero(copies > 1)
        home[several] = -1 - np.arange(len(several))
        cells = np.full(self.cells.shape[1:], -1, dtype=np.int32)
        shared = taken[copies[held[taken]] > 1]
        rank = (shared // (size.slots // size.ranks) - self.lane) % size.ranks
        cells[-1 - home[held[shared]], rank] = shared
        self.home[layer].copy_(torch.from_numpy(home))
        self.cells[layer].copy_(torch.from_numpy(cells))

    def choose(self, layer: int, experts: Tensor, valid: Tensor) -> Tensor:
        """Slots `[T, K]` int32 of `experts [T, K]` int and `valid [T]` bool, as of `AddressBook.resolve`."""
        from moeserve.experts.routing.address_kernels import address

        choices = (experts.contiguous(), None, valid.contiguous())
        slots, _ = address(self, layer, choices, (None, None))  # type: ignore[no-untyped-call]
        return cast(Tensor, slots)


def _power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << (number - 1).bit_length()
