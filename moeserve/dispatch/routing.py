"""`Routing`: where one lane's rows go in one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """Slots and weights of this lane's rows, and how many rows each lane brings (by the step's header)."""

    slots: Tensor  # [T, K] int32, EMPTY = none
    weights: Tensor  # [T, K] float32, final
    lane_rows: tuple[int, ...]  # by rank
