"""`AddressBook`: the one place where logical experts become slots."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.experts.placement import EMPTY, Placement
from moeserve.experts.routing.device_splitter import DeviceSplitter, splitter_on
from moeserve.experts.routing.replicas import Size, Splitter, choice_named

MOST_TOGETHER = 64
"""Rows of a batch that agree on replicas at most: its hot experts have many more than others."""

_READ_ONCE = 8
"""Rows of one expert that come to the same replica, where a batch chooses experts evenly. A step of few rows
takes as long as the weights that it reads, and rows at another replica have them read once more.
"""


class AddressBook:
    """The only door between logical experts and slots. A lane knows its own ids only.

    `choice` names the entry of `REPLICA_CHOICES` that picks among an expert's replicas; `lane` is the rank
    whose rows are resolved. Tables are allocated once and rewritten in place by `update` and `update_layer`,
    so a captured CUDA graph stays valid.
    """

    def __init__(
        self, placement: Placement, device: torch.device | str = "cpu", choice: str = "hash", lane: int = 0
    ) -> None:
        layers, slots = placement.slots.shape
        self.experts, self.slots = placement.experts, slots
        self.room = sum(placement.room)  # slots that owners have, of those numbers
        size = Size(layers, placement.experts, slots, placement.owners)
        entry = choice_named(choice)
        split, self._least_rows = entry.split, entry.least_rows
        self._lane = lane
        lane %= placement.owners
        self._splitter = None if split is None else Splitter(size, split, lane, device)
        self._on_device = splitter_on(device, size, split, lane)
        if self._on_device is not None:
            self._least_rows = 0  # one launch, faster than hashing
        width = slots - placement.experts + 1  # every expert has a slot, so none has more
        self._replicas = torch.full(
            (layers, placement.experts, width), EMPTY, dtype=torch.int32, device=device
        )
        self._copies = torch.zeros((layers, placement.experts), dtype=torch.int64, device=device)
        self.update(placement)

    def update(self, placement: Placement) -> None:
        """Rewrites the tables for `placement`, of the same size."""
        self.room = sum(placement.room)
        for layer, row in enumerate(placement.slots):
            self.update_layer(layer, row)

    def update_layer(self, layer: int, slots: NDArray[np.int32]) -> None:
        """Rewrites one layer's tables for its `slots [S]`."""
        table = np.full((self.experts, self._replicas.shape[2]), EMPTY, dtype=np.int32)
        copies = np.zeros(self.experts, dtype=np.int64)
        for slot, expert in enumerate(slots.tolist()):
            if expert != EMPTY:
                table[expert, copies[expert]] = slot
                copies[expert] += 1
        self._replicas[layer].copy_(torch.from_numpy(table))
        self._copies[layer].copy_(torch.from_numpy(copies))
        for splitter in (self._splitter, self._on_device):
            if splitter is not None:
                splitter.update_layer(layer, slots)

    def on_device(self, shape: tuple[int, ...]) -> DeviceSplitter | None:
        """The tables by which kernels resolve ids of `shape [T, K]`; None where tensor operations do."""
        serves = self._on_device is not None and self._on_device.serves(shape)
        return self._on_device if serves else None

    def resolve(self, layer: int, experts: Tensor, valid: Tensor) -> Tensor:
        """Slots for the chosen experts.

        `experts [T, K]` int, EMPTY for none; `valid [T]` bool, False for padding rows. Returns `[T, K]`
        int32, EMPTY where the id is out of range or the row is not valid. The same batch gives the same
        slots. By `hash` the lane, the expert and the row's index pick the replica, the same one for rows that
        lie together; the other choices split the batch's rows.
        """
        on_device = self.on_device(experts.shape)
        if on_device is not None:
            return on_device.choose(layer, experts, valid)
        if experts.is_cpu and (self._splitter is None or experts.shape[0] < self._least_rows):
            return self._hashed_on_host(layer, experts, valid)
        known = (experts >= 0) & (experts < self.experts) & valid[:, None]
        wanted = torch.where(known, experts, self.experts).long()  # E where there is none
        if self._splitter is not None and experts.shape[0] >= self._least_rows:
            slots = self._splitter.choose(layer, wanted.reshape(-1)).reshape(experts.shape)
            return torch.where(known, slots, EMPTY)
        return self._hashed(layer, torch.where(known, wanted, 0), known)

    def _hashed(self, layer: int, safe: Tensor, known: Tensor) -> Tensor:
        """The slots of experts `safe [T, K]` by lane, expert and row, EMPTY where the id is not `known`, bool
        `[T, K]`.
        """
        copies = self._copies[layer][safe]
        row = torch.arange(safe.shape[0], device=safe.device)[:, None]
        turn = torch.div(row, self._together(safe.shape[1]), rounding_mode="floor") + self._lane
        slots = self._replicas[layer][safe, (turn + safe) % copies]
        return torch.where(known, slots, EMPTY)

    def _hashed_on_host(self, layer: int, experts: Tensor, valid: Tensor) -> Tensor:
        """`_hashed` by NumPy, whose operations on few rows take a fraction of torch's time."""
        ids = experts.numpy()
        known = (ids >= 0) & (ids < self.experts) & valid.numpy()[:, None]
        safe = np.where(known, ids, 0)
        table = self._replicas.numpy()[layer]
        if table.shape[1] == 1:
            found = table[safe, 0]
        else:
            row = np.arange(len(ids), dtype=np.int64)[:, None]
            turn = row // self._together(ids.shape[1]) + self._lane
            found = table[safe, (turn + safe) % self._copies.numpy()[layer][safe]]
        return torch.from_numpy(np.where(known, found, np.int32(EMPTY)))

    def _together(self, chosen: int) -> int:
        """Rows of a batch that agree on replicas, where each chooses so many experts."""
        return min(MOST_TOGETHER, max(1, _READ_ONCE * self.experts // max(1, chosen)))
