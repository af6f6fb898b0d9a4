"""Placements with spare slots: how many a rank needs for some redundant experts."""

from __future__ import annotations

import numpy as np

from moeserve.experts.placement import EMPTY, Placement


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


def even_with_room(layers: int, experts: int, ranks: int, redundant: int) -> Placement:
    """`Placement.even` with the slots of `redundant` replicas left empty."""
    return spread(layers, experts, ranks, slots_a_rank(experts, ranks, redundant))


def spread(layers: int, experts: int, ranks: int, width: int) -> Placement:
    """`Placement.even` with `width` slots a rank; those it does not need are empty."""
    even = Placement.even(layers, experts, ranks)
    if width < even.slots_per_owner:
        raise ValueError(
            f"{width} slots a rank on {ranks} ranks cannot hold {experts} experts evenly; "
            f"each rank needs {even.slots_per_owner}"
        )
    slots = np.full((layers, ranks, width), EMPTY, dtype=np.int32)
    slots[:, :, : even.slots_per_owner] = even.slots.reshape(layers, ranks, -1)
    return Placement(slots.reshape(layers, -1), ranks, experts)
