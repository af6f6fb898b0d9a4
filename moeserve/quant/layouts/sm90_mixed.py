"""MXFP4 for Hopper's mixed-input GEMM (W4A16): codes where a warp's registers want them, scales folded.

Codes. In a tile of 16 rows and 64 columns (32 bytes), with rows h 8 + i and bytes u 16 + v 8 + q 4 + l, the
four bytes of all (q, h) become one 32-bit word at row v 8 + i, word u 4 + l, byte q 2 + h. The bits of the
word are then spread (`PLACES`) so that masks and shifts alone turn it into eight BF16 numbers.

Scales. Rows in 64s, groups of 32 columns in fours: scale (r, g) goes to
`[r // 64, g // 4, r % 16, ((r % 64) // 16) 4 + g % 4]`, 16 bytes a row.

N must be a multiple of 64, K of 128. The two agree with TensorRT-LLM's preprocessing and FlashInfer's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.quant.format import Part
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.layout import Rearrangement, TensorMove, must_divide
from moeserve.quant.layouts.pieces import pieces

TILE_ROWS, TILE_BYTES = 16, 32
FOLD_ROWS, FOLD_GROUPS = 64, 4

# fmt: off
PLACES = (
    6, 7, 8, 15,  22, 23, 24, 31,  # row i, columns c and c + 1
    3, 4, 5, 12,  19, 20, 21, 28,  # row i + 8
    0, 1, 2, 9,   16, 17, 18, 25,  # row i, columns c + 8 and c + 9
    13, 10, 11, 14,  29, 26, 27, 30,  # row i + 8
)
# fmt: on
"""Where each bit of a word of four bytes goes; of every code mantissa, exponent low and high, sign."""


def _masks(places: tuple[int, ...]) -> dict[int, int]:
    """Distances that bits travel (positive: up) -> the bits they fill, as an int32."""
    masks: dict[int, int] = {}
    for bit, place in enumerate(places):
        masks[place - bit] = masks.get(place - bit, 0) | 1 << place
    return {distance: mask - (mask >> 31 << 32) for distance, mask in masks.items()}


SPREAD = _masks(PLACES)
GATHER = _masks(tuple(PLACES.index(bit) for bit in range(32)))


def _moved_bits(words: Tensor, masks: dict[int, int]) -> Tensor:
    found = torch.zeros_like(words)
    for distance, mask in masks.items():
        shifted = words << distance if distance >= 0 else words >> -distance
        found |= shifted.bitwise_and_(mask)
    return found


@dataclass(frozen=True)
class Interleaved:
    """4-bit codes `[..., N, K / 2]` in words for the mixed-input GEMM, of the same shape."""

    def forward(self, stored: Tensor) -> Tensor:
        """The words as bytes. ValueError: N is no multiple of 16, or K of 64."""
        self._check(stored)
        out = torch.empty_like(stored, memory_format=torch.contiguous_format)
        for matrix, rows in pieces(stored, TILE_ROWS):
            own = stored[matrix][rows]
            n, k = own.shape
            split = own.reshape(n // 16, 2, 8, k // 32, 2, 2, 2, 4)  # h, i, tile, u, v, q, l
            bytes_ = split.permute(0, 5, 2, 3, 4, 7, 6, 1).reshape(n, k)
            out[matrix][rows] = _moved_bits(bytes_.view(torch.int32), SPREAD).view(torch.uint8)
        return out

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The codes by row and column."""
        out = torch.empty(like.shape, dtype=like.dtype, device=moved.device)
        for matrix, rows in pieces(moved, TILE_ROWS):
            words = moved[matrix][rows].contiguous().view(torch.int32)
            bytes_ = _moved_bits(words, GATHER).view(torch.uint8)
            n, k = bytes_.shape
            split = bytes_.reshape(n // 16, 2, 8, k // 32, 2, 4, 2, 2)  # v, i, tile, u, l, q, h
            out[matrix][rows] = split.permute(0, 7, 2, 3, 4, 1, 6, 5).reshape(n, k)
        return out

    @staticmethod
    def _check(stored: Tensor) -> None:
        must_divide("rows", stored.shape[-2], TILE_ROWS)
        must_divide("bytes of columns", stored.shape[-1], TILE_BYTES)


@dataclass(frozen=True)
class Folded:
    """Scales `[..., N, G]` as `[..., N / 64, G / 4, 16, 16]`."""

    def forward(self, stored: Tensor) -> Tensor:
        """The folded scales. ValueError: N is no multiple of 64, or G of 4."""
        *lead, rows, groups = stored.shape
        must_divide("rows", rows, FOLD_ROWS)
        must_divide("groups of columns", groups, FOLD_GROUPS)
        split = stored.reshape(*lead, rows // FOLD_ROWS, 4, 16, groups // FOLD_GROUPS, FOLD_GROUPS)
        folded = split.movedim(-2, -4).transpose(-3, -2)
        return folded.reshape(*lead, rows // FOLD_ROWS, groups // FOLD_GROUPS, 16, 16)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The scales by row and group."""
        split = moved.reshape(*moved.shape[:-1], 4, FOLD_GROUPS).transpose(-3, -2)
        return split.movedim(-4, -2).reshape(like.shape)


def _moves(part: Part, _: torch.Size) -> tuple[TensorMove, ...]:
    return (Interleaved(),) if part.name == "codes" else (Folded(),)


SM90_MIXED_MXFP4 = Rearrangement("sm90_mixed_mxfp4", frozenset({MXFP4}), _moves)
