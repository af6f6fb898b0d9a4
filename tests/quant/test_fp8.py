"""FP8 against worked examples: scales, bytes, saturation, and every E4M3 code."""

import pytest
import torch

from moeserve.quant.format import Format, Packed
from moeserve.quant.formats.fp8 import (
    E4M3,
    E4M3_MAX,
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_GROUP_UE8M0,
    FP8_STATIC,
    FP8_TENSOR,
    FP8_TOKEN,
    fp8_given,
    one_scale,
    to_fnuz,
)

# amax, a value of the block -> the block's scale, the value's byte and its decoded code
GROUPS = [(2.0, 2.0, 0.00446429, 0x7E, 448), (2.0, 0.3, 0.00446429, 0x68, 64)]
BLOCKS = [(4.48, 1.0, 0.01, 0x6C, 96), (0.448, -0.3, 0.001, 0xF9, -288)]

BYTES = {
    1.0: 0x38,
    448.0: 0x7E,
    240.0: 0x77,
    2**-6: 0x08,
    2**-9: 0x01,
    2**-10: 0x00,
    -0.0: 0x80,
    -448.0: 0xFE,
}
"""E4M3 bytes to remember; 2^-10 lies between 0 and 2^-9 and goes to the even code."""


def byte_at(packed: Packed, row: int, column: int) -> int:
    return int(packed.parts[0].view(torch.uint8)[row, column])


@pytest.mark.parametrize(("amax", "value", "scale", "byte", "code"), GROUPS)
def test_activation_groups(amax: float, value: float, scale: float, byte: int, code: int) -> None:
    x = torch.zeros(2, 256)
    x[1, 128], x[1, 200] = amax, value
    packed = FP8_GROUP.quantize(x)
    assert packed.parts[1].shape == (2, 2)
    assert packed.parts[1][1, 1].item() == pytest.approx(scale, rel=1e-5, abs=0)
    assert byte_at(packed, 1, 200) == byte
    assert packed.dequantize()[1, 200].item() == pytest.approx(code * amax / E4M3_MAX, rel=1e-6, abs=0)


@pytest.mark.parametrize(("amax", "value", "scale", "byte", "code"), BLOCKS)
def test_weight_blocks(amax: float, value: float, scale: float, byte: int, code: int) -> None:
    """100 lies halfway between the codes 96 and 104 and goes to the even one."""
    x = torch.zeros(256, 256)
    x[130, 5], x[255, 127] = amax, value
    packed = FP8_BLOCK.quantize(x)
    assert packed.parts[1].shape == (2, 2)
    assert packed.parts[1][1, 0].item() == pytest.approx(scale, rel=1e-5, abs=0)
    assert byte_at(packed, 255, 127) == byte
    assert packed.dequantize()[255, 127].item() == pytest.approx(code * scale, rel=1e-5, abs=0)


@pytest.mark.parametrize(("value", "byte"), BYTES.items())
def test_bytes_of_a_group_whose_scale_is_one(value: float, byte: int) -> None:
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1] = E4M3_MAX, value
    packed = FP8_GROUP.quantize(x)
    assert packed.parts[1].item() == 1.0
    assert byte_at(packed, 0, 1) == byte


def e4m3(byte: int) -> float:
    """The value of an E4M3 byte, by definition: bias 7, 3 mantissa bits, no infinity, NaN at 7F and FF."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = mantissa * 2**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if byte & 0x80 else magnitude


def test_every_code_decodes_by_the_definition_and_encodes_back() -> None:
    codes = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    values = torch.tensor([e4m3(byte) for byte in codes])
    both_reach_448 = torch.cat((values, values.new_zeros(2)))[None]  # two groups
    packed = FP8_GROUP.quantize(both_reach_448)
    assert packed.parts[1].tolist() == [[1.0, 1.0]]
    assert packed.parts[0].view(torch.uint8)[0, : len(codes)].tolist() == codes
    assert packed.dequantize()[0, : len(codes)].tolist() == values.tolist()


def test_rounding_is_to_nearest_even() -> None:
    """The middle of two neighbours goes to the even byte, anything off it to the nearer one."""
    lower = list(range(0x7E))
    low = torch.tensor([e4m3(byte) for byte in lower])
    high = torch.tensor([e4m3(byte + 1) for byte in lower])
    middle = (low + high) / 2
    full = torch.tensor([E4M3_MAX, 0.0])

    def bytes_of(x: torch.Tensor) -> list[int]:
        codes = FP8_GROUP.quantize(torch.cat((x, full))[None]).parts[0]
        return codes.view(torch.uint8)[0, : len(lower)].tolist()  # type: ignore[no-any-return]

    assert bytes_of(middle) == [byte + byte % 2 for byte in lower]
    assert bytes_of(middle * (1 - 1e-6)) == lower
    assert bytes_of(middle * (1 + 1e-6)) == [byte + 1 for byte in lower]


def test_values_that_the_scale_puts_past_the_largest_code_saturate() -> None:
    """amax / (amax / 448) may round to just above 448, and the raw cast of some libraries then gives NaN."""
    x = torch.linspace(1e-3, 1e3, 128 * 200).view(200, 128)
    packed = FP8_GROUP.quantize(x)
    assert not packed.dequantize().isnan().any()
    assert int(packed.parts[0].view(torch.uint8).max()) == 0x7E


@pytest.mark.parametrize(("form", "floor"), [(FP8_GROUP, 1e-10), (FP8_BLOCK, 1e-12)], ids=repr)
def test_a_zero_block_takes_the_floor_as_its_scale(form: Format, floor: float) -> None:
    packed = form.quantize(torch.zeros(1, 128))
    assert packed.parts[1].item() == pytest.approx(floor / E4M3_MAX, rel=1e-6, abs=0)
    assert not packed.parts[0].view(torch.uint8).any()


def test_a_stored_inverse_scale_multiplies() -> None:
    """DeepSeek's `weight_scale_inv`: value = code x scale."""
    codes = torch.full((128, 128), 2.0).to(torch.float8_e4m3fn)
    packed = Packed(FP8_BLOCK, torch.Size((128, 128)), (codes, torch.tensor([[0.25]])))
    assert packed.dequantize().unique().tolist() == [0.5]


