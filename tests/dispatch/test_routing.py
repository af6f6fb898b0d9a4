"""Repeated choices fold into the first, with their weights; ids become slots."""

import numpy as np
import pytest
import torch

from moeserve.experts.placement import Placement
from moeserve.experts.routing.address_book import AddressBook
from moeserve.experts.routing.choices import merge_by_operations, merge_duplicates

NAN = float("nan")


def test_repeats_fold_into_the_first_place() -> None:
    experts = torch.tensor([[4, 2, 4, 4], [1, 2, 3, 0], [-1, 5, -1, 5]])
    weights = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 3.0, 4.0], [NAN, 1.0, NAN, 2.0]])
    ids, summed = merge_duplicates(experts, weights, torch.ones(3, dtype=torch.bool))
    assert ids.tolist() == [[4, 2, -1, -1], [1, 2, 3, 0], [-1, 5, -1, -1]]
    assert summed.tolist() == [[13, 2, 0, 0], [1, 2, 3, 4], [0, 3, 0, 0]]


def test_a_real_nan_stays() -> None:
    ones = torch.ones(1, dtype=torch.bool)
    _, summed = merge_duplicates(torch.tensor([[4, 2, 4]]), torch.tensor([[NAN, 2.0, 1.0]]), ones)
    assert summed[0, 0].isnan() and summed[0, 1:].tolist() == [2, 0]


def test_no_rows() -> None:
    none = torch.empty(0, dtype=torch.bool)
    ids, summed = merge_duplicates(torch.empty(0, 3, dtype=torch.int32), torch.empty(0, 3), none)
    assert ids.shape == summed.shape == (0, 3)


def test_rows_that_are_not_valid_choose_none() -> None:
    valid = torch.tensor([False, True])
    ids, summed = merge_duplicates(
        torch.tensor([[1, 2], [1, 2]]), torch.tensor([[NAN, 1.0], [1.0, 1.0]]), valid
    )
    assert ids.tolist() == [[-1, -1], [1, 2]]
    assert summed.tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("top_k", [1, 4])
def test_the_host_and_torch_merge_alike(repeated: bool, top_k: int) -> None:
    draw = torch.Generator().manual_seed(top_k)
    experts = torch.rand(50, 9, generator=draw).argsort(dim=1)[:, :top_k].int() - 1  # -1: none
    if repeated and top_k > 1:
        experts[::3, 2] = experts[::3, 0]
    weights = torch.rand(50, top_k, generator=draw).to(torch.bfloat16)
    weights[experts < 0] = NAN
    valid = torch.rand(50, generator=draw) < 0.8
    found = merge_duplicates(experts, weights, valid)
    wanted = merge_by_operations(experts, weights, valid)
    assert [one.dtype for one in found] == [torch.int32, torch.float32]
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("copies", [1, 3])
def test_the_host_and_torch_hash_alike(copies: int) -> None:
    slots = np.tile(np.arange(6, dtype=np.int32), copies)[None]
    book = AddressBook(Placement(slots, copies, 6))
    ids = torch.randint(-2, 9, (40, 3), generator=torch.Generator().manual_seed(0)).int()
    valid = torch.arange(40) % 5 != 0
    known = (ids >= 0) & (ids < 6) & valid[:, None]
    wanted = book._hashed(0, torch.where(known, ids, 0).long(), known)
    found = book.resolve(0, ids, valid)
    assert found.dtype == torch.int32 and torch.equal(found, wanted)


def test_few_rows_of_a_lane_come_to_one_replica_and_other_lanes_rows_to_the_others() -> None:
    slots = np.tile(np.arange(6, dtype=np.int32), 3)[None]
    books = [AddressBook(Placement(slots, 3, 6), lane=lane) for lane in range(3)]
    ids = torch.randint(0, 6, (16, 3), generator=torch.Generator().manual_seed(0)).int()  # 8 of each expert
    valid = torch.ones(16, dtype=torch.bool)
    by_lane = [book.resolve(0, ids, valid) for book in books]
    for found in by_lane:
        assert [len(set(found[ids == expert].tolist())) for expert in range(6)] == [1] * 6
    together = torch.stack(by_lane)[:, ids == 2]
    assert sorted(together[:, 0].tolist()) == [2, 8, 14], "lanes share the replicas of an expert"


def test_many_rows_of_an_expert_are_divided_among_its_replicas() -> None:
    book = AddressBook(Placement(np.tile(np.arange(6, dtype=np.int32), 3)[None], 3, 6))
    ids = torch.full((48, 1), 4, dtype=torch.int32)
    counts = torch.bincount(
        book.resolve(0, ids.repeat(3, 1), torch.ones(144, dtype=torch.bool)).flatten().long()
    )
    assert counts[[4, 10, 16]].tolist() == [48, 48, 48]
