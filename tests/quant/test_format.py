"""The nouns of quant: parts and their shapes, formats compared by name, packed tensors, schemes."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from moeserve.quant.format import WHOLE, Part, Scheme
from moeserve.quant.formats.floats import BF16, FLOATS, FP16, FP32
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.quant.static import there

SPANS = [
    (1, 1, (2, 130, 257)),
    (1, 2, (2, 130, 129)),
    (1, Fraction(4, 3), (2, 130, 193)),  # four 6-bit codes in three bytes
    (128, 128, (2, 2, 3)),
    (1, WHOLE, (2, 130, 1)),
    (WHOLE, WHOLE, (2, 1, 1)),
]


@pytest.mark.parametrize(("rows", "columns", "expected"), SPANS)
def test_a_part_covers_the_matrix(rows: int, columns: int | Fraction, expected: tuple[int, ...]) -> None:
    assert Part("scale", torch.float32, rows, columns).shape_of((2, 130, 257)) == expected


def test_bytes_counted_without_a_tensor() -> None:
    assert BF16.nbytes((3, 5, 7)) == 210
    assert FP8_GROUP.nbytes((4, 7168)) == 4 * (7168 + 56 * 4)
    assert FP8_BLOCK.nbytes((2, 200, 300)) == 2 * (200 * 300 + 2 * 3 * 4)


def test_only_formats_without_shared_scales_are_row_wise() -> None:
    assert all(form.row_wise for form in (*FLOATS.values(), FP8_GROUP))
    assert not FP8_BLOCK.row_wise
    assert (FP32.block, FP8_GROUP.block, FP8_BLOCK.block) == ((1, 1), (1, 128), (128, 128))


def test_formats_are_equal_by_name() -> None:
    assert replace(BF16, bits=15) == BF16
    assert hash(replace(BF16, bits=15)) == hash(BF16)
    assert BF16 != FP16
    assert BF16 != "bf16"
    assert repr(FP8_BLOCK) == "fp8_block128"


def test_schemes_have_one_name_where_both_sides_agree() -> None:
    assert str(Scheme(BF16, BF16)) == "bf16"
    assert str(Scheme(FP8_BLOCK, FP8_GROUP)) == "fp8_block128 x fp8_group128"
    assert Scheme(BF16, BF16) == Scheme(replace(BF16), BF16)
    assert Scheme(FP8_BLOCK, BF16) != Scheme(FP8_BLOCK, FP8_GROUP)


def test_a_tensor_already_in_the_format_is_not_copied() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    assert BF16.quantize(x).parts[0].data_ptr() == x.data_ptr()


def test_with_parts_takes_other_storage_of_another_length() -> None:
    packed = FP8_GROUP.quantize(torch.randn(4, 300))
    longer = packed.with_parts([part.repeat(3, 1) for part in packed.parts])
    assert longer.shape == torch.Size((12, 300))
    assert torch.equal(longer.dequantize()[8:], packed.dequantize())
    assert longer.nbytes == 3 * packed.nbytes
    assert longer.device == torch.device("cpu")


def test_overflow_of_plain_floats_is_what_the_dtype_does() -> None:
    assert FP16.quantize(torch.tensor([[7e4, -7e4]])).dequantize().tolist() == [[float("inf"), float("-inf")]]
    assert BF16.quantize(torch.tensor([[7e4]])).dequantize().tolist() == [[70144.0]]


def test_a_constant_is_copied_to_a_device_once() -> None:
    constant, device = torch.tensor(0.5), torch.device("meta")
    assert there(constant, constant.device) is constant
    copied = there(constant, device)
    assert copied.device == device and there(constant, device) is copied
    assert there(torch.tensor(0.5), device) is not copied
