"""Marlin's form of FP4 experts: the tiles of 4-bit integers, and scales four columns at a time.

Codes stand as INT4's do. Scales `[G, N]` are permuted within 64 columns and then 0, 2, 1, 3 within each four.
MXFP4's stay E8M0 bytes. NVFP4's E4M3, none of them negative, become S0E5M3: the byte of 2^7 times the scale
as FP16 without its sign, exact for every scale. The kernel takes the global scale times 2^(bias - 7), which
is no part of the layout: the global scale stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.quant.format import WHOLE, Packed, Part
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4
from moeserve.quant.layout import Rearrangement, TensorMove
from moeserve.quant.layouts.marlin import GROUP_ORDER, Tiled
from moeserve.quant.layouts.words import ColumnsInOrder, Turned

FOURS = ColumnsInOrder((0, 2, 1, 3))
SHIFT = 2.0**7


@dataclass(frozen=True)
class Unsigned:
    """E4M3 numbers, not negative, as S0E5M3 bytes: uint8 of the same shape."""

    def forward(self, stored: Tensor) -> Tensor:
        """Exponent and mantissa of 2^7 times the number, as FP16 has them."""
        return ((stored.half() * SHIFT).view(torch.int16) >> 7).to(torch.uint8)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The scales as they were stored."""
        return ((moved.to(torch.int16) << 7).view(torch.float16) / SHIFT).to(like.dtype)


def _moves(part: Part, shape: torch.Size) -> Sequence[TensorMove]:
    if part.name == "codes":
        return (Tiled(4, shape[-1]),)
    if part.rows == WHOLE:
        return ()
    order = (Turned(), ColumnsInOrder(GROUP_ORDER), FOURS)
    return (Unsigned(), *order) if part.dtype == torch.float8_e4m3fn else order


def _not_negative(packed: Packed) -> None:
    """ValueError: an NVFP4 scale that is negative or NaN, which S0E5M3 does not hold."""
    if packed.format == NVFP4:
        bytes_ = packed.parts[1].view(torch.uint8)
        wrong = packed.parts[1][bytes_ >= 0x7F]
        if wrong.numel():
            raise ValueError(
                f"marlin_fp4 of {packed.format} needs scales of 0 to 448, found {wrong[0].float().item()}"
            )


MARLIN_FP4 = Rearrangement("marlin_fp4", frozenset({MXFP4, NVFP4}), _moves, check=_not_negative)
