"""Names ranks and slots of a new placement such that as many experts as possible stay where they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.placement import EMPTY, Placement

Slots = NDArray[np.integer]
Ints = NDArray[np.int64]


def aligned_within(current: Placement, wanted: Slots, nodes: int = 1) -> NDArray[np.int32]:
    """`wanted [L, S]`, of the owners and room of `current`, with owners and slots re-ordered towards it.

    Owners change places with those of as much room only, so every slot beyond an owner's room stays empty.
    `nodes` beyond one ask for one room of all owners.
    """
    layers, stride = current.layers, current.slots_per_owner
    now, then = (np.asarray(s).reshape(layers, current.owners, stride) for s in (current.slots, wanted))
    kept = np.full((layers, current.owners, stride), EMPTY, dtype=np.int32)
    for room in sorted(set(current.room) - {0}):
        alike = np.flatnonzero(np.array(current.room) == room)
        old, new = (part[:, alike, :room].reshape(layers, -1) for part in (now, then))
        kept[:, alike, :room] = aligned(old, new, len(alike), nodes=nodes).reshape(layers, -1, room)
    return kept.reshape(layers, -1)


def aligned(current: Slots, wanted: Slots, ranks: int, *, nodes: int = 1) -> NDArray[np.int32]:
    """`wanted [L, S]` with nodes, the ranks of a node and the slots of a rank re-ordered towards `current [L,
    S]`.

    What each rank holds together stays together, so balance is untouched; only the number of moves falls.
    """
    layers, slots = wanted.shape
    now, then = np.asarray(current, dtype=np.int64), np.asarray(wanted, dtype=np.int64)
    if nodes > 1:
        then = _matched(now, then, nodes)
        now, then = now.reshape(layers * nodes, -1), then.reshape(layers * nodes, -1)
    then = _matched(now, then, ranks // nodes)
    width = slots // ranks
    kept = _in_place(now.reshape(-1, width), then.reshape(-1, width))
    return kept.reshape(layers, slots).astype(np.int32)


def _matched(current: Ints, wanted: Ints, packs: int) -> Ints:
    """Packs of `wanted` in the order of the packs of `current` they share most experts with, greedily."""
    rows, slots = wanted.shape
    if packs == 1:
        return wanted
    new, old = _overlaps(current, wanted, packs)
    order = np.full(rows * packs, -1, dtype=np.int64)  # of each pack of current: the pack of wanted
    taken = np.zeros(rows * packs, dtype=bool)
    while len(new):
        place = np.arange(len(new))
        first_new, first_old = np.empty(rows * packs, dtype=np.int64), np.empty(rows * packs, dtype=np.int64)
        first_new[new[::-1]], first_old[old[::-1]] = (
            place[::-1],
            place[::-1],
        )  # the last write is the first place
        best = (first_new[new] == place) & (first_old[old] == place)
        order[old[best]], taken[new[best]] = new[best], True
        open_ = ~taken[new] & (order[old] < 0)
        new, old = new[open_], old[open_]
    order[order < 0] = np.flatnonzero(~taken)  # both ascend, row by row
    return wanted.reshape(rows * packs, -1)[order].reshape(rows, slots)


def _overlaps(current: Ints, wanted: Ints, packs: int) -> tuple[Ints, Ints]:
    """Pairs (pack of `wanted`, pack of `current`) of one row that share experts, most shared first."""
    rows, slots = wanted.shape
    row = np.arange(rows)[:, None]
    stride = max(int(current.max(initial=0)), int(wanted.max(initial=0))) + 2  # EMPTY is -1
    have, want = (row * stride + current + 1).ravel(), (row * stride + wanted + 1).ravel()
    by_expert = np.argsort(have, kind="stable")
    start = np.searchsorted(have[by_expert], want, side="left")
    count = np.searchsorted(have[by_expert], want, side="right") - start
    count[wanted.ravel() == EMPTY] = 0  # empty slots have nothing to stay for
    slot = np.repeat(np.arange(want.size), count)
    nth = np.arange(len(slot)) - np.repeat(np.cumsum(count) - count, count)
    width = slots // packs
    new, old = slot // width, by_expert[np.repeat(start, count) + nth] // width
    pairs, shared = np.unique(new * packs + old % packs, return_counts=True)
    pairs = pairs[np.argsort(-shared, kind="stable")]
    new = pairs // packs
    return new, new // packs * packs + pairs % packs


def _in_place(current: Ints, wanted: Ints) -> Ints:
    """Each row of `wanted` re-ordered such that what `current` holds too stays in its slot."""
    rows, width = wanted.shape
    have, want = _occurrences(current), _occurrences(wanted)
    stride = int(max(have.max(initial=0), want.max(initial=0))) + 1
    offset = np.arange(rows)[:, None] * stride
    flat, asked = (have + offset).ravel(), (want + offset).ravel()
    order = np.argsort(flat, kind="stable")
    at = np.minimum(np.searchsorted(flat[order], asked), flat.size - 1)
    slot = order[at]
    stays = flat[slot] == asked
    free = np.ones(flat.size, dtype=bool)
    free[slot[stays]] = False
    target = np.where(stays, slot, 0)
    target[~stays] = np.flatnonzero(free)  # as many in each row as experts that came, and both ascend by row
    placed = np.empty(flat.size, dtype=np.int64)
    placed[target] = wanted.ravel()
    return placed.reshape(rows, width)


def _occurrences(values: Ints) -> Ints:
    """Each value of a row told apart from its equals in the row: value * width + how many came before."""
    width = values.shape[1]
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    place = np.broadcast_to(np.arange(width), values.shape)
    fresh = np.ones(values.shape, dtype=bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    begin = np.maximum.accumulate(np.where(fresh, place, 0), axis=1)
    told = np.empty_like(values)
    np.put_along_axis(told, order, (ordered + 1) * width + place - begin, axis=1)
    return told
