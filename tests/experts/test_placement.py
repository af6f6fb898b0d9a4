"""Placement is a value, moves are its difference, and the address book is the only door to slots."""

import numpy as np
import pytest
import torch

from moeserve.experts.placement import EMPTY, Move, Placement
from moeserve.experts.routing.address_book import AddressBook

REPLICATED = np.array([[0, 1, 2, 0, 3, 0], [3, 2, 1, 0, EMPTY, 1]])


def replicated() -> Placement:
    return Placement(REPLICATED, owners=3, experts=4)


@pytest.mark.parametrize(
    ("experts", "ranks", "owned"),
    [
        (10, 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 4, [[0], [1], [], []]),
        (1, 1, [[0]]),
    ],
)
def test_even_gives_the_remainder_to_the_first_ranks(
    experts: int, ranks: int, owned: list[list[int]]
) -> None:
    placement = Placement.even(2, experts, ranks)
    for layer in range(2):
        found = [[e for e in placement.of_owner(layer, rank).tolist() if e != EMPTY] for rank in range(ranks)]
        assert found == owned


def test_a_placement_is_frozen_and_compared_by_value() -> None:
    placement = replicated()
    assert placement == replicated()
    assert hash(placement) == hash(replicated())
    with pytest.raises(ValueError, match="read-only"):
        placement.slots[0, 0] = 1


@pytest.mark.parametrize(
    ("slots", "ranks", "message"),
    [
        ([[0, 1, 2]], 2, "slots a multiple of owners=2"),
        ([[0, 1, 5, 2]], 2, "slots hold experts 0 to 5; a layer has experts 0 to 3"),
        ([[0, 1, 1, 2]], 2, r"layer 0 has no slot for experts \[3\]"),
    ],
)
def test_what_a_placement_cannot_be(slots: list[list[int]], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(np.array(slots), ranks, experts=4)


def test_moves_are_the_slots_that_change() -> None:
    target = REPLICATED.copy()
    target[0, 3], target[1, 4] = 3, 2
    moves = replicated().moves_to(Placement(target, 3, 4))
    assert moves == (Move(0, 3, 3, 4), Move(1, 4, 2, 1))
    assert replicated().moves_to(replicated()) == ()


def test_load_splits_over_replicas() -> None:
    load = np.array([[90.0, 10.0, 20.0, 30.0], [5.0, 8.0, 2.0, 1.0]])
    assert replicated().owner_load(load).tolist() == [[40.0, 50.0, 60.0], [3.0, 9.0, 4.0]]
    assert replicated().imbalance(load) == pytest.approx([60 / 50, 9 / (16 / 3)])
    assert replicated().imbalance(np.zeros((2, 4))).tolist() == [1.0, 1.0]


def test_every_id_resolves_to_a_slot_that_holds_it() -> None:
    book, random = AddressBook(replicated()), torch.Generator().manual_seed(0)
    experts = torch.randint(-1, 4, (200, 3), generator=random, dtype=torch.int32)
    for layer in range(2):
        slots = book.resolve(layer, experts, torch.ones(200, dtype=torch.bool))
        held = torch.from_numpy(REPLICATED[layer])[slots.clamp_min(0).long()]
        assert torch.equal(torch.where(slots == EMPTY, EMPTY, held.int()), experts)


def test_replicas_share_the_rows_and_a_row_is_resolved_the_same_each_time() -> None:
    book = AddressBook(replicated())
    experts = torch.zeros(3000, 1, dtype=torch.int32)
    slots = book.resolve(0, experts, torch.ones(3000, dtype=torch.bool))
    assert torch.equal(slots, book.resolve(0, experts, torch.ones(3000, dtype=torch.bool)))
    shares = torch.bincount(slots.flatten().long(), minlength=6)[[0, 3, 5]]
    assert (shares > 800).all()


def test_rows_that_are_not_valid_and_ids_out_of_range_resolve_to_none() -> None:
    experts = torch.tensor([[0, 1], [2, 3], [4, -5]], dtype=torch.int32)
    slots = AddressBook(replicated()).resolve(0, experts, torch.tensor([True, False, True]))
    assert (slots[0] != EMPTY).all()
    assert (slots[1:] == EMPTY).all()


def test_a_book_is_updated_in_place() -> None:
    book = AddressBook(replicated())
    tables = [tensor.data_ptr() for tensor in (book._replicas, book._copies)]
    book.update(Placement(REPLICATED[:, ::-1], 3, 4))
    assert tables == [tensor.data_ptr() for tensor in (book._replicas, book._copies)]
    assert int(book.resolve(0, torch.tensor([[3]]), torch.tensor([True]))) == 1


def test_slots_beyond_an_owners_room_stay_empty() -> None:
    slots = np.array([[0, 1, EMPTY, 2, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY]])
    placement = Placement(slots, 3, 3, room=(3, 1, 0))
    assert placement.usable.tolist() == [True] * 3 + [True, False, False] + [False] * 3
    assert [placement.of_owner(0, owner).tolist() for owner in range(3)] == [[0, 1, EMPTY], [2], []]
    assert placement != Placement(slots, 3, 3) and placement != Placement(slots, 3, 3, (3, 2, 0))
    assert placement == Placement(slots, 3, 3, (3, 1, 0))
    assert hash(placement) == hash(Placement(slots, 3, 3, (3, 1, 0)))
    assert Placement(slots, 3, 3).room == (3, 3, 3)
    assert placement.with_slots(np.roll(slots, 0)).room == (3, 1, 0)
    load = np.array([[1.0, 1.0, 4.0]])
    assert placement.imbalance(load) == pytest.approx([4 / 3])  # of two owners: the third has no room
    with pytest.raises(
        ValueError, match="owner 1 has room for 1 experts, and slot 4 beyond it holds expert 2"
    ):
        placement.with_slots(np.array([[0, 1, EMPTY, EMPTY, 2, EMPTY, EMPTY, EMPTY, EMPTY]]))
    for room in ((3, 1), (4, 1, 0), (3, -1, 0)):
        with pytest.raises(ValueError, match="must be 0 to 3 slots for each of 3 owners"):
            Placement(slots, 3, 3, room)


def test_reserved_owners_have_no_room() -> None:
    placement = Placement.even(2, 5, 2, reserved=2)
    assert (placement.owners, placement.room) == (4, (3, 3, 0, 0))
    assert placement.slots[:, :6].tolist() == Placement.even(2, 5, 2).slots.tolist()
    with pytest.raises(
        ValueError, match=r"3 experts need a slot each, and the room of 2 owners, \[1, 1\], is 2"
    ):
        Placement.blocks(1, 3, 1, (1, 1))
