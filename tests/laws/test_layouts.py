"""Laws of layouts: packed and unpacked is what it was, matrix by matrix, in no more memory than both take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from layout_cases import SHAPES, accepted, assert_same_bytes, filled, peak_bytes, some_format
from torch import Tensor

from moeserve.quant.bits import unpack_nibbles
from moeserve.quant.format import Format, Packed
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.layout import Layout
from moeserve.quant.layouts import LAYOUTS, layout_named
from moeserve.quant.layouts.padding import Padded
from moeserve.quant.layouts.pieces import PIECE_BYTES

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
PAIRS = [
    pytest.param(layout, form, id=f"{name}-{form}")
    for name, layout in LAYOUTS.items()
    for form in sorted(layout.formats, key=str)
]


def assert_same(left: Packed, right: Packed, what: object) -> None:
    assert (left.format, left.shape) == (right.format, right.shape), what
    for part, a, b in zip(left.format.parts, left.parts, right.parts, strict=True):
        assert_same_bytes(a, b, (what, part.name))


@pytest.mark.parametrize(("layout", "form"), PAIRS)
def test_inverse(layout: Layout, form: Format) -> None:
    """Bit for bit, at every size that is taken; `like` is only looked at."""
    for shape in accepted(layout, form):
        packed = filled(form, shape)
        tensors = layout.pack(packed)
        assert all(tensor.is_contiguous() for tensor in tensors.values()), shape
        assert_same(layout.unpack(tensors, form.empty(shape, "meta")), packed, shape)


@every_layout
def test_sizes_that_are_tried(layout: Layout) -> None:
    """Of every layout a matrix, a stack, and nothing in either dimension, so that the laws say something."""
    shapes = accepted(layout, some_format(layout))
    assert any(len(shape) == 2 and 0 not in shape for shape in shapes)
    assert any(len(shape) == 3 and 0 not in shape for shape in shapes)
    assert any(shape[-2] == 0 for shape in shapes)
    assert any(shape[-1] == 0 for shape in shapes)
    assert any(shape[0] == 0 and len(shape) == 3 for shape in shapes)


@every_layout
def test_matrices_of_a_stack_are_alone(layout: Layout) -> None:
    for form in layout.formats:
        shape = (3, *next(shape for shape in accepted(layout, form) if len(shape) == 2 and 0 not in shape))
        packed = filled(form, shape)
        whole = layout.pack(packed)
        for index in range(3):
            alone = layout.pack(packed.rows(slice(index, index + 1)))
            parts = tuple(part[index] for part in packed.parts)
            matrix = layout.pack(Packed(form, packed.shape[1:], parts))
            assert whole.keys() == alone.keys() == matrix.keys()
            for name, tensor in whole.items():
                assert_same_bytes(tensor[index : index + 1], alone[name], (form, name))
                assert_same_bytes(tensor[index], matrix[name], (form, name))


CHOOSY = {name: layout for name, layout in LAYOUTS.items() if not layout.formats >= set(FORMATS.values())}
"""Layouts that do not take every format."""


@pytest.mark.parametrize("layout", CHOOSY.values(), ids=CHOOSY)
def test_other_formats_are_named(layout: Layout) -> None:
    other = next(form for form in FORMATS.values() if form not in layout.formats)
    with pytest.raises(ValueError, match=f"{layout.name} does not take {other}, only "):
        layout.pack(filled(other, (256, 256)))


@every_layout
def test_sizes_that_are_not_taken_are_named(layout: Layout) -> None:
    for form in layout.formats:
        for shape in SHAPES:
            packed = form.empty(shape)
            if (reason := layout.refuses(packed)) is None:
                continue
            assert reason.startswith(f"{layout.name} of {form} {list(shape)}"), reason
            assert "must be a multiple of" in reason
            with pytest.raises(ValueError, match="must be a multiple of"):
                layout.pack(packed)
            with pytest.raises(ValueError, match="must be a multiple of"):
                layout.unpack({}, packed)


@every_layout
def test_tensors_that_are_not_its_own_are_named(layout: Layout) -> None:
    form = some_format(layout)
    shape = next(shape for shape in accepted(layout, form) if 0 not in shape)
    packed = filled(form, shape)
    tensors = layout.pack(packed)
    read = [name for name in tensors if name not in unread(layout, tensors, packed)]
    assert read
    for name in read:
        less = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(ValueError, match=f"{layout.name} needs the tensor {name}; found "):
            layout.unpack(less, packed)
        with pytest.raises(ValueError, match=rf"{layout.name}: {name} must be .* found torch.bool \[3, 3\]"):
            layout.unpack(tensors | {name: torch.zeros(3, 3, dtype=torch.bool)}, packed)


def unread(layout: Layout, tensors: Mapping[str, Tensor], packed: Packed) -> set[str]:
    """Tensors that follow from format and shape: `unpack` does without them."""
    found = set()
    for name in tensors:
        try:
            layout.unpack({other: t for other, t in tensors.items() if other != name}, packed)
        except ValueError:
            continue
        found.add(name)
    return found


PEAK_SHAPE = (4, 1024, 1024)
ROOM = 8 * PIECE_BYTES
"""For what is made of one piece at a time, whatever the size of the whole."""


@every_layout
def test_peak_memory(layout: Layout) -> None:
    """Neither way allocates more than the tensors that go in and those that come out take together."""
    form = max(layout.formats, key=lambda own: (own.nbytes(PEAK_SHAPE), own.name))
    packed = filled(form, PEAK_SHAPE)
    like = form.empty(PEAK_SHAPE, "meta")
    tensors = layout.pack(packed)
    bound = packed.nbytes + sum(tensor.nbytes for tensor in tensors.values()) + ROOM
    assert peak_bytes(lambda: layout.pack(packed)) <= bound
    assert peak_bytes(lambda: layout.unpack(tensors, like)) <= bound


def test_the_measure_of_memory_sees_what_is_made_on_the_way() -> None:
    assert (5 << 20) <= peak_bytes(lambda: (torch.zeros(1 << 20).byte() + 1)[:1].clone()) < 6 << 20


PADDED = {name: layout for name, layout in LAYOUTS.items() if isinstance(layout, Padded)}


@pytest.mark.parametrize("layout", PADDED.values(), ids=PADDED)
def test_padding_is_zero(layout: Padded) -> None:
    """A padded matrix has the values it had, and zeros around them."""
    for form in layout.formats:
        rows = layout.halves * 128
        for shape in ((rows, 256), (2, rows + 128 * layout.halves, 384), (rows, 128)):
            packed = form.quantize(torch.randn(shape))
            tensors = layout.pack(packed)
            padded = Packed(form, layout.shape_of(packed.shape), tuple(tensors[p.name] for p in form.parts))
            bands = padded.dequantize().reshape(*shape[:-2], layout.halves, -1, padded.shape[-1])
            band = shape[-2] // layout.halves
            own = bands[..., :band, : shape[-1]].reshape(shape)
            assert torch.equal(own, packed.dequantize())
            assert not bands[..., band:, :].any()
            assert not bands[..., shape[-1] :].any()


def rows_of(layout: str, rows: int) -> list[int]:
    """Where each row of a matrix in `layout` came from, by rows that hold their own number."""
    form = FORMATS["fp32"] if FORMATS["fp32"] in layout_named(layout).formats else FORMATS["bf16"]
    columns = 128
    x = torch.arange(rows).float()[:, None].expand(rows, columns)
    return layout_named(layout).pack(form.quantize(x))["codes"].float()[..., 0].flatten().int().tolist()


ORDERS: dict[str, Callable[[int, int], int]] = {  # row of the layout, N -> row of the matrix
    "up_gate": lambda row, n: (row + n // 2) % n,
    "gate_up_by_turns": lambda row, n: row // 2 + (row % 2) * n // 2,
    "up_gate_by_turns": lambda row, n: row // 2 + (1 - row % 2) * n // 2,
    "up_gate_by_64": lambda row, n: row % 64 + row // 128 * 64 + (1 - row // 64 % 2) * n // 2,
    "from_turns": lambda row, n: 2 * row if row < n // 2 else 2 * (row - n // 2) + 1,
}


@pytest.mark.parametrize(("name", "order"), ORDERS.items(), ids=ORDERS)
def test_worked_orders_of_gate_and_up(name: str, order: Callable[[int, int], int]) -> None:
    assert rows_of(name, 256) == [order(row, 256) for row in range(256)]


@pytest.mark.parametrize(("name", "block", "width"), [("trtllm_rows_128", 32, 4), ("trtllm_rows_64", 16, 2)])
def test_worked_row_shuffles(name: str, block: int, width: int) -> None:
    """Output row (i % width) * 8 + i // width of a block takes input row i."""
    found = rows_of(name, 256)
    for row in range(256):
        i = row % block
        assert found[row - i + (i % width) * 8 + i // width] == row


def test_worked_gated_rows_are_ordered_and_then_shuffled() -> None:
    turns, shuffle = rows_of("up_gate_by_turns", 256), rows_of("trtllm_rows_128", 256)
    form = FORMATS["mxfp8"]
    packed = filled(form, (256, 128))
    own, down = (layout_named(f"trtllm_fp4_{side}").pack(packed) for side in ("gate_up", "down"))
    assert torch.equal(own["codes"].view(torch.uint8), packed.parts[0].view(torch.uint8)[turns][shuffle])
    assert torch.equal(down["codes"].view(torch.uint8), packed.parts[0].view(torch.uint8)[shuffle])
    moved = Packed(form, packed.shape, tuple(part[turns][shuffle] for part in packed.parts))
    assert torch.equal(own["scale"], layout_named("scales_128x4").pack(moved)["scale"])


def test_worked_offsets_of_the_128x4_interleave() -> None:
    checks = {(0, 0): 0, (0, 3): 3, (1, 0): 16, (31, 0): 496, (32, 0): 4, (64, 2): 10, (96, 3): 15}
    checks |= {(127, 3): 511, (0, 4): 512, (128, 0): 1024, (130, 5): 1569}
    packed = filled(MXFP4, (256, 256))
    flat = layout_named("scales_128x4").pack(packed)["scale"].flatten()
    scale = packed.parts[1]
    assert all(flat[offset] == scale[m, k] for (m, k), offset in checks.items())
    for m in range(256):
        for k in range(8):
            offset = ((m // 128) * 2 + k // 4) * 512 + (m % 32) * 16 + ((m % 128) // 32) * 4 + k % 4
            assert flat[offset] == scale[m, k]


def test_worked_padding_of_the_128x4_interleave() -> None:
    packed = filled(MXFP4, (3, 5 * 32))
    found = layout_named("scales_128x4").pack(packed)["scale"]
    assert found.shape == (128, 8)
    assert int((found != 0).sum()) == int((packed.parts[1] != 0).sum())


def test_worked_blocks_of_128_bytes() -> None:
    form = FORMATS["mxfp8"]
    packed = filled(form, (40, 384))
    found = layout_named("block_major_k").pack(packed)["codes"].view(torch.uint8)
    assert found.shape == (3, 40, 128)
    codes = packed.parts[0].view(torch.uint8)
    assert all(torch.equal(found[b], codes[:, 128 * b : 128 * b + 128]) for b in range(3))
    plain = layout_named("block_major_k").pack(filled(FORMATS["bf16"], (8, 256)))["codes"]
    assert plain.shape == (4, 8, 64)


def code_of(word: int, mantissa: int, low: int, high: int, sign: int) -> int:
    """The E2M1 code whose bits stand at these places of a word."""
    bits = [word >> place & 1 for place in (mantissa, low, high, sign)]
    return sum(bit << position for position, bit in enumerate(bits))


MIXED = {  # row in 16, column beside the word's own -> places of mantissa, exponent low, high, sign
    (0, 0): (6, 7, 8, 15),
    (0, 1): (22, 23, 24, 31),
    (8, 0): (3, 4, 5, 12),
    (8, 1): (19, 20, 21, 28),
    (0, 8): (0, 1, 2, 9),
    (0, 9): (16, 17, 18, 25),
    (8, 8): (13, 10, 11, 14),
    (8, 9): (29, 26, 27, 30),
}


def test_worked_words_of_the_mixed_gemm() -> None:
    """Word j of row r: rows r % 8 and r % 8 + 8, columns from (j // 4) 32 + (r // 8) 16 + (j % 4) 2."""
    packed = filled(MXFP4, (64, 128))
    codes = unpack_nibbles(packed.parts[0], 128).tolist()
    words = layout_named("sm90_mixed_mxfp4").pack(packed)["codes"].view(torch.int32).tolist()
    for row in range(64):
        for j, word in enumerate(words[row]):
            tile, r = row // 16 * 16, row % 16
            column = j // 8 * 64 + j % 8 // 4 * 32 + r // 8 * 16 + j % 4 * 2
            for (below, beside), places in MIXED.items():
                assert code_of(word, *places) == codes[tile + r % 8 + below][column + beside]


def test_worked_fold_of_the_mixed_gemms_scales() -> None:
    packed = filled(MXFP4, (2, 128, 256))
    found = layout_named("sm90_mixed_mxfp4").pack(packed)["scale"]
    assert found.shape == (2, 2, 2, 16, 16)
    for r in range(128):
        for g in range(8):
            own = found[:, r // 64, g // 4, r % 16, ((r % 64) // 16) * 4 + g % 4]
            assert torch.equal(own, packed.parts[1][:, r, g])


def test_worked_columns_of_deep_gemm() -> None:
    packed = filled(FORMATS["fp8_group128"], (5, 300))
    found = layout_named("deep_gemm_fp32").pack(packed)["scale"]
    assert found.shape == (3, 8)
    assert_same_bytes(found.mT[:5], packed.parts[1], "the view that the kernel takes")
    assert not found[:, 5:].any()


def test_worked_exponents_of_deep_gemm() -> None:
    """Four groups in a word, the first in the low byte; a block's scale for each of its rows."""
    form = FORMATS["fp8_block128_ue8m0"]
    packed = filled(form, (130, 6 * 128))
    found = layout_named("deep_gemm_ue8m0").pack(packed)["scale"]
    assert found.shape == (2, 132) and found.dtype == torch.int32
    for row in range(130):
        for group in range(6):
            byte = int(found[group // 4, row]) >> 8 * (group % 4) & 255
            assert 2.0 ** (byte - 127) == packed.parts[1][row // 128, group]
    assert not found[:, 130:].any()
    bytes_ = filled(MXFP4, (4, 128))
    words = layout_named("deep_gemm_ue8m0").pack(bytes_)["scale"]
    assert torch.equal(words.mT.contiguous().view(torch.uint8), bytes_.parts[1])


@pytest.mark.parametrize("value", [0.75, -2.0, float("nan")])
def test_scales_that_are_no_powers_of_two_are_named(value: float) -> None:
    form = FORMATS["fp8_group128_ue8m0"]
    packed = filled(form, (4, 256))
    packed.parts[1][2, 1] = value
    with pytest.raises(ValueError, match=f"needs scales that are powers of two, found {value}"):
        layout_named("deep_gemm_ue8m0").pack(packed)


CODES = torch.tensor([[0, 1, 7, 8, 9, 10, 14, 15]])


def eight(columns: Tensor, zero: int = 3) -> Packed:
    """INT4 with zero points: one group whose codes are `columns`."""
    form = FORMATS["int4_asym_group32"]
    n, k = columns.shape
    codes = (columns[:, ::2] | columns[:, 1::2] << 4).to(torch.uint8)
    zeros = torch.full((n, 1), zero, dtype=torch.uint8)
    return Packed(form, torch.Size((n, k)), (codes, torch.ones(n, 1), zeros))


def test_worked_words_of_gptq_and_compressed_tensors() -> None:
    gptq = layout_named("gptq").pack(eight(CODES))
    assert gptq["qweight"].tolist() == [[-22444272]], "0xFEA98710"
    assert gptq["qweight"].view(torch.uint8).tolist() == [[0x10, 0x87, 0xA9, 0xFE]]
    assert gptq["qzeros"].tolist() == [[2]], "3 less one"
    assert layout_named("gptq_v2").pack(eight(CODES))["qzeros"].tolist() == [[3]]
    compressed = layout_named("compressed_ints").pack(eight(CODES))
    assert compressed["weight_packed"].tolist() == [[-22444272]]
    assert compressed["weight_zero_point"].tolist() == [[3]]
    assert compressed["weight_shape"].tolist() == [1, 8]


def test_worked_words_of_8_bits() -> None:
    codes = torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8)
    packed = Packed(FORMATS["int8_channel"], torch.Size((1, 4)), (codes, torch.ones(1, 1)))
    assert layout_named("compressed_ints").pack(packed)["weight_packed"].tolist() == [[0xFF807F00 - 2**32]]
    found = layout_named("gptq").pack(packed)
    assert found["qweight"].tolist() == [[0xFF807F00 - 2**32]]
    assert found["qzeros"].tolist() == [[0x7F7F7F7F]] and found["g_idx"].tolist() == [0] * 4


def test_worked_words_of_symmetric_gptq() -> None:
    packed = filled(FORMATS["int4_group32"], (16, 96))
    found = layout_named("gptq").pack(packed)
    assert found["qzeros"].tolist() == [[0x77777777] * 2] * 3
    assert found["g_idx"].tolist() == [column // 32 for column in range(96)]
    assert layout_named("gptq_v2").pack(packed)["qzeros"].unique().tolist() == [0x88888888 - 2**32]


def test_worked_words_of_awq() -> None:
    """The eight codes as eight columns of one row of the file."""
    turned = eight(CODES.mT.repeat(1, 2))
    found = layout_named("awq").pack(turned)
    assert found["qweight"].tolist() == [[-92149392], [-92149392]], "0xFA81E970"
    assert found["qzeros"].tolist() == [[0x33333333]]
    own = torch.tensor([[0, 3, 7, 12, 5, 9, 11, 15]]).mT.repeat(1, 2)
    assert layout_named("awq").pack(eight(own))["qweight"][0, 0] & 0xFFFFFFFF == 0xF9C3B570


@pytest.mark.parametrize(
    ("name", "zero", "allowed"), [("gptq", 0, "1..16"), ("gptq_v2", 16, "0..15"), ("awq", 16, "0..15")]
)
def test_zero_points_that_cannot_be_stored_are_named(name: str, zero: int, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{name} stores zero points {allowed}, found {zero}"):
        layout_named(name).pack(eight(CODES, zero))


def marlin_code(k: int, n: int) -> tuple[int, int]:
    """Word and nibble in a row of four tiles that the code at row k, column n of them must have.

    By the m16n8k16 fragment of the B operand: a lane holds, of column lane // 4, the rows 2 (lane % 4) and
    the next, and the same 8 below; of two halves of eight columns.
    """
    tile, column = n // 16, n % 16
    lane = column % 8 * 4 + k % 8 // 2
    place = column // 8 * 4 + k // 8 * 2 + k % 2  # of the eight codes of one lane and tile
    return lane * 4 + tile, (0, 2, 4, 6, 1, 3, 5, 7).index(place)


def test_worked_tiles_of_marlin() -> None:
    packed = filled(FORMATS["int4_group32"], (128, 64))
    codes = unpack_nibbles(packed.parts[0], 64)
    words = layout_named("marlin").pack(packed)["codes"]
    assert words.shape == (4, 256)
    for k in range(64):
        for n in range(128):
            word, nibble = marlin_code(k % 16, n % 64)
            found = int(words[k // 16, n // 64 * 128 + word]) >> 4 * nibble & 15
            assert found == codes[n, k]


def test_worked_scales_of_marlin() -> None:
    packed = filled(FORMATS["int4_group32"], (64, 96))
    found = layout_named("marlin").pack(packed)["scale"]
    assert_same_bytes(found, packed.parts[1].mT[:, [i + 8 * j for i in range(8) for j in range(8)]], "groups")
    one = filled(FORMATS["int4_channel"], (64, 96))
    columns = [2 * i + c + start for start in (0, 32) for i in range(4) for c in (0, 1, 8, 9, 16, 17, 24, 25)]
    assert_same_bytes(layout_named("marlin").pack(one)["scale"], one.parts[1].mT[:, columns], "one group")


def test_worked_scales_of_marlin_fp4() -> None:
    """Every scale from 0 to 448 as 5 bits of exponent and 3 of mantissa; columns 0, 2, 1, 3 of each four."""
    form = FORMATS["nvfp4"]
    packed = filled(form, (64, 128 * 16))
    bytes_ = torch.arange(127, dtype=torch.uint8).repeat(64 * 128 // 127 + 1)[: 64 * 128].view(64, 128)
    packed = Packed(form, packed.shape, (packed.parts[0], bytes_.view(torch.float8_e4m3fn), packed.parts[2]))
    found = layout_named("marlin_fp4").pack(packed)["scale"].tolist()
    values = packed.parts[1].float().tolist()
    for group in range(0, 128, 17):
        for place in range(64):
            own = place // 4 * 4 + (0, 2, 1, 3)[place % 4]
            value = values[own // 8 + own % 8 * 8][group] * 2**7
            byte = found[group][place]
            meant = 0.0 if byte == 0 else (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 15)
            assert meant == value
    mx = filled(FORMATS["mxfp4"], (64, 64))
    scale = layout_named("marlin_fp4").pack(mx)["scale"]
    assert scale[1, 1] == mx.parts[1][16, 1] and scale.dtype == torch.uint8


def test_scales_that_marlin_cannot_hold_are_named() -> None:
    packed = filled(FORMATS["nvfp4"], (64, 32))
    packed.parts[1][3, 1] = -2.0
    with pytest.raises(ValueError, match=r"marlin_fp4 of nvfp4 needs scales of 0 to 448, found -2\.0"):
        layout_named("marlin_fp4").pack(packed)


def test_the_table_is_keyed_by_name() -> None:
    assert all(layout.name == name for name, layout in LAYOUTS.items())
    with pytest.raises(ValueError, match="unknown layout 'vnni'; known: awq, block_major_k"):
        layout_named("vnni")
