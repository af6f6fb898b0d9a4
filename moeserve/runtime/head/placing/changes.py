"""The way from one placement to another, an epoch at a time: each changes so little that no rank needs more
room than it has, and every expert has a slot throughout.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.placement import EMPTY, Move, Placement
from moeserve.runtime.epoch import Change, Epoch

Row = NDArray[np.int32]


def rebalance(epoch: Epoch, target: Placement, staging_slots: int) -> Iterator[Change]:
    """The changes from `epoch` to `target`, in order; each copies into `staging_slots` slots a rank at most.

    Raises ValueError for a placement of another size or room, or `staging_slots` under 1.
    """
    if staging_slots < 1:
        raise ValueError(f"staging_slots={staging_slots} must be 1 or more to move experts")
    epoch.placement.moves_to(target)  # refuses another size
    if target.room != epoch.placement.room:
        raise ValueError(
            f"a placement with room for {list(target.room)} experts cannot follow one with room for "
            f"{list(epoch.placement.room)}; room changes only when members come or go"
        )
    changed = (epoch.placement.slots != target.slots).any(axis=1)
    for layer in np.flatnonzero(changed).tolist():
        for row in _rows(epoch.placement, layer, target.slots[layer], staging_slots):
            moved = epoch.moved(layer, row)
            yield Change(moved, layer, epoch.placement.moves_to(moved.placement))
            epoch = moved


def reload(epoch: Epoch, name: str, begun: int = 0) -> Iterator[Change]:
    """The changes that bring every layer to the weights of a name, each layer whole in one epoch.

    begun: the version of the weights that an earlier attempt has brought some layers to; 0: none has.
    """
    if epoch.names[begun - 1 : begun] != (name,):
        epoch = epoch.with_weights(name)
        begun = len(epoch.names)
    for layer in range(epoch.placement.layers):
        if epoch.version(layer) == begun:
            continue
        epoch = epoch.reloaded(layer, begun)
        slots = enumerate(epoch.placement.slots[layer].tolist())
        moves = tuple(Move(layer, slot, expert, EMPTY) for slot, expert in slots if expert != EMPTY)
        yield Change(epoch, layer, moves)


def _rows(placement: Placement, layer: int, target: Row, staging_slots: int) -> Iterator[Row]:
    """Rows of `layer` from now to `target`: each keeps every expert and changes few slots of a rank."""
    now = placement.slots[layer].copy()
    while (wanted := np.flatnonzero((now != target) & (target != EMPTY))).size:
        room = np.full(placement.owners, staging_slots)
        then = now.copy()
        for slot in wanted.tolist():
            if then[slot] == now[slot] and (more := _together(now, then, target, slot, room)):
                for each in more:
                    then[each] = target[each]
                    room[each // placement.slots_per_owner] -= 1
        if (then == now).all():
            then = _exchanged(now, target, placement.slots_per_owner, staging_slots)
        yield then.copy()
        now = then
    if (now != target).any():
        yield target.copy()  # slots that are given up: nothing is copied


def _together(now: Row, then: Row, target: Row, slot: int, room: NDArray[np.int64]) -> list[int]:
    """`slot`, and the slots that must change with it so that no expert is lost; empty where room ends."""
    width = len(now) // len(room)
    left, chosen, row = room.copy(), [], then.copy()
    waiting = [slot]
    while waiting:
        at = waiting.pop()
        if left[at // width] < 1:
            return []
        gone, row[at] = int(row[at]), target[at]
        left[at // width] -= 1
        chosen.append(at)
        if gone != EMPTY and not (row == gone).any():
            heirs = np.flatnonzero((target == gone) & (row != gone) & (then == now))
            if not heirs.size:
                return []
            waiting.append(int(heirs[left[heirs // width].argmax()]))
    return chosen


def _exchanged(now: Row, target: Row, width: int, staging_slots: int) -> Row:
    """Two slots change their experts, one of them for good: the way on where longer rings do not fit."""
    then = now.copy()
    for slot in np.flatnonzero((now != target) & (target != EMPTY)).tolist():
        holders = np.flatnonzero((now == target[slot]) & (now != target))
        for other in holders.tolist():
            if staging_slots > 1 or other // width != slot // width:
                then[slot], then[other] = now[other], now[slot]
                return then
    raise ValueError(
        "experts of one rank cannot change places within staging_slots=1; raise balance.staging_slots to 2"
    )
