# mypy: ignore-errors
"""Stored codes and scales to float32 values, inside a kernel, by integer arithmetic alone.

No cast from an 8-bit float is used: GPUs before sm89 have none. What these functions give is what
`Format.decode` gives, code by code, infinity and NaN included.
"""

import triton
import triton.language as tl


@triton.jit
def minifloat(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Values of codes `s e m` of BITS bits (int32, any shape), without infinity and NaN."""
    bits = (code & ((1 << (BITS - 1)) - 1)) << (23 - MANTISSA)  # a float32 that is 2^(BIAS - 127) as large
    value = bits.to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    return tl.where((code >> (BITS - 1)) != 0, -value, value)


@triton.jit
def e4m3(code):
    """Values of E4M3 bytes (int32)."""
    return tl.where((code & 127) == 127, float("nan"), minifloat(code, 8, 3, 7))


@triton.jit
def e8m0(byte):
    """2^(byte - 127) of int32; 255 is NaN, and 0 is 2^-127, which is subnormal."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _stored(codes, n, k0, N, K, ELEMENT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Codes `[BN, BK]` of rows n from column k0 on; 0 outside the matrix."""
    there = (n < N)[:, None]
    k = k0 + tl.arange(0, BK)
    if ELEMENT == "e2m1" or ELEMENT == "int4" or ELEMENT == "signed_int4":
        width = (K + 1) // 2
        b = k0 // 2 + tl.arange(0, BK // 2)
        pair = tl.load(codes + n[:, None] * width + b[None, :], mask=there & (b < width)[None, :], other=0)
        found = tl.reshape(tl.join(pair & 15, pair >> 4), (BN, BK))
    elif ELEMENT == "e3m2" or ELEMENT == "e2m3":
        width = (3 * K + 3) // 4
        b = (6 * k) >> 3
        at = codes + n[:, None] * width + b[None, :]
        low = tl.load(at, mask=there & (b < width)[None, :], other=0).to(tl.int32)
        high = tl.load(at + 1, mask=there & (b + 1 < width)[None, :], other=0).to(tl.int32)
        found = ((low | (high << 8)) >> ((6 * k) & 7)[None, :]) & 63
    else:
        found = tl.load(codes + n[:, None] * K + k[None, :], mask=there & (k < K)[None, :], other=0)
    return found


@triton.jit
def elements(codes, n, k0, N, K, ELEMENT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Values `[BN, BK]` of codes before any scale: float32, as stored for plain floats, int8 of integers."""
    code = _stored(codes, n, k0, N, K, ELEMENT, BN, BK)
    if ELEMENT == "e4m3":
        value = e4m3(code.to(tl.int32))
    elif ELEMENT == "e4m3fnuz":
        word = code.to(tl.int32)
        value = tl.where(word == 128, float("nan"), minifloat(word, 8, 3, 8))
    elif ELEMENT == "e5m2":
        value = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif ELEMENT == "e2m1":
        value = minifloat(code.to(tl.int32), 4, 1, 1)
    elif ELEMENT == "e3m2":
        value = minifloat(code, 6, 2, 3)
    elif ELEMENT == "e2m3":
        value = minifloat(code, 6, 3, 1)
    elif ELEMENT == "int4":
        value = code.to(tl.int8) - 8
    elif ELEMENT == "signed_int4":
        value = (code ^ 8).to(tl.int8) - 8
    elif ELEMENT == "int8_64ths":
        value = code.to(tl.float32) * 0.015625
    else:
        tl.static_assert(ELEMENT == "int8" or ELEMENT == "float", "an element without device code")
        value = code
    return value


@triton.jit
def by_group(
    part, order, row, there, k0, K, FINE: tl.constexpr, SPAN: tl.constexpr, ORDERED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A scale or zero point of each SPAN columns (0: of all): float32 `[BN, 1]` or `[BN, BK]`; 0 outside.

    `part [rows, K / SPAN]` is read at `row [BN]`; ORDERED takes each column's group from `order [K]`.
    """
    groups = (K + SPAN - 1) // SPAN if SPAN else 1
    if ORDERED:
        k = k0 + tl.arange(0, BK)
        group = tl.load(order + k, mask=k < K, other=0)
        found = tl.load(part + row[:, None] * groups + group[None, :], mask=there[:, None], other=0)
    elif SPAN == 0 or SPAN % BK == 0:
        at = k0 // SPAN if SPAN else 0
        found = tl.load(part + row * groups + at, mask=there, other=0)[:, None]
    else:
        group = k0 // SPAN + tl.arange(0, BK // SPAN)
        mask = there[:, None] & (group < groups)[None, :]
        few = tl.load(part + row[:, None] * groups + group[None, :], mask=mask, other=0)
        found = tl.reshape(tl.broadcast_to(few[:, :, None], (BN, BK // SPAN, SPAN)), (BN, BK))
    if FINE == "e4m3":
        value = e4m3(found.to(tl.int32))
    elif FINE == "e8m0":
        value = e8m0(found.to(tl.int32))
    else:
        value = found.to(tl.float32)
    return value
