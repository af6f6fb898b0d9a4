"""OCP MX: blocks of 32 along K that share an E8M0 byte, a power of two; elements FP4, FP6, FP8 or INT8.

Reading needs no rule: value = element x 2^(byte - 127). Writing does: how a block's exponent follows from
its largest magnitude is named in `EXPONENTS`, and a format made with another rule is the same format.
A block of zeros has byte 0 and codes 0. NaN, which FP4, FP6 and INT8 lack, gives the block the byte 0xFF,
which reads as NaN. What lies beyond the largest element saturates. MXINT8's elements are code / 64.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, pack_sextets, pick_pairs, sextet_words
from moeserve.quant.blocks import Blocks
from moeserve.quant.elements import (
    E2M1,
    E2M3,
    E3M2,
    FP8_LARGEST,
    FP32_MANTISSA_BITS,
    decode_e8m0,
    decode_fp8,
    encode_fp8,
    reciprocal_e8m0,
    table,
)
from moeserve.quant.format import Format, Part, Parts

GROUP = Blocks(1, 32)

E8M0_NAN = 255
SMALLEST_POWER = 1 << (FP32_MANTISSA_BITS - 1)
"""The bits of 2^-127, the byte 0, as float32."""


class MxElement(NamedTuple):
    """An MX element: what the rules of exponents need of it, and its own bytes."""

    part: Part
    bits: int
    mantissa: int  # bits
    top: int  # exponent of its largest value
    largest: float
    encode: Callable[[Tensor], Tensor]  # float32 [..., K], scaled -> codes
    decode: Callable[[Tensor, int], Tensor]  # codes, K -> float32 [..., K], not yet scaled


def _decode_e2m1(codes: Tensor, columns: int) -> Tensor:
    return pick_pairs(table(("pairs", "e2m1"), codes.device), codes, columns)


def _decode_fp6(element: str, codes: Tensor, columns: int) -> Tensor:
    return pick_pairs(table(("pairs", element), codes.device), sextet_words(codes, columns), columns)


def _codes(dtype: torch.dtype, columns: int | Fraction) -> Part:
    return Part("codes", dtype, 1, columns)


FP4 = MxElement(
    _codes(torch.uint8, 2),
    E2M1.bits,
    E2M1.mantissa,
    E2M1.top,
    E2M1.largest,
    lambda x: pack_nibbles(E2M1.encode(x)),
    _decode_e2m1,
)
FP6_E3M2, FP6_E2M3 = (
    MxElement(
        _codes(torch.uint8, Fraction(4, 3)),
        element.bits,
        element.mantissa,
        element.top,
        element.largest,
        lambda x, element=element: pack_sextets(element.encode(x)),  # type: ignore[misc]
        partial(_decode_fp6, element.name),
    )
    for element in (E3M2, E2M3)
)
FP8, FP8_E5M2 = (
    MxElement(
        _codes(dtype, 1),
        8,
        mantissa,
        top,
        FP8_LARGEST[dtype],
        partial(encode_fp8, dtype=dtype),
        lambda codes, columns: decode_fp8(codes),
    )
    for dtype, mantissa, top in ((torch.float8_e4m3fn, 3, 8), (torch.float8_e5m2, 2, 15))
)
INT8_STEPS = 64
INT8_CODE = 127  # -128 is left unused, so that both signs reach as far


def _encode_int8(x: Tensor) -> Tensor:
    steps = (x * INT8_STEPS).nan_to_num_(nan=0.0).round_()
    return steps.clamp_(-INT8_CODE, INT8_CODE).to(torch.int8)


INT8 = MxElement(
    _codes(torch.int8, 1),
    8,
    6,
    0,
    INT8_CODE / INT8_STEPS,
    _encode_int8,
    lambda codes, columns: codes.float().div_(INT8_STEPS),
)


def _biased_exponent(x: Tensor) -> Tensor:
    """floor(log2 x) + 127 of float32 x >= 0, int32; 0 for a subnormal."""
    return x.view(torch.int32) >> FP32_MANTISSA_BITS


def _floor(amax: Tensor, element: MxElement) -> Tensor:
    return _biased_exponent(amax) - element.top


def _rounded(mantissa: int, amax: Tensor, element: MxElement) -> Tensor:
    half = 1 << (FP32_MANTISSA_BITS - mantissa - 1)
    return ((amax.view(torch.int32) + half) >> FP32_MANTISSA_BITS) - element.top


def _even(amax: Tensor, element: MxElement) -> Tensor:
    return _rounded(element.mantissa, amax, element)


def _even_e2m1(amax: Tensor, element: MxElement) -> Tensor:
    return _rounded(E2M1.mantissa, amax, element)


def _ceil(amax: Tensor, element: MxElement) -> Tensor:
    ratio = (amax / element.largest).view(torch.int32)
    byte = (ratio + ((1 << FP32_MANTISSA_BITS) - 1)) >> FP32_MANTISSA_BITS
    return byte.masked_fill_(ratio <= SMALLEST_POWER, 0)  # a subnormal that 2^-127 is not below


EXPONENTS: dict[str, Callable[[Tensor, MxElement], Tensor]] = {
    "floor": _floor,
    "even": _even,
    "even_e2m1": _even_e2m1,
    "ceil": _ceil,
}
"""Rules by name: a block's largest magnitude -> its byte before clamping to 0..254.

