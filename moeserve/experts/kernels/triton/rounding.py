# mypy: ignore-errors
"""Rows rounded to an activation format, as the format's own encode and decode do: a program a row.

Quotients are rounded correctly (`div_rn`), halves go where the format sends them, and NaN comes out as NaN.
Rounded values are written without the scale of their row or group, which goes to `scale`; MX and NVFP4 values
are written with their block's, a power of two or an E4M3 number: both fit bf16 without loss.
"""

import triton
import triton.language as tl

from moeserve.experts.kernels.triton.decode import e8m0

FP8_FLOOR = tl.constexpr(1 / (448 * 512))


@triton.jit
def _amax(x, axis: tl.constexpr):
    """Largest magnitude along an axis; NaN where there is one."""
    size = tl.max(tl.abs(tl.where(x == x, x, 0.0)), axis)
    return tl.where(tl.max((x != x).to(tl.int32), axis) > 0, float("nan"), size)


@triton.jit
def _at_least(x, floor):
    """The larger of both; NaN of NaN."""
    return tl.where(x < floor, floor, x)


@triton.jit
def _half_even(x):
    down = tl.floor(x)
    rest = x - down
    odd = down * 0.5 != tl.floor(down * 0.5)
    return down + ((rest > 0.5) | ((rest == 0.5) & odd)).to(tl.float32)


@triton.jit
def _half_away(x):
    below_half = 0.49999997  # with a half, the number next below 0.5 would round up
    return tl.where(x < 0, tl.ceil(x - below_half), tl.floor(x + below_half))


@triton.jit
def _int8(x, HALVES: tl.constexpr):
    """Whole numbers -128..127, float32; 0 for NaN."""
    steps = _half_away(x) if HALVES == "away" else _half_even(x)
    return tl.where(x == x, tl.minimum(tl.maximum(steps, -128.0), 127.0), 0.0)


@triton.jit
def minifloat_of(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """x rounded to a small float, halves to even, saturated; the largest for NaN."""
    size = tl.where(x == x, tl.minimum(tl.abs(x), LARGEST), LARGEST)
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 128 - BIAS)
    # the float32 whose unit in the last place is the step: adding and taking it rounds to whole steps
    steps = ((exponent + (23 - MANTISSA)) << 23).to(tl.float32, bitcast=True)
    value = (size + steps) - steps
    return tl.where(x < 0, -value, value)


@triton.jit
def element_of(x, ELEMENT: tl.constexpr):
    """x rounded to a small float by name; E4M3 keeps NaN."""
    if ELEMENT == "e4m3":
        value = tl.where(x == x, minifloat_of(x, 3, 7, 448.0), float("nan"))
    elif ELEMENT == "e2m1":
        value = minifloat_of(x, 1, 1, 6.0)
    elif ELEMENT == "e3m2":
        value = minifloat_of(x, 2, 3, 28.0)
    else:
        tl.static_assert(ELEMENT == "e2m3", "an element without device code")
        value = minifloat_of(x, 3, 1, 7.5)
    return value


@triton.jit
def _mx(x, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    """Blocks `x [blocks, 32]` rounded to MX, scales included."""
    amax = _amax(x, 1)
    bits = amax.to(tl.int32, bitcast=True)
    if RULE == "ceil":
        tl.static_assert(ELEMENT == "e4m3", "the ceil rule is written for E4M3 alone")
        ratio = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32)).to(tl.int32, bitcast=True)
        byte = tl.where(ratio <= 1 << 22, 0, (ratio + 0x7FFFFF) >> 23)
    else:
        MANTISSA: tl.constexpr = 1 if ELEMENT == "e2m1" else (2 if ELEMENT == "e3m2" else 3)
        TOP: tl.constexpr = 4 if ELEMENT == "e3m2" else (8 if ELEMENT == "e4m3" else 2)
        byte = ((bits + (1 << (22 - MANTISSA))) >> 23) - TOP
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    value = element_of(x * e8m0(254 - byte)[:, None], ELEMENT)
    return value * tl.where(amax == amax, e8m0(byte), float("nan"))[:, None]


