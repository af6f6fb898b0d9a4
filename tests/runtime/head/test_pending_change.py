"""A pending change: who decides, who abandons, and what comes too late."""

from __future__ import annotations

from moeserve.runtime.control.orders import StagedCopy
from moeserve.runtime.epoch import Change, Epoch
from moeserve.runtime.head.placing.pending_change import PendingChange, Stage
from moeserve.runtime.mesh import Mesh


def pending(mesh: Mesh | None = None) -> PendingChange:
    return PendingChange(7, Change(Epoch.first(mesh or Mesh(2, 1, 2), 1, 4), 0, ()), (0, 1))


def copy(expert: int, checksum: str) -> StagedCopy:
    return StagedCopy(0, expert, checksum, "stream", 8, 0.1, 0)


def test_the_last_vote_decides_and_the_last_adoption_ends_it() -> None:
    one = pending()
    one.vote(0, (copy(1, "a"),), "")
    assert (one.stage, one.missing) == (Stage.PREPARING, [1])
    one.vote(1, (), "")
    assert (one.stage, one.ended) == (Stage.DECIDED, False)
    one.adopt(0)
    assert one.stage is Stage.DECIDED
    one.adopt(1)
    assert (one.stage, one.ended, one.reason) == (Stage.SERVED, True, "")
    assert [staged.expert for staged in one.staged] == [1]


def test_one_refusal_abandons_and_later_votes_change_nothing() -> None:
    one = pending()
    one.vote(1, (), "no room")
    assert (one.stage, one.reason) == (Stage.ABANDONED, "rank 1: no room")
    one.vote(0, (), "")
    one.vote(1, (), "")
    assert one.stage is Stage.ABANDONED


def test_replicas_that_differ_are_never_decided() -> None:
    one = pending()
    one.vote(0, (copy(3, "a"), copy(2, "x")), "")
    one.vote(1, (copy(3, "b"),), "")
    assert (one.stage, one.reason) == (Stage.ABANDONED, "copies of experts [3] differ between ranks")


def test_slices_of_an_expert_may_differ() -> None:
    one = pending(Mesh(2, 1, 1))
    one.vote(0, (copy(3, "a"),), "")
    one.vote(1, (copy(3, "b"),), "")
    assert one.stage is Stage.DECIDED


def test_what_is_decided_stands_when_the_group_aborts() -> None:
    one = pending()
    for rank in range(2):
        one.vote(rank, (), "")
    one.abandon("rank 1 is lost")
    assert (one.stage, one.reason) == (Stage.SERVED, "")
