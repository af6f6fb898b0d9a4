"""`Steps` and `Paths`: what a search did to each layer, so that each can stop where it pays to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Steps(NamedTuple):
    """One step of some layers: `rows [n]`, what two slots of each get; a replica fills the first alone."""

    rows: Ints  # [n] layers
    slots: Ints  # [n, 2]
    experts: Ints  # [n, 2]

    def of(self, which: NDArray[np.bool_]) -> Steps:
        """The steps chosen by a mask `[n]`."""
        return Steps(*(part[which] for part in self))


@dataclass(frozen=True, eq=False)
class Paths:
    """How far each layer came: after k steps `imbalance[k]` and `moves[k]`, both `[steps + 1, L]`."""

    start: NDArray[np.int32]  # [L, S]
    steps: tuple[Steps, ...]
    imbalance: NDArray[np.float64]
    moves: Ints

    def after(self, taken: Ints) -> NDArray[np.int32]:
        """Slots when layer l took the first `taken[l]` steps: `[L, S]`."""
        slots = self.start.copy()
        for number, steps in enumerate(self.steps):
            kept = steps.of(taken[steps.rows] > number)
            slots[kept.rows[:, None], kept.slots] = kept.experts
        return slots
