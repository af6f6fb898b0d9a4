"""`Even`, the placement every other one is compared with: experts in order, in equal blocks."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.experts.balance.budget import layers_within
from moeserve.experts.load import Load
from moeserve.experts.placement import Placement


@dataclass(frozen=True)
class Even:
    """Contiguous blocks of experts, spare slots empty, whatever the load; taken where it is no worse."""

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        """The placement after at most `budget` moves."""
        return layers_within(budget, placement, self.first(placement, load), load)

    def first(self, placement: Placement, load: Load) -> Placement:
        """The placement to load when nothing is loaded yet, of the size of `placement`."""
        stride = placement.slots_per_owner
        return Placement.blocks(placement.layers, placement.experts, stride, placement.room)
