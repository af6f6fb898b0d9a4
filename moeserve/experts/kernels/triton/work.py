# mypy: disable-error-code="import-not-found"
"""What every step of ours starts with: its work list on the device, and an activation's numbers."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.kernels.triton import rows


def most_groups(slots: int, capacity: int, tile_rows: int) -> int:
    """Most groups of at most `tile_rows` rows of one slot that `capacity` rows can make."""
    return min(slots, capacity) + capacity // tile_rows


def work_list(batch: ExpertBatch, limit: int, tile_rows: int) -> Tensor:
    """The groups of `batch`, `[4 + 4 limit]` int32, as `rows` describes them."""
    tiles = torch.empty(4 + 4 * limit, dtype=torch.int32, device=batch.counts.device)
    e, g = triton.next_power_of_2(batch.slots), 32
    rows.list_tiles[(triton.cdiv(limit, g),)](
        batch.counts, batch.offsets, tiles, batch.slots, limit, tile_rows, e, g
    )
    return tiles


def parameters(activation: Activation) -> tuple[float, float, float, float]:
    """Limit, alpha, beta and linear beta, 0 for those it does not take."""
    values = (activation.limit, activation.alpha, activation.beta, activation.linear_beta)
    limit, alpha, beta, linear_beta = (0.0 if value is None else float(value) for value in values)
    return limit, alpha, beta, linear_beta
