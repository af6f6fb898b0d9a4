"""The 128x4 interleave of block scales that tensor cores with block-scaled inputs read (NVFP4, MXFP4, MXFP8).

Scales `[R, C]`, one byte each, padded with zeros to multiples of 128 rows and 4 columns; KT = padded C / 4:

    offset(m, k) = ((m // 128) KT + k // 4) 512 + (m % 32) 16 + ((m % 128) // 32) 4 + k % 4

Every matrix of a stack is padded and swizzled by itself. Codes stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.quant.format import Part
from moeserve.quant.formats.mx import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_STATIC
from moeserve.quant.layout import Rearrangement, TensorMove

ROWS, COLUMNS, ATOM = 128, 4, 32
"""A tile, and the rows of it whose first bytes are 16 apart."""


@dataclass(frozen=True)
class Swizzled:
    """One-byte scales `[..., R, C]` tile by tile: `[..., padded R, padded C]`, which a kernel reads flat."""

    def forward(self, stored: Tensor) -> Tensor:
        """The scales in tiles, in their own dtype."""
        *lead, rows, columns = stored.shape
        padded = F.pad(stored.view(torch.uint8), (0, -columns % COLUMNS, 0, -rows % ROWS))
        rows, columns = padded.shape[-2:]
        split = padded.reshape(*lead, rows // ROWS, ROWS // ATOM, ATOM, columns // COLUMNS, COLUMNS)
        return split.transpose(-4, -2).reshape(*lead, rows, columns).view(stored.dtype)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The scales by row and column, without the padding."""
        *lead, rows, columns = moved.shape
        tiles = moved.view(torch.uint8).reshape(
            *lead, rows // ROWS, columns // COLUMNS, ATOM, ROWS // ATOM, COLUMNS
        )
        padded = tiles.transpose(-4, -2).reshape(*lead, rows, columns)
        return padded[..., : like.shape[-2], : like.shape[-1]].contiguous().view(like.dtype)


BLOCK_SCALED = frozenset({NVFP4, NVFP4_STATIC, MXFP4, MXFP6_E3M2, MXFP6_E2M3, MXFP8})


def _moves(part: Part, _: torch.Size) -> tuple[TensorMove, ...]:
    return (Swizzled(),) if part.name == "scale" else ()


SCALES_128X4 = Rearrangement("scales_128x4", BLOCK_SCALED, _moves)
