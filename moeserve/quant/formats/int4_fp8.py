"""W4A8-FP8 weights: signed nibbles, an E4M3 scale a group of 128, and a float32 scale an output row.

value = nibble x group scale x channel scale. The split keeps |nibble| x group scale within 448, so that a
kernel may turn weights into E4M3 and multiply them with FP8 activations, scaling rows of the answer once.
Nibbles are two's complement, low one first. Kernels want H and the rank's I in multiples of 256.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.quant.bits import pick_pairs
from moeserve.quant.blocks import Blocks
from moeserve.quant.elements import decode_fp8, encode_fp8, table
from moeserve.quant.format import WHOLE, Format, Packed, Part, Parts
from moeserve.quant.formats.int4 import INT4

GROUP = 128
GROUPS = Blocks(1, GROUP)
CHANNEL_FLOOR = 4.36e-6
SPARE = 8.0  # largest |nibble|, moved from the group scales to the channel's

SIGN_BITS = 0x88
"""Turns two codes q + 8 into two's complement, and back."""


def split_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Group scales `[..., N, G]` float32 as E4M3 `[..., N, G]` times float32 `[..., N, 1]`."""
    known = scale.nan_to_num(nan=0.0, posinf=torch.inf)  # a NaN stays in its group
    channel = (Blocks(1, WHOLE).amax(known) / 448).clamp_min(CHANNEL_FLOOR)
    fine = decode_fp8(encode_fp8(scale / channel))
    return encode_fp8(fine / SPARE), channel.mul_(SPARE)


def split(packed: Packed) -> Packed:
    """A symmetric INT4 matrix in groups of 128 with its scales split; rounds them to E4M3.

    ValueError: any other format.
    """
    if packed.format != INT4[GROUP]:
        raise ValueError(f"W4A8-FP8 is made of {INT4[GROUP]}, found {packed.format}")
    codes, scale = packed.parts
    return Packed(INT4_FP8, packed.shape, (codes ^ SIGN_BITS, *split_scales(scale)))


def _encode(x: Tensor) -> Parts:
    return split(INT4[GROUP].quantize(x)).parts


def _decode(parts: Parts, shape: torch.Size) -> Tensor:
    codes, fine, channel = parts
    values = pick_pairs(table("signed_int4", codes.device), codes, shape[-1])
    return GROUPS.multiply_(values, decode_fp8(fine)).mul_(channel)


INT4_FP8 = Format(
    "int4_fp8_group128",
    4,
    (
        Part("codes", torch.uint8, 1, 2),
        Part("scale", torch.float8_e4m3fn, 1, GROUP),
        Part("channel_scale", torch.float32, 1, WHOLE),
    ),
    _encode,
    _decode,
)
