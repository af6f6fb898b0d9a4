"""`Flexible`: a placement that leaves the choice of replicas in each step the most room.

Single steps are uneven even where the load is not. What a step can be evened by is rows of replicated
experts, and only between ranks that hold one in common: so the hottest experts are replicated, their replicas
lie on different ranks, each rank gets as much load that could also go elsewhere, and each pair of ranks a
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance.align import aligned_within
from moeserve.experts.balance.budget import layers_within
from moeserve.experts.balance.eplb import replicated
from moeserve.experts.balance.room import evenest
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PAIRED = 128  # ranks up to which pairs are looked at; beyond, a rank has few replicas and many pairs


@dataclass(frozen=True)
class Flexible:
    """A placement from scratch for each layer, taken where it is better also split evenly.

    Replicas are DeepSeek's, the hottest experts' by load a replica. Every slot is filled where owners have
    the same room.
    """

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        """The placement after at most `budget` moves; spends them on the layers that gain most a move."""
        kept = aligned_within(placement, self.first(placement, load).slots)
        return layers_within(budget, placement, placement.with_slots(kept), load)

    def first(self, placement: Placement, load: Load) -> Placement:
        """The placement to load when nothing is loaded yet, of the size of `placement`."""
        sizes = (placement.room, placement.slots_per_owner)
        return evenest(placement, load, lambda count: flexible_slots(load.tokens, *sizes, count))


def flexible_slots(tokens: NDArray[np.floating], room: Sequence[int], stride: int, slots: int) -> Ints:
    """The logical expert of each slot, `[L, owners * stride]`, for loads `tokens [L, E]`.

    `slots` replicas in all, and no more of an owner than its `room`; its other slot numbers are EMPTY.
    """
    weight = np.ascontiguousarray(tokens, dtype=np.float32)
    replicas, _ = replicated(weight, slots)
    layers = np.arange(len(weight))
    copies = np.stack([np.bincount(row, minlength=weight.shape[1]) for row in replicas])
    several = copies > 1
    order = np.lexsort(
        (np.arange(weight.shape[1]) + 0 * copies, -weight, ~several)
    )  # shared first, then heaviest
    packing = _Packing(len(weight), room, stride)
    which, left = np.zeros(len(weight), dtype=np.int64), np.take_along_axis(copies, order, axis=1)
    for _ in range(slots):
        expert = order[layers, which]
        packing.place(expert, weight[layers, expert].astype(np.float64), copies[layers, expert])
        left[layers, which] -= 1
        which = np.minimum(which + (left[layers, which] == 0), weight.shape[1] - 1)
    return packing.slots.reshape(len(weight), -1)


class _Packing:
    """Ranks that are being filled, a replica in each layer at a time, those of an expert one by one."""

    def __init__(self, layers: int, room: Sequence[int], width: int) -> None:
        ranks, self._room = len(room), np.array(room)
        self.slots = np.full((layers, ranks, width), EMPTY, dtype=np.int64)
        self._rows = np.arange(layers)
        self._filled = np.zeros((layers, ranks), dtype=np.int64)
        self._loads = np.zeros((layers, ranks))  # replicas with an equal share each
        self._shared = np.zeros((layers, ranks))  # all of the experts that could go elsewhere too
        self._ways = np.zeros((layers, ranks, ranks)) if ranks <= PAIRED else None
        self._expert = np.full(layers, -1)
        self._holders = np.zeros((layers, ranks), dtype=bool)

    def place(self, expert: Ints, weight: Floats, copies: Ints) -> None:
        """One replica of `expert [L]`, of `weight [L]` over `copies [L]`."""
        self._holders[expert != self._expert] = False
        self._expert = expert
        several = (copies > 1)[:, None]
        key = np.where(several, self._shared + self._reached(), self._loads)
        key = key + np.where(self._holders, 1 + 4 * weight.sum() + self._shared.sum(), 0.0)
        key[self._filled >= self._room] = np.inf
        rank = key.argmin(axis=1)
        self.slots[self._rows, rank, self._filled[self._rows, rank]] = expert
        self._filled[self._rows, rank] += 1
        self._loads[self._rows, rank] += weight / copies
        shared = np.where(several[:, 0], weight, 0.0)
        if self._ways is not None:
            ways = np.where(self._holders, shared[:, None], 0.0)
            self._ways[self._rows, rank] += ways
            self._ways[self._rows, :, rank] += ways
        self._shared[self._rows, rank] += shared
        self._holders[self._rows, rank] = True

    def _reached(self) -> Floats:
        """What each rank shares already with those that hold the expert: `[L, ranks]`."""
        if self._ways is None:
            return np.zeros(self._loads.shape)
        return np.asarray((self._ways * self._holders[:, None, :]).sum(axis=2))
