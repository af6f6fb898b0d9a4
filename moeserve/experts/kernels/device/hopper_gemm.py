# mypy: ignore-errors
"""One persistent grouped GEMM for Hopper: `out[m, n] = sum_k x[m, k] w[slot of m, n, k]`, weights streamed once.

A warp of its own issues bulk tensor copies into a ring of stages; each consumer is one warp group that owns 64
rows of the weights, which are the wide side of the matrix instruction, so that a handful of tokens fills it.
Weights are bf16, E4M3 with a 128x128 block scale, or E2M1 codes that are decoded in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

BF16, FP8, FP4 = (gl.constexpr(kind) for kind in range(3))

# An E2M1 code becomes a bf16 of 2^-126 times its value by moving its bits: sign to 15, magnitude to 8..6.
# A word holds four codes in each half, so that three of the four need one shift and one mask:
# s0 ... at 15 8-6, s1 at 12 5-3, s2 at 9 2-0, s3 at 14 13 11 10. Two neighbouring words make eight registers.
SPREAD_WORD = """
    and.b32 {o0}, {w}, 0x81C081C0;
    shl.b32 t, {w}, 3;
    and.b32 {o1}, t, 0x81C081C0;
    shl.b32 t, {w}, 6;
    and.b32 {o2}, t, 0x81C081C0;
    shl.b32 t, {w}, 1;
    and.b32 u, t, 0x80008000;
    shr.u32 t, {w}, 5;
    lop3.b32 u, t, 0x01000100, u, 0xEA;
    shr.u32 t, {w}, 4;
    lop3.b32 {o3}, t, 0x00C000C0, u, 0xEA;
