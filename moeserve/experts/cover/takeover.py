"""Who takes over which experts of one layer when owners are lost: a pure function of where experts lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.placement import EMPTY, slots_within

Row = NDArray[np.int32]

KEPT = 1 << 13
"""Layers' takeovers that are kept: a change of the placement leaves all layers but one as they were."""


class NoRoom(ValueError):
    """The survivors have too few spare slots for the experts that lost their last replica."""


def taken_over(
    row: Row,
    room: tuple[int, ...],
    experts: int,
    lost: Collection[int],
    wish: Mapping[int, int] | None = None,
) -> Row:
    """The slots `[S]` of one layer when the owners `lost` are gone, with every expert in a slot.

    `room` counts the slots of each owner, S = owners x stride. Nothing moves but experts that lost their last
    replica. Each goes to the owner that `wish` names by expert, where that has a spare slot; the others, one
    after the other, to the owner with the least load, where every expert has the same, shared evenly by its
    replicas. Empty slots are filled before replicas are overwritten: of these, first one that its owner has
    twice, then one of the expert with the most replicas. Raises NoRoom.
    """
    stride = len(row) // len(room)
    left = tuple(0 if owner in lost else each for owner, each in enumerate(room))
    usable = slots_within(left, stride)
    filled = _Filled(np.where(usable, row, EMPTY).astype(np.int32), usable, stride, experts)
    missing = np.flatnonzero(filled.copies == 0).tolist()
    spare = int(usable.sum()) - (experts - len(missing))
    if len(missing) > spare:
        raise NoRoom(
            f"{len(missing)} experts lost their last replica, and the survivors have {spare} spare slots; "
            "raise balance.redundant_experts, or keep more ranks"
        )
    wished = wish or {}
    for expert in sorted(missing, key=lambda one: (one not in wished, one)):
        slot = filled.spare_of(wished[expert]) if expert in wished else None
        filled.put(filled.best() if slot is None else slot, expert)
    return filled.row


def repeated(row: Row, stride: int) -> NDArray[np.bool_]:
    """Which slots `[S]` hold an expert that an earlier slot of the same owner holds too."""
    key = np.arange(len(row)) // stride * (int(row.max(initial=0)) + 2) + row + 1
    later = np.ones(len(row), dtype=np.bool_)
    later[np.unique(key, return_index=True)[1]] = False
    return np.asarray(later & (row != EMPTY))


class _Filled:
    """The slots of one layer while missing experts are put into them."""

    def __init__(self, row: Row, usable: NDArray[np.bool_], stride: int, experts: int) -> None:
        self.row = row
        self._usable, self._stride = usable, stride
        self._owner = np.arange(len(row)) // stride
        self.copies = np.bincount(row[row != EMPTY], minlength=experts)

    def put(self, slot: int, expert: int) -> None:
        """Has a slot hold another expert."""
        if (gone := self.row[slot]) != EMPTY:
            self.copies[gone] -= 1
        self.row[slot] = expert
        self.copies[expert] += 1

    def spare_of(self, owner: int) -> int | None:
        """The slot of `owner` that is best filled; None where it has no spare one."""
        spare = np.flatnonzero(self._spare() & (self._owner == owner))
        return self._cheapest(spare) if spare.size else None

    def best(self) -> int:
        """The slot that is best filled, of the owner with the least load."""
        spare = self._spare()
        if (empty := spare & (self.row == EMPTY)).any():
            spare = empty
        at = np.flatnonzero(spare)
        load = self._loads()[self._owner[at]]
        return self._cheapest(at[load <= load.min() + 1e-9])

    def _cheapest(self, slots: NDArray[np.int64]) -> int:
        """Of spare slots the one whose expert is missed least: an empty one, its owner's second, the most."""
        copies = np.where(self.row[slots] == EMPTY, len(self.row) + 1, self.copies[self.row[slots]])
        twice = repeated(self.row, self._stride)[slots]
        return int(slots[np.lexsort((slots, -copies, ~(twice | (self.row[slots] == EMPTY))))[0]])

    def _spare(self) -> NDArray[np.bool_]:
        several = (self.row != EMPTY) & (self.copies[self.row] > 1)
        return np.asarray(self._usable & ((self.row == EMPTY) | several))

    def _loads(self) -> NDArray[np.float64]:
        share = np.where(self.row == EMPTY, 0.0, 1.0 / np.maximum(self.copies[self.row], 1))
        return np.asarray(share.reshape(-1, self._stride).sum(axis=1))


@lru_cache(maxsize=KEPT)
def row_without(slots: bytes, room: tuple[int, ...], experts: int, lost: int) -> Row | None:
    """`taken_over` for one lost owner, of the int32 bytes of one layer's slots; None where there is no room.

    The answer is kept: it cannot be written to.
    """
    try:
        row = taken_over(np.frombuffer(slots, dtype=np.int32), room, experts, {lost})
    except NoRoom:
        return None
    row.setflags(write=False)
    return row


def heirs(slots: bytes, room: tuple[int, ...], experts: int, lost: int) -> dict[int, int] | None:
    """The owner that takes over each expert that only the owner `lost` holds, by expert.

    `slots` are the int32 bytes of one layer's slots. None where the others have no room for all of them.
    """
    then = row_without(slots, room, experts, lost)
    if then is None:
        return None
    row = np.frombuffer(slots, dtype=np.int32)
    stride = len(row) // len(room)
    taken = np.flatnonzero((then != row) & (then != EMPTY))
    return {int(then[slot]): int(slot) // stride for slot in taken.tolist()}
