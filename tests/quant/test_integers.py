"""INT8, INT4 and W4A8-FP8 against worked examples: rules of rounding, zero points, order, split scales."""

import pytest
import torch

from moeserve.quant.act_order import in_order
from moeserve.quant.bits import unpack_nibbles
from moeserve.quant.format import WHOLE, Format, Packed
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.int4 import INT4, INT4_ACT_ORDER, INT4_ASYMMETRIC, INT4_ASYMMETRIC_ACT_ORDER, int4
from moeserve.quant.formats.int4_fp8 import INT4_FP8, split, split_scales
from moeserve.quant.formats.int8 import (
    INT8_CHANNEL,
    INT8_GROUP128,
    INT8_STATIC,
    INT8_TOKEN,
    INT8_TOKEN_ASYMMETRIC,
    half_away,
    int8_channel,
    int8_given,
    int8_group,
    int8_token,
)
from moeserve.quant.formats.int8_grouped import (
    INT8_ACT_ORDER,
    INT8_ASYMMETRIC,
    INT8_ASYMMETRIC_ACT_ORDER,
    in_act_order,
    int8_asymmetric,
)


def test_int8_per_token() -> None:
    packed = INT8_TOKEN.quantize(torch.tensor([[0.5, -1, 0.25, 1.27]]))
    assert packed.parts[1].item() == pytest.approx(0.01, rel=1e-6)
    assert packed.parts[0].view(torch.uint8).tolist() == [[0x32, 0x9C, 0x19, 0x7F]]


def test_int8_rules_differ_at_halves() -> None:
    x = torch.tensor([[127.0, 2.5, -2.5, 3.5, -0.5, 2.6]])
    assert INT8_TOKEN.quantize(x).parts[0].tolist() == [[127, 3, -3, 4, -1, 3]]
    assert int8_token("half_even").quantize(x).parts[0].tolist() == [[127, 2, -2, 4, 0, 3]]
    assert int8_group(128, "truncate").quantize(x).parts[0].tolist() == [[127, 2, -2, 3, 0, 2]]
    assert int8_token("half_even") == INT8_TOKEN
    assert half_away(torch.tensor([0.49999997, 8388609.0])).tolist() == [0.0, 8388609.0]


def test_int8_channels() -> None:
    packed = INT8_CHANNEL.quantize(torch.tensor([[-2.54, 0.03, 1, 2]]))
    assert packed.parts[1].item() == pytest.approx(0.02, rel=1e-6)
    assert packed.parts[0].tolist() == [[-127, 2, 50, 100]]
    wide = int8_channel(span="wide").quantize(torch.tensor([[-1.275, -0.01, 0, 1.27]]))
    assert wide.parts[1].item() == pytest.approx(0.01, rel=1e-6)
    assert wide.parts[0].tolist() == [[-128, -1, 0, 127]]


def test_int8_zero_rows_and_nan() -> None:
    assert INT8_TOKEN.quantize(torch.zeros(1, 4)).parts[1].item() == pytest.approx(1e-10 / 127, rel=1e-5)
    packed = INT8_GROUP128.quantize(torch.tensor([[float("nan"), 1.0]]))
    assert packed.parts[0].tolist() == [[0, 0]] and packed.parts[1].isnan().all()


def test_int8_with_zero_points() -> None:
    """scale (max - min) / 255, zero round(-128 - min / scale); the range need not hold 0."""
    rows = torch.tensor([[-1.28, 0, 0.64, 1.27], [10.0, 10.5, 11.0, 12.55]])
    packed = INT8_TOKEN_ASYMMETRIC.quantize(rows)
    codes, scale, zero = packed.parts
    assert scale.flatten().tolist() == pytest.approx([0.01, 0.01], rel=1e-5)
    assert zero.flatten().tolist() == [0, -128 - 1000]
    assert codes.tolist() == [[-128, 0, 64, 127], [-128, -78, -28, 127]]
    assert torch.equal(packed.dequantize(), (codes.float() - zero) * scale)


