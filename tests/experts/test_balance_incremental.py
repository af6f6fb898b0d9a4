"""`incremental` by hand: the swap, the replica, where it stops, what a budget buys, phases and nodes."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.experts.balance.budget import best_steps
from moeserve.experts.balance.cost import CostModel
from moeserve.experts.balance.eplb import Eplb
from moeserve.experts.balance.incremental import UNLIMITED, Incremental
from moeserve.experts.balance.objective import ActiveExperts, StepTime, Tokens
from moeserve.experts.balance.room import even_with_room, slots_a_rank
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement


def one_layer(slots: list[int], ranks: int, tokens: list[float]) -> tuple[Placement, Load]:
    load = Load(np.array([tokens], dtype=np.float64))
    return Placement(np.array([slots]), ranks, len(tokens)), load


def test_one_swap_where_one_does() -> None:
    start, load = one_layer([0, 1, 2, 3], 2, [6, 4, 3, 1])  # 10 against 4; 0 with 2 makes 7 and 7
    assert Incremental()(start, load, UNLIMITED).slots.tolist() == [[2, 1, 0, 3]]


def test_replicas_where_no_swap_helps() -> None:
    start, load = one_layer([0, EMPTY, 1, EMPTY], 2, [9, 1])
    assert Incremental()(start, load, 1).slots.tolist() == [[0, EMPTY, 1, 0]]
    assert Incremental()(start, load, UNLIMITED).slots.tolist() == [[0, 1, 1, 0]]


def test_a_cold_replica_gives_way_to_a_hot_one() -> None:
    start, load = one_layer([0, 1, 2, 1], 2, [10, 2, 4])  # expert 1 twice for nothing
    found = Incremental()(start, load, UNLIMITED)
    assert found.imbalance(load.tokens)[0] == pytest.approx(1.0, abs=0.15)
    assert found.replicas(0, 0).size == 2
    assert np.count_nonzero(found.slots != start.slots) == 1


def test_it_stops_where_a_move_no_longer_pays() -> None:
    start, load = one_layer(
        [0, 1, 2, 3], 2, [52, 50, 50, 48]
    )  # 1.02: a swap copies two and gains 0.02 x 2 ranks
    assert Incremental(worth=0.021)(start, load, UNLIMITED) == start
    assert Incremental(worth=0.019)(start, load, UNLIMITED) != start


def test_the_budget_goes_where_a_move_gains_most() -> None:
    slots = np.array([[0, 1, 2, 3]] * 3)
    load = Load(np.array([[6, 4, 3, 1], [60, 0, 30, 10], [5, 4, 4, 3.0]]))
    start = Placement(slots, 2, 4)
    found = Incremental()(start, load, 2)
    assert (found.slots != slots).any(axis=1).tolist() == [True, False, False]
    assert Incremental()(start, load, 1) == start  # no single move is legal


def test_steps_are_chosen_by_gain_a_move() -> None:
    imbalance = np.array([[2.0, 2.0], [1.9, 1.2], [1.0, 1.1]])
    moves = np.array([[0, 0], [2, 2], [4, 4]])
    assert best_steps(imbalance, moves, 100, worth=0.01).tolist() == [2, 2]
    assert best_steps(imbalance, moves, 100, worth=0.06).tolist() == [2, 1]
    assert best_steps(imbalance, moves, 6, worth=0.01).tolist() == [2, 1]
    assert best_steps(imbalance, moves, 4, worth=0.01).tolist() in ([2, 0], [1, 1])
    assert best_steps(imbalance, moves, 2, worth=0.01).tolist() == [0, 1]
    assert best_steps(imbalance, moves, 1, worth=0.01).tolist() == [0, 0]


def test_a_shift_costs_a_few_moves_where_from_scratch_costs_most() -> None:
    random = np.random.default_rng(0)
    before = random.lognormal(3, 1, (6, 64))
    after = Load(before * random.lognormal(0, 0.5, before.shape))
    start = Eplb().first(even_with_room(6, 64, 4, 0), Load(before))
    found, fresh = Incremental()(start, after, UNLIMITED), Eplb()(start, after, UNLIMITED)
    balance = [(1 / each.imbalance(after.tokens)).mean() for each in (start, found, fresh)]
    assert balance[1] >= 0.99 * balance[2] > balance[0]
    assert np.count_nonzero(found.slots != start.slots) <= 10 * 6
    assert np.count_nonzero(fresh.slots != start.slots) > 24 * 6


def test_the_first_plan_is_at_least_deepseeks() -> None:
    load = Load(np.random.default_rng(1).lognormal(3, 1.3, (8, 48)))
    for ranks, redundant in ((4, 0), (4, 4), (8, 8), (16, 0), (16, 16)):
        base = even_with_room(8, 48, ranks, redundant)
        ours, theirs = (policy.first(base, load).imbalance(load.tokens) for policy in (Incremental(), Eplb()))
        assert (ours <= theirs + 1e-9).all()


def test_small_decode_batches_spread_active_experts_and_prefill_spreads_tokens() -> None:
    """One hot expert with cold ones: alone it is half of the tokens, and one of eight that are read."""
    tokens = [70.0, 10, 10, 10, 10, 10, 10, 10]
    start, load = one_layer([0, 1, EMPTY, EMPTY, 2, 3, 4, EMPTY, 5, 6, 7, EMPTY][:12], 3, tokens)
    by_tokens = Incremental(cost=Tokens())(start, load, UNLIMITED)
    active = ActiveExperts(step_tokens=400, top_k=2)
    by_active = Incremental(cost=active)(start, load, UNLIMITED)
    assert by_tokens.replicas(0, 0).size > 1
    assert by_active.replicas(0, 0).size == 1
    counts = [np.count_nonzero(by_active.of_owner(0, rank) != EMPTY) for rank in range(3)]
    assert sorted(counts) == [2, 3, 3]


def test_costs_of_a_replica() -> None:
    tokens, one = np.array([[30.0, 10, 0, 40]]), np.ones((1, 4))
    assert Tokens()(tokens, 2 * one).tolist() == [[15, 5, 0, 20]]
    active = ActiveExperts(step_tokens=1, top_k=2)(tokens, one)
    assert active.tolist() == [pytest.approx([0.75, 0.25, 0, 1.0])]
    model = CostModel()
    few, many = (StepTime(model, step)(tokens, one) for step in (1, 1_000_000))
    assert few[0, 1] < model.read_seconds
    assert many[0, 3] == pytest.approx(1_000_000 * model.row_seconds)
    assert Tokens()(np.zeros((1, 4)), one).tolist() == ActiveExperts(8, 2)(np.zeros((1, 4)), one).tolist()


def test_experts_stay_in_their_node_while_it_has_a_light_rank() -> None:
    load = Load(np.array([[9.0, 9, 1, 1, 5, 5, 5, 5]]))
    start = Placement(np.arange(8)[None], 4, 8)  # ranks {0,1} {2,3} | {4,5} {6,7}
    found = Incremental(nodes=2)(start, load, UNLIMITED)
    assert set(found.slots[0, :4].tolist()) == {0, 1, 2, 3}
    assert found.imbalance(load.tokens) == pytest.approx([1.0])


def test_room_for_redundant_experts() -> None:
    assert [slots_a_rank(*each) for each in ((256, 32, 32), (256, 10, 4), (256, 10, 0), (10, 4, 4))] == [
        9,
        26,
        26,
        4,
    ]
    with pytest.raises(ValueError, match=r"5 redundant experts do not divide over 4 ranks.*take 4 or 8"):
        slots_a_rank(16, 4, 5)
    with pytest.raises(ValueError, match="redundant=-1 0 or more"):
        slots_a_rank(16, 4, -1)
    with pytest.raises(
        ValueError, match=r"16 experts need a slot each, and the room of 4 owners, \[3, 3, 3, 3\], is 12"
    ):
        Placement.blocks(1, 16, 3, (3, 3, 3, 3))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="worth=0 must be more than 0"):
        Incremental(worth=0)
    start = even_with_room(2, 8, 4, 0)
    with pytest.raises(ValueError, match=r"load \[1, 8\] is not of 2 layers and 8 experts"):
        Incremental()(start, Load(np.ones((1, 8))), 1)
    with pytest.raises(ValueError, match="4 ranks must be a multiple of 3 nodes"):
        Incremental(nodes=3)(start, Load(np.ones((2, 8))), 1)
    with pytest.raises(ValueError, match="flops=0 must be more than 0"):
        CostModel(flops=0)
