"""`Scaling`: in which order ranks come and go, and what it says where that cannot be or does not end well."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from moeserve.dispatch.members import Members
from moeserve.experts.balance import balancer_named
from moeserve.experts.load import Load
from moeserve.runtime.epoch import Change, Epoch
from moeserve.runtime.head.generations.returning import with_ranks
from moeserve.runtime.head.placing.pending_change import Outcome
from moeserve.runtime.head.rebalancer import Rebalancer
from moeserve.runtime.head.scaling import CannotScale, ScaleSeconds, Scaling
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.sections import BalanceConfig

EXPERTS = 6


class Group:
    """Ranks that prepare changes at once, and the seats among them that come and go; `done` says in order."""

    def __init__(self, ranks: int, redundant: int) -> None:
        members = Members.of_ranks(ranks, 4, 4)
        self.epoch = Epoch.first(Mesh(ranks, 1, ranks), 1, EXPERTS, redundant, members)
        self.done: list[str] = []
        self.away: set[int] = set()
        self.why, self.abandoned = "", ""  # why ranks do not come or go, and why changes are abandoned

    # -- as a coordinator
    def load(self) -> Load:
        return Load(np.zeros((1, EXPERTS)))

    def wait_turned(self, timeout: float) -> None:
        """Returns at once."""

    def change(self, change: Change, timeout: float) -> Outcome:
        self.done.append("move")
        if self.abandoned:
            return Outcome(self.abandoned)
        self.epoch = change.epoch
        return Outcome("")

    # -- as its seats
    @property
    def wanted(self) -> frozenset[int]:
        return frozenset({*self.epoch.members.seats, *self.away})

    def forget_orphans(self) -> None:
        """There are none."""

    def expect(self, seats: Collection[int]) -> None:
        self.done.append(f"expect {sorted(seats)}")
        self._coming = with_ranks(self.epoch, seats)

    def wait_joined(self, seats: Collection[int], seconds: float) -> str:
        if not self.why:
            self.epoch = self._coming
        return self.why

    def settle(self, seats: Collection[int]) -> list[int]:
        self.done.append("settle")
        return [seat for seat in seats if seat in self.epoch.members.seats]

    def epoch_without(self, seats: Collection[int]) -> Epoch:
        return self.epoch.without(seats)

    def leave(self, seats: Collection[int]) -> None:
        self.done.append(f"leave {sorted(seats)}")

    def drain(self, seats: Collection[int], seconds: float, reason: str) -> None:
        self.done.append("drain")

    def retire(self, seats: Collection[int], seconds: float) -> str:
        self.done.append("retire")
        if not self.why:
            before = self.epoch.placement
            self.epoch = self.epoch.without(seats)
            stay = before.slots[:, : self.epoch.placement.slots_per_owner * min(seats)]
            assert np.array_equal(self.epoch.placement.slots[:, : stay.shape[1]], stay), "nothing is read"
        return self.why


def scaling(group: Group, **settings: Any) -> Scaling:
    policy = balancer_named("incremental")
    rebalancer = Rebalancer(group, BalanceConfig(**settings), policy, (1,))  # type: ignore[arg-type]
    return Scaling(rebalancer, group, ScaleSeconds(9.0, 0.0, 1.0))  # type: ignore[arg-type]


def test_new_ranks_take_the_lowest_free_seats() -> None:
    group = Group(2, 0)
    done = scaling(group).scale(4)
    assert (done.outcome, done.joined, done.left) == ("scaled", (2, 3), ())
    assert group.done == ["expect [2, 3]", "settle"]
    assert scaling(group).scale(4).outcome == "unchanged"


def test_who_does_not_join_is_said_and_expected_no_more() -> None:
    group = Group(2, 0)
    group.why = "rank 2 cannot start: no such GPU"
    done = scaling(group).scale(3)
    assert (done.outcome, done.reason, done.joined) == ("abandoned", group.why, ())
    assert group.done == ["expect [2]", "settle"]


def test_experts_move_before_lanes_leave_and_lanes_before_their_ranks() -> None:
    group = Group(3, 6)  # four slots each: two hold all six, and hold four now
    done = scaling(group).scale(2)
    assert (done.outcome, done.left, done.moved.epochs) == ("scaled", (2,), 1)
    assert group.done == ["move", "leave [2]", "drain", "retire"]


def test_ranks_stay_where_their_experts_do_not_move() -> None:
    group = Group(3, 6)
    group.abandoned = "rank 1 is lost"
    done = scaling(group).scale(2)
    assert (done.outcome, done.left) == ("abandoned", ())
    assert done.reason == "experts did not move: rank 1 is lost" and group.done == ["move"]


@pytest.mark.parametrize(
    ("ranks", "redundant", "settings", "wanted", "why"),
    [
        (2, 0, {}, 5, "room for 4 lanes and 4 owners"),
        (3, 0, {}, 2, r"ranks=2: layer 0: 2 experts lost their last replica"),
        (3, 6, {"cover_owners": 1}, 2, r"balance\.cover_owners = 1: 2 owners do not stand the loss of one"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_happens(
    ranks: int, redundant: int, settings: dict[str, Any], wanted: int, why: str
) -> None:
    group = Group(ranks, redundant)
    with pytest.raises(CannotScale, match=why):
        scaling(group, **settings).scale(wanted)
    assert group.done == []


def test_nothing_changes_while_a_rank_is_away() -> None:
    group = Group(3, 6)
    group.away = {3}
    with pytest.raises(CannotScale, match=r"ranks \[3\] are away"):
        scaling(group).scale(2)
    assert group.done == []
