"""What our own Hopper kernels share: rows of a batch laid flat, and the step that is cut from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moeserve.experts.batch import ExpertBatch
from moeserve.experts.kernels.tiles import tile_for
from moeserve.quant.format import Packed

if TYPE_CHECKING:
    from moeserve.experts.kernels.device.grouped import Step


def flat(tokens: Packed) -> Packed:
    """PADDED rows `[e, C, H]` as `[e * C, H]`, contiguous; RAGGED rows are so already."""
    rows, width = tokens.shape[:-1].numel(), tokens.shape[-1]
    parts = tuple(part.reshape(rows, part.shape[-1]).contiguous() for part in tokens.parts)
    return Packed(tokens.format, torch.Size((rows, width)), parts)


def step_for(kind: str, batch: ExpertBatch, tokens: Packed) -> Step:
    """The step of `batch` on weights of `kind`, with the tile measured for this device and so many rows."""
    from moeserve.experts.kernels.device.grouped import Step

    device = torch.cuda.get_device_name(tokens.device)
    return Step(batch, tokens.shape[0], tile_for(device, kind, batch.rows_a_slot))
