"""A rebalancer that covers losses: it mends what members that came or went have broken, and keeps it."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.experts.balance import balancer_named
from moeserve.experts.cover.replicas import covered_experts
from moeserve.experts.load import Load
from moeserve.runtime.control.orders import StagedCopy
from moeserve.runtime.epoch import Change, Epoch
from moeserve.runtime.head.coordinator import Progress
from moeserve.runtime.head.placing.pending_change import Outcome
from moeserve.runtime.head.rebalancer import Rebalancer
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.sections import OFF, BalanceConfig

LAYERS, EXPERTS = 2, 16


class Group:
    """A coordinator whose ranks prepare at once."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch, self.tokens = epoch, np.zeros((LAYERS, EXPERTS))

    def load(self) -> Load:
        return Load(self.tokens)

    def wait_turned(self, timeout: float) -> None:
        """Nobody is about to join."""

    def progress(self) -> Progress:
        return Progress("serving", "", 1, 0, 0, 0, 0)

    def change(self, change: Change, timeout: float) -> Outcome:
        self.epoch = change.epoch
        return Outcome("", 0.0, tuple(StagedCopy(0, m.expert, "", "stream", 7, 0.0, 0) for m in change.moves))


def after_two_losses(redundant: int = EXPERTS) -> Epoch:
    """Two owners were lost at once and are back: what they took over is there thrice, other experts once."""
    start = Epoch.first(Mesh(4, 1, 4), LAYERS, EXPERTS, redundant).covered()
    epoch, width = start.without({0, 1}), start.placement.slots_per_owner
    for seat in (0, 1):
        held = start.placement.slots[:, seat * width : (seat + 1) * width]
        epoch = epoch.joined(start.members.at(seat), slots=held)
    return epoch


def rebalancer(group: Group, **settings: object) -> Rebalancer:
    balance = BalanceConfig(**settings)  # type: ignore[arg-type]
    policy = balancer_named("incremental" if balance.policy == OFF else balance.policy)
    return Rebalancer(group, balance, policy, (7,) * LAYERS)  # type: ignore[arg-type]


def test_a_look_gives_every_expert_two_owners_again_though_nobody_calls() -> None:
    group = Group(after_two_losses())
    assert (covered_experts(group.epoch.placement).sum(axis=1) < EXPERTS).all()
    made = rebalancer(group, cover_owners=1)
    assert made.interval == 60.0
    cycle = made.look()
    assert (cycle.outcome, cycle.reason) == ("moved", "")
    assert cycle.moves > 0 and covered_experts(group.epoch.placement).all()
    number = group.epoch.number
    assert (made.look().outcome, group.epoch.number) == ("even", number), "once, and no more"


@pytest.mark.parametrize("redundant", [8, 16])
def test_experts_come_back_to_where_they_were_before_a_loss(redundant: int) -> None:
    start = Epoch.first(Mesh(4, 1, 4), LAYERS, EXPERTS, redundant).covered()
    group, width = Group(start), start.placement.slots_per_owner
    made = rebalancer(group, cover_owners=1)
    assert made.look().outcome == "even"
    for lost in (2, 0, 3):
        slots = group.epoch.placement.slots[:, lost * width : (lost + 1) * width].copy()
        group.epoch = group.epoch.without({lost})
        assert made.look().outcome == "even", "nothing is better while it is away"
        group.epoch = group.epoch.joined(start.members.at(lost), slots=slots)
        made.look()
        assert group.epoch.placement == start.placement
    group.tokens = np.random.default_rng(0).lognormal(3, 1.5, (LAYERS, EXPERTS))
    assert made.rebalance()[1].outcome == "moved"
    by_hand = group.epoch.placement
    slots = by_hand.slots[:, :width].copy()
    group.epoch = group.epoch.without({0}).joined(start.members.at(0), slots=slots)
    made.look()
    assert group.epoch.placement == by_hand != start.placement, "that is where they are at home now"


def test_experts_are_at_home_where_a_change_of_members_has_brought_them() -> None:
    start = Epoch.first(Mesh(4, 1, 4), LAYERS, EXPERTS, EXPERTS).covered()
    group, width = Group(start), start.placement.slots_per_owner
    made = rebalancer(group, cover_owners=1)
    made.look()
    group.epoch = group.epoch.without({3})  # on purpose: three are left
    with made.alone():
        assert made.mend().outcome == "even"
    three = group.epoch.placement
    slots = three.slots[:, :width].copy()
    group.epoch = group.epoch.without({0}).joined(start.members.at(0), slots=slots)
    assert group.epoch.placement != three
    made.look()
    assert group.epoch.placement == three


@pytest.mark.parametrize("redundant", [8, 16, 20])
@pytest.mark.parametrize("policy", ["eplb", "incremental", "flexible", "even"])
def test_no_policy_breaks_the_cover(policy: str, redundant: int) -> None:
    group = Group(Epoch.first(Mesh(4, 1, 4), LAYERS, EXPERTS, redundant).covered())
    made = rebalancer(group, cover_owners=1, policy=policy, min_tokens=1)
    draw = np.random.default_rng(0)
    for _ in range(4):
        group.tokens = group.tokens + draw.lognormal(3, 1.5, (LAYERS, EXPERTS)).round()
        made.look()
        made.rebalance(balancer_named("eplb"), 5)
        assert (covered_experts(group.epoch.placement).sum(axis=1) == min(EXPERTS, redundant)).all()
        for seat in range(4):
            group.epoch.without({seat})


def test_without_the_key_nothing_is_mended() -> None:
    group = Group(after_two_losses())
    made, before = rebalancer(group), group.epoch.placement
    assert made.interval == 0.0
    assert rebalancer(group, policy="incremental").look().outcome == "idle"
    assert group.epoch.placement == before


def test_a_reload_that_goes_on_is_no_rebalancing_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers it has: each is within balance.prepare_timeout_seconds."""
    now, ages = [0.0], list[float]()
    monkeypatch.setattr("moeserve.runtime.head.rebalancer.time.monotonic", lambda: now[0])
    group = Group(Epoch.first(Mesh(4, 1, 4), LAYERS, EXPERTS))
    made, change = rebalancer(group), group.change

    def slow(wanted: Change, timeout: float) -> Outcome:
        now[0] += 50.0
        ages.append(made.age())
        return change(wanted, timeout)

    monkeypatch.setattr(group, "change", slow)
    monkeypatch.setattr(group, "generation", 1, raising=False)
    assert made.reload("/other").outcome == "reloaded"
    assert ages == [50.0] * LAYERS and made.age() == 0.0
