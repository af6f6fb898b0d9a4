# mypy: ignore-errors
"""Codes and scales to values, inside a kernel, by integer arithmetic alone.

No cast from an 8-bit float is used: GPUs before sm89 have none. What `elements` and `by_group` give of codes
as they are stored is what `Format.decode` gives, code by code, infinity and NaN included. `word_tile` reads
codes that `words.py` has packed.
"""

import triton
import triton.language as tl


@triton.jit
def _e4m3fnuz(code):
    """Values of bytes (int32) of E4M3 with a bias of 8, but for 128, which is NaN."""
    value = ((code & 127) << 20).to(tl.float32, bitcast=True) * 2.0**119
    return tl.where(code >> 7 != 0, -value, value)


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
    if ELEMENT == "int4":
        width = (K + 1) // 2
        b = k0 // 2 + tl.arange(0, BK // 2)
        pair = tl.load(codes + n[:, None] * width + b[None, :], mask=there & (b < width)[None, :], other=0)
        found = tl.reshape(tl.join(pair & 15, pair >> 4), (BN, BK))
    else:
        found = tl.load(codes + n[:, None] * K + k[None, :], mask=there & (k < K)[None, :], other=0)
    return found


@triton.jit
def elements(codes, n, k0, N, K, ELEMENT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Values `[BN, BK]` of codes before any scale: float32, as stored for plain floats, int8 of integers."""
    code = _stored(codes, n, k0, N, K, ELEMENT, BN, BK)
    if ELEMENT == "e4m3fnuz":
        byte = code.to(tl.int32)
        value = tl.where(byte == 128, float("nan"), _e4m3fnuz(byte))
    elif ELEMENT == "e5m2":
        value = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif ELEMENT == "int4":
        value = code.to(tl.int8) - 8
    elif ELEMENT == "int8_64ths":
        value = code.to(tl.float32) * 0.015625
    else:
        tl.static_assert(ELEMENT == "int8" or ELEMENT == "float", "an element without device code")
        value = code
    return value


@triton.jit
def by_group(
    part, row, there, k0, K, FINE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """A scale or zero point of each SPAN columns (0: of all): float32 `[BN, 1]` or `[BN, BK]`; 0 outside.

    `part [rows, K / SPAN]` is read at `row [BN]`.
    """
    groups = (K + SPAN - 1) // SPAN if SPAN else 1
    if SPAN == 0 or SPAN % BK == 0:
        at = k0 // SPAN if SPAN else 0
        found = tl.load(part + row * groups + at, mask=there, other=0)[:, None]
    else:
        group = k0 // SPAN + tl.arange(0, BK // SPAN)
        mask = there[:, None] & (group < groups)[None, :]
        few = tl.load(part + row[:, None] * groups + group[None, :], mask=mask, other=0)
        found = tl.reshape(tl.broadcast_to(few[:, :, None], (BN, BK // SPAN, SPAN)), (BN, BK))
    return e8m0(found.to(tl.int32)) if FINE == "e8m0" else found.to(tl.float32)


@triton.jit
def _fma(a, b, c):
    """a b + c of 16 bits, rounded once; of float32, which stands for bf16 under the interpreter, as it is."""
    if a.dtype.primitive_bitwidth == 16:  # left to itself the compiler exchanges halves of registers
        FMA: tl.constexpr = "fma.rn.bf16x2" if a.dtype == tl.bfloat16 else "fma.rn.f16x2"
        answer = tl.inline_asm_elementwise(
            FMA + " $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=a.dtype, is_pure=True, pack=2
        )
    else:
        answer = a * b + c
    return answer


@triton.jit
def _pair(bits, FLOAT: tl.constexpr):
    """The two numbers in each of `bits [BN, W]` int32: FLOAT `[BN, W, 2]`."""
    if FLOAT.primitive_bitwidth == 16:
        low = bits.to(tl.int16).to(FLOAT, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(FLOAT, bitcast=True)
    else:
        low = (bits << 16).to(tl.float32, bitcast=True)
        high = (bits & -0x10000).to(tl.float32, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _of_groups(part, n, k0, N, SPAN: tl.constexpr, BK: tl.constexpr):
    """`part [groups, N]` of the groups of BK columns: `[BN, groups]`; one group where SPAN is 0."""
    GROUPS: tl.constexpr = BK // SPAN if SPAN > 0 and SPAN < BK else 1
    group = (k0 // SPAN if SPAN else 0) + tl.arange(0, GROUPS)
    return tl.load(part + group[None, :] * N + n[:, None], mask=(n < N)[:, None], other=0)


@triton.jit
def _wide(few, WIDTH: tl.constexpr):
    """`few [BN, groups]` over columns, `[BN, WIDTH]`."""
    BN: tl.constexpr = few.shape[0]
    GROUPS: tl.constexpr = few.shape[1]
    return tl.reshape(tl.broadcast_to(few[:, :, None], (BN, GROUPS, WIDTH // GROUPS)), (BN, WIDTH))


@triton.jit
def _times(a, b):
    return _fma(a, b, tl.zeros(a.shape, a.dtype))


@triton.jit
def _lowest(scale, BITS: tl.constexpr, SCALED: tl.constexpr):
    """The lowest integer of BITS bits, as words have it, times `scale`; not SCALED: 2^127, fp16: 2^15."""
    if not SCALED:
        less = tl.full(scale.shape, -(2.0 ** (BITS - (10 if scale.dtype == tl.float16 else 7))), scale.dtype)
    elif scale.dtype.primitive_bitwidth == 16:  # the compiler takes a number as small as the factor for 0
        FMA: tl.constexpr = "fma.rn.bf16x2" if scale.dtype == tl.bfloat16 else "fma.rn.f16x2"
        FACTOR: tl.constexpr = "0x80088008" if BITS == 4 else "0x80808080"
        less = tl.inline_asm_elementwise(
            "{ .reg .b32 f, n; mov.b32 f, " + FACTOR + "; mov.b32 n, 0; " + FMA + " $0, $1, f, n; }",
            "=r,r", [scale], dtype=scale.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        less = scale * -(2.0 ** (BITS - 134))
    return less


@triton.jit
def _integers(bits, scale, less, zero, TIMES: tl.constexpr, ZERO: tl.constexpr):
    """(integer - lowest or zero point) x scale of the pairs of integers, times TIMES, in `bits [BN, W]`.

    `less` is the lowest times the scale, `zero` the bits of minus the zero point; all `[BN, W]`.
    """
    value = _pair(bits, scale.dtype)
    if ZERO:
        if scale.dtype.primitive_bitwidth == 16:
            zero = zero.to(scale.dtype, bitcast=True)
        else:
            zero = (zero.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        zero = _times(zero, tl.full(zero.shape, TIMES, zero.dtype))
        value = _fma(value, tl.full(value.shape, 1.0, value.dtype), zero[:, :, None])
        value = _times(value, scale[:, :, None])
    else:
        value = _fma(value, scale[:, :, None], less[:, :, None])
    return value


@triton.jit
def _join4(a, b, c, d):
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _in_order(value, BN: tl.constexpr, BK: tl.constexpr):
    """Pairs `[BN, W, 2, 2, ...]`, a side and then the bits of their number, lowest first: `[BN, BK]`."""
    if len(value.shape) == 4:
        value = tl.permute(tl.reshape(value, (BN, BK // 16, 4, 2, 2)), (0, 1, 4, 2, 3))
    elif len(value.shape) == 5:
        value = tl.permute(tl.reshape(value, (BN, BK // 32, 4, 2, 2, 2)), (0, 1, 5, 4, 2, 3))
    else:
        value = tl.permute(tl.reshape(value, (BN, BK // 64, 4, 2, 2, 2, 2)), (0, 1, 6, 5, 4, 2, 3))
    return tl.reshape(value, (BN, BK))


@triton.jit
def _eight_bits(word, FLOAT: tl.constexpr):
    """E4M3 of two pairs, moved to where bf16 has its bits."""
    first = word & -0x780F7810  # 0x87F087F0
    second = ((word << 4) & -0x7F0F7F10) | ((word >> 4) & 0x07000700)
    return tl.join(_pair(first, FLOAT), _pair(second, FLOAT))


@triton.jit
def _four_bits(word, FLOAT: tl.constexpr):
    """E2M1 of four pairs."""
    last = ((word << 1) & -0x7FFF8000) | ((word >> 4) & 0x00C000C0) | ((word >> 5) & 0x01000100)
    return _join4(
        _pair(word & -0x7E3F7E40, FLOAT),
        _pair((word << 3) & -0x7E3F7E40, FLOAT),
        _pair((word << 6) & -0x7E3F7E40, FLOAT),
        _pair(last, FLOAT),
    )


@triton.jit
def _six_bits(a, b, c, ELEMENT: tl.constexpr, FLOAT: tl.constexpr):
    """E3M2 or E2M3 of the eight pairs in three words."""
    if ELEMENT == "e3m2":
        low = _join4(
            _pair(a & -0x7C1F7C20, FLOAT),
            _pair(b & -0x7C1F7C20, FLOAT),
            _pair(c & -0x7C1F7C20, FLOAT),
            _pair((a << 5) & -0x7C1F7C20, FLOAT),
        )
        sixth = ((a >> 5) & 0x03C003C0) | ((c >> 8) & 0x00200020) | ((c << 1) & -0x7FFF8000)
        seventh = ((b >> 5) & 0x03C003C0) | ((c >> 6) & 0x00200020) | ((c << 3) & -0x7FFF8000)
        high = _join4(
            _pair((b << 5) & -0x7C1F7C20, FLOAT),
            _pair((c << 5) & -0x7C1F7C20, FLOAT),
            _pair(sixth, FLOAT),
            _pair(seventh, FLOAT),
        )
    else:
        low = _join4(
            _pair(a & -0x7E0F7E10, FLOAT),
            _pair(b & -0x7E0F7E10, FLOAT),
            _pair(c & -0x7E0F7E10, FLOAT),
            _pair(((a >> 5) & 0x01F001F0) | ((a << 1) & -0x7FFF8000), FLOAT),
        )
        sixth = ((a << 5) & 0x01E001E0) | ((c << 1) & 0x00100010) | ((c << 13) & -0x7FFF8000)
        seventh = ((b << 5) & 0x01E001E0) | ((c << 3) & 0x00100010) | ((c << 15) & -0x7FFF8000)
        high = _join4(
            _pair(((b >> 5) & 0x01F001F0) | ((b << 1) & -0x7FFF8000), FLOAT),
            _pair(((c >> 5) & 0x01F001F0) | ((c << 1) & -0x7FFF8000), FLOAT),
            _pair(sixth, FLOAT),
            _pair(seventh, FLOAT),
        )
    return tl.join(low, high)


@triton.jit
def _words(
    codes, n, k0, N, width, PAIRS: tl.constexpr, PLANE: tl.constexpr, PLANES: tl.constexpr, BK: tl.constexpr
):
    """Words `[BN, BK / (2 PAIRS)]` of rows n from column k0 on, every PLANES-th four of them."""
    j = tl.arange(0, BK // (2 * PAIRS))
    if PLANES > 1:
        j = j // 4 * (4 * PLANES) + 4 * PLANE + j % 4
    at = codes + n[:, None] * width + (k0 // (2 * PAIRS) * PLANES + j)[None, :]
    return tl.load(at, mask=(n < N)[:, None], other=0)


@triton.jit
def _integer_tile(
    word, few, zero, BITS: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr, BK: tl.constexpr
):
    """Integers of BITS bits `[BN, BK]`, less their lowest or `zero`, times `few [BN, groups]`."""
    FLOAT: tl.constexpr = few.dtype
    W: tl.constexpr = word.shape[1]
    scale = _wide(few, W)
    zero = _wide(zero, W) if ZERO else scale
    less = _lowest(scale, BITS, SCALED)
    if BITS == 4:
        sixteenth = tl.full(scale.shape, 2.0 ** (11 if tl.float16 == FLOAT else 123), FLOAT)
        if SCALED:
            sixteenth = _times(scale, tl.full(scale.shape, 0.0625, FLOAT))
        top = word >> 8
        value = _join4(
            _integers(word & 0x000F000F, scale, less, zero, 1, ZERO),
            _integers(word & 0x00F000F0, sixteenth, less, zero, 16, ZERO),
            _integers(top & 0x000F000F, scale, less, zero, 1, ZERO),
            _integers(top & 0x00F000F0, sixteenth, less, zero, 16, ZERO),
        )
    else:
        value = tl.join(
            _integers(word & 0x00FF00FF, scale, less, zero, 1, ZERO),
            _integers((word >> 8) & 0x00FF00FF, scale, less, zero, 1, ZERO),
        )
    return _in_order(value, word.shape[0], BK)


@triton.jit
def word_tile(
    codes, scale, zero, n, k0, N, width, ELEMENT: tl.constexpr, SCALED: tl.constexpr, SPAN: tl.constexpr,
    ZERO: tl.constexpr, FLOAT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Weights `[BN, BK]` of one slot's words, in FLOAT, but for what `outer` has.

    Without SCALED they are times a constant instead.
    """
    if SCALED:
        few = _of_groups(scale, n, k0, N, SPAN, BK).to(FLOAT)
    else:
        few = tl.full(
            (BN, 1), 2.0 ** (120 if ELEMENT == "e4m3" else 15 if tl.float16 == FLOAT else 127), FLOAT
        )
    if ELEMENT == "int4" or ELEMENT == "int8":
        BITS: tl.constexpr = 4 if ELEMENT == "int4" else 8
        word = _words(codes, n, k0, N, width, 16 // BITS, 0, 1, BK)
        tile = _integer_tile(
            word, few, _of_groups(zero, n, k0, N, SPAN, BK) if ZERO else few, BITS, SCALED, ZERO, BK
        )
    else:
        if ELEMENT == "e4m3":
            value = _eight_bits(_words(codes, n, k0, N, width, 2, 0, 1, BK), FLOAT)
        elif ELEMENT == "e2m1":
            value = _four_bits(_words(codes, n, k0, N, width, 4, 0, 1, BK), FLOAT)
        else:
            a = _words(codes, n, k0, N, width, 8, 0, 3, BK)
            b = _words(codes, n, k0, N, width, 8, 1, 3, BK)
            value = _six_bits(a, b, _words(codes, n, k0, N, width, 8, 2, 3, BK), ELEMENT, FLOAT)
        tile = _times(_in_order(value, BN, BK), _wide(few, BK))
    return tile
