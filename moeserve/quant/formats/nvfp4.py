"""NVFP4: E2M1 codes, an E4M3 scale a block of 16 along K, and a float32 scale of the whole matrix.

All scales multiply on decode: value = code x scale x global. ModelOpt stores the global so
(`weight_scale_2`, `input_scale`); compressed-tensors stores its reciprocal. A writer takes global = amax /
2688 (6 x 448), so that the largest block scale is 448; block scales are clamped to [2^-9, 448], and a block
of zeros has scale 1.

A kernel that multiplies in E4M3 cannot hold code x scale, of up to five significant bits. NVFP4_E4M3 is NVFP4
read so: value = code x scale rounded to four significant bits, ties to even, x global. It stores and writes
what NVFP4 does.

Activations take their global from the checkpoint (`input_scale`). It is then no part of the stored tensor,
and rows can travel alone: `NVFP4_STATIC.given(scale)`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, pick_pairs
from moeserve.quant.blocks import Blocks
from moeserve.quant.elements import E2M1, decode_fp8, encode_fp8, table
from moeserve.quant.format import WHOLE, Format, Part, Parts
from moeserve.quant.static import static_format, there

BLOCK = Blocks(1, 16)
LARGEST_SCALE = 448.0
SMALLEST_SCALE = 2.0**-9

CODES = Part("codes", torch.uint8, 1, 2)
SCALE = Part("scale", torch.float8_e4m3fn, 1, 16)


def global_scale(x: Tensor) -> Tensor:
    """amax / 2688 of each matrix of `x [..., N, K]`: `[..., 1, 1]`; 1 where 0 or not finite."""
    scale = Blocks(WHOLE, WHOLE).amax(x.float()) / (E2M1.largest * LARGEST_SCALE)
    return torch.where(scale.isfinite() & (scale > 0), scale, 1.0)


def _encode_codes(x: Tensor, factor: Tensor) -> Tensor:
    return pack_nibbles(E2M1.encode(BLOCK.multiply(x, factor)))


def _decode_codes(codes: Tensor, scale: Tensor, columns: int) -> Tensor:
    values = pick_pairs(table(("pairs", E2M1.name), codes.device), codes, columns)
    return BLOCK.multiply_(values, decode_fp8(scale))


def _encode(x: Tensor) -> Parts:
    x = x.float()
    whole, amax = global_scale(x), BLOCK.amax(x)
    scale = (amax / (E2M1.largest * whole)).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    codes = encode_fp8(torch.where(amax == 0, 1.0, scale))
    divisor = decode_fp8(codes) * whole
    return pack_nibbles(E2M1.encode(BLOCK.divide(x, divisor))), codes, whole


def _decode(parts: Parts, shape: torch.Size) -> Tensor:
    codes, scale, whole = parts
    return _decode_codes(codes, scale, shape[-1]).mul_(whole)


NVFP4 = Format(
    "nvfp4", 4, (CODES, SCALE, Part("global_scale", torch.float32, WHOLE, WHOLE)), _encode, _decode
)
"""Codes uint8 `[N, K/2]`, low nibble first; scale E4M3 `[N, K/16]`, linear; global scale float32 `[1, 1]`."""


E4M3_SPARE_BITS = 20
"""Bits of a float32's mantissa beyond those that E4M3 keeps."""


def _decode_e4m3(parts: Parts, shape: torch.Size) -> Tensor:
    codes, scale, whole = parts
    bits = _decode_codes(codes, scale, shape[-1]).view(torch.int32)
    odd = bits >> E4M3_SPARE_BITS & 1
    bits.add_(odd.add_((1 << E4M3_SPARE_BITS - 1) - 1)).bitwise_and_(-1 << E4M3_SPARE_BITS)
    return bits.view(torch.float32).mul_(whole)


NVFP4_E4M3 = replace(NVFP4, name="nvfp4_e4m3", decode=_decode_e4m3)
"""NVFP4 whose products code x scale are read with E4M3's precision, as `cuda_w4a8` multiplies them."""


def _encode_given(factor: Tensor, x: Tensor) -> Parts:
    x = x.float()
    factor = there(factor, x.device)
    scale = encode_fp8(factor * BLOCK.amax(x) / E2M1.largest)
    values = decode_fp8(scale)
    return _encode_codes(x, torch.where(values == 0, 0.0, factor / values)), scale


def _decode_given(factor: Tensor, parts: Parts, shape: torch.Size) -> Tensor:
    codes, scale = parts
    return _decode_codes(codes, scale, shape[-1]).div_(there(factor, codes.device))


def nvfp4_given(input_scale: Tensor) -> Format:
    """NVFP4 whose global scale is the constant `input_scale` (float32, one value): parts codes and scale.

    Quantizes with g = 1 / input_scale: scale = e4m3(g amax / 6), code = e2m1(x g / scale), value = code
    scale / g.
    """
    factor = input_scale.float().reciprocal().reshape(())
    return replace(NVFP4_STATIC, encode=partial(_encode_given, factor), decode=partial(_decode_given, factor))


NVFP4_STATIC = static_format("nvfp4_static", 4, (CODES, SCALE), nvfp4_given)
