"""`Routing`: where one lane's rows go in one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.experts.placement import EMPTY


@dataclass(frozen=True, eq=False)
class Routing:
    """Slots and weights of this lane's rows, and how many rows each lane brings (by the step's header)."""

    slots: Tensor  # [T, K] int32, EMPTY = none
    weights: Tensor  # [T, K] float32, final
    lane_rows: tuple[int, ...]  # by rank


def merge_duplicates(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Folds repeated experts of a row into their first place, weights summed; later places become EMPTY.

    `experts [T, K]` int, `weights [T, K]` float32; the weight of an EMPTY place is dropped, even NaN. Returns
    new tensors of the same shapes. Only so does a token travel to a slot at most once.
    """
    weights = torch.where(experts < 0, 0.0, weights.float())
    same = experts[:, :, None] == experts[:, None, :]  # [T, K, K]
    first = same.new_ones(same.shape[1:]).tril(-1)  # strictly earlier places
    repeated = (same & first).any(dim=2)
    summed = torch.where(same, weights[:, None, :], 0.0).sum(dim=2)  # a NaN stays with its own expert
    return torch.where(repeated, EMPTY, experts), torch.where(repeated | (experts < 0), 0.0, summed)