"""


def _decode_asm() -> str:
    """Eight chunks of 16 from one pair of words, each times its scale: outputs $0-$7, words $8 $9, scales $10-$25."""
    words = [
        SPREAD_WORD.format(w=f"${8 + half}", **{f"o{i}": f"c{4 * half + i}" for i in range(4)})
        for half in (0, 1)
    ]
    scaled = [f"mul.rn.bf16x2 ${j}, c{j}, ${10 + 2 * j};" for j in range(8)]
    codes = ", ".join(f"c{j}" for j in range(8))
    return "{ .reg .b32 t, u, " + codes + ";" + "".join(words) + "\n".join(scaled) + "}"


def _scale_asm() -> str:
    """Eight scale bytes (words $8 $9) to eight pairs of equal bf16: byte b is the bf16 of bits b << 4 | 0x7000."""
    lines = []
    for half in (0, 1):
        w, o = f"${8 + half}", 4 * half
        lines += [
            f"shl.b32 t, {w}, 4;",
            "lop3.b32 t, t, 0x0FF00FF0, 0x70007000, 0xEA;",
            f"shr.u32 u, {w}, 4;",
            "lop3.b32 u, u, 0x0FF00FF0, 0x70007000, 0xEA;",
            f"prmt.b32 ${o}, t, t, 0x1010;",
            f"prmt.b32 ${o + 1}, u, u, 0x1010;",
            f"prmt.b32 ${o + 2}, t, t, 0x3232;",
            f"prmt.b32 ${o + 3}, u, u, 0x3232;",
        ]
    return "{ .reg .b32 t, u;" + "\n".join(lines) + "}"


DECODE = gl.constexpr(_decode_asm())
DECODE_REGISTERS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 18))
SCALES = gl.constexpr(_scale_asm())
SCALE_REGISTERS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 2))


@gluon.jit
def _join4(a, b, c, d):
    """Four `[64, 16]` chunks side by side: `[64, 64]`."""
    pairs = gl.join(gl.join(a, c), gl.join(b, d))  # [.., 2: a|c, 2: a|b], so chunk = 2 * second-last + last
    return gl.reshape(gl.permute(pairs, (0, 2, 3, 1)), (64, 64))


@gluon.jit
def _words(words_smem, A: gl.constexpr):
    """One block of 64 rows x 128 codes as words `[64, 16]`, already in the registers of the matrix operand."""
    flat = words_smem.load(
        gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    )  # [32, 32] words of 16 bytes a thread
    # row of 32: half (column + 8), warp, lane 3-4; column: lane 0-2, then (row + 8, column 0)
    bits = gl.reshape(flat, (2, 4, 4, 2, 4, 2, 2))  # half, warp, row 1-2, row 0, lane % 4, row 3, column 0
    bits = gl.permute(bits, (1, 5, 2, 3, 0, 4, 6))
    return gl.convert_layout(gl.reshape(bits, (64, 16)), A)


@gluon.jit
def _scale_words(scales_smem, A: gl.constexpr):
    """The scales of 64 rows x 256 codes: four words a row (two of each 128 codes), each `[64]`."""
    HELD: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [4, 0]],
        lane_bases=[[0, 0], [0, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[1, 0], [2, 0]],
        block_bases=[],
        shape=[8, 32],
    )
    flat = scales_smem.load(HELD)  # rows: half of K, warp; columns: row 0-2, row 3, word
    bits = gl.permute(gl.reshape(flat, (2, 4, 8, 2, 2)), (1, 3, 2, 0, 4))
    even, odd = gl.split(bits)
    e0, e1 = gl.split(even)
    o0, o1 = gl.split(odd)
    return _row(e0, A), _row(o0, A), _row(e1, A), _row(o1, A)


@gluon.jit
def _row(words, A: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(gl.reshape(words, (64,)), gl.SliceLayout(1, A)), 1)


@gluon.jit
def _operands(w, s0, s1, A: gl.constexpr):
    """Two operands `[64, 64]` bf16 of one block of 64 x 128 codes; `w [64, 16]` words, `s0`, `s1 [64, 1]` scales."""
    f0, f1, f2, f3, f4, f5, f6, f7 = gl.inline_asm_elementwise(
        SCALES, SCALE_REGISTERS, [s0, s1], (gl.int32,) * 8, is_pure=True, pack=1
    )
    c0, c1, c2, c3, c4, c5, c6, c7 = gl.inline_asm_elementwise(
        DECODE,
        DECODE_REGISTERS,
        [w, f0, f1, f2, f3, f4, f5, f6, f7],
        (gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    left = gl.convert_layout(_join4(c0, c1, c2, c3), A)
    right = gl.convert_layout(_join4(c4, c5, c6, c7), A)
    return left, right


@gluon.jit
def _produce(descriptors, stages, ready, empty, tiles, sizes, c: gl.constexpr):
    KIND: gl.constexpr = c[0]
    BM: gl.constexpr = c[1]
    BK: gl.constexpr = c[2]
    STAGES: gl.constexpr = c[3]
    NB: gl.constexpr = c[4] * c[5]
    x_desc, w_desc, s_desc = descriptors
    xs, ws, ss = stages
    N_TILES, K_BLOCKS, N, w_blocks, scale_rows, scale_columns = sizes
    total = gl.load(tiles) * N_TILES
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        group = tiles + 4 + (tile // N_TILES) * 4
        slot = gl.load(group)
        row0 = gl.load(group + 1)
        n = (tile % N_TILES) * NB
        for kb in range(K_BLOCKS):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(s)
            if KIND == FP4:
                mbarrier.expect(bar, NB * (64 * BK // 2 + 64 * BK // 16) + BM * BK * 2)
                for i in gl.static_range(NB):
                    block = (slot * w_blocks + gl.minimum(n + i, w_blocks - 1)) * K_BLOCKS + kb
                    tma.async_copy_global_to_shared(w_desc, [block * (BK // 4), 0], bar, ws.index(s * NB + i))
                    tma.async_copy_global_to_shared(
                        s_desc, [block * (BK // 32), 0], bar, ss.index(s * NB + i)
                    )
                for q in gl.static_range(BK // 64):
                    tma.async_copy_global_to_shared(
                        x_desc, [row0, kb * BK + 64 * q], bar, xs.index(s * (BK // 64) + q)
                    )
            else:
                SIZE: gl.constexpr = 2 if KIND == BF16 else 1
                mbarrier.expect(bar, (NB * 64 + BM) * BK * SIZE + (BM * 4 if KIND == FP8 else 0))
                for i in gl.static_range(NB):
                    row = slot * w_blocks + (n + i) * 64
                    tma.async_copy_global_to_shared(w_desc, [row, kb * BK], bar, ws.index(s * NB + i))
                tma.async_copy_global_to_shared(x_desc, [row0, kb * BK], bar, xs.index(s))
                if KIND == FP8:
                    tma.async_copy_global_to_shared(s_desc, [kb, row0], bar, ss.index(s))
            step += 1


@gluon.jit
def _consume(i: gl.constexpr, stages, ready, empty, tiles, given, sizes, c: gl.constexpr):
    """Consumer i: for each tile the narrowest sum that holds its rows."""
    BM: gl.constexpr = c[1]
    N_TILES, K_BLOCKS, N, w_blocks, scale_rows, scale_columns = sizes
    total = gl.load(tiles) * N_TILES
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        group = tiles + 4 + (tile // N_TILES) * 4
        slot = gl.load(group)
        row0 = gl.load(group + 1)
        rows = gl.load(group + 2)
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
    N_TILES, K_BLOCKS, N, w_blocks, scale_rows, scale_columns = sizes
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 32 if KIND == FP8 else 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    acc = gl.zeros([64, M], gl.float32, MMA)
    acc1 = acc
    if KIND == FP8:
        zero = gl.zeros([64, M], gl.float32, MMA)
        slot_scale = w_scale + slot * scale_rows * scale_columns
        at = slot_scale + gl.minimum(n0 // 128, scale_rows - 1) * scale_columns
        w_s = gl.load(at)
        for kb in range(K_BLOCKS):
            s = step % STAGES
            next_s = gl.load(at + gl.minimum(kb + 1, scale_columns - 1))
            mbarrier.wait(ready.index(s), (step // STAGES) & 1)
            x = xs.index(s).slice(0, M, 0).permute((1, 0))
            part = warpgroup_mma(
                ws.index(s * NB + i * RB), x, zero, use_acc=False, is_async=True, max_num_imprecise_acc=BK
            )
            factor = ss.index(s).slice(0, M, 1).load(MMA) * w_s
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
            w_s = next_s
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
        for kb in range(K_BLOCKS):
            s = step % STAGES
            mbarrier.wait(ready.index(s), (step // STAGES) & 1)
            acc = _add_decoded(acc, s * NB + i * RB, s * (BK // 64), stages, M, A)
            if RB == 2:
                acc1 = _add_decoded(acc1, s * NB + i * RB + 1, s * (BK // 64), stages, M, A)
                acc, acc1 = warpgroup_mma_wait(0, [acc, acc1])
            else:
                acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(empty.index(s), count=1)
            step += 1
    _store(acc, n0, where, given, N, c)
    if RB == 2:
        _store(acc1, n0 + 64, where, given, N, c)


@gluon.jit
def _add_decoded(acc, block, x_at, stages, M: gl.constexpr, A: gl.constexpr):
    """Adds 64 rows x 256 codes of one stage, decoded block by block while the last product runs."""
    xs, ws, ss = stages
    s0, s1, s2, s3 = _scale_words(ss.index(block), A)
    w = _words(ws.index(block).slice(0, 32, 0), A)
    left, right = _operands(w, s0, s1, A)
    acc = warpgroup_mma(left, xs.index(x_at).slice(0, M, 0).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(right, xs.index(x_at + 1).slice(0, M, 0).permute((1, 0)), acc, is_async=True)
    w = _words(ws.index(block).slice(32, 32, 0), A)
    left, right = _operands(w, s2, s3, A)
    acc = warpgroup_mma(left, xs.index(x_at + 2).slice(0, M, 0).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma(right, xs.index(x_at + 3).slice(0, M, 0).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _store(acc, n0, where, given, N, c: gl.constexpr):
    """Writes `acc [64, M]` to rows row0.. of `out [R, N]`, columns n0.., times the row scale, plus the bias."""
    MMA: gl.constexpr = acc.type.layout
    M: gl.constexpr = acc.type.shape[1]
    x_scale, w_scale, bias, out = given
    slot, row0, rows, _, _ = where
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]) if M >= 64 else MMA
    n = n0 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    if c[0] == FP4:
        acc = acc * gl.expand_dims(gl.load(w_scale + slot * N + n, mask=n < N, other=0.0), 1)
    if c[6]:
        acc = acc + gl.expand_dims(gl.load(bias + slot * N + n, mask=n < N, other=0.0), 1)
    answer = gl.convert_layout(acc.to(out.dtype.element_ty), OUT)
    n_out = n0 + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    m = gl.arange(0, M, gl.SliceLayout(0, OUT))
    place = out + gl.expand_dims((row0 + m).to(gl.int64) * N, 0) + gl.expand_dims(n_out, 1)
    gl.store(place, answer, mask=gl.expand_dims(m < rows, 0) & gl.expand_dims(n_out < N, 1))


@gluon.jit
def grouped_gemm(
    x_desc, w_desc, s_desc, w_scale, bias, out, tiles,
    N, N_TILES, K_BLOCKS, w_blocks, scale_rows, scale_columns,
    KIND: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, NC: gl.constexpr,
    RB: gl.constexpr, HAS_BIAS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs; `tiles` lists the groups of rows, see `moeserve.experts.kernels.device.rows`.

    Each of NC consumers owns RB blocks of 64 rows of weights. `w_blocks` is the distance between slots: rows of
    weights, or blocks of 64 rows for codes. `s_desc` has the scales of rows `[K / 128, R]` (fp8) or of codes;
    `w_scale` is one float32 a block of 128 x 128, or one a row for codes.
    """
    X_TILES: gl.constexpr = BK // 64 if KIND == FP4 else 1
    NB: gl.constexpr = NC * RB
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES * NB] + w_desc.block_type.shape, w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * X_TILES] + x_desc.block_type.shape, x_desc.layout)
    if KIND == FP4:
        ss = gl.allocate_shared_memory(s_desc.dtype, [STAGES * NB] + s_desc.block_type.shape, s_desc.layout)
    elif KIND == FP8:
        ss = gl.allocate_shared_memory(s_desc.dtype, [STAGES] + s_desc.block_type.shape, s_desc.layout)
    else:
        ss = ws
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=NC)
    c: gl.constexpr = (KIND, BM, BK, STAGES, NC, RB, HAS_BIAS)
    stages = (xs, ws, ss)
    given = (w_scale, w_scale, bias, out)
    sizes = (N_TILES, K_BLOCKS, N, w_blocks, scale_rows, scale_columns)
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
