# mypy: ignore-errors
"""Kernels over rows of a batch: the work list, the activation between the GEMMs, rounding to 1x128 groups.

`tiles [4 + 4 G]` int32 is the work list of a step, made on the device: the number of groups of rows, then at
4 + 4 g of group g its slot, first row and number of rows (at most BM, all of one slot). These kernels also
run under Triton's interpreter.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["LIMIT"])  # one variant for steps of any size
def list_tiles(counts, offsets, tiles, SLOTS, LIMIT, BM: tl.constexpr, E: tl.constexpr, G: tl.constexpr):
    """Writes `tiles` for `counts [SLOTS]` and `offsets`; E is SLOTS rounded up to a power of two."""
    e = tl.arange(0, E)
    count = tl.load(counts + e, mask=e < SLOTS, other=0)
    groups = (count + BM - 1) // BM
    ends = tl.cumsum(groups, 0)
    g = tl.program_id(0) * G + tl.arange(0, G)
    slot = tl.sum((ends[None, :] <= g[:, None]).to(tl.int32), 1)
    there = (slot < SLOTS) & (g < LIMIT)
    before = tl.sum(tl.where(ends[None, :] <= g[:, None], groups[None, :], 0), 1)
    first = (g - before) * BM
    start = tl.load(offsets + slot, mask=there, other=0)
    rows = tl.minimum(tl.load(counts + slot, mask=there, other=0) - first, BM)
    tl.store(tiles + 4 + 4 * g, slot, mask=there)
    tl.store(tiles + 5 + 4 * g, start + first, mask=there)
    tl.store(tiles + 6 + 4 * g, rows, mask=there)
    if tl.program_id(0) == 0:
        tl.store(tiles, tl.sum(groups, 0))


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _gelu(x):
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):
    return 0.5 * x * (1 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def _act(
    gate, up, limit, alpha, beta, linear_beta, ACT: tl.constexpr, LIMITED: tl.constexpr, BOUNDED: tl.constexpr
):
    """The activation `ACT` of float32 rows, as `moeserve.experts.activation` defines it."""
    if ACT == "silu":
        if LIMITED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        y = gate * tl.sigmoid(gate) * up
    elif ACT == "gelu":
        y = _gelu(gate) * up
    elif ACT == "gelu_tanh":
        y = _gelu_tanh(gate) * up
    elif ACT == "swigluoai" or ACT == "swigluoai_uninterleave":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = gate * tl.sigmoid(alpha * gate) * (up + beta)
    elif ACT == "swiglustep":
        y = tl.minimum(gate * tl.sigmoid(gate), limit) * tl.minimum(tl.maximum(up, -limit), limit)
    elif ACT == "situ":
        if BOUNDED:
            up = linear_beta * _tanh(up / linear_beta)
        y = beta * _tanh(gate / beta) * tl.sigmoid(gate) * up
    elif ACT == "silu_no_mul":
        y = gate * tl.sigmoid(gate)
    elif ACT == "gelu_no_mul":
        y = _gelu(gate)
    elif ACT == "gelu_tanh_no_mul":
        y = _gelu_tanh(gate)
    elif ACT == "relu_no_mul":
        y = tl.maximum(gate, 0)
    else:
        tl.static_assert(ACT == "relu2_no_mul", "an activation without device code")
        y = tl.maximum(gate, 0) * tl.maximum(gate, 0)
    return y


@triton.jit
def _store_rounded(y, out, scale, rows, columns, mask, width, stride, group, FP8: tl.constexpr):
    """Stores `y [rows, 128]` as it is, or as E4M3 codes and each row's scale at `scale[group, row]`."""
    at = out + rows[:, None].to(tl.int64) * width + columns[None, :]
    if FP8:
        amax = tl.max(tl.where(mask, tl.abs(y), 0.0), 1)
        s = tl.maximum(amax, 1e-10) / 448.0
        codes = tl.minimum(tl.maximum(y / s[:, None], -448.0), 448.0)
        tl.store(at, codes.to(tl.float8e4nv), mask=mask)
        tl.store(scale + group.to(tl.int64) * stride + rows, s, mask=tl.max(mask.to(tl.int32), 1) > 0)
    else:
        tl.store(at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def activate(
    between, out, scale, tiles, inner, stride, limit, alpha, beta, linear_beta,
    BM: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, FP8: tl.constexpr,
    LIMITED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """`between [R, 2 inner]` (`[R, inner]` ungated) to `out [R, inner]`; grid (groups, inner / 128)."""
    g = tl.program_id(0)
    if g < tl.load(tiles):
        row0 = tl.load(tiles + 5 + 4 * g)
        count = tl.load(tiles + 6 + 4 * g)
        m = tl.arange(0, BM)
        columns = tl.program_id(1) * 128 + tl.arange(0, 128)
        mask = (m[:, None] < count) & (columns[None, :] < inner)
        rows = row0 + m
        at = between + rows[:, None].to(tl.int64) * (inner * (2 if GATED else 1)) + columns[None, :]
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(at + inner, mask=mask, other=0.0).to(tl.float32)
        y = _act(gate, up, limit, alpha, beta, linear_beta, ACT, LIMITED, BOUNDED)
        _store_rounded(y, out, scale, rows, columns, mask, inner, stride, tl.program_id(1), FP8)


@triton.jit
def round_rows(x, out, scale, tiles, width, stride, BM: tl.constexpr):
    """`x [R, width]` to E4M3 codes `out` and `scale [width / 128, stride]`; grid (groups, width / 128)."""
    g = tl.program_id(0)
    if g < tl.load(tiles):
        row0 = tl.load(tiles + 5 + 4 * g)
        count = tl.load(tiles + 6 + 4 * g)
        m = tl.arange(0, BM)
        columns = tl.program_id(1) * 128 + tl.arange(0, 128)
        mask = (m[:, None] < count) & (columns[None, :] < width)
        rows = row0 + m
        y = tl.load(x + rows[:, None].to(tl.int64) * width + columns[None, :], mask=mask, other=0.0)
        _store_rounded(
            y.to(tl.float32), out, scale, rows, columns, mask, width, stride, tl.program_id(1), FP8=True
        )
