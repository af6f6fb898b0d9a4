"""Epochs: pure changes of the world, and what refuses them."""

import json

import numpy as np
import pytest

from moeserve.experts.placement import EMPTY, Placement
from moeserve.runtime.control.messages import epoch_from, epoch_message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.mesh import Mesh


def spare_epoch() -> Epoch:
    """Six experts on three ranks with three slots each: experts 0, 2 and 4 twice."""
    slots = np.array([[0, 1, 2, 2, 3, 4, 4, 5, 0]])
    return Epoch(7, Mesh(3, 1, 3), Placement(slots, 3, 6))


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
    epoch = spare_epoch().without({lost})
    assert (epoch.number, epoch.mesh.ranks, epoch.placement.owners) == (8, 2, 2)
    assert set(epoch.placement.slots[0].tolist()) - {EMPTY} == set(range(6))


def test_without_says_when_there_is_no_room() -> None:
    with pytest.raises(
        ValueError, match="layer 0: 2 experts lost their last replica, and the survivors have 0 spare slots"
    ):
        Epoch.first(Mesh(4, 1, 4), 1, 8).without({1})
    with pytest.raises(ValueError, match="hold slices of every expert"):
        Epoch.first(Mesh(2, 2, 1), 1, 8).without({1})


def test_joined_fills_new_slots_with_the_rarest() -> None:
    epoch = spare_epoch().joined(1)
    assert (epoch.mesh.ranks, epoch.placement.slots.shape) == (4, (1, 12))
    assert sorted(epoch.placement.of_owner(0, 3).tolist()) == [1, 3, 5]
    assert np.array_equal(epoch.placement.slots[:, :9], spare_epoch().placement.slots)


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
    assert epoch_from(json.loads(json.dumps(epoch_message(epoch)))) == epoch
