"""BlockMajorK: columns in blocks of 128 bytes, the block outermost: codes `[N, K]` -> `[K / b, N, b]`.

b is 128 for one-byte codes, 64 for BF16; two 4-bit codes count as one byte. Scales stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.quant.format import Part
from moeserve.quant.formats.floats import BF16, FP16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_BLOCK_UE8M0, FP8_CHANNEL, FP8_TENSOR
from moeserve.quant.formats.int4 import INT4
from moeserve.quant.formats.mx import MXFP8
from moeserve.quant.layout import Rearrangement, TensorMove, must_divide

BYTES = 128


@dataclass(frozen=True)
class BlockMajor:
    """Codes `[..., N, k]` as `[..., k / b, N, b]`, b elements being 128 bytes."""

    def forward(self, stored: Tensor) -> Tensor:
        """The blocks, one after another. ValueError: k is no multiple of b."""
        *lead, rows, columns = stored.shape
        block = BYTES // stored.dtype.itemsize
        must_divide("columns", columns, block)
        return stored.reshape(*lead, rows, columns // block, block).transpose(-3, -2).contiguous()

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The rows in one piece again, in the shape of `like`."""
        return moved.transpose(-3, -2).reshape(like.shape)


def _moves(part: Part, _: torch.Size) -> tuple[TensorMove, ...]:
    return (BlockMajor(),) if part.name == "codes" else ()


BLOCK_MAJOR_K = Rearrangement(
    "block_major_k",
    frozenset({BF16, FP16, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, FP8_BLOCK_UE8M0, MXFP8, INT4[32]}),
    _moves,
)
