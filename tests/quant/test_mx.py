"""OCP MX against worked bytes, the rules of exponents where they differ, and the ends of E8M0."""

import pytest
import torch

from moeserve.quant.format import Format, Packed
from moeserve.quant.formats import format_named
from moeserve.quant.formats.mx import (
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    MXFP8_E5M2,
    MXINT8,
    mxfp4,
    mxfp6_e2m3,
    mxfp6_e3m2,
    mxfp8,
    mxfp8_e5m2,
    mxint8,
)

ALL = [MXFP4, MXFP6_E3M2, MXFP6_E2M3, MXFP8, MXFP8_E5M2, MXINT8]

BLOCK = torch.zeros(1, 32)
BLOCK[0, :8] = torch.tensor([0.1, 0.2, 0.3, 0.4, -0.5, 0.75, 1, 3])

WORKED = [
    (mxfp4("floor"), 0x7E, "10213a74"),
    (mxfp4("even"), 0x7E, "10213a74"),
    (mxfp6_e3m2("floor"), 0x7C, "8a1349b48579"),
    (mxfp6_e3m2("even"), 0x7C, "8a1349b48579"),
    (mxfp6_e2m3("even"), 0x7E, "c25018280371"),
    (mxfp8("floor"), 0x78, "555d6265e86c707c"),
    (mxfp8("ceil"), 0x78, "555d6265e86c707c"),
]


@pytest.mark.parametrize(("form", "scale", "codes"), WORKED, ids=str)
def test_worked_blocks(form: Format, scale: int, codes: str) -> None:
    packed = form.quantize(BLOCK)
    assert packed.parts[1].tolist() == [[scale]]
    assert packed.parts[0].view(torch.uint8)[0].numpy().tobytes().hex().startswith(codes)
    assert not packed.parts[0].view(torch.uint8)[0, len(codes) // 2 :].any()


def test_what_the_worked_block_decodes_to() -> None:
    assert MXFP4.quantize(BLOCK).dequantize()[0, :8].tolist() == [0, 0.25, 0.25, 0.5, -0.5, 0.75, 1, 3]
    codes = [13, 26, 40, 52, -64, 96, 128, 384]
    assert MXFP8.quantize(BLOCK).dequantize()[0, :8].tolist() == [code / 128 for code in codes]


EXPONENTS = [  # rule, largest magnitude, exponent
    (mxfp4, "floor", 3.4, -1),
    (mxfp4, "even", 3.4, -1),
    (mxfp4, "ceil", 3.4, 0),
    (mxfp4, "ceil", 3.0, -1),
    (mxfp4, "floor", 3.5, -1),
    (mxfp4, "floor", 3.6, -1),
    (mxfp4, "even", 3.5, 0),
    (mxfp4, "even", 3.6, 0),
    (mxfp8, "floor", 3.6, -7),
    (mxfp8, "ceil", 3.6, -6),
    (mxfp8, "ceil", 3.5, -7),
    (mxfp8, "even_e2m1", 3.5, -6),
    (mxfp8, "floor", 3.5, -7),
]


@pytest.mark.parametrize(("make", "rule", "amax", "exponent"), EXPONENTS)
def test_where_the_rules_differ(make: object, rule: str, amax: float, exponent: int) -> None:
    form = make(rule)  # type: ignore[operator]
    packed = form.quantize(torch.tensor([[amax, -amax / 9]]))
    assert packed.parts[1].item() - 127 == exponent
    assert form == format_named(form.name), "a rule of writing makes no other format"


def test_saturation_is_what_floor_costs() -> None:
    x = torch.tensor([[3.6]])
    assert mxfp4("floor").quantize(x).dequantize().item() == 3
    assert mxfp4("even").quantize(x).dequantize().item() == 4
    assert mxfp8("floor").quantize(x).dequantize().item() == 3.5
    assert mxfp8("ceil").quantize(x).dequantize().item() == 224 / 64


@pytest.mark.parametrize(
    "make", [mxfp4, mxfp6_e3m2, mxfp6_e2m3, mxfp8, mxfp8_e5m2, mxint8], ids=lambda make: make.__name__
)
def test_ceil_never_saturates_and_is_the_smallest_that_does_not(make: object) -> None:
    form = make("ceil")  # type: ignore[operator]
    largest = {"mxfp4": 6, "mxfp6_e3m2": 28, "mxfp6_e2m3": 7.5, "mxfp8": 448}
    largest |= {"mxfp8_e5m2": 57344, "mxint8": 127 / 64}
    largest = largest[form.name]
    edges = torch.tensor([largest * 2.0**e for e in range(-40, 40)])
    x = torch.cat((edges, torch.nextafter(edges, edges * 2), torch.nextafter(edges, edges * 0)))[:, None]
    scale = torch.exp2(form.quantize(x).parts[1].float() - 127)
    assert bool((x <= largest * scale).all())
    assert bool((x > largest * scale / 2).all())


@pytest.mark.parametrize("form", ALL, ids=repr)
def test_a_block_of_zeros_has_byte_zero(form: Format) -> None:
    packed = form.quantize(torch.zeros(2, 64))
    assert not packed.parts[0].view(torch.uint8).any()
    assert not packed.parts[1].any()


@pytest.mark.parametrize("form", ALL, ids=repr)
def test_the_ends_of_the_scale(form: Format) -> None:
    """The smallest float32 values vanish or stay small, the largest stay finite, NaN is the byte 0xFF."""
    tiny = form.quantize(torch.full((1, 32), 2.0**-149))
    assert tiny.parts[1].item() == 0
    assert 0 <= tiny.dequantize().max() <= 2.0**-127
    huge = form.quantize(torch.full((1, 32), 2.0**127))
    assert huge.parts[1].item() <= 254
    assert huge.dequantize().unique().tolist() == [2.0**127]
    nan = form.quantize(torch.tensor([[1.0, float("nan")]]))
    assert nan.parts[1].item() == 255
    assert bool(nan.dequantize().isnan().all())


def test_byte_zero_scales_by_the_smallest_power() -> None:
    codes = torch.full((1, 16), 0x77, dtype=torch.uint8)
    packed = Packed(MXFP4, torch.Size((1, 32)), (codes, torch.zeros(1, 1, dtype=torch.uint8)))
    assert packed.dequantize().unique().tolist() == [6 * 2.0**-127]


@pytest.mark.parametrize("columns", [1, 2, 3, 33, 50])
def test_six_bit_rows_of_any_length(columns: int) -> None:
    x = torch.linspace(-7, 7, 3 * columns).view(3, columns)
    packed = MXFP6_E2M3.quantize(x)
    assert packed.parts[0].shape == (3, -(-3 * columns // 4))
    whole = MXFP6_E2M3.quantize(torch.nn.functional.pad(x, (0, -columns % 32))).dequantize()
    assert torch.equal(packed.dequantize(), whole[:, :columns])


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="unknown exponent rule 'nearest' of mxfp4; known: floor, even"):
        mxfp4("nearest")