def test_int8_weights_with_zero_points_and_order() -> None:
    codes = torch.tensor([[-128, 127, 0, 5]], dtype=torch.int8)
    scale, zero = torch.tensor([[0.5, 0.25]]), torch.tensor([[-3, 7]], dtype=torch.int8)
    form = int8_asymmetric(2)
    assert Packed(form, codes.shape, (codes, scale, zero)).dequantize().tolist() == [[-62.5, 65, -1.75, -0.5]]
    order = torch.tensor([[1, 0, 0, 1]], dtype=torch.int32)
    held = Packed(in_act_order(form, 2), codes.shape, (codes, scale, zero, order))
    assert held.dequantize().tolist() == [[-33.75, 65, 1.5, -0.5]]
    held = Packed(in_act_order(int8_group(2), 2), codes.shape, (codes, scale, order))
    assert held.dequantize().tolist() == [[-32, 63.5, 0, 1.25]]
    whole = INT8_ASYMMETRIC[WHOLE].quantize(torch.tensor([[-1.0, 4.1]]))
    assert whole.parts[0].tolist() == [[-128, 127]] and whole.parts[2].tolist() == [[-78]]
    with pytest.raises(ValueError, match="group=0 must be positive"):
        int8_asymmetric(0)


@pytest.mark.parametrize("value", [5.0, -3e-7, 1e30, 0.0])
def test_a_row_of_one_value_is_kept(value: float) -> None:
    packed = INT8_TOKEN_ASYMMETRIC.quantize(torch.full((1, 3), value))
    assert packed.dequantize().tolist()[0] == pytest.approx([value] * 3, rel=1e-5, abs=1e-11)


def test_int8_static() -> None:
    packed = int8_given(torch.tensor(0.01)).quantize(torch.tensor([[0.025, -9.0, 9.0, float("nan")]]))
    assert packed.parts[0].tolist() == [[2, -128, 127, 0]] and len(packed.parts) == 1
    assert packed.dequantize()[0].tolist() == pytest.approx([0.02, -1.28, 1.27, 0], rel=1e-6)
    with pytest.raises(ValueError, match="int8_static has no scale of its own"):
        INT8_STATIC.quantize(torch.ones(1, 1))


def test_unknown_rules_are_named() -> None:
    with pytest.raises(ValueError, match="unknown rule 'up' of int8_token; known: half_even, half_away"):
        int8_token("up")
    with pytest.raises(ValueError, match="group=0 must be positive"):
        int8_group(0)
    with pytest.raises(ValueError, match="group=-2 must be positive, or -1"):
        int4(-2)
    with pytest.raises(ValueError, match="unknown rule span='narrow'"):
        int4(128, span="narrow")
    with pytest.raises(ValueError, match="activation order needs groups"):
        int4(WHOLE, act_order=True)


SYMMETRIC = torch.tensor([[-0.8, -0.7, -0.1, 0, 0.1, 0.2, 0.6, 0.7]])
ASYMMETRIC = torch.tensor([[-0.3, 0, 0.45, 0.9, 0.15, 0.6, 0.75, 1.2]])


@pytest.mark.parametrize("group", [32, 64, 128, WHOLE])
def test_int4_symmetric(group: int) -> None:
    packed = int4(group, span="wide").quantize(SYMMETRIC)
    assert packed.parts[1].item() == pytest.approx(0.8 / 7.5, rel=1e-6)
    assert unpack_nibbles(packed.parts[0], 8).tolist() == [[0, 1, 7, 8, 9, 10, 14, 15]]
    assert packed.parts[0].view(torch.int32).item() == -22444272
    assert packed.format == INT4[group]
    full = INT4[group].quantize(SYMMETRIC)
    assert full.parts[1].item() == pytest.approx(0.8 / 7, rel=1e-6)
    assert full.dequantize().min().item() == pytest.approx(-0.8, rel=1e-6)


@pytest.mark.parametrize("group", [32, 64, 128, WHOLE])
def test_int4_with_zero_points(group: int) -> None:
    packed = INT4_ASYMMETRIC[group].quantize(ASYMMETRIC)
    codes, scale, zero = packed.parts
    assert scale.item() == pytest.approx(0.1, rel=1e-6) and zero.item() == 3
    assert unpack_nibbles(codes, 8).tolist() == [[0, 3, 7, 12, 5, 9, 11, 15]]
    assert codes.view(torch.int32).item() & 0xFFFFFFFF == 0xFB95C730
    expected = (torch.tensor([[0, 3, 7, 12, 5, 9, 11, 15.0]]) - 3) * scale
    assert torch.equal(packed.dequantize(), expected)


