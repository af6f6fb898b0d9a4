"""Placements with spare slots: how many a rank needs for some redundant experts, and how many to fill."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.load import Load
from moeserve.experts.placement import Placement

TRIED = 9
"""Numbers of replicas that are tried where owners differ in room, from one of each expert to all slots."""


def slots_a_rank(experts: int, ranks: int, redundant: int) -> int:
    """Slots of each rank for `redundant` replicas over all ranks beside the `experts`.

    Without redundant ones, experts need not divide by ranks. Else either the redundant slots or all slots
    must: ValueError names the nearest numbers that do.
    """
    if experts < 1 or ranks < 1 or redundant < 0:
        raise ValueError(
            f"experts={experts} and ranks={ranks} must be 1 or more, redundant={redundant} 0 or more"
        )
    if (experts + redundant) % ranks and redundant % ranks:
        low = redundant // ranks * ranks
        raise ValueError(
            f"{redundant} redundant experts do not divide over {ranks} ranks, "
            f"nor do {experts + redundant} slots in all; take {low} or {low + ranks}"
        )
    if (experts + redundant) % ranks == 0:
        return (experts + redundant) // ranks
    return -(-experts // ranks) + redundant // ranks


def even_with_room(layers: int, experts: int, ranks: int, redundant: int, reserved: int = 0) -> Placement:
    """`Placement.even` with the slots of `redundant` replicas left empty, and `reserved` owners beside."""
    width = slots_a_rank(experts, ranks, redundant)
    return Placement.blocks(layers, experts, width, (width,) * ranks + (0,) * reserved)


def evenest(placement: Placement, load: Load, plan: Callable[[int], NDArray[np.int64]]) -> Placement:
    """The evenest that `plan` makes of each layer; slots that it does not fill are empty.

    `plan(replicas)` gives slots `[L, S]` within the room of `placement` that hold so many replicas in all.
    Owners of one room get every slot filled. Where rooms differ, that would load the larger owners more.
    """
    slots = sum(placement.room)
    if len(set(placement.room) - {0}) == 1:
        return placement.with_slots(plan(slots).astype(np.int32))
    counts = sorted({int(count) for count in np.linspace(placement.experts, slots, TRIED)}, reverse=True)
    found = [placement.with_slots(plan(count).astype(np.int32)) for count in counts]
    best = np.stack([each.imbalance(load.tokens) for each in found]).argmin(axis=0)
    return placement.with_slots(np.stack([found[one].slots[layer] for layer, one in enumerate(best)]))
