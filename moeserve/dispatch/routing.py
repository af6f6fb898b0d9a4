"""`Routing`: where one lane's rows go in one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.experts.machine import kernels_serve
from moeserve.experts.placement import EMPTY


@dataclass(frozen=True, eq=False)
class Routing:
    """Slots and weights of this lane's rows, and how many rows each lane brings (by the step's header)."""

    slots: Tensor  # [T, K] int32, EMPTY = none
    weights: Tensor  # [T, K] float32, final
    lane_rows: tuple[int, ...]  # by rank


def merge_duplicates(experts: Tensor, weights: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Folds repeated experts of a row into their first place, weights summed; later places become EMPTY.

    `experts [T, K]` int32, `weights [T, K]` float32, `valid [T]` bool: other rows choose none. The weight of
    an EMPTY place is dropped, even NaN. Returns new tensors of the same shapes. Only so does a token travel
    to a slot at most once.
    """
    if kernels_serve(experts.device):
        from moeserve.experts.choice_kernels import merge

        merged: tuple[Tensor, Tensor] = merge(experts.contiguous(), weights.contiguous(), valid)  # type: ignore[no-untyped-call]
        return merged
    experts = torch.where(valid[:, None], experts, EMPTY)
    weights = torch.where(experts < 0, 0.0, weights.float())
    same = experts[:, :, None] == experts[:, None, :]  # [T, K, K]
    first = same.new_ones(same.shape[1:]).tril(-1)  # strictly earlier places
    repeated = (same & first).any(dim=2)
    summed = torch.where(same, weights[:, None, :], 0.0).sum(dim=2)  # a NaN stays with its own expert
    return torch.where(repeated, EMPTY, experts), torch.where(repeated | (experts < 0), 0.0, summed)
