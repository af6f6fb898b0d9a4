# mypy: ignore-errors
"""Four-bit codes in a warp group's registers: words and scale bytes to bf16 operands of the matrix unit."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moeserve.quant.layouts.hopper_fp4 import REST

# An E2M1 code becomes a bf16 of 2^-126 times its value by moving its bits: sign to 15, magnitude to 8..6.
# Of a half of a word three codes stand so that one turn and one mask do it; what they leave of two words
# makes a third one with a code for each (`codes.TURNS`). Turns that wrap no bit that is kept are shifts,
# which the FP32 pipe can do.
SPREAD = """
    and.b32 c0, $8, 0x81C081C0;
    shl.b32 t, $8, 4;
    and.b32 c1, t, 0x81C081C0;
    shf.l.wrap.b32 t, $8, $8, 10;
    and.b32 c2, t, 0x81C081C0;
    shl.b32 t, $9, 2;
    and.b32 c4, t, 0x81C081C0;
    shl.b32 t, $9, 6;
    and.b32 c5, t, 0x81C081C0;
    shf.l.wrap.b32 t, $9, $9, 12;
    and.b32 c6, t, 0x81C081C0;
    lop3.b32 u, REST, $8, $9, 0xCA;
    shf.l.wrap.b32 t, u, u, 8;
    and.b32 c3, t, 0x81C081C0;
    shf.l.wrap.b32 t, u, u, 14;
    and.b32 c7, t, 0x81C081C0;
"""


def _decode_asm() -> str:
    """Eight chunks $0-$7 from a pair of words $8 $9, times their scales, pairs of bf16 in $10-$17."""
    lines = [SPREAD.replace("REST", hex(REST))]
    for j in range(8):
        scales, side = 10 + j // 4 * 4 + j % 2 * 2, "lh"[j % 4 // 2]
        lines += [
            f"mov.b32 {{l, h}}, ${scales};",
            f"mov.b32 t, {{{side}, {side}}};",
            f"mul.rn.bf16x2 ${j}, c{j}, t;",
        ]
    codes = ", ".join(f"c{j}" for j in range(8))
    return "{ .reg .b32 t, u, " + codes + "; .reg .b16 l, h;" + "\n".join(lines) + "}"


def _scale_asm() -> str:
    """Scale bytes b of two words $4 $5, turned, to pairs of bf16 b << 4 | 0x7000: 0 and 2, then 1 and 3."""
    lines = []
    for half in (0, 1):
        lines += [
            f"lop3.b32 ${2 * half}, ${4 + half}, 0x0FF00FF0, 0x70007000, 0xEA;",
            f"shf.r.wrap.b32 t, ${4 + half}, ${4 + half}, 8;",
            f"lop3.b32 ${2 * half + 1}, t, 0x0FF00FF0, 0x70007000, 0xEA;",
        ]
    return "{ .reg .b32 t;" + "\n".join(lines) + "}"


DECODE = gl.constexpr(_decode_asm())
DECODE_REGISTERS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 10))
SCALES = gl.constexpr(_scale_asm())
SCALE_REGISTERS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 2))


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
    f0, f1, f2, f3 = gl.inline_asm_elementwise(
        SCALES, SCALE_REGISTERS, [s0, s1], (gl.int32,) * 4, is_pure=True, pack=1
    )
    c0, c1, c2, c3, c4, c5, c6, c7 = gl.inline_asm_elementwise(
        DECODE,
        DECODE_REGISTERS,
        [w, f0, f1, f2, f3],
        (gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    left = gl.convert_layout(_join4(c0, c1, c2, c3), A)
    right = gl.convert_layout(_join4(c4, c5, c6, c7), A)
    return left, right
