"""Placement as a value: which slot holds which logical expert, and the `AddressBook` that turns experts into
slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.experts.replicas import Gathered, Size, Splitter, choice_named, counted
from moeserve.experts.replicas.on_device import DeviceSplitter, splitter_on

EMPTY = -1
"""A slot that holds no expert, and an id that chooses none."""

_KNUTH = 2654435769  # 2^32 / golden ratio: consecutive tokens spread over replicas


class Move(NamedTuple):
    """One expert copied into one slot of one layer; `source` holds it now, EMPTY: from disk."""

    layer: int  # position among the served layers
    slot: int
    expert: int
    source: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Which logical expert each slot holds: `slots [L, S]`, S = ranks x slots a rank, EMPTY where none.

    Rank r owns slots `r * S / ranks` to `(r + 1) * S / ranks`. An expert in several slots is replicated. When
    experts are sliced (tensor parallel), the group is the one owner: `ranks` is 1 and every rank holds its
    slice
    of every slot. Raises ValueError when S does not divide by ranks or an expert of a layer has no slot.
    """

    slots: NDArray[np.int32]
    ranks: int
    experts: int  # E

    def __post_init__(self) -> None:
        slots = np.array(self.slots, dtype=np.int32)
        if slots.ndim != 2 or slots.shape[1] % self.ranks:
            raise ValueError(
                f"slots {list(slots.shape)} must be [layers, slots], "
                f"with slots a multiple of ranks={self.ranks}"
            )
        if slots.size and (slots.min() < EMPTY or slots.max() >= self.experts):
            raise ValueError(
                f"slots hold experts {slots.min()} to {slots.max()}; "
                f"a layer has experts 0 to {self.experts - 1}"
            )
        for layer, row in enumerate(slots):
            if missing := sorted(set(range(self.experts)) - set(row.tolist())):
                raise ValueError(
                    f"layer {layer} has no slot for experts {missing[:8]}; every expert needs one"
                )
        slots.setflags(write=False)
        object.__setattr__(self, "slots", slots)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and self.ranks == other.ranks
            and np.array_equal(self.slots, other.slots)
        )

    def __hash__(self) -> int:
        return hash((self.ranks, self.slots.tobytes()))

    @classmethod
    def even(cls, layers: int, experts: int, ranks: int) -> Placement:
        """Contiguous blocks in order; the first E mod ranks ranks hold one more, and a rank past E holds
        none.
        """
        base, rest = divmod(experts, ranks)
        width = base + (rest > 0)
        row = np.full(ranks * width, EMPTY, dtype=np.int32)
        for rank in range(ranks):
            first, count = rank * base + min(rank, rest), base + (rank < rest)
            row[rank * width : rank * width + count] = np.arange(first, first + count)
        return cls(np.tile(row, (layers, 1)), ranks, experts)

    @property
    def layers(self) -> int:
        """L."""
        return int(self.slots.shape[0])

    @property
    def slots_per_rank(self) -> int:
        """e."""
        return int(self.slots.shape[1]) // self.ranks

    def of_rank(self, layer: int, rank: int) -> NDArray[np.int32]:
        """Experts in the slots of `rank` at `layer`: [e], EMPTY where none."""
        width = self.slots_per_rank
        return self.slots[layer, rank * width : (rank + 1) * width]

    def replicas(self, layer: int, expert: int) -> NDArray[np.int64]:
        """Slots that hold `expert` at `layer`, ascending."""
        return np.flatnonzero(self.slots[layer] == expert)

    def moves_to(self, other: Placement) -> tuple[Move, ...]:
        """What has to be copied to get to `other`: one move for each slot that gets another expert."""
        if self.slots.shape != other.slots.shape or self.ranks != other.ranks:
            raise ValueError(
                f"placements differ in size: {list(self.slots.shape)} on {self.ranks} ranks, "
                f"{list(other.slots.shape)} on {other.ranks}"
            )
        changed = zip(*np.nonzero((self.slots != other.slots) & (other.slots != EMPTY)), strict=True)
        return tuple(
            Move(
                int(layer),
                int(slot),
                int(other.slots[layer, slot]),
                int(self.replicas(layer, other.slots[layer, slot])[0]),
            )
            for layer, slot in changed
        )

    def rank_load(self, load: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens each rank gets, an expert's load `[L, E]` split evenly over its replicas: [L, ranks]."""
        filled = self.slots != EMPTY
        copies = np.stack([np.bincount(row[row != EMPTY], minlength=self.experts) for row in self.slots])
        share = np.asarray(load, dtype=np.float64) / copies
        per_slot = np.where(filled, np.take_along_axis(share, np.where(filled, self.slots, 0), axis=1), 0.0)
        ranks: NDArray[np.float64] = per_slot.reshape(self.layers, self.ranks, -1).sum(axis=2)
        return ranks

    def imbalance(self, load: NDArray[np.float64]) -> NDArray[np.float64]:
        """Largest over mean rank load of each layer under `load [L, E]`: [L], 1 = even."""
        ranks = self.rank_load(load)
        mean = ranks.mean(axis=1)
        return np.where(mean > 0, ranks.max(axis=1) / np.where(mean > 0, mean, 1.0), 1.0)


class AddressBook:
    """The only door between logical experts and slots. A lane knows its own ids only.

    `choice` names the row of `REPLICA_CHOICES` that picks among an expert's replicas, and `lane` is the rank
    whose rows are resolved. Tables are allocated once and rewritten in place by `update` and `update_layer`,
    so a captured CUDA graph stays valid.
    """

    def __init__(
        self, placement: Placement, device: torch.device | str = "cpu", choice: str = "hash", lane: int = 0
    ) -> None:
        layers, slots = placement.slots.shape
        self.experts, self.slots = placement.experts, slots
        size = Size(layers, placement.experts, slots, placement.ranks)
        row = choice_named(choice)
        split, self._least_rows = row.split, row.least_rows
        lane %= placement.ranks
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

    def counts(self, experts: Tensor, valid: Tensor) -> Tensor:
        """How often each logical expert is chosen, `[E]` int64: what lanes gather to split together."""
        return counted(self._wanted(experts, valid).reshape(-1), self.experts)

    def on_device(self, shape: tuple[int, ...]) -> DeviceSplitter | None:
        """The tables by which kernels resolve ids of `shape [T, K]`; None where tensor operations do."""
        serves = self._on_device is not None and self._on_device.serves(shape)
        return self._on_device if serves else None

    def resolve(self, layer: int, experts: Tensor, valid: Tensor, gathered: Gathered | None = None) -> Tensor:
        """Slots for the chosen experts.

        `experts [T, K]` int, EMPTY for none; `valid [T]` bool, False for padding rows. Returns `[T, K]`
        int32, EMPTY where the id is out of range or the row is not valid. The same batch gives the same
        slots. By `hash` the row's index picks the replica, so all K of a row agree on it; the other choices
        split the batch's rows, and those of all lanes together where counts were `gathered` (then each
        lane's book is built for lane 0, so that all split alike).
        """
        on_device = self.on_device(experts.shape) if gathered is None else None
        if on_device is not None:
            return on_device.choose(layer, experts, valid)
        wanted = self._wanted(experts, valid)
        known = wanted < self.experts
        if self._splitter is not None and experts.shape[0] >= self._least_rows:
            slots = self._splitter.choose(layer, wanted.reshape(-1), gathered).reshape(experts.shape)
            return torch.where(known, slots, EMPTY)
        safe = torch.where(known, wanted, 0)
        copies = self._copies[layer][safe]
        row = torch.arange(experts.shape[0], device=experts.device)[:, None]
        replica = (row * _KNUTH & 0xFFFFFFFF) % copies
        slots = self._replicas[layer][safe, replica]
        return torch.where(known, slots, EMPTY)

    def _wanted(self, experts: Tensor, valid: Tensor) -> Tensor:
        """The ids as int64, E where there is none."""
        known = (experts >= 0) & (experts < self.experts) & valid[:, None]
        return torch.where(known, experts, self.experts).long()
