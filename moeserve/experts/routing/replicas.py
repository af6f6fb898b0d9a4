"""Which replica of an expert takes which rows of a batch, decided anew each step from one lane's own rows.

Each lane makes the ranks even over the rows it brings itself; what is even in every lane is even in all.
A choice uses tensor operations of fixed shapes only: no host synchronisation, so a CUDA
graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COMPUTE_BOUND = 1024  # rows of a lane from where even rows shorten a step; below, reading weights is its time
ROUNDS = 12  # of `transport`, from where more change the largest rank by less than a row in a thousand
MOMENTUM = 0.4  # of a round in the next
MOVES = 6  # rounds of whole rows between pairs of ranks, after rounding
_FAR = 1 << 40  # more rows than any rank gets


@dataclass(frozen=True, eq=False)
class Crowd:
    """One lane's rows of one layer, as a split sees them: X replicated experts, N ranks.

    X is fixed by the sizes, slots less experts; entries that no expert takes have no rows and no holders.
    """

    shared: Tensor  # [X] int64 rows of each replicated expert
    holders: Tensor  # [X, N] bool the ranks that hold it
    fixed: Tensor  # [N] int64 rows of the experts with one replica, by the rank that holds it


Split = Callable[[Crowd], Tensor]
"""Rows of replicated experts by rank, `[X, N]` int64; they sum to `shared`; only holders get any."""


def waterfill(crowd: Crowd) -> Tensor:
    """Each expert once, the one with most rows first: poured over its holders as water finds its level."""
    loads, split = crowd.fixed, torch.zeros_like(crowd.holders, dtype=torch.int64)
    order = crowd.shared.argsort(descending=True, stable=True)
    for at in range(len(order)):
        expert = order[at : at + 1]
        rows, holds = crowd.shared.index_select(0, expert), crowd.holders.index_select(0, expert)[0]
        poured = _poured(loads, rows, holds)
        loads = loads + poured
        split = split.index_add(0, expert, poured[None])
    return split


def _poured(loads: Tensor, rows: Tensor, holds: Tensor) -> Tensor:
    """`rows [1]` over the ranks that `holds [N]` marks, such that those who get any end level: `[N]`."""
    level, rank = torch.where(holds, loads, _FAR).sort(stable=True)
    place = torch.arange(len(level), device=level.device)
    below = level.cumsum(0)
    wet = (level * (place + 1) - below <= rows).sum(
        0, keepdim=True
    )  # ranks that get rows, or are level with them
    filled = rows + below.gather(0, wet - 1)
    share = filled // wet - level + (place < filled % wet)
    return torch.zeros_like(loads).scatter(0, rank, torch.where(place < wet, share, 0))


def transport(crowd: Crowd) -> Tensor:
    """The split whose fullest rank is emptiest, to about a row: a transport problem, all experts at once.

    Minimises the sum of squared rank loads over splits in fractions, which also makes the largest one least,
    as the loads that splits can reach are the base of a polymatroid. Every round moves each expert's rows
    from holders above its own level to those below, by the part that keeps a rank shared by many from
    swinging; rounding and moves of whole rows follow.
    """
    shared, holders = crowd.shared[:, None].float(), crowd.holders.float()
    step = 1 / holders.sum(0).clamp_min(1)
    even = shared * holders / holders.sum(1, keepdim=True).clamp_min(1)
    split, drift, fixed = even, torch.zeros_like(even), crowd.fixed.float()
    for _ in range(ROUNDS):
        loads = fixed + split.sum(0)
        level = (split * loads).sum(1, keepdim=True) / shared.clamp_min(1)
        drift = MOMENTUM * drift - step * (loads - level)
        moved = (split + drift).clamp_min(0) * holders
        total = moved.sum(1, keepdim=True)
        moved = torch.where(total > 0, moved * (shared / total.clamp_min(1e-6)), even)
        split, drift = moved, moved - split
    return _levelled(crowd, _whole(crowd, split))


def _whole(crowd: Crowd, split: Tensor) -> Tensor:
    """`split [X, N]` in whole rows: the largest fractions of an expert are rounded up."""
    floor = split.floor()
    fraction = torch.where(crowd.holders, split - floor, -1.0)
    place = fraction.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    rows = floor.long()
    return rows + (place < (crowd.shared - rows.sum(1))[:, None])


def _levelled(crowd: Crowd, split: Tensor) -> Tensor:
    """`split` after rounds of moves: each expert offers rows from its fullest to its emptiest rank.

    A rank takes part in the best offer that touches it, so the moves of one round do not disturb each other.
    """
    ranks, count = crowd.fixed.shape[0], len(crowd.shared)
    number = torch.arange(count, device=split.device)
    for _ in range(MOVES):
        loads = crowd.fixed + split.sum(0)
        high, source = torch.where(split > 0, loads, -1).max(1)
        low, target = torch.where(crowd.holders, loads, _FAR).min(1)
        offer = torch.where(high - low >= 2, (high - low) * count + number, -1)
        best = torch.full((ranks,), -1, dtype=torch.int64, device=split.device)
        best = best.scatter_reduce(0, source, offer, "amax").scatter_reduce(0, target, offer, "amax")
        agreed = (offer >= 0) & (best.gather(0, source) == offer) & (best.gather(0, target) == offer)
        rows = torch.minimum((high - low) // 2, split.gather(1, source[:, None])[:, 0])
        rows = torch.where(agreed, rows, 0)[:, None]
        split = split.scatter_add(1, source[:, None], -rows).scatter_add(1, target[:, None], rows)
    return split


@dataclass(frozen=True)
class ReplicaChoice:
    """One way to pick replicas. Lane, expert and row pick without a `split`, or in smaller batches."""

    name: str
    about: str
    split: Split | None = None
    least_rows: int = 0  # of a batch, for the split where no kernel makes it


REPLICA_CHOICES: dict[str, ReplicaChoice] = {
    entry.name: entry
    for entry in (
        ReplicaChoice(
            "hash",
            "by lane, expert and row, the same for rows that lie together, so that weights are read once",
        ),
        ReplicaChoice("waterfill", "one pass over replicated experts, the fullest first", waterfill),
        ReplicaChoice(
            "lp", "the emptiest fullest rank, by a transport step on the batch's counts", transport
        ),
        ReplicaChoice(
            "auto",
            f"lp on a GPU; on a CPU lp in batches of {COMPUTE_BOUND} rows or more, hash in smaller ones",
            transport,
            COMPUTE_BOUND,
        ),
    )
}


def choice_named(name: str) -> ReplicaChoice:
    """The choice `name`. Raises ValueError with the known names."""
    if name not in REPLICA_CHOICES:
        raise ValueError(f"unknown replica choice {name!r}; known: {', '.join(REPLICA_CHOICES)}")
    return REPLICA_CHOICES[name]


@dataclass(frozen=True)
class Size:
    """What a table of slots is allocated for."""

    layers: int
    experts: int
    slots: int  # S, over all ranks
    ranks: int


class Splitter:
    """Tables that turn experts into slots by a `Split`: allocated once, rewritten in place layer by layer.

    Slots stand in the order of their experts. Rows in that order too meet the slot whose share of rows,
    summed up over the slots before it, covers their place. `lane` turns the ranks round, so that what cannot
    be even falls to another rank in each lane.
    """

    def __init__(self, size: Size, split: Split, lane: int, device: torch.device | str) -> None:
        spare = size.slots - size.experts

        def table(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((size.layers, *shape), fill, dtype=dtype, device=device)

        self._size, self._split, self._lane = size, split, lane
        self._alone = table(
            size.slots, fill=size.experts
        )  # by slot: its expert, where that has no other slot
        self._shared = table(spare, fill=size.experts)  # replicated experts
        self._holders = table(spare, size.ranks, dtype=torch.bool)
        self._slot = table(size.slots, dtype=torch.int32)  # in the order of experts, here and below
        self._single = table(size.slots, fill=size.experts)  # its expert, where that has no other slot
        self._cell = table(size.slots, fill=spare * size.ranks)  # its place in the split, where it has

    def update_layer(self, layer: int, slots: NDArray[np.int32]) -> None:
        """Rewrites a layer's tables for its `slots [S]`."""
        size, spare = self._size, self._size.slots - self._size.experts
        held = slots.astype(np.int64)
        copies = np.bincount(held[held >= 0], minlength=size.experts)
        rank = (np.arange(size.slots) // (size.slots // size.ranks) - self._lane) % size.ranks
        order = np.argsort(np.where(held >= 0, held, size.experts), kind="stable")
        several = np.flatnonzero(copies > 1)
        number = np.full(size.experts, spare)
        number[several] = np.arange(len(several))
        alone = np.where((held >= 0) & (copies[held] == 1), held, size.experts)
        cell = np.where(
            (held >= 0) & (copies[held] > 1), number[held] * size.ranks + rank, spare * size.ranks
        )
        shared, holders = np.full(spare, size.experts), np.zeros((spare, size.ranks), dtype=bool)
        shared[: len(several)] = several
        holders.reshape(-1)[cell[cell < holders.size]] = True
        cell = cell[order]
        again = np.zeros(size.slots, dtype=bool)  # a second slot of one expert on one rank gets nothing
        again[np.setdiff1d(np.arange(size.slots), np.unique(cell, return_index=True)[1])] = True
        cell[again] = spare * size.ranks
        for table, values in (
            (self._alone, alone),
            (self._shared, shared),
            (self._holders, holders),
            (self._slot, order.astype(np.int32)),
            (self._single, alone[order]),
            (self._cell, cell),
        ):
            table[layer].copy_(torch.from_numpy(values))

    def choose(self, layer: int, experts: Tensor) -> Tensor:
        """Slots `[n]` int32 for `experts [n]` int64; E stands for none, and gets any slot."""
        size, device = self._size, experts.device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        count = torch.cat([_counted(experts, size.experts), zero])
        fixed = count[self._alone[layer]].reshape(size.ranks, -1).sum(1).roll(-self._lane)
        split = self._split(Crowd(count[self._shared[layer]], self._holders[layer], fixed))
        rows = count[self._single[layer]] + torch.cat([split.reshape(-1), zero])[self._cell[layer]]
        order = experts.argsort(stable=True)
        place = torch.arange(len(order), device=device)
        at = torch.searchsorted(rows.cumsum(0), place, right=True).clamp_max(size.slots - 1)
        slots = self._slot[layer][at]
        return torch.empty_like(slots).scatter(0, order, slots)


def _counted(experts: Tensor, number: int) -> Tensor:
    """Rows of each of `number` experts, `[number]`, among `experts [n]` int64, where `number` is none."""
    zeros = torch.zeros(number + 1, dtype=torch.int64, device=experts.device)
    return zeros.scatter_add(0, experts, torch.ones_like(experts))[:-1]