def test_zero_points_may_lie_past_the_codes() -> None:
    """GPTQ v1 stores zero - 1, and 15 there is 16."""
    form = INT4_ASYMMETRIC[32]
    parts = (torch.tensor([[0xF0]], dtype=torch.uint8), torch.tensor([[0.5]]), torch.tensor([[16]]).byte())
    assert Packed(form, torch.Size((1, 2)), parts).dequantize().tolist() == [[-8, -0.5]]


def test_activation_order_gives_each_column_its_group() -> None:
    form = int4(4, act_order=True)
    order = torch.tensor([[1, 0, 0, 1, 1, 0, 1, 0]], dtype=torch.int32)
    codes = torch.full((2, 4), 0x99, dtype=torch.uint8)
    scale = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    packed = Packed(form, torch.Size((2, 8)), (codes, scale, order))
    assert packed.dequantize().tolist() == [[10, 1, 1, 10, 10, 1, 10, 1], [20, 2, 2, 20, 20, 2, 20, 2]]
    plain, places = in_order(packed)
    assert plain.format == int4(4) and places.tolist() == [1, 2, 5, 7, 0, 3, 4, 6]
    assert torch.equal(plain.dequantize(), packed.dequantize()[:, places])


ORDERED = (INT4_ACT_ORDER, INT4_ASYMMETRIC_ACT_ORDER, INT8_ACT_ORDER, INT8_ASYMMETRIC_ACT_ORDER)


@pytest.mark.parametrize("form", [forms[32] for forms in ORDERED], ids=repr)
def test_sorting_columns_changes_no_value(form: Format) -> None:
    random = torch.Generator().manual_seed(0)
    packed = form.quantize(torch.randn(3, 5, 96, generator=random))
    order = torch.stack([torch.randperm(96, generator=random) // 32 for _ in range(3)])[:, None].int()
    shuffled = Packed(form, packed.shape, (*packed.parts[:-1], order))
    plain, places = in_order(shuffled)
    assert plain.format in FORMATS.values() and len(plain.parts) == len(shuffled.parts) - 1
    index = places[:, None].expand(3, 5, 96)
    assert torch.equal(plain.dequantize(), shuffled.dequantize().gather(-1, index))


def test_groups_of_other_sizes_cannot_be_sorted() -> None:
    packed = INT4_ACT_ORDER[32].quantize(torch.ones(1, 64))
    uneven = Packed(packed.format, packed.shape, (*packed.parts[:-1], torch.zeros(1, 64, dtype=torch.int32)))
    with pytest.raises(ValueError, match="groups of int4_group32_act_order are not 32 columns each"):
        in_order(uneven)


def test_split_scales() -> None:
    fine, channel = split_scales(torch.tensor([[0.02, 0.04, 0.01, 0.03]]))
    assert fine.view(torch.uint8).tolist() == [[0x5E, 0x66, 0x56, 0x62]]
    assert fine.float().tolist() == [[28, 56, 14, 40]], "336 lies halfway and goes to the even 320"
    assert channel.item() == pytest.approx(7.142857e-4, rel=1e-6)


def test_w4a8_weights() -> None:
    codes = torch.full((1, 256), 0x55, dtype=torch.uint8)  # 5 = -3 + 8
    scale = torch.tensor([[0.02, 0.04, 0.01, 0.03]])
    packed = split(Packed(INT4[128], torch.Size((1, 512)), (codes, scale)))
    assert packed.format == INT4_FP8
    assert packed.parts[0].unique().tolist() == [0xDD], "-3 in two's complement nibbles"
    assert packed.dequantize()[0, 0].item() == pytest.approx(-0.06, rel=1e-6)
    assert packed.dequantize()[0, 511].item() == pytest.approx(-3 * 320 / 448 * 0.04, rel=1e-6)
    with pytest.raises(ValueError, match="W4A8-FP8 is made of int4_group128, found int4_group32"):
        split(INT4[32].quantize(torch.ones(1, 32)))
