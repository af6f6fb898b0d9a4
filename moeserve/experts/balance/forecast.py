"""`forecast`: what a policy makes of a workload, or of one after another, before anybody buys a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance import Policy
from moeserve.experts.balance.align import aligned_within
from moeserve.experts.balance.budget import moves_a_layer
from moeserve.experts.balance.cost import CostModel
from moeserve.experts.balance.incremental import UNLIMITED
from moeserve.experts.balance.objective import ActiveExperts
from moeserve.experts.balance.room import even_with_room
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement

REPEATS, ENOUGH = 9, 0.5  # timings of one plan, and seconds after which fewer do


@dataclass(frozen=True)
class ForecastSetting:
    """The group to plan for: ranks, redundant experts over all ranks, tokens each lane brings to a step."""

    ranks: int
    redundant: int = 0
    nodes: int = 1  # hosts that share the ranks evenly
    rank_tokens: int = 128
    budget: int = UNLIMITED  # moves of one rebalance, over all layers
    samples: int = 32  # steps drawn for the balance of one step
    model: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes", "rank_tokens", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.ranks % self.nodes:
            fit = ", ".join(str(nodes) for nodes in range(1, self.ranks + 1) if self.ranks % nodes == 0)
            raise ValueError(
                f"{self.ranks} ranks do not divide over {self.nodes} nodes, which hold as many ranks each; "
                f"{self.ranks} ranks divide over {fit} nodes"
            )


@dataclass(frozen=True, eq=False)
class Balance:
    """How even a placement serves a load. Balancedness is mean over largest rank load, 1 = even."""

    layers: NDArray[np.float64]  # [L] of the whole load
    in_a_step: float  # mean over layers and drawn steps
    wire_bytes: float  # over the busiest rank's link in one step, mean over layers
    step_seconds: float  # of one step through all layers, by the cost model

    @property
    def mean(self) -> float:
        """The mean balance over layers."""
        return float(self.layers.mean())

    @property
    def worst(self) -> float:
        """The balance of the worst layer."""
        return float(self.layers.min())


@dataclass(frozen=True, eq=False)
class ForecastChange:
    """A plan and what it takes to get to it."""

    before: Placement
    after: Placement
    seconds: float  # to plan, the best of several after the first

    @property
    def moves(self) -> NDArray[np.int64]:
        """Experts copied in each layer, `[L]`."""
        return moves_a_layer(self.before.slots, self.after.slots)


@dataclass(frozen=True, eq=False)
class Forecast:
    """What a policy makes of a setting: each change of plan, and the balance after each under its own load.

    The first change is from contiguous blocks to the plan of the first load, each later one to the next
    load's.
    """

    changes: tuple[ForecastChange, ...]
    balances: tuple[Balance, ...]

    @property
    def placement(self) -> Placement:
        """The placement that the last change of plan leads to."""
        return self.changes[-1].after


def forecast(policy: Policy, loads: Sequence[Load], setting: ForecastSetting) -> Forecast:
    """Plans for the first load when nothing is loaded, then rebalances to each next one.

    The first plan's ranks and slots are named towards contiguous blocks, so that its moves compare with
    others'.
    """
    layers, experts = loads[0].tokens.shape
    placement = even_with_room(layers, experts, setting.ranks, setting.redundant)
    changes, balances = [], []
    for number, load in enumerate(loads):
        before = placement
        if number:
            placement, seconds = _timed(lambda: policy(before, load, setting.budget))  # noqa: B023
        else:
            fresh, seconds = _timed(lambda: policy.first(before, load))  # noqa: B023
            placement = before.with_slots(aligned_within(before, fresh.slots, nodes=setting.nodes))
        changes.append(ForecastChange(before, placement, seconds))
        balances.append(balance_of(placement, load, setting))
    return Forecast(tuple(changes), tuple(balances))


def balance_of(placement: Placement, load: Load, setting: ForecastSetting) -> Balance:
    """How evenly `placement` serves `load`, over all of it and in single steps of the setting's size.

    A step's pairs (token, expert) are drawn independently, and each replica of an expert gets its share of
    them at random. Real batches are more alike than that, and so less even; and by the choice `hash` few rows
    of a lane come to one replica.
    """
    model, tokens = setting.model, setting.rank_tokens * setting.ranks
    holding = np.array(placement.room) > 0
    ranks = placement.owner_load(load.tokens)[:, holding]
    total = ranks.sum(axis=1, keepdims=True)
    share = np.where(total > 0, ranks / np.where(total > 0, total, 1.0), 1 / ranks.shape[1])
    random = np.random.default_rng(0)
    drawn = random.multinomial(tokens * model.top_k, share, size=(setting.samples, placement.layers))
    wire = model.wire_bytes(share, setting.rank_tokens)
    active = _active(placement, load, tokens, model.top_k)[:, holding]
    seconds = model.step_seconds(active, share * tokens * model.top_k, wire)
    return Balance(
        layers=1 / placement.imbalance(load.tokens),
        in_a_step=float((drawn.mean(axis=2) / drawn.max(axis=2)).mean()),
        wire_bytes=float(wire.mean()),
        step_seconds=float(seconds.sum()),
    )


def rank_bytes(placement: Placement, model: CostModel) -> int:
    """Most bytes of expert slots a rank holds, over all layers; empty slots count, they are allocated."""
    return placement.layers * max(placement.room) * model.expert_bytes


def _active(placement: Placement, load: Load, tokens: int, top_k: int) -> NDArray[np.float64]:
    """Experts of each rank that get a row of a step, on average: `[L, ranks]`."""
    held = np.where(placement.slots == EMPTY, 0, placement.slots)
    copies = np.stack([np.bincount(r[r != EMPTY], minlength=placement.experts) for r in placement.slots])
    chance = ActiveExperts(tokens, top_k)(load.tokens, copies.astype(np.float64))
    of_slot = np.where(placement.slots == EMPTY, 0.0, np.take_along_axis(chance, held, axis=1))
    active: NDArray[np.float64] = of_slot.reshape(placement.layers, placement.owners, -1).sum(axis=2)
    return active


def _timed(plan: Callable[[], Placement]) -> tuple[Placement, float]:
    """The plan, and the shortest of several times to make it; the first, cold one counts only if long."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < REPEATS and sum(times) < ENOUGH):
        begin = time.perf_counter()
        placement = plan()
        times.append(time.perf_counter() - begin)
        if times[0] > ENOUGH:
            break
    return placement, min(times[1:] or times)
