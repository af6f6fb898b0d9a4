"""Placement as a value: which slot holds which logical expert, and the `AddressBook` that turns experts into
slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EMPTY = -1
"""A slot that holds no expert, and an id that chooses none."""


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
        """L, the layers that are placed."""
        return int(self.slots.shape[0])

    @property
    def slots_per_rank(self) -> int:
        """e, the slots of one rank and layer."""
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
