"""Laws of every balancing policy: experts kept, deterministic, never worse, within the budget."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.experts.balance import BALANCERS, Policy, Wish, balancer_named
from moeserve.experts.balance.cost import CostModel
from moeserve.experts.balance.incremental import UNLIMITED
from moeserve.experts.balance.objective import ActiveExperts, ReplicaCost, StepTime, Tokens
from moeserve.experts.balance.room import even_with_room
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement

SIZES = [  # experts, ranks, redundant
    (16, 4, 0),
    (16, 4, 4),
    (18, 4, 2),
    (10, 4, 0),  # does not divide: two empty slots
    (10, 4, 4),
    (8, 8, 0),  # one slot a rank
    (6, 4, 10),
    (64, 2, 0),  # many slots a rank
    (64, 2, 6),
    (5, 1, 2),
]
COSTS = {"tokens": Tokens(), "active": ActiveExperts(16, 2), "time": StepTime(CostModel(top_k=2), 64)}
BUDGETS = [0, 1, 2, 5, 17, UNLIMITED]


def skewed(experts: int, seed: int, layers: int = 5) -> Load:
    """Loads with a few hot experts; the last layer has none."""
    tokens = np.random.default_rng(seed).lognormal(3, 1.2, (layers, experts)).round()
    tokens[-1] = 0
    return Load(tokens)


def hottest(cost: ReplicaCost, placement: Placement, load: Load) -> np.ndarray:
    """Cost of each layer's hottest rank, slot by slot: `[L]`."""
    found = []
    for row, tokens in zip(placement.slots, load.tokens, strict=True):
        copies = np.bincount(row[row != EMPTY], minlength=placement.experts)
        each = cost(tokens[None], copies[None].astype(float))[0]
        ranks = row.reshape(placement.owners, -1)
        found.append(max(sum(each[e] for e in rank if e != EMPTY) for rank in ranks))
    return np.array(found)


def moves(now: Placement, then: Placement) -> int:
    return int(np.count_nonzero((now.slots != then.slots) & (then.slots != EMPTY)))


CHOICES = [
    pytest.param((name, cost), id=f"{name}-{cost}")
    for name, entry in BALANCERS.items()
    for cost in (COSTS if "cost" in entry.knows else ["tokens"])
]
"""Every policy with every cost that it can balance."""


@pytest.fixture(params=CHOICES)
def policy(request: pytest.FixtureRequest) -> tuple[Policy, str]:
    name, cost = request.param
    return balancer_named(name, Wish(cost=COSTS[cost])), cost


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_policy_keeps_every_expert_gets_no_worse_and_keeps_its_budget(
    policy: tuple[Policy, str], size: tuple[int, int, int], budget: int
) -> None:
    balance, cost = policy
    start = even_with_room(5, *size)
    for seed in range(3):
        load = skewed(size[0], seed)
        found = balance(start, load, budget)  # Placement itself refuses a lost expert
        assert (found.slots.shape, found.owners) == (start.slots.shape, start.owners)
        assert moves(start, found) <= budget
        before, after = (hottest(COSTS[cost], each, load) for each in (start, found))
        assert (after <= before * (1 + 1e-9)).all()
        assert balance(start, load, budget) == found
        start = found if budget == UNLIMITED else start


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_first_plan_has_the_asked_size(policy: tuple[Policy, str], size: tuple[int, int, int]) -> None:
    balance, _ = policy
    start, load = even_with_room(5, *size), skewed(size[0], 1)
    found = balance.first(start, load)
    assert (found.slots.shape, found.owners) == (start.slots.shape, start.owners)
    assert found == balance.first(start, load)


@pytest.mark.parametrize("name", BALANCERS)
def test_a_balanced_placement_is_left_alone(name: str) -> None:
    start = even_with_room(2, 12, 4, 0)
    assert balancer_named(name)(start, Load(np.ones((2, 12))), UNLIMITED) == start


@pytest.mark.parametrize("name", ["eplb", "incremental"])
def test_a_bigger_budget_is_no_worse_in_sum(name: str) -> None:
    start, load = even_with_room(5, 32, 4, 4), skewed(32, 3)
    sums = [balancer_named(name)(start, load, budget).imbalance(load.tokens).sum() for budget in BUDGETS]
    assert sums[-1] == min(sums) < sums[0] == max(sums)


def test_an_unknown_policy_is_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match="unknown balancing policy 'greedy'; known: even, eplb, incremental"):
        balancer_named("greedy")
