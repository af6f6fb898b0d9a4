"""`StepRoom`: where a step's rows are gathered on the device; `StagedRoutes`: host memory of its routes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moeserve.runtime.step import Job, LaneInput

ALIGNED_BYTES = 256
"""At which torch's allocator aligns device memory; kernels are compiled for aligned and other addresses
apart.
"""


@dataclass(frozen=True, eq=False)
class StepRoom:
    """A lane's rows of one step in device memory, where they are gathered.

    `routes` is the memory of experts, weights and validity of all rows, one after the other, so that one copy
    fills it.
    """

    rows: LaneInput
    routes: Tensor  # uint8
    parts: dict[int, LaneInput] = field(default_factory=dict)  # the first rows, as many as were asked for
    staged: deque[StagedRoutes] = field(default_factory=deque)  # of steps that have ended, to be filled again

    def first(self, count: int) -> LaneInput:
        """The first `count` rows."""
        found = self.parts.get(count)
        if found is None:
            found = self.parts[count] = self.rows.rows(slice(count))
        return found

    @classmethod
    def of(cls, hidden: Tensor, top_k: int) -> StepRoom:
        """Room beside `hidden [R, H]`, not filled."""
        count = hidden.shape[0]
        routes = torch.empty(_routes_bytes(count, top_k), dtype=torch.uint8, device=hidden.device)
        return cls(LaneInput(hidden, *_route_columns(routes, count, top_k)), routes)


class StagedRoutes:
    """Host memory from which the routes of one step are copied to its room, and where their columns lie.

    memory: uint8, as large as the room's `routes`.
    """

    def __init__(self, memory: Tensor, rows: int, top_k: int) -> None:
        self.memory = memory
        there = memory.numpy()
        size, column = 4 * rows * top_k, _column_bytes(rows, top_k)
        there[:] = 0
        self._experts = there[:size].view(np.int32).reshape(rows, top_k)
        self._weights = there[column : column + size].view(np.float32).reshape(rows, top_k)
        self._valid = there[2 * column :]

    def fill(self, parts: Sequence[tuple[int, Job | None]]) -> None:
        """Takes the routes of a step's jobs, in its order; rows of a job that is gone, and those behind the
        last, are not valid, whatever stands in them.
        """
        at = 0
        for rows, job in parts:
            end = at + rows
            if job is not None:
                self._experts[at:end] = job.experts.numpy()
                self._weights[at:end] = job.weights.numpy()
            self._valid[at:end] = job is not None
            at = end
        self._valid[at:] = 0


def _column_bytes(rows: int, top_k: int) -> int:
    """Bytes of experts, and of weights: each column starts as aligned as memory of its own would be."""
    return -(-4 * rows * top_k // ALIGNED_BYTES) * ALIGNED_BYTES


def _routes_bytes(rows: int, top_k: int) -> int:
    return 2 * _column_bytes(rows, top_k) + rows


def _route_columns(routes: Tensor, rows: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts `[R, K]` int32, weights `[R, K]` float32 and validity `[R]` bool as views of `routes`."""
    size, column = 4 * rows * top_k, _column_bytes(rows, top_k)
    experts = routes[:size].view(torch.int32)
    weights = routes[column : column + size].view(torch.float32)
    shape = (rows, top_k)
    return experts.view(shape), weights.view(shape), routes[2 * column :].view(torch.bool)
