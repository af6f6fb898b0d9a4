"""Second replicas on other owners: `covered` gives each expert one, as far as there are slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance import Policy
from moeserve.experts.balance.budget import layers_within, moves_a_layer
from moeserve.experts.cover.evening import evened
from moeserve.experts.cover.takeover import repeated
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement

HARDLY = 0.01
"""Of largest over mean load of an owner: a layer is not laid out anew for less."""

Floats = NDArray[np.float64]


def covered_experts(placement: Placement) -> NDArray[np.bool_]:
    """Which experts of each layer two owners hold or more: `[L, E]`."""
    return np.stack(
        [_held(row, placement.owners, placement.experts).sum(axis=1) > 1 for row in placement.slots]
    )


def covered(placement: Placement, load: Load, now: Placement | None = None) -> Placement:
    """`placement` with a second replica on another owner for every expert, before any has a third.

    They go to empty slots first, then over what an owner holds twice, then over third replicas: where slots
    do not reach, the experts with the most load come first, as many as can be. Each goes to the owner that is
    loaded least when the other one is lost. A replica that `now` has in such a slot stays there, which copies
    nothing. Experts move only where spare slots are left on their own owner alone.
    """
    before = placement if now is None else now
    rows = [
        _Cover(placement, row, np.asarray(tokens, dtype=np.float64)).row_after(was)
        for row, was, tokens in zip(placement.slots, before.slots, load.tokens, strict=True)
    ]
    return placement.with_slots(np.stack(rows)) if rows else placement


@dataclass(frozen=True)
class Covering:
    """A policy whose placements stand the loss of an owner as far as their slots do.

    What the policy wants is mended, and evened by experts that change places; where that is hardly better,
    only places are changed from the placement as it is. Layers that are as well covered before change only
    where that evens their load, and within the budget. Others are mended beyond it.
    """

    policy: Policy

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        """The placement after at most `budget` moves, and those that mend layers."""
        most = min(budget // 2, placement.slots.shape[1])
        near = evened(covered(placement, load), load, most)
        far = covered(self.policy(placement, load, budget), load, placement)
        far = evened(far, load, placement.slots.shape[1])
        better = far.imbalance(load.tokens) < near.imbalance(load.tokens) - HARDLY
        wanted = placement.with_slots(np.where(better[:, None], far.slots, near.slots))
        kept = layers_within(budget, placement, wanted, load)
        left = budget - int(moves_a_layer(placement.slots, kept.slots).sum())
        same = (kept.slots == placement.slots).all(axis=1)  # too far for what is left of the budget
        nearer = kept.with_slots(np.where(same[:, None], near.slots, kept.slots))
        kept = layers_within(left, kept, nearer, load)
        mended = covered_experts(placement).sum(axis=1) < covered_experts(wanted).sum(axis=1)
        return placement.with_slots(np.where(mended[:, None], wanted.slots, kept.slots))

    def first(self, placement: Placement, load: Load) -> Placement:
        """The placement to load when nothing is loaded yet, of the size of `placement`."""
        found = covered(self.policy.first(placement, load), load)
        return evened(found, load, placement.slots.shape[1])


def _held(row: NDArray[np.int32], owners: int, experts: int) -> NDArray[np.bool_]:
    """Which owner holds which expert: `[E, owners]`."""
    found = np.zeros((experts, owners), dtype=bool)
    slots = np.flatnonzero(row != EMPTY)
    found[row[slots], slots // (len(row) // owners)] = True
    return found


class _Cover:
    """One layer while second replicas are put into its spare slots."""

    def __init__(self, placement: Placement, row: NDArray[np.int32], tokens: Floats) -> None:
        self._row, self._usable = row.copy(), placement.usable
        self._stride = placement.slots_per_owner
        self._owner = np.arange(len(row)) // self._stride
        self._held = _held(row, placement.owners, placement.experts)
        self._weight = tokens if tokens.any() else np.ones(placement.experts)

    def row_after(self, now: NDArray[np.int32]) -> NDArray[np.int32]:
        """The slots with as many experts covered as can be; replicas of `now` stay where spare slots are."""
        waiting = self._uncovered()
        for expert in waiting:
            here = np.flatnonzero(self._spare() & (now == expert) & ~self._held[expert][self._owner])
            if here.size:
                self._put(int(here[0]), expert)
        for expert in waiting:
            if self._held[expert].sum() < 2 and (spare := np.flatnonzero(self._spare())).size:
                self._cover(expert, spare)
        return self._row

    def _uncovered(self) -> list[int]:
        """Experts that one owner holds, the most load first; those of equal load by owners in turn."""
        alone = np.flatnonzero(self._held.sum(axis=1) == 1)
        owner = self._held[alone].argmax(axis=1)
        turn = np.array([np.count_nonzero(owner[:at] == owner[at]) for at in range(len(alone))], dtype=int)
        order = np.lexsort((owner, turn, -self._weight[alone]))
        return [int(expert) for expert in alone[order]]

    def _cover(self, expert: int, spare: NDArray[np.int64]) -> None:
        """Gives `expert` a second owner, by one of the `spare` slots."""
        elsewhere = spare[~self._held[expert][self._owner[spare]]]
        if elsewhere.size:
            self._put(self._best(expert, elsewhere), expert)
            return
        own = int(spare[0])  # on its own owner: another expert comes here and makes room for it there
        home = self._owner[own]
        movable = (self._row != EMPTY) & ~self._held[self._row, home] & (self._owner != home) & self._usable
        if (there := np.flatnonzero(movable)).size:
            slot = int(there[0])
            other = int(self._row[slot])
            self._put(slot, expert)
            self._put(own, other)

    def _best(self, expert: int, slots: NDArray[np.int64]) -> int:
        """The slot of the owner that is loaded least when the holder of `expert` is lost; empty first."""
        home = int(self._held[expert].argmax())
        load, taken = self._loads(home)
        after = load + taken + self._weight[expert] / 2
        kind = np.where(
            self._row[slots] == EMPTY, 0, np.where(repeated(self._row, self._stride)[slots], 1, 2)
        )
        return int(slots[np.lexsort((slots, after[self._owner[slots]], kind))[0]])

    def _loads(self, home: int) -> tuple[Floats, Floats]:
        """Each owner's load, and what it takes over of the owner `home`: `[owners]` each."""
        holders = self._held.sum(axis=1)
        share = (self._weight / np.maximum(holders, 1))[:, None] * self._held
        left = np.maximum(holders - self._held[:, home], 1)
        more = (self._weight * self._held[:, home] / np.maximum(holders, 1) / left)[:, None] * self._held
        return share.sum(axis=0), more.sum(axis=0)

    def _put(self, slot: int, expert: int) -> None:
        gone, owner = int(self._row[slot]), self._owner[slot]
        self._row[slot] = expert
        if gone != EMPTY:
            self._held[gone, owner] = bool((self._row[self._owner == owner] == gone).any())
        self._held[expert, owner] = True

    def _spare(self) -> NDArray[np.bool_]:
        """Slots whose expert keeps two owners without them, or has its owner's another slot; empty ones."""
        third = (self._row != EMPTY) & (self._held[self._row].sum(axis=1) > 2)
        return np.asarray(self._usable & ((self._row == EMPTY) | third | repeated(self._row, self._stride)))
