"""Experts that move while steps run: answers stay the same, and a failure loses nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from failures import stand_still
from houses import EP4, Alone, house_config

from moeserve.experts.load import Load
from moeserve.experts.placement import Placement
from moeserve.proto.client import MoeClient
from moeserve.proto.client.batch import Choice
from moeserve.runtime.head.rebalancer import Cycle
from moeserve.runtime.launch.local_cluster import LocalCluster

SPARE = {"balance__redundant_experts": 4, "balance__staging_slots": 2}
LAYERS = (0, 1)


class Asking:
    """Clients that keep asking, each answer compared with the one process's; a context."""

    def __init__(self, address: str, alone: Alone, clients: int = 2) -> None:
        self._alone = alone
        self._stop = threading.Event()
        self.errors: list[BaseException] = []
        self.answers = 0
        self.epochs: set[int] = set()
        self._threads = [
            threading.Thread(target=self._ask, args=(address, seed), daemon=True) for seed in range(clients)
        ]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if self.errors:
            raise self.errors[0]

    def _ask(self, address: str, seed: int) -> None:
        try:
            with MoeClient(address, timeout=60) as client:
                for at in range(100_000):
                    if self._stop.is_set():
                        return
                    layer, batch = LAYERS[at % 2], self._alone.batch(7, seed=seed * 1000 + at % 50)
                    hidden, experts, weights = batch
                    reply = client.call(layer, hidden, Choice(experts, weights))
                    torch.testing.assert_close(
                        torch.as_tensor(reply.hidden),
                        self._alone.forward(layer, *batch),
                        rtol=1e-4,
                        atol=1e-4,
                    )
                    self.answers += 1
                    self.epochs.add(reply.epoch)
        except BaseException as error:
            self.errors.append(error)


def shuffled(placement: Placement, seed: int) -> Placement:
    """Any other placement of the same size."""
    random = np.random.default_rng(seed)
    return placement.with_slots(random.permuted(placement.slots, axis=1))


class Shuffle:
    """A policy for tests: another placement each time, whatever the load."""

    def __init__(self) -> None:
        self.seed = 0

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        self.seed += 1
        return shuffled(placement, self.seed)

    def first(self, placement: Placement, load: Load) -> Placement:
        return placement


@pytest.fixture
def spare_house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(checkpoint_path, members__serve_on=False, **EP4, **SPARE)) as house:
        yield house


def test_answers_stay_the_same_while_experts_move(spare_house: LocalCluster, alone: Alone) -> None:
    policy, rebalancer = Shuffle(), spare_house.head.rebalancer
    with Asking(spare_house.address, alone) as asking:
        for _ in range(4):
            plan, cycle = rebalancer.rebalance(policy)
            assert (cycle.outcome, cycle.corrupted) == ("moved", 0), cycle.reason
            assert cycle.moves >= len(plan.moves) > 0
            assert cycle.nbytes > 0
            assert spare_house.head.coordinator.epoch.placement == plan.target
        until = time.monotonic() + 60
        while asking.answers <= 20 or max(asking.epochs) < spare_house.head.coordinator.epoch.number:
            assert time.monotonic() < until and not asking.errors, (asking.answers, asking.errors)
            time.sleep(0.01)
    assert max(asking.epochs) == spare_house.head.coordinator.epoch.number > 4
    assert spare_house.head.coordinator.progress().generation == 1, "no group was formed again"


def test_a_rank_killed_while_it_prepares_abandons_the_epoch(spare_house: LocalCluster, alone: Alone) -> None:
    coordinator, rebalancer = spare_house.head.coordinator, spare_house.head.rebalancer
    with Asking(spare_house.address, alone, clients=1):
        stand_still(spare_house.pid(2))  # it cannot vote
        killer = threading.Timer(0.5, lambda: os.kill(spare_house.pid(2), signal.SIGKILL))
        killer.start()
        _, cycle = rebalancer.rebalance(Shuffle())
        assert cycle.outcome == "abandoned"
        assert "rank 2" in cycle.reason
        assert (cycle.epochs, coordinator.epoch.number) == (0, 1)
        coordinator.wait_serving(60)
        _, cycle = rebalancer.rebalance(Shuffle())
        assert cycle.outcome == "moved", cycle.reason


def test_a_killed_rank_comes_back_with_the_experts_it_had_moved(
    spare_house: LocalCluster, alone: Alone
) -> None:
    _, cycle = spare_house.head.rebalancer.rebalance(Shuffle())
    assert cycle.outcome == "moved"
    epoch = spare_house.head.coordinator.epoch
    os.kill(spare_house.pid(1), signal.SIGKILL)
    time.sleep(0.5)
    spare_house.head.coordinator.wait_serving(60)
    assert spare_house.head.coordinator.epoch == epoch
    with Asking(spare_house.address, alone, clients=1):
        time.sleep(0.5)


def test_a_hot_rank_is_relieved_by_itself(checkpoint_path: Path, alone: Alone) -> None:
    """All rows ask for the two experts of rank 0: the policy moves one of them away, and says so."""
    watched = {"balance__policy": "incremental", "balance__interval_seconds": 0.3, "balance__min_tokens": 32}
    cycles: list[Cycle] = []
    with LocalCluster(house_config(checkpoint_path, **EP4, **SPARE, **watched)) as house:
        count = house.head.rebalancer.observe

        def observe(cycle: Cycle) -> None:
            cycles.append(cycle)
            count(cycle)

        house.head.rebalancer.observe = observe
        hidden, experts, weights = alone.batch(24, seed=3)
        experts[:, 0], experts[:, 1] = 0, 1
        started = time.monotonic()
        with MoeClient(house.address, timeout=60) as client:
            while not all(spread_out(house.head.coordinator.epoch.placement, layer) for layer in (0, 1)):
                assert time.monotonic() - started < 60, cycles
                for layer in LAYERS:
                    answer = client.forward(layer, hidden, experts, weights)
                    wanted = alone.forward(layer, hidden, experts, weights)
                    torch.testing.assert_close(answer, wanted, rtol=1e-4, atol=1e-4)
        moved = next(cycle for cycle in cycles if cycle.outcome == "moved")
        assert moved.expected > 0
        assert house.head.rebalancer.age() < 60


def spread_out(placement: Placement, layer: int) -> bool:
    """Whether experts 0 and 1 are not both on one rank alone."""
    slots = np.flatnonzero(np.isin(placement.slots[layer], (0, 1)))
    return len(set((slots // placement.slots_per_owner).tolist())) > 1
