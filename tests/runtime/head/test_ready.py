"""Plans for losses: made beforehand, of the newest epoch; what a loss would bring in, and from where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from moeserve.dispatch.members import Member
from moeserve.experts.placement import EMPTY
from moeserve.runtime.control.shadowed import Shadowed
from moeserve.runtime.epoch import Epoch, shadows_of
from moeserve.runtime.head.generations.ready import Cover, ReadyPlans
from moeserve.runtime.mesh import Mesh

LAYERS, EXPERTS, SECONDS = 3, 16, 20.0
NBYTES = (100, 200, 300)


def start_epoch(redundant: int, layers: int = LAYERS) -> Epoch:
    return Epoch.first(Mesh(4, 1, 4), layers, EXPERTS, redundant).covered()


@pytest.fixture
def plans() -> Iterator[ReadyPlans]:
    made = ReadyPlans(nbytes=NBYTES)
    made.start()
    yield made
    made.close()


def waited_for(what: Callable[[], bool]) -> bool:
    until = time.monotonic() + SECONDS
    while not what() and time.monotonic() < until:
        time.sleep(0.01)
    return what()


def test_a_plan_is_made_beforehand_and_is_what_would_be_made_now(plans: ReadyPlans) -> None:
    epoch = start_epoch(8)
    plans.renew(epoch)
    assert waited_for(lambda: plans._planned is epoch)
    for seat in range(4):
        plan = plans.without(epoch, [seat])
        assert plan == epoch.without({seat})
        assert plans.without(epoch, [seat]) is plan, "it was there"


def test_a_loss_before_the_plan_is_there_is_planned_at_once() -> None:
    plans, epoch = ReadyPlans(), start_epoch(8)
    assert plans.without(epoch, [2]) == epoch.without({2})
    assert plans.without(start_epoch(16), [0, 3]) == start_epoch(16).without({0, 3})


def test_the_newest_epoch_wins(plans: ReadyPlans) -> None:
    epoch = start_epoch(8)
    for _ in range(20):
        plans.renew(epoch)
        epoch = epoch.moved(0, epoch.placement.slots[0])
    plans.renew(epoch)
    plans.renew(epoch)
    assert waited_for(lambda: plans._planned is epoch)
    assert plans.without(epoch, [1]).number == epoch.number + 1


@pytest.mark.parametrize(
    ("epoch", "reason"),
    [
        (Epoch.first(Mesh(4, 1, 4), LAYERS, EXPERTS), "layer 0: 4 experts lost their last replica"),
        (Epoch.first(Mesh(2, 1, 1), LAYERS, EXPERTS), "slices of every expert"),
        (Epoch.first(Mesh(1, 1, 1), LAYERS, EXPERTS), "no member that holds experts survives"),
    ],
)
def test_a_loss_that_the_others_cannot_stand_is_refused_by_name(
    plans: ReadyPlans, epoch: Epoch, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        plans.without(epoch, [0])
    plans.renew(epoch)
    assert waited_for(lambda: plans._planned is epoch)
    with pytest.raises(ValueError, match=reason):
        plans.without(epoch, [0])
    found = plans.covered(epoch, 0)
    assert (found.waits, found.replicas, found.nbytes) == (LAYERS, 0, 0)
    assert found.why_waits


def test_where_the_experts_of_a_lost_member_come_from() -> None:
    told: dict[int, Shadowed] = {}
    plans = ReadyPlans(lambda: told, NBYTES)
    assert plans.covered(start_epoch(16), 1) == Cover(replicas=LAYERS)
    plans.renew(start_epoch(16))
    partly = start_epoch(8)
    gone = [
        set(row.tolist()) - set(np.delete(row.reshape(4, -1), 1, axis=0).ravel().tolist()) - {EMPTY}
        for row in partly.placement.slots
    ]
    nbytes = sum(len(experts) * size for experts, size in zip(gone, NBYTES, strict=True))
    assert nbytes > 0
    assert plans.covered(partly, 1) == Cover(disk=LAYERS, nbytes=nbytes)
    plans.renew(partly)
    for seat in (0, 2, 3):
        told[seat] = Shadowed(partly.number, frozenset(shadows_of(partly, seat)) - {1})
    assert plans.covered(partly, 1) == Cover(shadows=2, disk=1, nbytes=nbytes)
    turned = partly.moved(2, partly.placement.slots[0][::-1].copy())
    assert plans.covered(turned, 1).shadows == 1, "two layers are as they were, one of them has no shadows"
    assert plans.covered(partly.with_weights("/new").reloaded(0, 2), 1).shadows == 1
    told[0] = Shadowed(partly.number + 7, frozenset(range(LAYERS)))
    assert plans.covered(partly, 1) == Cover(disk=LAYERS, nbytes=nbytes), "of an epoch that is not known"
    with_lane = Epoch.first(Mesh(4, 1, 4), LAYERS, EXPERTS, 8, Mesh(4, 1, 4).members(max_lanes=5)).joined(
        Member(6, lane=4)
    )
    assert plans.covered(with_lane, 6) == Cover(replicas=LAYERS)


def test_a_second_loss_goes_where_the_shadows_of_the_first_are() -> None:
    told: dict[int, Shadowed] = {}
    epoch = Epoch.first(Mesh(4, 1, 4), LAYERS, EXPERTS, EXPERTS)  # any two have room for all
    plans = ReadyPlans(lambda: told, NBYTES)
    plans.renew(epoch)
    for seat in range(4):
        told[seat] = Shadowed(epoch.number, frozenset(range(LAYERS)))
    first = plans.without(epoch, [0])
    assert first == epoch.without({0})
    del told[0]
    plans.renew(first)

    def elsewhere(then: Epoch) -> list[int]:
        """Experts newly in a slot of an owner, of which another one has the shadow."""
        stride, found = epoch.placement.slots_per_owner, []
        held = {e: seat for seat in (2, 3) for e in shadows_of(epoch, seat)[0]}
        for slot in np.flatnonzero(then.placement.slots[0] != first.placement.slots[0]).tolist():
            expert = int(then.placement.slots[0, slot])
            if expert in held and held[expert] != slot // stride:
                found.append(expert)
        return found

    assert elsewhere(plans.without(first, [1])) == []
    assert elsewhere(first.without({1})) != []
    for seat in (2, 3):
        told[seat] = Shadowed(first.number, frozenset(range(LAYERS)))
    assert plans.without(first, [1]) == first.without({1}), "they have the shadows of the new epoch"
