"""`Incremental`: from the placement as it is, the swaps and replicas that gain most for each expert copied."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance.budget import best_steps
from moeserve.experts.balance.eplb import Eplb
from moeserve.experts.balance.objective import ReplicaCost, Tokens
from moeserve.experts.balance.search import Search
from moeserve.experts.load import Load
from moeserve.experts.placement import Placement

UNLIMITED = 1 << 60
"""A budget of moves that does not bind."""


@dataclass(frozen=True)
class Incremental:
    """Swaps and replicas, one after the other, from each layer's hottest rank; slots that need not change do not.

    Each layer walks a path of steps (`Search`). It then goes as far along it as pays: all ranks wait for the
    hottest, so a move has to take `worth` off largest over mean rank load times ranks, that is off the mean loads
    the ranks together could have computed meanwhile. All layers compete for the budget, and a layer never ends
    worse than it was. With `nodes` > 1 experts stay inside their node while that node has a rank below the mean.
    `cost` says what load is: tokens, active experts, or time.
    """

    worth: float = 0.012
    nodes: int = 1
    groups: int = 1
    cost: ReplicaCost = field(default_factory=Tokens)

    def __post_init__(self) -> None:
        if not self.worth > 0:
            raise ValueError(f"worth={self.worth} must be more than 0: a move that gains nothing costs its bytes")

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        """The placement after at most `budget` moves."""
        return self._improved(placement, load, budget, self.worth / placement.ranks)

    def first(self, placement: Placement, load: Load) -> Placement:
        """The placement to load when nothing is loaded yet, of the size of `placement`: moves cost nothing.

        For tokens it starts from DeepSeek's packing; another cost may want spare slots left empty, so there it
        starts from `placement`.
        """
        if isinstance(self.cost, Tokens):
            placement = Eplb(self.nodes, self.groups).first(placement, load)
        return self._improved(placement, load, UNLIMITED, worth=1e-5)

    def _improved(self, placement: Placement, load: Load, budget: int, worth: float) -> Placement:
        search = Search(placement, load, self.cost, self.nodes)
        paths = search.walk(worth)
        taken = best_steps(paths.imbalance, paths.moves, budget, worth=worth)
        return Placement(paths.after(taken), placement.ranks, placement.experts)


def imbalance_under(cost: ReplicaCost, placement: Placement, load: Load) -> NDArray[np.float64]:
    """Largest over mean rank load of each layer when load is measured in `cost`: `[L]`, 1 = even."""
    return Search(placement, load, cost).imbalance()
