"""Formats that encode as compressed-tensors does: a scale is first rounded to the dtype that files store.

Codes are then rounded once, from the float32 quotient with the stored scale, so that reading gives back the
same codes and scales. llm-compressor's observers divide in the model's dtype, so a few of its codes are off
by one; its scales are the same. Each format here equals the one that it is made of; only `encode` differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeserve.checkpoints.dialects.forms import NVFP4_DIVIDED
from moeserve.quant.bits import pack_nibbles
from moeserve.quant.blocks import Blocks
from moeserve.quant.elements import E2M1, FP8_LARGEST, decode_fp8, encode_fp8
from moeserve.quant.format import WHOLE, Format, Parts
from moeserve.quant.formats.fp8 import E4M3
from moeserve.quant.formats.int4 import INT4, INT4_ASYMMETRIC, MIDDLE, RANGES
from moeserve.quant.formats.int8 import INT8_CHANNEL, LARGEST, codes_of
from moeserve.quant.formats.nvfp4 import LARGEST_SCALE, SMALLEST_SCALE

SMALLEST = 2.0**-100
"""The smallest scale: that of a block of zeros. It can be any number that all scale dtypes hold."""

NVFP4_BLOCK = Blocks(1, 16)
ASYMMETRIC_STEPS = 15


@dataclass(frozen=True)
class Rounded:
    """Encodes with one scale a block, amax / `largest` in `dtype`; `codes` rounds quotients."""

    blocks: Blocks
    largest: float
    codes: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Parts:
        scale = stored(self.blocks.amax(x) / self.largest, self.dtype)
        return self.codes(self.blocks.divide(x, scale)), scale


@dataclass(frozen=True)
class RoundedAsymmetric:
    """Encodes 4-bit codes with a zero point; the scale is the range / 15 in `dtype`."""

    blocks: Blocks
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Parts:
        low, high = self.blocks.bounds(x)
        scale = stored((high - low) / ASYMMETRIC_STEPS, self.dtype)
        zero = (-low / scale).round().clamp(0, ASYMMETRIC_STEPS)
        steps = self.blocks.subtract(self.blocks.divide(x, scale).round(), -zero)
        return pack_nibbles(_nibbles(steps)), scale, zero.to(torch.uint8)


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds `scale`, at least `SMALLEST`, to what `dtype` can hold; returns float32."""
    return scale.clamp_min(SMALLEST).to(dtype).float()


def fp8(form: Format, dtype: torch.dtype) -> Format:
    """Returns an E4M3 format with one scale a block; scales are rounded to `dtype`."""
    rule = Rounded(Blocks(*_spans(form)), FP8_LARGEST[E4M3], encode_fp8, dtype)
    return replace(form, encode=rule)


def int8(dtype: torch.dtype) -> Format:
    """Returns INT8 with one scale a row, amax / 127.5, rounded to `dtype`."""
    rule = Rounded(Blocks(1, WHOLE), LARGEST["wide"], lambda x: codes_of(x, "half_even"), dtype)
    return replace(INT8_CHANNEL, encode=rule)


def int4(group: int, dtype: torch.dtype) -> Format:
    """Returns symmetric INT4 in groups of `group` (WHOLE: rows), scales amax / 7.5 in `dtype`."""
    rule = Rounded(Blocks(1, group), RANGES["wide"], _symmetric, dtype)
    return replace(INT4[group], encode=rule)


def int4_asymmetric(group: int, dtype: torch.dtype) -> Format:
    """Returns INT4 with zero points in groups of `group` (WHOLE: rows); scales are rounded to `dtype`."""
    return replace(INT4_ASYMMETRIC[group], encode=RoundedAsymmetric(Blocks(1, group), dtype))


def _symmetric(quotient: Tensor) -> Tensor:
    return pack_nibbles(_nibbles(quotient.round() + MIDDLE))


def _nibbles(steps: Tensor) -> Tensor:
    return steps.clamp(0, 15).to(torch.uint8)


def _spans(form: Format) -> tuple[int, int]:
    rows, columns = form.block
    return rows, int(columns)


def _encode_nvfp4(x: Tensor) -> Parts:
    """Encodes NVFP4 with a global scale whose reciprocal is a bfloat16 number, which files store exactly."""
    divisor = (E2M1.largest * LARGEST_SCALE / Blocks(WHOLE, WHOLE).amax(x)).bfloat16().float()
    divisor = torch.where(divisor.isfinite(), divisor, 1.0)
    amax = NVFP4_BLOCK.amax(x)
    scale = (divisor * amax / E2M1.largest).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    codes = encode_fp8(torch.where(amax == 0, 1.0, scale))
    quotient = NVFP4_BLOCK.divide(x * divisor, decode_fp8(codes))
    return pack_nibbles(E2M1.encode(quotient)), codes, divisor.reciprocal()


NVFP4 = replace(NVFP4_DIVIDED, encode=_encode_nvfp4)
