"""`Routing`: where one lane's rows go in one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """Slots and weights of this member's rows, and the step that they belong to (by its header).

    A lane without rows is not named by the step. `number` counts the steps that members take together, from
    1: whoever orders the steps gives it. It rises from one dispatch of a member to its next. Members that are
    in different steps at the same time are in steps less than 2^31 apart.
    """

    slots: Tensor  # [T, K] int32, EMPTY = none
    weights: Tensor  # [T, K] float32, final
    lane_rows: tuple[int, ...]  # by lane, reserved ones too
    number: int
