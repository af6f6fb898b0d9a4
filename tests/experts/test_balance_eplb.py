"""DeepSeek's algorithm, exactly: its published example, and a plain copy of its rules as the judge."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.experts.balance.align import aligned
from moeserve.experts.balance.eplb import Eplb, eplb_slots, packed, replicated
from moeserve.experts.balance.room import even_with_room
from moeserve.experts.load import Load
from moeserve.experts.placement import Placement

PUBLISHED_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED_MAP = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_example() -> None:
    """README of deepseek-ai/EPLB: 16 replicas, 4 groups, 2 nodes, 8 GPUs."""
    assert eplb_slots(np.array(PUBLISHED_LOAD), 16, 8, nodes=2, groups=4).tolist() == PUBLISHED_MAP
    first = Eplb(2, 4).first(even_with_room(2, 12, 8, 4), Load(np.array(PUBLISHED_LOAD, dtype=np.float64)))
    assert first.slots.tolist() == PUBLISHED_MAP


def plain_replicas(weight: np.ndarray, slots: int) -> list[int]:
    """One replica after the other to the expert whose replicas bear most."""
    copies, held = np.ones(len(weight), dtype=np.float32), list(range(len(weight)))
    for _ in range(slots - len(weight)):
        held.append(int((weight / copies).argmax()))
        copies[held[-1]] += 1
    return held


def plain_packs(weight: np.ndarray, packs: int) -> list[list[int]]:
    """Heaviest first to the lightest pack with room."""
    room, held = len(weight) // packs, [[] for _ in range(packs)]
    sums = np.zeros(packs, dtype=np.float32)
    if room == 1:
        return [[item] for item in range(packs)]
    for item in np.argsort(-weight, kind="stable"):
        pack = min((p for p in range(packs) if len(held[p]) < room), key=lambda p: sums[p])
        held[pack].append(int(item))
        sums[pack] += weight[item]
    return held


@pytest.mark.parametrize(("experts", "slots"), [(12, 12), (12, 13), (12, 20), (5, 40), (64, 72), (3, 4)])
def test_replicas_are_those_of_the_plain_rule(experts: int, slots: int) -> None:
    weight = np.random.default_rng(slots).lognormal(2, 2, (6, experts)).astype(np.float32)
    weight[1], weight[2] = 7, np.floor(weight[2])  # ties
    held, each = replicated(weight, slots)
    for row, found, shares in zip(weight, held, each, strict=True):
        assert found.tolist() == plain_replicas(row, slots)
        copies = np.bincount(found, minlength=experts).astype(np.float32)
        assert shares.tolist() == (row / copies)[found].tolist()


@pytest.mark.parametrize(("items", "packs"), [(12, 4), (12, 12), (12, 1), (64, 8), (30, 2)])
def test_packs_are_those_of_the_plain_rule(items: int, packs: int) -> None:
    weight = np.random.default_rng(items).lognormal(2, 1, (6, items)).astype(np.float32)
    weight[1], weight[2], weight[3] = 7, np.floor(weight[2]), 0
    pack, place = packed(weight, packs)
    for row, one, at in zip(weight, pack, place, strict=True):
        found: list[list[int]] = [[-1] * (items // packs) for _ in range(packs)]
        for item in range(items):
            found[one[item]][at[item]] = item
        if packs == 1:
            assert sorted(found[0]) == list(range(items))
        else:
            assert found == plain_packs(row, packs)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((17, 8, 2, 4), "17 over 8: slots must be a multiple of ranks"),
        ((18, 9, 2, 4), "9 over 2: ranks must be a multiple of nodes"),
        ((16, 8, 5, 5), "8 over 5: ranks must be a multiple of nodes"),
        ((20, 10, 5, 5), "12 over 5: experts must be a multiple of groups"),
        ((8, 8, 1, 1), "8 slots cannot hold 12 experts; give each rank more slots"),
    ],
)
def test_sizes_that_do_not_divide(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eplb_slots(np.array(PUBLISHED_LOAD), *sizes)


def test_nodes_that_do_not_divide_groups_make_it_global() -> None:
    load = np.array(PUBLISHED_LOAD)
    assert (eplb_slots(load, 16, 8, nodes=2, groups=3) == eplb_slots(load, 16, 8)).all()


@pytest.mark.parametrize("nodes", [1, 2])
def test_alignment_renames_and_no_more(nodes: int) -> None:
    random = np.random.default_rng(nodes)
    current = np.stack([random.permutation(24) for _ in range(4)])
    wanted = np.stack([random.permutation(24) for _ in range(4)])
    found = aligned(current, wanted, 6, nodes=nodes)
    for row, asked in zip(found, wanted, strict=True):
        ranks, given = ({frozenset(rank) for rank in each.reshape(6, 4).tolist()} for each in (row, asked))
        assert ranks == given
        hosts, lent = ({frozenset(h) for h in each.reshape(nodes, -1).tolist()} for each in (row, asked))
        assert hosts == lent
    assert (found != current).sum() < (wanted != current).sum()


def test_alignment_finds_a_renamed_placement_again() -> None:
    current = np.array([[0, 1, 2, 0, 3, 4], [5, 4, 3, 2, 1, 0]])
    renamed = current.reshape(2, 3, 2)[:, [2, 0, 1]][:, :, ::-1].reshape(2, 6)
    assert aligned(current, renamed, 3).tolist() == current.tolist()


def test_a_rebalance_keeps_what_can_stay() -> None:
    start = even_with_room(1, 8, 4, 0)
    swapped = Placement(start.slots.reshape(1, 4, 2)[:, ::-1].reshape(1, 8), 4, 8)
    load = Load(np.array([[9.0, 1, 8, 2, 7, 3, 6, 4]]))
    assert Eplb()(swapped, load, 100) == swapped  # even already: no rank or slot is renamed for nothing
