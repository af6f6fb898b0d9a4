"""`Incremental`: from the placement as it is, the swaps and replicas that gain most for each move."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance.budget import best_steps, moves_a_layer
from moeserve.experts.balance.eplb import Eplb
from moeserve.experts.balance.objective import ReplicaCost, Tokens
from moeserve.experts.balance.search import Search
from moeserve.experts.load import Load
from moeserve.experts.placement import Placement

UNLIMITED = 1 << 60
"""A budget of moves that does not bind."""


@dataclass(frozen=True)
class Incremental:
    """Swaps and replicas, one after the other, from each layer's hottest rank; slots that need not change do
    not.

    Each layer walks a path of steps (`Search`). It then goes as far along it as pays: all ranks wait for the
    hottest, so a move has to take `worth` off largest over mean rank load times ranks, that is off the mean
    loads the ranks together could have computed meanwhile. All layers compete for the budget, and a layer
    never ends worse than it was. With `nodes` > 1 experts stay inside their node while that node has a rank
    below the mean. Where that path ends far from even, DeepSeek's packing is one more place to go to, at the
    price of its moves. `cost` says what load is: tokens, active experts, or time.
    """

    worth: float = 0.014
    nodes: int = 1
    groups: int = 1
    cost: ReplicaCost = field(default_factory=Tokens)

    def __post_init__(self) -> None:
        if not self.worth > 0:
            raise ValueError(
                f"worth={self.worth} must be more than 0: a move that gains nothing costs its bytes"
            )

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        """The placement after at most `budget` moves."""
        return self._improved(placement, load, budget, self.worth / np.count_nonzero(placement.room))

    def first(self, placement: Placement, load: Load) -> Placement:
        """The placement to load when nothing is loaded yet, of the size of `placement`: moves cost nothing.

        For tokens it starts from DeepSeek's packing; another cost may want spare slots left empty, so there
        it starts from `placement`.
        """
        if isinstance(self.cost, Tokens):
            placement = self._packing(placement).first(placement, load)
        return self._improved(placement, load, UNLIMITED, worth=1e-5)

    def _improved(self, placement: Placement, load: Load, budget: int, worth: float) -> Placement:
        paths = Search(placement, load, self.cost, self.nodes).walk(worth)
        imbalance, moves = paths.imbalance, paths.moves
        afresh = placement.slots
        if self._stuck(placement, imbalance + worth * moves, worth):
            policy = self._packing(placement)
            packed = policy.first(placement, load)
            afresh = policy.aligned(placement, packed)
            imbalance = np.vstack([imbalance, packed.imbalance(load.tokens)])
            moves = np.vstack([moves, moves_a_layer(placement.slots, afresh)])
        taken = best_steps(imbalance, moves, budget, worth=worth)
        slots = np.where((taken == len(paths.imbalance))[:, None], afresh, paths.after(taken))
        return placement.with_slots(slots)

    def _packing(self, placement: Placement) -> Eplb:
        """DeepSeek's packing; on nodes only where all owners have the same room."""
        alike = len(set(placement.room)) == 1
        return Eplb(self.nodes, self.groups) if alike else Eplb()

    def _stuck(self, placement: Placement, price: NDArray[np.float64], worth: float) -> bool:
        """Whether a layer ended so far from even that packing it afresh, most of its slots, might pay."""
        dear = worth * sum(placement.room) / 4
        return isinstance(self.cost, Tokens) and bool((price.min(axis=0) - 1 > dear).any())
