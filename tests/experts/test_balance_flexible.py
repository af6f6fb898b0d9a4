"""`flexible`: replicas on different ranks, load that can go elsewhere on every rank, and even steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.experts.balance import balancer_named
from moeserve.experts.balance.room import even_with_room
from moeserve.experts.load import Load
from moeserve.experts.placement import Placement
from moeserve.experts.routing.address_book import AddressBook

EXPERTS, LAYERS = 64, 3


def load(seed: int = 0) -> Load:
    return Load(np.random.default_rng(seed).lognormal(4, 0.8, (LAYERS, EXPERTS)).round())


def planned(policy: str, ranks: int, redundant: int) -> Placement:
    return balancer_named(policy).first(even_with_room(LAYERS, EXPERTS, ranks, redundant), load())


@pytest.mark.parametrize(("ranks", "redundant"), [(4, 4), (4, 8), (8, 8), (16, 32), (130, 66)])
def test_an_experts_replicas_lie_on_different_ranks(ranks: int, redundant: int) -> None:
    placement = planned("flexible", ranks, redundant)
    for layer in range(LAYERS):
        copies = np.bincount(placement.slots[layer], minlength=EXPERTS)
        assert copies.sum() == EXPERTS + redundant
        for expert in np.flatnonzero(copies > 1):
            owners = placement.replicas(layer, expert) // placement.slots_per_owner
            assert len(set(owners.tolist())) == min(copies[expert], ranks)


@pytest.mark.parametrize(("ranks", "redundant"), [(4, 8), (8, 16)])
def test_every_rank_has_its_part_of_what_can_go_elsewhere_and_the_load_is_even(
    ranks: int, redundant: int
) -> None:
    placement, tokens = planned("flexible", ranks, redundant), load().tokens
    assert (placement.imbalance(tokens) < 1.03).all()
    for layer in range(LAYERS):
        copies = np.bincount(placement.slots[layer], minlength=EXPERTS)
        held = placement.slots[layer].reshape(ranks, -1)
        shared = np.where(copies[held] > 1, tokens[layer][held], 0).sum(axis=1)
        assert shared.min() > 0.7 * shared.mean()


def test_steps_are_more_even_than_with_plans_that_do_not_think_of_them() -> None:
    random, found = np.random.default_rng(1), {}
    steps = [
        (layer, torch.from_numpy(random.choice(EXPERTS, (128, 8), p=row / row.sum())))
        for layer, row in enumerate(load().tokens)
        for _ in range(12)
    ]
    for policy in ("eplb", "incremental", "flexible"):
        book = AddressBook(planned(policy, 4, 8), choice="lp")
        rows = [
            torch.bincount(book.resolve(layer, ids, torch.ones(128, dtype=torch.bool)).flatten() // 18)
            for layer, ids in steps
        ]
        found[policy] = np.mean([1024 / 4 / int(each.max()) for each in rows])
    assert found["flexible"] > max(found["eplb"], found["incremental"])
    assert found["flexible"] > 0.985
