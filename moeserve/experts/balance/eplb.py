"""`Eplb`, DeepSeek's expert-parallel load balancer: replicate the hottest experts, then pack, hottest first.

After `deepseek-ai/EPLB`: its hierarchical policy (groups of experts packed on nodes, replicas inside a node)
and its global one, in arithmetic of its own float32, for all layers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance.align import aligned_within
from moeserve.experts.balance.budget import layers_within
from moeserve.experts.balance.room import evenest
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Eplb:
    """A placement from scratch for each layer, taken where it is better and the budget allows.

    `nodes` hosts share the ranks evenly; the experts come in `groups` of equal size (a router that limits a
    token to a few groups). When nodes divide groups the policy is hierarchical: whole groups go to nodes.
    Ranks and slots are then named such that as many experts as possible stay where they are. Every slot is
    filled. Where owners differ in room, the policy is the global one, with as many replicas as make the
    largest load of an owner least; the hierarchical one needs equal owners, and raises ValueError.
    """

    nodes: int = 1
    groups: int = 1

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        """The placement after at most `budget` moves; spends them on the layers that gain most a move."""
        kept = self.aligned(placement, self.first(placement, load))
        return layers_within(budget, placement, placement.with_slots(kept), load)

    def aligned(self, placement: Placement, fresh: Placement) -> NDArray[np.int32]:
        """The slots of `fresh` with ranks and slots renamed towards `placement`."""
        return aligned_within(placement, fresh.slots, nodes=self._packed_nodes)

    def first(self, placement: Placement, load: Load) -> Placement:
        """The placement to load when nothing is loaded yet, of the size of `placement`."""
        holding = np.flatnonzero(placement.room)
        rooms = {placement.room[owner] for owner in holding}
        if self._packed_nodes > 1 and (len(rooms) > 1 or len(holding) < placement.owners):
            raise ValueError(
                f"policy eplb packs groups of experts on {self.nodes} nodes of owners with equal room, and "
                f"here it is {list(placement.room)}; balance with policy incremental, or with nodes=1"
            )
        if len(rooms) > 1:
            sizes = (placement.room, placement.slots_per_owner)
            return evenest(placement, load, lambda count: eplb_within(load.tokens, *sizes, count))
        room, layers = rooms.pop(), placement.layers
        packed = eplb_slots(load.tokens, room * len(holding), len(holding), self.nodes, self.groups)
        whole = np.full((layers, placement.owners, placement.slots_per_owner), EMPTY, dtype=np.int32)
        whole[:, holding, :room] = packed.reshape(layers, len(holding), room)
        return placement.with_slots(whole.reshape(layers, -1))

    @property
    def _packed_nodes(self) -> int:
        """Nodes that groups are packed on; 1 where they do not divide, and the policy is global."""
        return self.nodes if self.groups % self.nodes == 0 else 1


def eplb_slots(tokens: NDArray[np.floating], slots: int, ranks: int, nodes: int = 1, groups: int = 1) -> Ints:
    """The logical expert of each slot, `[L, slots]`, for loads `tokens [L, E]`.

    Hierarchical when `nodes` divides `groups`, global otherwise. ValueError: sizes that do not divide.
    """
    experts = tokens.shape[1]
    if groups % nodes:
        nodes = groups = 1
    for whole, part, said in (
        (slots, ranks, "slots must be a multiple of ranks"),
        (ranks, nodes, "ranks must be a multiple of nodes"),
        (experts, groups, "experts must be a multiple of groups"),
    ):
        if whole % part:
            raise ValueError(f"{whole} over {part}: {said}")
    if slots < experts:
        raise ValueError(f"{slots} slots cannot hold {experts} experts; give each rank more slots")
    weight = np.ascontiguousarray(tokens, dtype=np.float32)
    size = experts // groups
    node, place = packed(weight.reshape(len(weight), groups, size).sum(axis=2), nodes)
    by_node = _inverse((node * (groups // nodes) + place)[:, :, None] * size + np.arange(size))
    local = np.take_along_axis(weight, by_node, axis=1).reshape(len(weight) * nodes, -1)
    replicas, each = replicated(local, slots // nodes)
    rank, place = packed(each, ranks // nodes)
    held = np.take_along_axis(replicas, _inverse(rank * (slots // ranks) + place), axis=1)
    held = held.reshape(len(weight), nodes, -1) + np.arange(nodes)[:, None] * (experts // nodes)
    return np.take_along_axis(by_node, held.reshape(len(weight), -1), axis=1)


def eplb_within(tokens: NDArray[np.floating], room: Sequence[int], stride: int, count: int) -> Ints:
    """The logical expert of each slot, `[L, owners * stride]`, for owners of different `room`; else EMPTY.

    The global policy for `count` replicas in all: each goes, heaviest first, to the lightest owner that has
    room for it; one that holds the expert already comes last.
    """
    weight = np.ascontiguousarray(tokens, dtype=np.float32)
    layers, most = len(weight), np.array(room)
    replicas, each = replicated(weight, count)
    order = np.argsort(-each, axis=1, kind="stable")
    slots = np.full((layers, len(room), stride), EMPTY, dtype=np.int64)
    row, loads = np.arange(layers), np.zeros((layers, len(room)))
    filled = np.zeros((layers, len(room)), dtype=np.int64)
    for item in order.T:
        expert = replicas[row, item]
        key = np.where((slots == expert[:, None, None]).any(axis=2), loads + 1 + each.sum(), loads)
        owner = np.where(filled < most, key, np.inf).argmin(axis=1)
        slots[row, owner, filled[row, owner]] = expert
        loads[row, owner] += each[row, item]
        filled[row, owner] += 1
    return slots.reshape(layers, -1)


def replicated(weight: Floats, slots: int) -> tuple[Ints, Floats]:
    """Expert of each of `slots` replicas, `[X, slots]`, and the weight one replica bears.

    One extra replica at a time goes to the expert whose replicas bear most, the lower id first. That greedy
    choice is the `slots - E` largest quotients weight / count, so it is made by one sort: the i-th heaviest
    expert can have a c-th quotient among them only if i * c <= slots - E.
    """
    rows, experts = weight.shape
    first = np.broadcast_to(np.arange(experts), weight.shape)
    extra = slots - experts
    if not extra:
        return first, weight
    place, count = _quotients(extra, experts)
    order = _descending(weight, first)[:, :extra]
    candidates = order[:, place]
    quotients = np.take_along_axis(weight, candidates, axis=1) / count
    best = _descending(quotients, candidates)[:, :extra]  # ids, in the order they are replicated
    copies = np.ones(weight.shape, dtype=np.int64)
    np.add.at(copies, (np.arange(rows)[:, None], best), 1)
    replicas = np.concatenate([first, best], axis=1)
    each: Floats = np.divide(weight, copies, dtype=np.float32)
    return replicas, np.take_along_axis(each, replicas, axis=1)


def packed(weight: Floats, packs: int) -> tuple[Ints, Ints]:
    """Pack of each item and its place there, `[X, n]` each: n / packs items a pack, weights even.

    Items go, heaviest first, to the lightest pack that has room, the lower index first.
    """
    rows, items = weight.shape
    room = items // packs
    if room == 1 or packs == 1:
        straight = np.broadcast_to(np.arange(items), weight.shape)
        return (straight, np.zeros_like(straight)) if room == 1 else (np.zeros_like(straight), straight)
    order = _descending(weight, np.broadcast_to(np.arange(items), weight.shape))
    heaviest = np.ascontiguousarray(np.take_along_axis(weight, order, axis=1).T)
    sums, filled = np.zeros((rows, packs), dtype=np.float32), np.zeros(rows * packs, dtype=np.int64)
    flat, offset = sums.reshape(-1), np.arange(rows) * packs
    closing = np.zeros(room, dtype=np.float32)  # what the item in a pack's last place adds beside its weight
    closing[-1] = np.inf
    chosen, places = (np.empty((items, rows), dtype=np.int64) for _ in range(2))
    for item, pack, place in zip(heaviest, chosen, places, strict=True):
        sums.argmin(axis=1, out=pack)
        pack += offset
        filled.take(pack, out=place)
        filled[pack] = place + 1
        item += closing.take(place)
        item += flat.take(pack)
        flat[pack] = item
    pack_of, place_of = np.empty_like(order), np.empty_like(order)
    np.put_along_axis(pack_of, order, (chosen - offset).T, axis=1)
    np.put_along_axis(place_of, order, places.T, axis=1)
    return pack_of, place_of


def _descending(weight: Floats, ids: Ints) -> Ints:
    """The `ids` by falling weight, equal weights by rising id: `[X, n]`.

    The bits of a float that is not negative rise with it, so weight and id sort as one integer.
    """
    bits = np.ascontiguousarray(weight, dtype=np.float32).view(np.uint32).astype(np.int64)
    keys = ((0xFFFFFFFF - bits) << 31) | ids
    keys.sort(axis=1)
    return keys & 0x7FFFFFFF


@lru_cache(maxsize=64)
def _quotients(extra: int, experts: int) -> tuple[Ints, Floats]:
    """Places (from 0) and counts (from 1) whose quotients can be among the `extra` largest."""
    pairs = [(i, c) for i in range(min(extra, experts)) for c in range(1, extra // (i + 1) + 1)]
    places, counts = np.array(pairs).T
    return places, counts.astype(np.float32)


def _inverse(where: Ints) -> Ints:
    """The permutation that undoes each row of `where`, flattened to `[X, n]`."""
    flat = where.reshape(len(where), -1)
    back = np.empty_like(flat)
    np.put_along_axis(back, flat, np.broadcast_to(np.arange(flat.shape[1]), flat.shape), axis=1)
    return back
