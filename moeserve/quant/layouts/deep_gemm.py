"""DeepGEMM's scales: column-major with 16-byte aligned columns (TMA), as float32 or as bytes of exponents.

- `deep_gemm_fp32` (Hopper): scales of groups `[M, G]` as `[G, M]`, each column padded with zeros to a
  multiple of four numbers. DeepGEMM's own argument is the view `scale.mT[..., :M, :]`.
- `deep_gemm_ue8m0` (Blackwell): each scale, a power of two, as its E8M0 byte, four groups in one int32, first
  in the low byte: `[ceil(G / 4), M padded to 4]`. A scale of 128 rows is repeated for each of them.

128x128 weight scales stay as they are on Hopper. Codes always do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.quant.elements import FP32_MANTISSA_BITS
from moeserve.quant.format import Packed, Part
from moeserve.quant.formats.fp8 import FP8_BLOCK_UE8M0, FP8_GROUP, FP8_GROUP64, FP8_GROUP_UE8M0
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.layout import Rearrangement, TensorMove
from moeserve.quant.layouts.words import Words

ALIGNED = 4
"""Numbers of 32 bits in 16 bytes."""


@dataclass(frozen=True)
class ColumnMajor:
    """32-bit scales `[..., M, G]` as `[..., G, M padded to 4]`."""

    def forward(self, stored: Tensor) -> Tensor:
        """The columns, one after another."""
        return F.pad(stored.mT, (0, -stored.shape[-2] % ALIGNED)).contiguous()

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The rows, without the padding."""
        return moved[..., : like.shape[-2]].mT.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Exponents:
    """Powers of two as float32, any shape, as their biased exponents, uint8; no other value may occur."""

    def forward(self, stored: Tensor) -> Tensor:
        """The biased exponents, uint8 of the same shape."""
        return (stored.view(torch.int32) >> FP32_MANTISSA_BITS).to(torch.uint8)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The powers of two again, float32 of the same shape."""
        return moved.to(torch.int32).bitwise_left_shift_(FP32_MANTISSA_BITS).view(torch.float32)


@dataclass(frozen=True)
class Repeated:
    """Scales of blocks of `block` rows, `[..., ceil(n / block), G]`, for each of the `rows` they cover."""

    block: int
    rows: int

    def forward(self, stored: Tensor) -> Tensor:
        """One row of scales for each row they cover: `[..., rows, G]`."""
        return stored.repeat_interleave(self.block, dim=-2)[..., : self.rows, :]

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The first row of every block."""
        return moved[..., :: self.block, :]


def _float_moves(part: Part, _: torch.Size) -> Sequence[TensorMove]:
    return (ColumnMajor(),) if part.name == "scale" else ()


def _exponent_moves(part: Part, shape: torch.Size) -> Sequence[TensorMove]:
    if part.name != "scale":
        return ()
    exponents = (Exponents(),) if part.dtype == torch.float32 else ()
    repeated = (Repeated(part.rows, shape[-2]),) if part.rows > 1 else ()
    return (*exponents, *repeated, Words(), ColumnMajor())


def _powers_of_two(packed: Packed) -> None:
    """ValueError: a scale that is no power of two a byte can hold, or 0."""
    scale = packed.parts[1]
    if scale.dtype != torch.float32:
        return
    bits = scale.view(torch.int32)
    wrong = scale[(bits & ((1 << FP32_MANTISSA_BITS) - 1) != 0) | (bits < 0)]
    if wrong.numel():
        raise ValueError(
            f"deep_gemm_ue8m0 of {packed.format} needs scales that are powers of two, "
            f"found {wrong.flatten()[0].item()}"
        )


ENTRIES = (
    Rearrangement("deep_gemm_fp32", frozenset({FP8_GROUP, FP8_GROUP64, FP8_GROUP_UE8M0}), _float_moves),
    Rearrangement(
        "deep_gemm_ue8m0",
        frozenset({FP8_BLOCK_UE8M0, FP8_GROUP_UE8M0, MXFP4, MXFP8}),
        _exponent_moves,
        check=_powers_of_two,
    ),
)