@triton.jit
def _group_scale(amax, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    LARGEST: tl.constexpr = 127.0 if ELEMENT == "int8" else 448.0
    scale = tl.div_rn(_at_least(amax, 1e-10), tl.full(amax.shape, LARGEST, tl.float32))
    if RULE == "power_of_two":
        up = _at_least(scale, 1e-10).to(tl.int32, bitcast=True) + 0x7FFFFF
        scale = tl.where(amax == amax, (up & -0x800000).to(tl.float32, bitcast=True), amax)
    return scale


@triton.jit
def round_blocks(
    x, out, scale, given, tiles, K: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr,
    SPAN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Formats with a scale a SPAN of columns; grid (groups of rows, BM, K / B).

    RULE: "even" and "ceil" of MX; "nvfp4", whose constant is `given [slots]`; else of a scale that is written
    to `scale [R, K / SPAN]`: "amax" or "power_of_two".
    """
    g, m = tl.program_id(0), tl.program_id(1)
    if (g < tl.load(tiles)) & (m < tl.load(tiles + 6 + 4 * g)):
        row = (tl.load(tiles + 5 + 4 * g) + m).to(tl.int64)
        span = tl.program_id(2) * (B // SPAN) + tl.arange(0, B // SPAN)
        k = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        v = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        if RULE == "even" or RULE == "ceil":
            value = _mx(v, ELEMENT, RULE)
        elif RULE == "nvfp4":
            factor = tl.div_rn(1.0, tl.load(given + tl.load(tiles + 4 + 4 * g)))
            amax = _amax(v, 1)
            s = element_of(tl.div_rn(factor * amax, tl.full(amax.shape, 6.0, tl.float32)), "e4m3")
            inverse = tl.div_rn(tl.zeros(s.shape, tl.float32) + factor, tl.where(s == 0, 1.0, s))
            value = element_of(v * tl.where(s == 0, 0.0, inverse)[:, None], "e2m1") * s[:, None]
            if tl.program_id(2) == 0:
                tl.store(scale + row, tl.div_rn(1.0, factor))
        else:
            s = _group_scale(_amax(v, 1), ELEMENT, RULE)
            quotient = tl.div_rn(v, tl.broadcast_to(s[:, None], v.shape))
            value = _int8(quotient, "even") if ELEMENT == "int8" else element_of(quotient, ELEMENT)
            groups = (K + SPAN - 1) // SPAN
            tl.store(scale + row * groups + span, s, mask=span < groups)
        tl.store(out + row * K + k, value.to(out.dtype.element_ty), mask=k < K)


@triton.jit
def _static(v, s, ELEMENT: tl.constexpr):
    """Values by a constant scale: E4M3 multiplies by its reciprocal, INT8 divides."""
    if ELEMENT == "int8":
        value = _int8(tl.div_rn(v, tl.zeros(v.shape, tl.float32) + s), "even")
    else:
        value = element_of(v * tl.div_rn(1.0, s), ELEMENT)
    return value


@triton.jit
def round_tokens(
    x, out, scale, given, tiles, K: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr, B: tl.constexpr
):
    """Formats with a scale a row, `scale [R]`; grid (groups of rows, BM).

    RULE: "static", whose scales are `given [slots]`; "amax"; "range", which has a zero point and writes codes
    less that: of eight bits and a sign where a row's range holds 0.
    """
    g, m = tl.program_id(0), tl.program_id(1)
    if (g < tl.load(tiles)) & (m < tl.load(tiles + 6 + 4 * g)):
        row = (tl.load(tiles + 5 + 4 * g) + m).to(tl.int64)
        high = tl.full((B,), -float("inf"), tl.float32)
        low = tl.full((B,), float("inf"), tl.float32)
        bad = tl.zeros((B,), tl.int32)
        if RULE == "static":
            s = tl.load(given + tl.load(tiles + 4 + 4 * g))
        else:
            for k0 in range(0, K, B):
                k = k0 + tl.arange(0, B)
                v = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
                bad |= (v != v).to(tl.int32)
                high = tl.where((k < K) & (v > high), v, high)
                low = tl.where((k < K) & (v < low), v, low)
            top, bottom = tl.max(high, 0), tl.min(low, 0)
            amax = tl.maximum(tl.abs(top), tl.abs(bottom))
            if RULE == "range":
                narrow = tl.maximum(amax, 1e-10) * (2.0**-22)
                s = tl.maximum(tl.div_rn(top - bottom, 255.0), narrow)
                zero = _half_even(-128.0 - tl.div_rn(bottom, s))
            elif ELEMENT == "int8":
                s = tl.div_rn(tl.maximum(amax, 1e-10), 127.0)
            else:
                s = tl.maximum(tl.div_rn(amax, 448.0), FP8_FLOOR)
            s = tl.where(tl.max(bad, 0) > 0, float("nan"), s)
        tl.store(scale + row, s)
        for k0 in range(0, K, B):
            k = k0 + tl.arange(0, B)
            v = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
            if RULE == "static":
                value = _static(v, s, ELEMENT)
            else:
                quotient = tl.div_rn(v, tl.zeros(v.shape, tl.float32) + s)
                if RULE == "range":
                    value = _int8(_half_even(quotient) + zero, "even") - zero
                elif ELEMENT == "int8":
                    value = _int8(quotient, "away")
                else:
                    value = element_of(quotient, ELEMENT)
            tl.store(out + row * K + k, value.to(out.dtype.element_ty), mask=k < K)


@triton.jit
def gather_columns(x, out, columns, tiles, K: tl.constexpr, B: tl.constexpr):
    """`out[row, k] = x[row, columns[slot, k]]`; grid (groups of rows, BM, K / B)."""
    g, m = tl.program_id(0), tl.program_id(1)
    if (g < tl.load(tiles)) & (m < tl.load(tiles + 6 + 4 * g)):
        row = (tl.load(tiles + 5 + 4 * g) + m).to(tl.int64)
        k = tl.program_id(2) * B + tl.arange(0, B)
        column = tl.load(columns + tl.load(tiles + 4 + 4 * g).to(tl.int64) * K + k, mask=k < K, other=0)
        tl.store(out + row * K + k, tl.load(x + row * K + column, mask=k < K), mask=k < K)
