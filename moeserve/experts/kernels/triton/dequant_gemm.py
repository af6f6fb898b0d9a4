# mypy: ignore-errors
"""The portable grouped GEMM: stored weights of any format, decoded tile by tile in registers.

A program multiplies BN rows of one slot's weights with at most BM rows of that slot. The weights are the
left operand, so that few rows still fill the tensor cores, and decoded values need not pass through shared
memory where the hardware takes that operand from registers. The dtype of `x` is the dtype of the products:
codes of int8 and E4M3 are multiplied as they are, everything else as bf16 or fp16; sums are int32 or float32.
"""

import triton
import triton.language as tl

from moeserve.experts.kernels.triton.decode import by_group, elements, word_tile


@triton.jit
def stored_tile(
    codes, fine, zero, n, k0, N, K, ELEMENT: tl.constexpr, FINE: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, ZERO: tl.constexpr, SCALED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Weights `[BN, BK]` of one slot, less their zero points and, if SCALED, times their fine scales."""
    value = elements(codes, n, k0, N, K, ELEMENT, BN, BK)
    if ZERO:
        value = value.to(tl.float32) - by_group(zero, n, n < N, k0, K, "int", SPAN, BN, BK)
    if SCALED:
        scale = by_group(fine, n // ROWS, n < N, k0, K, FINE, SPAN, BN, BK)
        value = value.to(tl.float32) * scale
    return value


@triton.jit
def grouped_gemm(
    x, x_scale, codes, fine, zero, outer, bias, out, tiles, N, K: tl.constexpr, width, groups,
    ELEMENT: tl.constexpr, WORDS: tl.constexpr, FINE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
    SUMS: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr, X_SPAN: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`out [R, N]` of `x [R, K]`; grid (groups of rows, N / BN).

    A row of codes is `width` long. WORDS: they lie as `words.py` packs them; else as they are stored. FINE
    names how fine scales are stored ("none": there are none), ROWS x SPAN what one of them covers; there are
    `groups` along K. With SUMS they multiply sums, not elements. OUTER: "none", "row" or "matrix", float32
    scales of the whole sum. X_SPAN: columns of x that share a scale, 0 all, -1 no scale.
    """
    g = tl.program_id(0)
    if g < tl.load(tiles):
        slot = tl.load(tiles + 4 + 4 * g).to(tl.int64)
        row0 = tl.load(tiles + 5 + 4 * g)
        m = tl.arange(0, BM)
        here = m < tl.load(tiles + 6 + 4 * g)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        rows = (row0 + m).to(tl.int64)
        # inside one slot 32 bits are enough; where a slot starts needs 64
        codes += slot * N * width
        fine += slot * ((N + ROWS - 1) // ROWS) * groups
        zero += slot * N * groups
        INT: tl.constexpr = x.dtype.element_ty == tl.int8
        FP8: tl.constexpr = x.dtype.element_ty == tl.float8e4nv
        total = tl.zeros((BN, BM), tl.int32 if INT and not SUMS and X_SPAN <= 0 else tl.float32)
        # said at the loop, the number of stages is that of scales of sums too
        for k0 in tl.range(0, K, BK, num_stages=STAGES if WORDS else None):
            k = k0 + tl.arange(0, BK)
            mask = here[None, :]
            if K % BK:
                mask = mask & (k < K)[:, None]
            columns = tl.load(x + rows[None, :] * K + k[:, None], mask=mask, other=0.0)
            if WORDS:
                tile = word_tile(
                    codes, fine, zero, n, k0, N, width, ELEMENT, FINE != "none" and not SUMS, SPAN, ZERO,
                    x.dtype.element_ty, BN, BK,
                )  # fmt: skip
            elif FP8:
                mask = (n < N)[:, None] & (k < K)[None, :]
                tile = tl.load(codes + n[:, None] * K + k[None, :], mask=mask, other=0.0)
            else:
                tile = stored_tile(
                    codes, fine, zero, n, k0, N, K, ELEMENT, FINE, ROWS, SPAN, ZERO,
                    FINE != "none" and not SUMS, BN, BK,
                ).to(x.dtype.element_ty)  # fmt: skip
            if SUMS or X_SPAN > 0:
                part = tl.dot(tile, columns, out_dtype=tl.int32 if INT else tl.float32).to(tl.float32)
                if SUMS:
                    part *= by_group(fine, n // ROWS, n < N, k0, K, FINE, SPAN, BN, BK)
                if X_SPAN > 0:
                    at = x_scale + rows * ((K + X_SPAN - 1) // X_SPAN) + k0 // X_SPAN
                    part *= tl.load(at, mask=here, other=0.0)[None, :]
                total += part
            elif INT:
                total = tl.dot(tile, columns, total, out_dtype=tl.int32)
            elif FP8:  # Hopper adds E4M3 products with few bits: float32 takes over after each step
                total = tl.dot(tile, columns, total, max_num_imprecise_acc=BK)
            else:
                total = tl.dot(tile, columns, total)
        y = total.to(tl.float32)
        if OUTER == "row":
            y *= tl.load(outer + slot * N + n, mask=n < N, other=0.0)[:, None]
        if OUTER == "matrix":
            y *= tl.load(outer + slot)
        if X_SPAN == 0:
            y *= tl.load(x_scale + rows, mask=here, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias + slot * N + n, mask=n < N, other=0.0)[:, None]
        mask = here[None, :] & (n < N)[:, None]
        tl.store(out + rows[None, :] * N + n[:, None], y.to(out.dtype.element_ty), mask=mask)
