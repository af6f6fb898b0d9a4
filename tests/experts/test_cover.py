"""Standing the loss of an owner: properties of second replicas, and of who takes over which experts."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.experts.balance import BALANCERS, balancer_named
from moeserve.experts.balance.incremental import UNLIMITED
from moeserve.experts.cover.evening import evened
from moeserve.experts.cover.replicas import Covering, covered, covered_experts
from moeserve.experts.cover.slots import check_cover, redundant_for
from moeserve.experts.cover.takeover import NoRoom, heirs, taken_over
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement

LAYERS = 3
SIZES = [  # experts, room of each owner
    (8, (4, 4)),
    (8, (8, 8)),
    (64, (22, 22, 22, 22)),
    (64, (32, 32, 32, 32)),
    (16, (6, 6, 6)),
    (16, (20, 3, 3)),
    (6, (6, 1, 1)),
    (12, (8, 8, 0, 8)),  # a place without an owner
    (5, (9, 9)),
    (10, (4, 3, 5, 2, 7)),
]


def random_placement(experts: int, room: tuple[int, ...], seed: int) -> Placement:
    """Every expert somewhere, and anything in most of the other slots."""
    draw, stride = np.random.default_rng(seed), max(room)
    slots = np.full((LAYERS, len(room) * stride), EMPTY, dtype=np.int32)
    for row in slots:
        there = draw.permutation(
            [owner * stride + at for owner, each in enumerate(room) for at in range(each)]
        )
        row[there[:experts]] = draw.permutation(experts)
        rest = there[experts:]
        row[rest] = np.where(draw.random(len(rest)) < 0.8, draw.integers(0, experts, len(rest)), EMPTY)
    return Placement(slots, len(room), experts, room)


def skewed(experts: int, seed: int) -> Load:
    tokens = np.random.default_rng(seed).lognormal(3, 1.2, (LAYERS, experts)).round()
    tokens[-1] = 0
    return Load(tokens)


def most_covered(experts: int, room: tuple[int, ...]) -> int:
    """No more experts can have a second owner: every one has one, and no owner needs one twice."""
    return min(experts, sum(min(each, experts) for each in room) - experts)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_as_many_experts_have_a_second_owner_as_can(size: tuple[int, tuple[int, ...]], seed: int) -> None:
    experts, room = size
    start, load = random_placement(experts, room, seed), skewed(experts, seed)
    found = covered(start, load)  # Placement itself refuses a lost expert, and one beyond an owner's room
    assert (covered_experts(found).sum(axis=1) == most_covered(experts, room)).all()
    assert (covered_experts(found) >= covered_experts(start))[
        covered_experts(start).sum(axis=1) == most_covered(experts, room)
    ].all()
    assert covered(found, load) == found, "nothing is left to do"
    assert covered(start, load) == found


@pytest.mark.parametrize("seed", range(6))
def test_the_busiest_experts_come_first_and_owners_share_a_loss(seed: int) -> None:
    load = Load(np.random.default_rng(seed).permuted(np.tile(np.arange(1.0, 65.0), (LAYERS, 1)), axis=1))
    start = Placement.blocks(LAYERS, 64, 22, (22,) * 4)
    found = covered(start, load)
    for tokens, has in zip(load.tokens, covered_experts(found), strict=True):
        assert set(np.flatnonzero(has)) == set(np.argsort(-tokens)[:24]), "24 slots, from empty ones"
    full = covered(Placement.blocks(LAYERS, 64, 32, (32,) * 4), load)
    for lost in range(4):
        left = full.slots.copy().reshape(LAYERS, 4, 32)
        left[:, lost] = EMPTY
        after = full.with_slots(left.reshape(LAYERS, -1))
        survivors = np.delete(after.owner_load(load.tokens), lost, axis=1)
        assert (survivors.max(axis=1) < 1.1 * survivors.mean(axis=1)).all()


def test_a_replica_that_is_there_stays_where_it_is() -> None:
    start = covered(Placement.blocks(LAYERS, 16, 8, (8,) * 4), skewed(16, 1))
    slots = start.slots.copy()
    spare = np.flatnonzero(slots[0] == slots[0, 0])[1]
    other = next(expert for expert in range(16) if not (slots[0].reshape(4, 8)[spare // 8] == expert).any())
    slots[0, spare] = other  # a third replica takes the place of a second
    assert covered(start.with_slots(slots), skewed(16, 2), start) == start


def owners_and_copies(placement: Placement) -> np.ndarray:
    """How many owners hold each expert, and in how many slots: `[L, 2, E]`."""
    found = []
    for row in placement.slots:
        per_owner = [
            np.bincount(part[part != EMPTY], minlength=placement.experts)
            for part in row.reshape(placement.owners, -1)
        ]
        found.append([np.count_nonzero(per_owner, axis=0), np.sum(per_owner, axis=0)])
    return np.array(found)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("most", [0, 1, 4, 100])
def test_experts_that_change_places_even_the_load_and_keep_their_owners(
    size: tuple[int, tuple[int, ...]], most: int
) -> None:
    experts, room = size
    for seed in range(6):
        start, load = random_placement(experts, room, seed), skewed(experts, seed)
        found = evened(start, load, most)
        assert np.count_nonzero(found.slots != start.slots, axis=1).max() <= 2 * most
        before, after = owners_and_copies(start), owners_and_copies(found)
        assert np.array_equal(after[:, 1], before[:, 1])
        assert (after[:, 0] >= before[:, 0]).all(), "an owner that had one twice may give one away"
        assert (found.imbalance(load.tokens) <= start.imbalance(load.tokens) + 1e-9).all()


@pytest.mark.parametrize("redundant", [24, 64, 96])
@pytest.mark.parametrize("name", [name for name in BALANCERS if name != "even"])
def test_a_covered_placement_is_about_as_even_as_a_free_one(name: str, redundant: int) -> None:
    room = (16 + redundant // 4,) * 4
    start = covered(Placement.blocks(LAYERS, 64, room[0], room), Load(np.ones((LAYERS, 64))))
    load = Load(np.random.default_rng(3).lognormal(3, 1.0, (LAYERS, 64)).round())
    free = balancer_named("eplb")(start, load, UNLIMITED).imbalance(load.tokens)
    found = Covering(balancer_named(name))(start, load, UNLIMITED).imbalance(load.tokens)
    assert (found <= free + 0.02).all() and (start.imbalance(load.tokens) > 1.05).all()
    few = Covering(balancer_named(name))(start, load, 8)
    assert few.imbalance(load.tokens).sum() < start.imbalance(load.tokens).sum()


@pytest.mark.parametrize("name", BALANCERS)
@pytest.mark.parametrize("size", [size for size in SIZES if len(set(size[1])) == 1], ids=str)
@pytest.mark.parametrize("budget", [0, 3, UNLIMITED])
def test_every_policy_keeps_the_cover_and_its_budget_once_it_is_there(
    name: str, size: tuple[int, tuple[int, ...]], budget: int
) -> None:
    experts, room = size
    policy = Covering(balancer_named(name))
    start = covered(random_placement(experts, room, 1), skewed(experts, 1))
    for seed in range(3):
        load = skewed(experts, seed)
        found = policy(start, load, budget)
        assert (covered_experts(found).sum(axis=1) == most_covered(experts, room)).all()
        assert (found.imbalance(load.tokens) <= start.imbalance(load.tokens) + 1e-9).all()
        assert np.count_nonzero(found.slots != start.slots) <= budget
        mended = policy(random_placement(experts, room, seed), load, budget)
        assert (covered_experts(mended).sum(axis=1) == most_covered(experts, room)).all()
    first = policy.first(start, skewed(experts, 1))
    assert (covered_experts(first).sum(axis=1) == most_covered(experts, room)).all()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_whoever_is_lost_the_others_hold_every_expert_or_have_no_room(
    size: tuple[int, tuple[int, ...]], seed: int
) -> None:
    experts, room = size
    placement, stride = random_placement(experts, room, seed), max(room)
    draw = np.random.default_rng(seed)
    for count in (1, 1, 2, 3):
        lost = set(draw.permutation(len(room))[: min(count, len(room) - 1)].tolist())
        left = tuple(0 if owner in lost else each for owner, each in enumerate(room))
        for row in placement.slots:
            if sum(left) < experts:
                with pytest.raises(NoRoom, match="lost their last replica, and the survivors have"):
                    taken_over(row, room, experts, lost)
                continue
            found = taken_over(row, room, experts, lost)
            after = Placement(found[None], len(room), experts, left)  # refuses a lost expert
            survives = np.array([slot // stride not in lost for slot in range(len(row))])
            moved = survives & (found != row)
            gone = set(range(experts)) - set(row[survives].tolist())
            assert set(found[moved].tolist()) == gone, "only what lost its last replica moves"
            assert after == Placement(taken_over(row, room, experts, lost)[None], len(room), experts, left)


def test_experts_go_to_the_owner_with_the_least_load_and_into_empty_slots_first() -> None:
    row = np.array([0, 1, 2, EMPTY, 3, 4, 5, EMPTY, 6, 3, EMPTY, EMPTY], dtype=np.int32)
    found = taken_over(row, (4, 4, 4), 7, {0})
    assert found.tolist() == [EMPTY] * 4 + [3, 4, 5, 1, 6, 3, 0, 2]
    twice = np.array([0, 1, EMPTY, 2, 2, 1], dtype=np.int32)
    assert taken_over(twice, (2, 3), 3, {0}).tolist() == [EMPTY] * 3 + [2, 0, 1]
    with pytest.raises(NoRoom, match="3 experts lost their last replica, and the survivors have 2 spare"):
        taken_over(np.array([0, 1, 2, 3, 3, 3], dtype=np.int32), (3, 3), 4, {0})


def test_an_owner_that_is_wished_for_comes_first_where_it_has_room() -> None:
    row = np.array([0, 1, EMPTY, 2, 3, EMPTY, 4, 5, EMPTY], dtype=np.int32)
    free = taken_over(row, (3, 3, 3), 6, {0})
    assert free.tolist() == [EMPTY] * 3 + [2, 3, 0, 4, 5, 1]
    wished = taken_over(row, (3, 3, 3), 6, {0}, {0: 2, 1: 2})
    assert wished.tolist() == [EMPTY] * 3 + [2, 3, 1, 4, 5, 0], "its one spare slot, and the other's"


def test_heirs_are_where_experts_are_taken_over() -> None:
    row = np.array([0, 1, EMPTY, 2, 3, EMPTY, 4, 0, EMPTY], dtype=np.int32)
    assert heirs(row.tobytes(), (3, 3, 3), 5, 0) == {1: 1}
    assert heirs(row.tobytes(), (3, 3, 3), 5, 1) == {2: 0, 3: 2}
    assert heirs(np.arange(6, dtype=np.int32).tobytes(), (3, 3), 6, 0) is None


def test_how_many_slots_a_loss_takes() -> None:
    assert (redundant_for(64, 4, replicas=False), redundant_for(64, 4, replicas=True)) == (24, 64)
    assert (redundant_for(256, 32, replicas=False), redundant_for(8, 2, replicas=True)) == (32, 8)
    check_cover(64, 4, 24)
    for redundant, missing in ((0, 24), (20, 4)):
        with pytest.raises(ValueError, match=rf"{missing} more are missing \(24 in all; .*: 64\)"):
            check_cover(64, 4, redundant)
    with pytest.raises(ValueError, match="1 owner cannot be lost"):
        check_cover(64, 1, 64)
    for experts, owners in ((64, 4), (10, 3), (7, 2), (256, 16)):
        least = redundant_for(experts, owners, replicas=False)
        check_cover(experts, owners, least)