@pytest.mark.parametrize(
    ("form", "x", "scale", "codes"),
    [
        (FP8_TENSOR, [[0.1, -0.5, 1, 3]], [[3 / 448]], [[0x57, 0xE9, 0x71, 0x7E]]),
        (FP8_TOKEN, [[0.5, -2], [4, 1]], [[2 / 448], [4 / 448]], [[0x6E, 0xFE], [0x7E, 0x6E]]),
        (FP8_CHANNEL, [[0.5, -2], [4, 1]], [[2 / 448], [4 / 448]], [[0x6E, 0xFE], [0x7E, 0x6E]]),
        (FP8_GROUP_UE8M0, [[2.0, 0.3]], [[2**-7]], [[0x78, 0x62]]),
        (FP8_BLOCK_UE8M0, [[2.0, 0.3]], [[2**-7]], [[0x78, 0x62]]),
    ],
    ids=str,
)
def test_worked_scales_and_bytes(
    form: Format, x: list[list[float]], scale: list[list[float]], codes: list[list[int]]
) -> None:
    packed = form.quantize(torch.tensor(x))
    assert packed.parts[1].flatten().tolist() == pytest.approx([v for row in scale for v in row], rel=1e-6)
    assert packed.parts[0].view(torch.uint8).tolist() == codes


def test_a_static_scale_saturates_and_does_not_travel() -> None:
    form = fp8_given(torch.tensor(0.01))
    packed = form.quantize(torch.tensor([[0.1, -0.5, 1, 6]]))
    assert len(packed.parts) == 1 and form.row_wise
    assert packed.parts[0].view(torch.uint8).tolist() == [[0x52, 0xE4, 0x6C, 0x7E]]
    assert packed.dequantize()[0].tolist() == pytest.approx([0.1, -0.48, 0.96, 4.48], rel=1e-6)
    with pytest.raises(ValueError, match="fp8_static has no scale of its own"):
        FP8_STATIC.quantize(torch.ones(1, 1))


@pytest.mark.parametrize("form", [FP8_TENSOR, FP8_TOKEN, FP8_CHANNEL], ids=repr)
def test_zeros_take_the_smallest_scale(form: Format) -> None:
    packed = form.quantize(torch.zeros(2, 3))
    assert packed.parts[1].unique().tolist() == [pytest.approx(1 / (448 * 512), rel=1e-6)]


def test_the_first_half_takes_the_larger_scale_of_both() -> None:
    def half(codes: list[int], scale: float) -> Packed:
        stored = torch.tensor([codes], dtype=torch.uint8).view(torch.float8_e4m3fn)
        return Packed(FP8_TENSOR, torch.Size((1, 3)), (stored, torch.tensor([[scale]])))

    gate, up = one_scale(half([0x7E, 0xF6, 0x6C], 0.01), half([0x7E, 0x38, 0x00], 0.02))
    assert gate.parts[0].view(torch.uint8).tolist() == [[0x76, 0xEE, 0x64]]
    assert up.parts[0].view(torch.uint8).tolist() == [[0x7E, 0x38, 0x00]]
    assert gate.parts[1].item() == up.parts[1].item() == pytest.approx(0.02)


def test_fnuz_codes_have_half_the_value_and_twice_the_scale() -> None:
    codes = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    stored = torch.tensor([codes], dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = Packed(FP8_TENSOR, torch.Size((1, len(codes))), (stored, torch.tensor([[0.25]])))
    other = to_fnuz(packed)
    assert torch.equal(other.dequantize(), packed.dequantize())
    assert other.parts[1].item() == 0.5
    assert other.parts[0].view(torch.uint8)[0, 0x7F].item() == 0, "-0 is NaN there"
    nan = Packed(FP8_TENSOR, torch.Size((1, 1)), (torch.tensor([[torch.nan]]).to(E4M3), torch.ones(1, 1)))
    with pytest.raises(ValueError, match=r"fp8_tensor codes hold NaN .* E4M3FNUZ would read as 240"):
        to_fnuz(nan)


@pytest.mark.parametrize("form", [FP8_GROUP_UE8M0, FP8_BLOCK_UE8M0], ids=repr)
def test_powers_of_two_never_let_a_value_saturate(form: Format) -> None:
    edges = torch.tensor([448 * 2.0**e for e in range(-20, 20)])
    for x in (edges, torch.nextafter(edges, edges * 2), torch.nextafter(edges, edges * 0)):
        for value in x.tolist():
            scale = form.quantize(torch.tensor([[value]])).parts[1].item()
            assert scale / 2 < value / 448 <= scale and scale == 2.0 ** round(
                torch.tensor(scale).log2().item()
            )
