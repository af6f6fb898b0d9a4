"""compressed-tensors' `pack-quantized` integers: `weight_packed` int32 along K, `weight_zero_point` along N.

`weight_packed [N, ceil(K b / 32)]` holds code + 2^(b - 1); `weight_zero_point [ceil(N b / 32), G]` the same
of zero points; `weight_scale [N, G]`; `weight_g_idx [K]` with activation order; `weight_shape` is (N, K).
Scales stay float32: a writer that narrows them must know that it loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.quant.format import Packed, Part
from moeserve.quant.layout import Rearrangement, TensorMove
from moeserve.quant.layouts.integers import ALL_GROUPED
from moeserve.quant.layouts.words import (
    Biased,
    Nibbles,
    OneRow,
    Turned,
    Words,
    codes,
    zero_points_within,
)

NAMES = {
    "codes": "weight_packed",
    "scale": "weight_scale",
    "zero": "weight_zero_point",
    "order": "weight_g_idx",
}


def _moves(part: Part, _: torch.Size) -> Sequence[TensorMove]:
    bits = 4 if part.dtype == torch.uint8 else 8
    moves: dict[str, Sequence[TensorMove]] = {
        "codes": codes(bits),
        "scale": (),
        "zero": (Turned(), Nibbles() if bits == 4 else Biased(), Words(), Turned()),
        "order": (OneRow(),),
    }
    return moves[part.name]


def _four_bits(packed: Packed) -> None:
    """ValueError: a zero point beyond 4 bits; with 8 every one can be stored."""
    if packed.format.bits == 4:
        zero_points_within("compressed_ints", 0, packed)


def _shape(packed: Packed) -> dict[str, Tensor]:
    *lead, n, k = packed.shape
    return {"weight_shape": torch.tensor([n, k], device=packed.device).expand(*lead, 2).contiguous()}


COMPRESSED_INTS = Rearrangement(
    "compressed_ints",
    ALL_GROUPED,
    _moves,
    NAMES,
    check=_four_bits,
    constants=_shape,
)
