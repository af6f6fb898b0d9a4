"""Every policy where owners differ in room: no expert is lost, none lies beyond an owner's room, and the way
there stays within the staging slots.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from moeserve.experts.balance import BALANCERS, Wish, balancer_named
from moeserve.experts.balance.align import aligned_within
from moeserve.experts.balance.cost import CostModel
from moeserve.experts.balance.eplb import Eplb
from moeserve.experts.balance.flexible import Flexible
from moeserve.experts.balance.forecast import ForecastSetting, balance_of
from moeserve.experts.balance.incremental import UNLIMITED, Incremental
from moeserve.experts.balance.objective import ActiveExperts, ReplicaCost, StepTime, Tokens
from moeserve.experts.balance.room import even_with_room
from moeserve.experts.balance.search import CROWDED
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement, even_shares
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.placing.changes import rebalance
from moeserve.runtime.mesh import Mesh

COSTS: dict[str, ReplicaCost] = {
    "tokens": Tokens(),
    "active experts": ActiveExperts(64, 2),
    "time": StepTime(CostModel(hidden=64, inner=64, top_k=2), 64),
}
CHOICES = [
    (name, cost)
    for name, entry in BALANCERS.items()
    for cost in (COSTS if "cost" in entry.knows else ["tokens"])
]
LAYERS = 3


def random_placement(seed: int) -> Placement:
    """Owners of different room, some with none; experts anywhere in it, some replicated, some slots empty."""
    random = np.random.default_rng(seed)
    owners, stride = int(random.integers(2, 9)), int(random.integers(1, 9))
    if seed % 10 == 7:
        stride += CROWDED  # where a search takes its swaps another way
    room = random.integers(0, stride + 1, owners)
    room[random.integers(owners)] = stride
    if seed % 3 == 0:
        room = np.where(room > 0, stride, 0)  # equal, beside owners that are only reserved
    slots = int(room.sum())
    experts = int(random.integers(1, slots + 1))
    usable = np.flatnonzero(np.arange(stride) < room[:, None])
    rows = np.full((LAYERS, owners * stride), EMPTY, dtype=np.int32)
    for row in rows:
        more = random.integers(EMPTY, experts, slots - experts)
        row[usable] = random.permutation(np.concatenate([np.arange(experts), more]))
    return Placement(rows, owners, experts, tuple(room.tolist()))


def random_load(placement: Placement, seed: int) -> Load:
    random = np.random.default_rng(seed + 1000)
    tokens = random.lognormal(3, 1.5, (LAYERS, placement.experts))
    return Load(np.where(random.random(tokens.shape) < 0.1, 0.0, tokens))


def hottest(cost: ReplicaCost, placement: Placement, load: Load) -> NDArray[np.float64]:
    """Cost of each layer's hottest owner, slot by slot: `[L]`."""
    found = []
    for layer, (row, tokens) in enumerate(zip(placement.slots, load.tokens, strict=True)):
        copies = np.bincount(row[row != EMPTY], minlength=placement.experts)
        each = cost(tokens[None], copies[None].astype(float))[0]
        held = (placement.of_owner(layer, owner) for owner in range(placement.owners))
        found.append(max(sum(each[e] for e in experts if e != EMPTY) for experts in held))
    return np.array(found)


def check_whole(found: Placement, start: Placement) -> None:
    """What a placement must be, counted here anew and not by `Placement`."""
    assert (found.slots.shape, found.owners, found.room) == (start.slots.shape, start.owners, start.room)
    for row in found.slots:
        assert set(row.tolist()) - {EMPTY} == set(range(start.experts))
        for owner, held in enumerate(row.reshape(start.owners, -1)):
            assert (held[start.room[owner] :] == EMPTY).all()


@pytest.mark.parametrize(("name", "cost"), CHOICES)
def test_a_policy_respects_room(name: str, cost: str) -> None:
    policy = balancer_named(name, Wish(cost=COSTS[cost]))
    for seed in range(40):
        start = random_placement(seed)
        load = random_load(start, seed)
        for budget in (UNLIMITED, 5):
            found = policy(start, load, budget)
            check_whole(found, start)
            moves = np.count_nonzero((found.slots != start.slots) & (found.slots != EMPTY))
            assert moves <= budget
            before, after = (hottest(COSTS[cost], each, load) for each in (start, found))
            assert (after <= before * (1 + 1e-9)).all()
            assert policy(start, load, budget) == found
        check_whole(policy.first(start, load), start)


