"""Evening the load of a covered placement: experts of two owners change places, so that the cover stays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement

WORTH = 0.005
"""The least drop of the busier owner's load that pays an exchange, of an owner's mean."""


def evened(placement: Placement, load: Load, most: int) -> Placement:
    """`placement` after at most `most` exchanges in each layer, each of the busiest owner with another.

    An expert has as many replicas as before, and as many owners. An exchange with an empty slot is a move.
    """
    rows = [
        _evened_row(placement, row, np.asarray(tokens, dtype=np.float64), most)
        for row, tokens in zip(placement.slots, load.tokens, strict=True)
    ]
    return placement.with_slots(np.stack(rows)) if rows else placement


def _evened_row(
    placement: Placement, row: NDArray[np.int32], tokens: NDArray[np.float64], most: int
) -> NDArray[np.int32]:
    row, owners, stride = row.copy(), placement.owners, placement.slots_per_owner
    owner, usable = np.arange(len(row)) // stride, placement.usable
    there = np.array(placement.room) > 0
    copies = np.bincount(row[row != EMPTY], minlength=placement.experts)
    share = np.append(tokens / np.maximum(copies, 1), 0.0)  # of an empty slot, at the end, nothing
    held = np.zeros((placement.experts + 1, owners), dtype=bool)
    held[row[row != EMPTY], owner[row != EMPTY]] = True
    for _ in range(most):
        loads = share[row].reshape(owners, stride).sum(axis=1)
        busiest = int(np.where(there, loads, -1.0).argmax())
        mine = np.flatnonzero((owner == busiest) & (row != EMPTY))
        others = np.flatnonzero(usable & (owner != busiest))
        if not (mine.size and others.size):
            break
        less = share[row[mine]][:, None] - share[row[others]][None, :]
        fits = ~held[row[mine]][:, owner[others]] & ~held[row[others], busiest][None, :]
        then = np.maximum(loads[busiest] - less, loads[owner[others]][None, :] + less)
        then = np.where(fits, then, np.inf)
        at, to = np.unravel_index(int(then.argmin()), then.shape)
        if not loads[busiest] - then[at, to] > WORTH * loads[there].mean():
            break
        one, other = int(mine[at]), int(others[to])
        row[one], row[other] = row[other], row[one]
        for expert in {int(row[one]), int(row[other])} - {EMPTY}:
            held[expert] = np.bincount(owner[row == expert], minlength=owners) > 0
    return row
