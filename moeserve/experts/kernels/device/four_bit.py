# mypy: ignore-errors
"""Four-bit codes in a warp group's registers: words and scale bytes to bf16 operands of the matrix unit."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
    """Eight chunks from a pair of words, times their scales: outputs $0-$7, words $8 $9, scales $10-$25."""
    words = [
        SPREAD_WORD.format(w=f"${8 + half}", **{f"o{i}": f"c{4 * half + i}" for i in range(4)})
        for half in (0, 1)
    ]
    scaled = [f"mul.rn.bf16x2 ${j}, c{j}, ${10 + 2 * j};" for j in range(8)]
    codes = ", ".join(f"c{j}" for j in range(8))
    return "{ .reg .b32 t, u, " + codes + ";" + "".join(words) + "\n".join(scaled) + "}"


def _scale_asm() -> str:
    """Eight scale bytes (words $8 $9) to eight pairs of equal bf16, whose bits are b << 4 | 0x7000."""
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
def words(words_smem, A: gl.constexpr):
    """One block of 64 rows x 128 codes as words `[64, 16]`, in the registers of the matrix operand."""
    flat = words_smem.load(
        gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    )  # [32, 32] words of 16 bytes a thread
    # row of 32: half (column + 8), warp, lane 3-4; column: lane 0-2, then (row + 8, column 0)
    bits = gl.reshape(flat, (2, 4, 4, 2, 4, 2, 2))  # half, warp, row 1-2, row 0, lane % 4, row 3, column 0
    bits = gl.permute(bits, (1, 5, 2, 3, 0, 4, 6))
    return gl.convert_layout(gl.reshape(bits, (64, 16)), A)


@gluon.jit
def scale_words(scales_smem, A: gl.constexpr):
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
def operands(w, s0, s1, A: gl.constexpr):
    """Two operands `[64, 64]` bf16 of 64 x 128 codes; `w [64, 16]` words, `s0`, `s1 [64, 1]` scales."""
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