@pytest.mark.parametrize(("name", "cost"), CHOICES)
def test_nothing_changes_by_owners_that_are_only_reserved(name: str, cost: str) -> None:
    """The plan of a group is the same whether places are reserved behind it or not."""
    policy = balancer_named(name, Wish(cost=COSTS[cost]))
    for seed, (experts, ranks, redundant) in enumerate([(16, 4, 4), (13, 3, 3), (32, 2, 0)]):
        bare, wide = (even_with_room(LAYERS, experts, ranks, redundant, more) for more in (0, 3))
        load = random_load(bare, seed)
        for plan in (policy.first, lambda start, load: policy(start, load, UNLIMITED)):
            found, other = plan(bare, load), plan(wide, load)
            assert np.array_equal(found.slots, other.slots[:, : bare.slots.shape[1]])
            assert other.imbalance(load.tokens) == pytest.approx(found.imbalance(load.tokens))


@pytest.mark.parametrize("name", BALANCERS)
def test_the_way_there_stays_within_staging_slots(name: str) -> None:
    for seed in range(25):
        start = random_placement(seed)
        target = balancer_named(name).first(start, random_load(start, seed))
        mesh = Mesh(start.owners, 1, start.owners)
        epoch = Epoch(1, mesh, start, mesh.members())
        for change in rebalance(epoch, target, 2):
            check_whole(change.epoch.placement, start)
            owners = [move.slot // start.slots_per_owner for move in change.moves]
            assert np.bincount(owners, minlength=1).max() <= 2
            epoch = change.epoch
        assert epoch.placement == target


def test_policies_even_out_owners_of_different_room() -> None:
    """Owners with one expert each beside one that has four, and room elsewhere for what it has too many."""
    skewed = Load(np.array([[8.0, 4, 4, 4, 2, 2]]))
    slots = np.full((4, 6), EMPTY, dtype=np.int32)
    slots[0, 0], slots[2, :4], slots[3, 0] = 4, range(4), 5
    crowded = Placement(slots.reshape(1, -1), 4, 6, (3, 0, 6, 3))
    assert crowded.imbalance(skewed.tokens) == pytest.approx([20 / 8])
    for policy in (Incremental(), Eplb(), Flexible()):
        assert policy(crowded, skewed, UNLIMITED).imbalance(skewed.tokens)[0] < 1.3, policy


def test_deepseeks_hierarchy_asks_for_equal_owners() -> None:
    start = Placement.blocks(1, 8, 4, (4, 4, 4, 2))
    load = Load(np.arange(1.0, 9)[None])
    with pytest.raises(ValueError, match=re.escape("owners with equal room, and here it is [4, 4, 4, 2]")):
        Eplb(nodes=2, groups=4)(start, load, UNLIMITED)
    check_whole(Eplb(nodes=2, groups=3).first(start, load), start)  # not hierarchical: groups do not divide
    check_whole(Incremental(nodes=2, groups=4)(start, load, UNLIMITED), start)


def test_owners_change_places_with_those_of_as_much_room() -> None:
    now = Placement(np.array([[0, 1, EMPTY, 2, EMPTY, EMPTY, 3, 4, EMPTY]]), 3, 5, (2, 1, 2))
    wanted = np.array([[4, 3, EMPTY, 2, EMPTY, EMPTY, 1, 0, EMPTY]], dtype=np.int32)
    assert aligned_within(now, wanted).tolist() == now.slots.tolist()


@pytest.mark.parametrize(
    ("count", "room", "shares"),
    [
        (10, (3, 3, 3, 3), [3, 3, 2, 2]),
        (10, (1, 9, 0, 9), [1, 5, 0, 4]),
        (3, (0, 1, 1, 1), [0, 1, 1, 1]),
        (0, (2, 2), [0, 0]),
        (7, (4, 1, 2), [4, 1, 2]),
    ],
)
def test_shares_are_as_even_as_room_lets_them_be(
    count: int, room: tuple[int, ...], shares: list[int]
) -> None:
    assert even_shares(count, room) == shares


def test_a_forecast_leaves_out_owners_without_room() -> None:
    bare, wide = (even_with_room(LAYERS, 12, 4, 4, reserved) for reserved in (0, 4))
    load = random_load(bare, 0)
    found, other = (balance_of(each, load, ForecastSetting(4)) for each in (bare, wide))
    assert other.in_a_step == found.in_a_step
    assert (other.step_seconds, other.wire_bytes) == (found.step_seconds, found.wire_bytes)


def test_a_rebalance_does_not_change_room() -> None:
    mesh = Mesh(2, 1, 2)
    epoch = Epoch(1, mesh, Placement.blocks(1, 3, 3, (3, 2)), mesh.members())
    with pytest.raises(ValueError, match="room changes only when members come or go"):
        next(rebalance(epoch, Placement.blocks(1, 3, 3, (2, 3)), 2))
