"""Epochs: pure changes of the world, and what refuses them."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from moeserve.dispatch.members import Member, Members
from moeserve.experts.placement import EMPTY, Placement
from moeserve.runtime.control.messages import epoch_from, epoch_message
from moeserve.runtime.epoch import Epoch, marked, shadows_of
from moeserve.runtime.mesh import Mesh


def spare_epoch() -> Epoch:
    """Six experts on three ranks with three slots each: experts 0, 2 and 4 twice. Room for two more lanes and
    one more owner.
    """
    slots = np.array([[0, 1, 2, 2, 3, 4, 4, 5, 0, EMPTY, EMPTY, EMPTY]])
    mesh = Mesh(3, 1, 3)
    return Epoch(7, mesh, Placement(slots, 4, 6, (3, 3, 3, 0)), mesh.members(max_lanes=5, max_owners=4))


def test_first_is_the_even_load() -> None:
    epoch = Epoch.first(Mesh(2, 2, 4), layers=3, experts=10)
    assert epoch.number == 1
    assert [sorted(e for e in epoch.placement.of_owner(0, rank) if e != EMPTY) for rank in range(4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
        [8, 9],
    ]


def test_slices_have_one_owner() -> None:
    assert Epoch.first(Mesh(2, 2, 1), layers=1, experts=5).placement.owners == 1


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_without_keeps_every_expert(lost: int) -> None:
    start = spare_epoch()
    epoch = start.without({lost})
    assert (epoch.number, len(epoch.members), epoch.members.max_owners) == (8, 2, 4)
    assert set(epoch.placement.slots[0].tolist()) - {EMPTY} == set(range(6))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_nobody_else_moves_when_a_member_is_lost(lost: int) -> None:
    start = spare_epoch()
    epoch = start.without({lost})
    assert epoch.members.seats == tuple(seat for seat in range(3) if seat != lost)
    assert epoch.placement.room == tuple(
        0 if owner == lost else room for owner, room in enumerate((3, 3, 3, 0))
    )
    assert epoch.placement.slots.shape == start.placement.slots.shape
    alone = {0, 1, 2, 3, 4, 5} - set(start.placement.slots[0].tolist()[3 * lost : 3 * lost + 3])
    for slot, (old, new) in enumerate(zip(start.placement.slots[0], epoch.placement.slots[0], strict=True)):
        if slot // 3 == lost:
            assert new == EMPTY
        elif new != old:
            assert new not in alone  # only what lost its last replica is written over second replicas
            assert np.count_nonzero(start.placement.slots[0] == old) > 1
    back = epoch.joined(start.members.at(lost))
    assert back.members == start.members
    assert back.placement.room == start.placement.room


def test_lost_experts_go_to_the_survivors_in_turn() -> None:
    slots = np.full((1, 24), EMPTY)
    slots[0, [0, 1, 2, 3, 8, 16]] = range(6)
    mesh = Mesh(3, 1, 3)
    epoch = Epoch(1, mesh, Placement(slots, 3, 6), mesh.members()).without({0})
    held = [np.count_nonzero(epoch.placement.of_owner(0, owner) != EMPTY) for owner in range(3)]
    assert held == [0, 3, 3]


def test_a_member_that_only_brings_rows_comes_and_goes_without_a_move() -> None:
    start = spare_epoch()
    epoch = start.joined(Member(6, lane=4))
    assert (epoch.number, epoch.members.seat_of_lane) == (8, (0, 1, 2, None, 6))
    assert epoch.placement is start.placement
    left = epoch.without({6})
    assert (left.number, left.members, left.placement) == (9, start.members, start.placement)


@pytest.mark.parametrize(
    ("mend", "message"),
    [
        (lambda epoch: epoch.without({3}), r"seat 3 is vacant; the members have seats \[0, 1, 2\]"),
        (lambda epoch: epoch.without({0, 1, 2}), "no member that holds experts survives"),
        (lambda epoch: epoch.joined(Member(2, 3, 3)), "two members have the same seat"),
        (lambda epoch: epoch.joined(Member(3, owner=2)), "two members have the same owner"),
        (lambda epoch: epoch.joined(Member(3, lane=5)), "lanes .* must lie between 0 and 4"),
        (lambda epoch: epoch.joined(Member(3, owner=3), room=4), "room=4 of a new owner must be 0 to 3"),
    ],
)
def test_who_cannot_come_or_go(mend: Callable[[Epoch], Epoch], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mend(spare_epoch())


def test_what_an_epoch_cannot_be() -> None:
    mesh = Mesh(2, 1, 2)
    with pytest.raises(ValueError, match="a placement on 2 owners is not of a group with room for 3"):
        Epoch(1, mesh, Placement.even(1, 4, 2), mesh.members(max_owners=3))
    with pytest.raises(ValueError, match=r"owners \[2\] have room for experts, and no member is there"):
        Epoch(1, mesh, Placement.even(1, 6, 3), mesh.members(max_owners=3))


def test_reserved_places_hold_nothing_at_first() -> None:
    mesh = Mesh(2, 1, 2)
    epoch = Epoch.first(mesh, 2, 6, 2, mesh.members(max_lanes=6, max_owners=4))
    assert epoch.placement.room == (4, 4, 0, 0)
    assert epoch.placement.slots[:, :8].tolist() == Epoch.first(mesh, 2, 6, 2).placement.slots.tolist()
    apart = Epoch.first(mesh, 1, 6, 0, Members.split(2, 3))
    assert apart.placement.slots.tolist() == [[0, 1, 2, 3, 4, 5]]
    sliced = Mesh(2, 1, 1)
    assert Epoch.first(sliced, 1, 6, 0, sliced.members(max_lanes=3)).placement.room == (6,)


def test_without_says_when_there_is_no_room() -> None:
    with pytest.raises(
        ValueError, match="layer 0: 2 experts lost their last replica, and the survivors have 0 spare slots"
    ):
        Epoch.first(Mesh(4, 1, 4), 1, 8).without({1})
    with pytest.raises(ValueError, match="hold slices of every expert"):
        Epoch.first(Mesh(2, 2, 1), 1, 8).without({1})


def test_joined_fills_new_slots_with_the_rarest() -> None:
    epoch = spare_epoch().joined(Member(3, 3, 3))
    assert (len(epoch.members), epoch.placement.room) == (4, (3, 3, 3, 3))
    assert sorted(epoch.placement.of_owner(0, 3).tolist()) == [1, 3, 5]
    assert np.array_equal(epoch.placement.slots[:, :9], spare_epoch().placement.slots[:, :9])
    few = spare_epoch().joined(Member(3, owner=3), room=2)
    assert (few.placement.room, few.placement.of_owner(0, 3).tolist()) == ((3, 3, 3, 2), [1, 3])


def test_a_place_holds_no_expert_twice() -> None:
    mesh = Mesh(1, 1, 1)
    start = Epoch.first(mesh, 1, 2, 2, mesh.members(max_owners=2))
    epoch = start.joined(Member(1, owner=1))
    assert epoch.placement.of_owner(0, 1).tolist() == [0, 1, EMPTY, EMPTY]


def test_a_reload_goes_layer_by_layer_and_keeps_the_placement() -> None:
    start = Epoch.first(Mesh(2, 1, 2), layers=2, experts=4).with_weights("/new")
    assert (start.number, start.weights_version) == (1, 1)
    half = start.reloaded(1, 2)
    assert (half.number, half.version(0), half.version(1), half.weights_version) == (2, 1, 2, 1)
    whole = half.reloaded(0, 2)
    assert (whole.weights_version, whole.placement) == (2, start.placement)
    with pytest.raises(ValueError, match="weights version 3 is not one of 1 to 2"):
        whole.reloaded(0, 3)


def test_folders_of_weights_that_are_served_no_more_are_forgotten() -> None:
    epoch = Epoch.first(Mesh(2, 1, 2), layers=2, experts=4).with_weights("/two").reloaded(0, 2)
    assert epoch.with_weights("/three").weights == ("", "/two", "/three")
    epoch = epoch.reloaded(1, 2).with_weights("/three").reloaded(0, 3).reloaded(1, 3)
    assert epoch.with_weights("/four").weights == ("", "", "/three", "/four")


def test_a_move_changes_one_layer() -> None:
    start = Epoch.first(Mesh(2, 1, 2), layers=2, experts=4)
    moved = start.moved(1, np.array([2, 1, 0, 3], dtype=np.int32))
    assert moved.number == 2
    assert moved.placement.slots.tolist() == [[0, 1, 2, 3], [2, 1, 0, 3]]


def test_an_epoch_survives_its_message() -> None:
    epoch = spare_epoch().with_weights("/new").reloaded(0, 2)
    for each in (epoch, epoch.joined(Member(3, lane=4)), epoch.joined(Member(3, owner=3), 2).without({0})):
        assert epoch_from(json.loads(json.dumps(epoch_message(each)))) == each


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_owner_comes_back_with_the_slots_that_it_had(lost: int) -> None:
    start = spare_epoch()
    before = start.placement.slots[:, 3 * lost : 3 * lost + 3]
    epoch = start.without({lost})
    back = epoch.joined(start.members.at(lost), slots=before)
    assert (back.members, back.placement.room) == (start.members, start.placement.room)
    assert np.array_equal(back.placement.slots[:, 3 * lost : 3 * lost + 3], before)
    others = np.ones(12, dtype=bool)
    others[3 * lost : 3 * lost + 3] = False
    assert np.array_equal(back.placement.slots[:, others], epoch.placement.slots[:, others])
    few = epoch.joined(start.members.at(lost), slots=before[:, :2])
    assert few.placement.room[lost] == 2


def test_slots_of_another_size_cannot_come_back() -> None:
    for slots, room in (((2, 3), None), ((1, 4), None), ((1, 2), 3)):
        with pytest.raises(ValueError, match=r"of a member that joins|room=4 of a new owner"):
            spare_epoch().joined(Member(3, owner=3), room, np.zeros(slots, dtype=np.int32))


def covered_epoch(redundant: int) -> Epoch:
    """64 experts on four owners, three layers; spare slots hold second replicas."""
    return Epoch.first(Mesh(4, 1, 4), layers=3, experts=64, redundant=redundant).covered()


def test_slots_that_cannot_be_read_are_given_up_where_others_hold_the_expert() -> None:
    start = spare_epoch()  # 0 1 2 | 2 3 4 | 4 5 0
    assert start.yielding({}) is start
    assert start.yielding({0: [4]}) is start, "a lane that holds nothing, or nobody"
    after = start.yielding({0: [1]})
    assert after.number == 8 and after.members == start.members
    assert after.placement.slots[0, :9].tolist() == [0, 1, 2, EMPTY, 3, EMPTY, 4, 5, 0]
    both = start.yielding({0: [0, 1]}).placement.slots[0, :9].tolist()
    assert both == [EMPTY, 1, 2, 2, 3, EMPTY, 4, 5, 0], "what two lack and nobody else holds, both keep"
    assert start.yielding({0: [0, 1, 2]}) is start
    sliced = Epoch.first(Mesh(2, 2, 1), layers=1, experts=5)
    assert sliced.yielding({0: [0]}) is sliced


def test_a_covered_first_load_loses_no_expert_with_any_owner() -> None:
    whole = covered_epoch(64)
    for lost in range(4):
        after = whole.without({lost})
        unmoved = np.delete(whole.placement.slots.reshape(3, 4, -1), lost, axis=1)
        assert np.array_equal(np.delete(after.placement.slots.reshape(3, 4, -1), lost, axis=1), unmoved)
        assert shadows_of(whole, lost) == {}
    partly = covered_epoch(24)
    assert all(np.count_nonzero(np.bincount(row, minlength=64) == 2) == 24 for row in partly.placement.slots)
    for lost in range(4):
        partly.without({lost})
    bare = Epoch.first(Mesh(4, 1, 4), layers=1, experts=64)
    assert bare.covered() == bare
    sliced = Epoch.first(Mesh(2, 1, 1), layers=1, experts=6)
    assert (sliced.covered(), shadows_of(sliced, 0)) == (sliced, {})


def taken(before: Epoch, after: Epoch) -> dict[tuple[int, int], int]:
    """The owner that each expert newly lies with, by layer and expert."""
    stride = before.placement.slots_per_owner
    changed = (before.placement.slots != after.placement.slots) & (after.placement.slots != EMPTY)
    return {
        (int(layer), int(after.placement.slots[layer, slot])): int(slot) // stride
        for layer, slot in np.argwhere(changed)
    }


@pytest.mark.parametrize("redundant", [24, 40])
def test_what_an_owner_takes_over_has_a_shadow_there(redundant: int) -> None:
    epoch = covered_epoch(redundant)
    shadows = {
        (layer, expert, owner)
        for owner in range(4)
        for layer, experts in shadows_of(epoch, owner).items()
        for expert in experts
    }
    wanted = {
        (*which, heir) for lost in range(4) for which, heir in taken(epoch, epoch.without({lost})).items()
    }
    assert shadows == wanted != set()
    for layer, expert, owner in shadows:
        assert expert not in epoch.placement.of_owner(layer, owner)


def test_of_two_that_are_lost_experts_go_where_their_shadows_are() -> None:
    epoch = covered_epoch(80)  # 36 slots an owner: any two hold 64
    for lost in ({0, 1}, {1, 3}):
        found = taken(epoch, epoch.without(lost))
        assert found, "experts that both held had no other replica"
        for owner in sorted(lost):
            for which, heir in taken(epoch, epoch.without({owner})).items():
                if heir not in lost:
                    assert found[which] == heir
    with pytest.raises(ValueError, match=r"layer 0: \d+ experts lost their last replica"):
        covered_epoch(24).without({0, 1})
    with pytest.raises(ValueError, match=r"layer 0: \d+ experts lost their last replica"):
        covered_epoch(64).without({0, 1, 2})


def test_no_shadow_is_kept_for_a_loss_that_no_slots_stand() -> None:
    epoch = Epoch.first(Mesh(4, 1, 4), layers=2, experts=64)
    assert [shadows_of(epoch, owner) for owner in range(4)] == [{}] * 4
    away = covered_epoch(24).without({2})
    assert shadows_of(away, 2) == {}


def test_a_version_of_the_weights_has_a_mark_where_its_name_tells_one() -> None:
    start = Epoch.first(Mesh(2, 1, 2), layers=2, experts=4)
    assert start.names == ("",) and start.with_names(start.names) == start
    begun = start.with_names([marked("", "a1")]).with_weights(marked("/new", "b2")).reloaded(0, 2)
    assert (begun.weights, begun.marks) == (("", "/new"), ("a1", "b2"))
    assert epoch_from(epoch_message(begun)) == begun
    later = begun.reloaded(1, 2).with_weights("/three")
    assert (later.weights, later.marks) == (("", "/new", "/three"), ("", "b2", ""))
