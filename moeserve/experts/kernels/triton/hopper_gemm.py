# mypy: ignore-errors
# ruff: noqa: RUF005, RUF059, B007  (device code unpacks whole tuples and knows no starred lists)
"""One persistent grouped GEMM for Hopper: `out[m, n] = sum_k x[m, k] w[slot of m, n, k]`.

A warp of its own issues bulk tensor copies into a ring of stages; each consumer is one warp group that owns
64 rows of the weights, which are the wide side of the matrix instruction, so that a few tokens fill it.
Weights are bf16, E4M3 with a 128x128 block scale, or E2M1 codes that are decoded in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moeserve.experts.kernels.triton import four_bit

BF16, FP8, FP4 = (gl.constexpr(kind) for kind in range(3))


@gluon.jit
def _group(tiles, tile, total, N_TILES):
    """Slot, first row and rows of a tile; of the last one past the end, so that it can be asked for ahead."""
    group = tiles + 4 + (gl.maximum(gl.minimum(tile, total - 1), 0) // N_TILES) * 4
    return gl.load(group), gl.load(group + 1), gl.load(group + 2)


@gluon.jit
def _produce(descriptors, stages, ready, empty, tiles, sizes, c: gl.constexpr):
    KIND: gl.constexpr = c[0]
    BM: gl.constexpr = c[1]
    BK: gl.constexpr = c[2]
    STAGES: gl.constexpr = c[3]
    NB: gl.constexpr = c[4] * c[5]
    SUB: gl.constexpr = BK // 256
    x_desc, w_desc, s_desc = descriptors
    xs, ws, ss = stages
    N_TILES, K_BLOCKS, N, w_blocks, x_stride, scale_rows, scale_columns = sizes
    total = gl.load(tiles) * N_TILES
    step = 0
    slot, row0, _ = _group(tiles, gl.program_id(0), total, N_TILES)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        next_slot, next_row0, _ = _group(tiles, tile + gl.num_programs(0), total, N_TILES)
        n = (tile % N_TILES) * NB
        for kb in range(K_BLOCKS):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(s)
            if KIND == FP4:
                k_blocks = scale_columns  # blocks of 256 that were packed; what lies past them meets zeros
                mbarrier.expect(bar, NB * (64 * BK // 2 + 64 * BK // 16) + BM * BK * 2)
                for i in gl.static_range(NB):
                    block = (slot * w_blocks + gl.minimum(n + i, w_blocks - 1)) * k_blocks + kb * SUB
                    for u in gl.static_range(SUB):
                        at = (s * NB + i) * SUB + u
                        tma.async_copy_global_to_shared(w_desc, [(block + u) * 64, 0], bar, ws.index(at))
                        tma.async_copy_global_to_shared(s_desc, [(block + u) * 8, 0], bar, ss.index(at))
                for q in gl.static_range(BK // 64):
                    tma.async_copy_global_to_shared(
                        x_desc, [row0, kb * BK + 64 * q], bar, xs.index(s * (BK // 64) + q)
                    )
            else:
                SIZE: gl.constexpr = 2 if KIND == BF16 else 1
                mbarrier.expect(bar, (NB * 64 + BM) * BK * SIZE)
                for i in gl.static_range(NB):
                    row = slot * w_blocks + (n + i) * 64
                    tma.async_copy_global_to_shared(w_desc, [row, kb * BK], bar, ws.index(s * NB + i))
                tma.async_copy_global_to_shared(x_desc, [row0, kb * BK], bar, xs.index(s))
            step += 1
        slot, row0 = next_slot, next_row0


@gluon.jit
def _consume(i: gl.constexpr, stages, ready, empty, tiles, given, sizes, c: gl.constexpr):
    """Consumer i: for each tile the narrowest sum that holds its rows."""
    BM: gl.constexpr = c[1]
    N_TILES, K_BLOCKS, N, w_blocks, x_stride, scale_rows, scale_columns = sizes
    total = gl.load(tiles) * N_TILES
    step = 0
    slot, row0, rows = _group(tiles, gl.program_id(0), total, N_TILES)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        next_slot, next_row0, next_rows = _group(tiles, tile + gl.num_programs(0), total, N_TILES)
        n = (tile % N_TILES) * (c[4] * c[5]) + i * c[5]
        where = (slot, row0, rows, n * 64, step)
        if BM >= 128:
            if rows <= BM // 4:
                _sum(i, BM // 4, where, stages, ready, empty, given, sizes, c)
            elif rows <= BM // 2:
                _sum(i, BM // 2, where, stages, ready, empty, given, sizes, c)
            else:
                _sum(i, BM, where, stages, ready, empty, given, sizes, c)
        else:
            _sum(i, BM, where, stages, ready, empty, given, sizes, c)
        step += K_BLOCKS
        slot, row0, rows = next_slot, next_row0, next_rows


@gluon.jit
def _sum(i: gl.constexpr, M: gl.constexpr, where, stages, ready, empty, given, sizes, c: gl.constexpr):
    """The tile's first M rows times this consumer's RB blocks of 64 rows of weights, stored."""
    KIND: gl.constexpr = c[0]
    BK: gl.constexpr = c[2]
    STAGES: gl.constexpr = c[3]
    RB: gl.constexpr = c[5]
    NB: gl.constexpr = c[4] * RB
    xs, ws, ss = stages
    x_scale, w_scale, bias, out = given
    slot, row0, rows, n0, step = where
    N_TILES, K_BLOCKS, N, w_blocks, x_stride, scale_rows, scale_columns = sizes
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 32 if KIND == FP8 else 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    acc = gl.zeros([64, M], gl.float32, MMA)
    acc1 = acc
    scale0, bias0 = _row_terms(n0, slot, w_scale, bias, N, MMA, c)
    scale1, bias1 = _row_terms(n0 + 64 * (RB - 1), slot, w_scale, bias, N, MMA, c)
    if KIND == FP8:
        zero = gl.zeros([64, M], gl.float32, MMA)
        slot_scale = w_scale + slot * scale_rows * scale_columns
        at = slot_scale + gl.minimum(n0 // 128, scale_rows - 1) * scale_columns
        w_s = gl.load(at)
        x_at = x_scale + row0 + gl.arange(0, M, gl.SliceLayout(0, MMA))
        AHEAD: gl.constexpr = (
            M <= 64
        )  # wider tiles have no registers to spare, and longer products to hide behind
        x_s = gl.load(x_at)
        for kb in range(K_BLOCKS):
            s = step % STAGES
            following = gl.minimum(kb + 1, K_BLOCKS - 1)
            next_w = gl.load(at + following)
            mbarrier.wait(ready.index(s), (step // STAGES) & 1)
            x = xs.index(s).slice(0, M, 0).permute((1, 0))
            part = warpgroup_mma(
                ws.index(s * NB + i * RB), x, zero, use_acc=False, is_async=True, max_num_imprecise_acc=BK
            )
            if AHEAD:
                factor = gl.expand_dims(x_s * w_s, 0)
                x_s = gl.load(x_at + following * x_stride)
            else:
                factor = gl.expand_dims(gl.load(x_at + kb * x_stride) * w_s, 0)
            part = warpgroup_mma_wait(0, [part])
            if RB == 1:
                mbarrier.arrive(empty.index(s), count=1)
            acc += part * factor
            if RB == 2:
                part = warpgroup_mma(
                    ws.index(s * NB + i * RB + 1),
                    x,
                    zero,
                    use_acc=False,
                    is_async=True,
                    max_num_imprecise_acc=BK,
                )
                part = warpgroup_mma_wait(0, [part])
                mbarrier.arrive(empty.index(s), count=1)
                acc1 += part * factor
            w_s = next_w
            step += 1
    elif KIND == BF16:
        for kb in range(K_BLOCKS):
            s = step % STAGES
            mbarrier.wait(ready.index(s), (step // STAGES) & 1)
            x = xs.index(s).slice(0, M, 0).permute((1, 0))
            acc = warpgroup_mma(ws.index(s * NB + i * RB), x, acc, is_async=True)
            if RB == 2:
                acc1 = warpgroup_mma(ws.index(s * NB + i * RB + 1), x, acc1, is_async=True)
                acc, acc1 = warpgroup_mma_wait(2, [acc, acc1])
            else:
                acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=kb > 0)
            step += 1
        if RB == 2:
            acc, acc1 = warpgroup_mma_wait(0, [acc, acc1])
        else:
            acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    else:
        SUB: gl.constexpr = BK // 256
        for kb in range(K_BLOCKS):
            s = step % STAGES
            mbarrier.wait(ready.index(s), (step // STAGES) & 1)
            for u in gl.static_range(SUB):
                for r in gl.static_range(RB):
                    block = (s * NB + i * RB + r) * SUB + u
                    x_at = s * (BK // 64) + u * 4
                    s0, s1, s2, s3 = four_bit.scale_words(ss.index(block), A)
                    left, right = four_bit.operands(
                        four_bit.words(ws.index(block).slice(0, 32, 0), A), s0, s1, A
                    )
                    if r == 0:
                        acc = _add(acc, left, right, xs, x_at, M)
                    else:
                        acc1 = _add(acc1, left, right, xs, x_at, M)
                    left, right = four_bit.operands(
                        four_bit.words(ws.index(block).slice(32, 32, 0), A), s2, s3, A
                    )
                    if r == 0:
                        acc = _add(acc, left, right, xs, x_at + 2, M)
                    else:
                        acc1 = _add(acc1, left, right, xs, x_at + 2, M)
            # waiting a stage later makes ptxas serialize products that have an operand in registers
            if RB == 2:
                acc, acc1 = warpgroup_mma_wait(0, [acc, acc1])
            else:
                acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(empty.index(s), count=1)
            step += 1
    _store(acc, scale0, bias0, n0, where, out, N, c)
    if RB == 2:
        _store(acc1, scale1, bias1, n0 + 64, where, out, N, c)


@gluon.jit
def _row_terms(n0, slot, w_scale, bias, N, MMA: gl.constexpr, c: gl.constexpr):
    """What 64 output columns are multiplied by and what is added: `[64]` each, asked for before the sum."""
    n = n0 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    scale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, MMA))
    add = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, MMA))
    if c[0] == FP4:
        scale = gl.load(w_scale + slot * N + n, mask=n < N, other=0.0)
    if c[6]:
        add = gl.load(bias + slot * N + n, mask=n < N, other=0.0)
    return scale, add


@gluon.jit
def _add(acc, left, right, xs, x_at, M: gl.constexpr):
    """Starts the products of 64 rows x 128 decoded weights with two tiles of 64 columns of the rows."""
    acc = warpgroup_mma(left, xs.index(x_at).slice(0, M, 0).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma(right, xs.index(x_at + 1).slice(0, M, 0).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _store(acc, scale, add, n0, where, out, N, c: gl.constexpr):
    """Writes `acc [64, M]`, times its scale, plus the bias, to rows row0.. of `out [R, N]`, columns n0..."""
    MMA: gl.constexpr = acc.type.layout
    M: gl.constexpr = acc.type.shape[1]
    slot, row0, rows, _, _ = where
    # float32 leaves in whole sectors as it stands, and codes leave no shared memory for its shuffle
    PLAIN: gl.constexpr = M < 64 or (c[0] == FP4 and out.dtype.element_ty.primitive_bitwidth == 32)
    OUT: gl.constexpr = MMA if PLAIN else gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    if c[0] == FP4:
        acc = acc * gl.expand_dims(scale, 1)
    if c[6]:
        acc = acc + gl.expand_dims(add, 1)
    answer = gl.convert_layout(acc.to(out.dtype.element_ty), OUT)
    n_out = n0 + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    m = gl.arange(0, M, gl.SliceLayout(0, OUT))
    place = out + gl.expand_dims((row0 + m).to(gl.int64) * N, 0) + gl.expand_dims(n_out, 1)
    gl.store(place, answer, mask=gl.expand_dims(m < rows, 0) & gl.expand_dims(n_out < N, 1))


@gluon.jit
def grouped_gemm(
    x_desc, w_desc, s_desc, x_scale, w_scale, bias, out, tiles,
    N, N_TILES, K_BLOCKS, w_blocks, x_stride, scale_rows, scale_columns,
    KIND: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, NC: gl.constexpr,
    RB: gl.constexpr, HAS_BIAS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs; `tiles` lists the groups of rows, see `rows.py` beside this file.

    Each of NC consumers owns RB blocks of 64 rows of weights. `w_blocks` is the distance between slots: rows
    of weights, or blocks of 64 rows for codes, whose scales `s_desc` has. `x_scale` is float32
    `[K / 128, x_stride]`; `w_scale` one float32 a block of 128 x 128, or one a row for codes, of which
    `scale_columns` blocks of 256 along K were packed.
    """
    X_TILES: gl.constexpr = BK // 64 if KIND == FP4 else 1
    NB: gl.constexpr = NC * RB
    SUB: gl.constexpr = BK // 256 if KIND == FP4 else 1
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES * NB * SUB] + w_desc.block_type.shape, w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * X_TILES] + x_desc.block_type.shape, x_desc.layout)
    if KIND == FP4:
        ss = gl.allocate_shared_memory(
            s_desc.dtype, [STAGES * NB * SUB] + s_desc.block_type.shape, s_desc.layout
        )
    else:
        ss = ws
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=NC)
    c: gl.constexpr = (KIND, BM, BK, STAGES, NC, RB, HAS_BIAS)
    stages = (xs, ws, ss)
    given = (x_scale, w_scale, bias, out)
    sizes = (N_TILES, K_BLOCKS, N, w_blocks, x_stride, scale_rows, scale_columns)
    produced = ((x_desc, w_desc, s_desc), stages, ready, empty, tiles, sizes, c)
    if NC == 1:
        gl.warp_specialize(
            [(_consume, (0, stages, ready, empty, tiles, given, sizes, c)), (_produce, produced)], [1], [24]
        )
    elif NC == 2:
        gl.warp_specialize(
            [
                (_consume, (0, stages, ready, empty, tiles, given, sizes, c)),
                (_consume, (1, stages, ready, empty, tiles, given, sizes, c)),
                (_produce, produced),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    elif NC == 3:
        gl.warp_specialize(
            [
                (_consume, (0, stages, ready, empty, tiles, given, sizes, c)),
                (_consume, (1, stages, ready, empty, tiles, given, sizes, c)),
                (_consume, (2, stages, ready, empty, tiles, given, sizes, c)),
                (_produce, produced),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, stages, ready, empty, tiles, given, sizes, c)),
                (_consume, (1, stages, ready, empty, tiles, given, sizes, c)),
                (_consume, (2, stages, ready, empty, tiles, given, sizes, c)),
                (_consume, (3, stages, ready, empty, tiles, given, sizes, c)),
                (_produce, produced),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