floor: floor(log2 amax) - top, the OCP reference; saturates where the mantissa of amax is large.
even: amax is rounded to the element's mantissa first, so that a large mantissa takes the next exponent
(Quark, vLLM's MXFP4 and MXFP6 activations, compressed-tensors' MXFP4).
even_e2m1: the same with FP4's mantissa, whatever the element (compressed-tensors' MXFP8).
ceil: the smallest exponent that saturates nothing (vLLM's MXFP8, ModelOpt).
"""


def _encode(element: MxElement, rule: str, x: Tensor) -> Parts:
    x = x.float()
    amax = GROUP.amax(x)
    byte = EXPONENTS[rule](amax, element).clamp_(0, E8M0_NAN - 1)
    powers = reciprocal_e8m0(byte)
    byte = torch.where(amax.isnan(), E8M0_NAN, byte).to(torch.uint8)
    return element.encode(GROUP.multiply(x, powers)), byte


def _decode(element: MxElement, parts: Parts, shape: torch.Size) -> Tensor:
    codes, byte = parts
    return GROUP.multiply_(element.decode(codes, shape[-1]), decode_e8m0(byte))


def _mx(name: str, element: MxElement, rule: str) -> Format:
    if rule not in EXPONENTS:
        raise ValueError(f"unknown exponent rule {rule!r} of {name}; known: {', '.join(EXPONENTS)}")
    parts = (element.part, Part("scale", torch.uint8, GROUP.rows, GROUP.columns))
    return Format(name, element.bits, parts, partial(_encode, element, rule), partial(_decode, element))


def mxfp4(rule: str = "even") -> Format:
    """MXFP4: codes uint8 `[N, K/2]`, low nibble first; writes by `rule`. ValueError: an unknown rule."""
    return _mx("mxfp4", FP4, rule)


def mxfp6_e3m2(rule: str = "even") -> Format:
    """MXFP6 E3M2: codes uint8 `[N, 3K/4]`, four in three bytes; writes by `rule`."""
    return _mx("mxfp6_e3m2", FP6_E3M2, rule)


def mxfp6_e2m3(rule: str = "even") -> Format:
    """MXFP6 E2M3: codes uint8 `[N, 3K/4]`, four in three bytes; writes by `rule`."""
    return _mx("mxfp6_e2m3", FP6_E2M3, rule)


def mxfp8(rule: str = "ceil") -> Format:
    """MXFP8 E4M3: codes E4M3 `[N, K]`; writes by `rule`."""
    return _mx("mxfp8", FP8, rule)


def mxfp8_e5m2(rule: str = "ceil") -> Format:
    """MXFP8 E5M2: codes E5M2 `[N, K]`; writes by `rule`. ValueError: an unknown rule."""
    return _mx("mxfp8_e5m2", FP8_E5M2, rule)


def mxint8(rule: str = "ceil") -> Format:
    """MXINT8: codes int8 `[N, K]` in 64ths; writes by `rule`. ValueError: an unknown rule."""
    return _mx("mxint8", INT8, rule)


MXFP4, MXFP6_E3M2, MXFP6_E2M3, MXFP8 = mxfp4(), mxfp6_e3m2(), mxfp6_e2m3(), mxfp8()
MXFP8_E5M2, MXINT8 = mxfp8_e5m2(), mxint8()
