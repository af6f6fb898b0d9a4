"""Repeated choices fold into the first, with their weights."""

import torch

from moeserve.experts.routing.choices import merge_duplicates

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
