"""FP8 with float32 scales that multiply on decode: one a tensor, a row, a 1x128 group or a 128x128 block.

A scale is amax / largest with a floor; codes are `x / scale`, clamped to the largest code (448 for E4M3)
before the cast, rounded to nearest even, NaN kept. DeepSeek's `weight_scale_inv` is such a scale: it
multiplies, despite its name. The UE8M0 formats round the scale up to a power of two, still stored as float32.

The per-tensor scale quantizes as `x * (1 / scale)`, all others by true division, as their kernels do. An
all-zero tensor gets the floor as its scale, where the CUDA kernel without one divides by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moeserve.quant.blocks import Blocks
from moeserve.quant.elements import FP8_LARGEST, decode_fp8, encode_fp8
from moeserve.quant.format import WHOLE, Format, Packed, Part, Parts
from moeserve.quant.static import static_format, there

E4M3 = torch.float8_e4m3fn
E4M3_MAX = FP8_LARGEST[E4M3]
SCALE_FLOOR = 1 / (448 * 512)
"""Smallest scale of a tensor or a row."""
GROUP_AMAX_FLOOR = 1e-10  # activation groups
BLOCK_AMAX_FLOOR = 1e-12  # weight blocks
UE8M0_FLOOR = 1e-10

ScaleRule = Callable[[Tensor], Tensor]
"""Largest magnitudes of blocks -> their scales."""


def floored_scale(largest: float, amax: Tensor) -> Tensor:
    """amax / largest, at least `SCALE_FLOOR`."""
    return (amax / largest).clamp_min(SCALE_FLOOR)


def floored_amax(floor: float, amax: Tensor) -> Tensor:
    """amax / 448 with amax at least `floor`."""
    return amax.clamp_min(floor) / E4M3_MAX


def power_of_two(scale: ScaleRule, amax: Tensor) -> Tensor:
    """Another rule's scale, at least 1e-10, rounded up to a power of two."""
    bits = scale(amax).clamp_min(UE8M0_FLOOR).view(torch.int32)
    return torch.where(amax.isnan(), amax, ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32))


def _encode(blocks: Blocks, rule: ScaleRule, dtype: torch.dtype, x: Tensor) -> Parts:
    x = x.float()
    scale = rule(blocks.amax(x))
    whole = blocks == Blocks(WHOLE, WHOLE)
    quotient = x * scale.reciprocal() if whole else blocks.divide(x, scale)
    return encode_fp8(quotient, dtype), scale


def _decode(blocks: Blocks, parts: Parts, shape: torch.Size) -> Tensor:
    return blocks.multiply_(decode_fp8(parts[0]), parts[1])


def _fp8(name: str, blocks: Blocks, rule: ScaleRule, dtype: torch.dtype = E4M3) -> Format:
    parts = (Part("codes", dtype, 1, 1), Part("scale", torch.float32, blocks.rows, blocks.columns))
    return Format(name, 8, parts, partial(_encode, blocks, rule, dtype), partial(_decode, blocks))


TENSOR, ENTRY, GROUP, BLOCK = Blocks(WHOLE, WHOLE), Blocks(1, WHOLE), Blocks(1, 128), Blocks(128, 128)

_ROW_SCALE = partial(floored_scale, E4M3_MAX)
_GROUP_SCALE = partial(floored_amax, GROUP_AMAX_FLOOR)
_BLOCK_SCALE = partial(floored_amax, BLOCK_AMAX_FLOOR)

FP8_TENSOR = _fp8("fp8_tensor", TENSOR, _ROW_SCALE)
FP8_CHANNEL = _fp8("fp8_channel", ENTRY, _ROW_SCALE)
"""Weights with a scale an output row."""
FP8_TOKEN = _fp8("fp8_token", ENTRY, _ROW_SCALE)
"""Activations with a scale a token: stored and rounded as `FP8_CHANNEL`, under the field's other name."""
FP8_BLOCK = _fp8("fp8_block128", BLOCK, _BLOCK_SCALE)
FP8_GROUP = _fp8("fp8_group128", GROUP, _GROUP_SCALE)
FP8_GROUP64 = _fp8("fp8_group64", Blocks(1, 64), _GROUP_SCALE)
FP8_BLOCK_UE8M0 = _fp8("fp8_block128_ue8m0", BLOCK, partial(power_of_two, _BLOCK_SCALE))
FP8_GROUP_UE8M0 = _fp8("fp8_group128_ue8m0", GROUP, partial(power_of_two, _GROUP_SCALE))


def _scale_to(dtype: torch.dtype) -> ScaleRule:
    return partial(floored_scale, FP8_LARGEST[dtype])


FP8_E5M2 = _fp8("fp8_e5m2", TENSOR, _scale_to(torch.float8_e5m2), torch.float8_e5m2)
FP8_E4M3FNUZ = _fp8("fp8_e4m3fnuz", TENSOR, _scale_to(torch.float8_e4m3fnuz), torch.float8_e4m3fnuz)


def _encode_given(scale: Tensor, x: Tensor) -> Parts:
    return (encode_fp8(x.float() * there(scale, x.device).reciprocal()),)


def _decode_given(scale: Tensor, parts: Parts, shape: torch.Size) -> Tensor:
    return decode_fp8(parts[0]) * there(scale, parts[0].device)


def fp8_given(scale: Tensor) -> Format:
    """Activations with the checkpoint's one scale (float32, one value), codes `x * (1 / scale)`."""
    scale = scale.float().reshape(())
    return replace(FP8_STATIC, encode=partial(_encode_given, scale), decode=partial(_decode_given, scale))


FP8_STATIC = static_format("fp8_static", 8, (Part("codes", E4M3, 1, 1),), fp8_given)


def to_fnuz(packed: Packed, like: Format = FP8_E4M3FNUZ) -> Packed:
    """These values with E4M3FNUZ codes, for GPUs (gfx94x) that have no other: same bits, twice the scale.

    -0 becomes 0. ValueError: a NaN code, which would read as 240.
    """
    codes = packed.parts[0].view(torch.uint8)
    if bool((codes & 0x7F == 0x7F).any()):
        raise ValueError(f"{packed.format} codes hold NaN (0x7F or 0xFF), which E4M3FNUZ would read as 240")
    codes = torch.where(codes == 0x80, 0, codes).to(torch.uint8).view(torch.float8_e4m3fnuz)
    return Packed(like, packed.shape, (codes, packed.parts[1] * 2))


def one_scale(gate: Packed, up: Packed) -> tuple[Packed, Packed]:
    """Returns both halves of a per-tensor gate_up re-quantized with the larger of their scales.

    Kernels that take one scale an expert need that. It goes through FP16, as usual, and
    rounds the half with the smaller scale.
    """
    scale = torch.maximum(gate.parts[1], up.parts[1])
    halves = []
    for half in (gate, up):
        values = decode_fp8(half.parts[0]).half().float() * half.parts[1]
        halves.append(Packed(half.format, half.shape, (encode_fp8(values * scale.reciprocal()), scale)))
    return halves[0], halves[1]
