"""Changes: one layer an epoch, within the staging slots of every rank, no expert lost on the way."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.experts.placement import EMPTY, Placement
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.placing.changes import rebalance, reload
from moeserve.runtime.mesh import Mesh


def random_placement(
    random: np.random.Generator, layers: int, ranks: int, width: int, experts: int
) -> Placement:
    rows = []
    for _ in range(layers):
        row = np.concatenate([np.arange(experts), random.integers(EMPTY, experts, ranks * width - experts)])
        rows.append(random.permutation(row))
    return Placement(np.stack(rows).astype(np.int32), ranks, experts)


def two_ranks(placement: Placement) -> Epoch:
    mesh = Mesh(2, 1, 2)
    return Epoch(1, mesh, placement, mesh.members())


@pytest.mark.parametrize("staging", [1, 2, 5])
@pytest.mark.parametrize(("ranks", "width", "experts"), [(4, 5, 16), (4, 4, 16), (3, 6, 11), (2, 1, 2)])
def test_every_epoch_on_the_way_is_whole_and_small(
    ranks: int, width: int, experts: int, staging: int
) -> None:
    for seed in range(40):
        random = np.random.default_rng(seed)
        now, then = (random_placement(random, 2, ranks, width, experts) for _ in range(2))
        mesh = Mesh(ranks, 1, ranks)
        epoch = Epoch(1, mesh, now, mesh.members())
        try:
            changes = list(rebalance(epoch, then, staging))
        except ValueError as error:
            assert staging == 1
            assert "staging_slots" in str(error)
            continue
        for change in changes:  # a Placement itself refuses to lose an expert
            assert change.epoch.number == epoch.number + 1
            assert {move.layer for move in change.moves} <= {change.layer}
            assert change.moves == epoch.placement.moves_to(change.epoch.placement)
            per_rank = np.bincount([move.slot // width for move in change.moves], minlength=ranks)
            assert per_rank.max(initial=0) <= staging
            epoch = change.epoch
        assert epoch.placement == then
        assert sum(len(change.moves) for change in changes) <= 2 * len(now.moves_to(then))


def test_a_swap_between_ranks_is_one_epoch() -> None:
    now = Placement.even(1, 4, 2)
    then = Placement(np.array([[2, 1, 0, 3]]), 2, 4)
    (change,) = rebalance(two_ranks(now), then, 1)
    assert [(move.slot, move.expert, move.source) for move in change.moves] == [(0, 2, 2), (2, 0, 0)]


def test_a_slot_given_up_copies_nothing() -> None:
    now = Placement(np.array([[0, 1, 2, 0]]), 2, 3)
    then = Placement(np.array([[0, 1, 2, EMPTY]]), 2, 3)
    (change,) = rebalance(two_ranks(now), then, 1)
    assert change.moves == ()


def test_a_reload_takes_each_layer_whole_from_disk() -> None:
    epoch = Epoch.first(Mesh(2, 1, 2), layers=3, experts=3)
    changes = list(reload(epoch, "/new"))
    assert [change.layer for change in changes] == [0, 1, 2]
    assert [change.epoch.weights_version for change in changes] == [1, 1, 2]
    assert changes[-1].epoch.weights == ("", "/new")
    for change in changes:
        assert [(move.slot, move.expert, move.source) for move in change.moves] == [
            (0, 0, EMPTY),
            (1, 1, EMPTY),
            (2, 2, EMPTY),
        ]


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="staging_slots=0 must be 1 or more"):
        next(rebalance(Epoch.first(Mesh(2, 1, 2), 1, 4), Placement.even(1, 4, 2), 0))
