"""NVFP4 against worked bytes: weights with their own outer scale, activations with a given one."""

import pytest
import torch

from moeserve.quant.format import Packed
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_E4M3, NVFP4_STATIC, global_scale, nvfp4_given

ENTRY = torch.zeros(16)
ENTRY[:8] = torch.tensor([0.1, 0.2, 0.3, 0.4, -0.5, 0.75, 1, 3])


def test_worked_weights() -> None:
    x = torch.zeros(2, 32)
    x[0, :16], x[1, 16] = ENTRY, -6
    packed = NVFP4.quantize(x)
    codes, scale, whole = packed.parts
    assert whole.tolist() == [[pytest.approx(0.002232143, rel=1e-6)]]
    assert scale.view(torch.uint8).tolist() == [[0x76, 0x38], [0x38, 0x7E]], "a block of zeros has scale 1"
    assert codes[0].numpy().tobytes().hex() == "10213a7400000000" + 16 * "0"
    assert packed.dequantize()[0, :8].tolist() == pytest.approx(
        [0, 0.25, 0.25, 0.5, -0.5, 0.75, 1, 3], rel=1e-6
    )


def test_worked_activations() -> None:
    form = nvfp4_given(torch.tensor(1 / 500))
    packed = form.quantize(torch.tensor([[1.7, 0.3, -0.6]]))
    assert packed.parts[1].view(torch.uint8).tolist() == [[0x71]]
    assert packed.parts[0].tolist() == [[0x27, 0x0C]]
    assert packed.dequantize()[0].tolist() == pytest.approx([1.728, 0.288, -0.576], rel=1e-6)


def test_matrices_of_a_stack_have_their_own_outer_scale() -> None:
    x = torch.ones(2, 4, 16)
    x[1] *= 7
    assert global_scale(x).flatten().tolist() == pytest.approx([1 / 2688, 7 / 2688], rel=1e-6)


def test_a_matrix_without_a_range_has_outer_scale_one() -> None:
    for x in (torch.zeros(2, 16), torch.tensor([[float("inf"), 1.0]]), torch.tensor([[float("nan"), 1.0]])):
        assert NVFP4.quantize(x).parts[2].item() == 1


def test_small_blocks_keep_the_smallest_scale() -> None:
    x = torch.full((1, 32), 1e-9)
    x[0, 0] = 1
    packed = NVFP4.quantize(x)
    assert packed.parts[1].view(torch.uint8).tolist() == [[0x7E, 0x01]]
    assert packed.dequantize()[0, 16:].abs().max() == 0


def test_activations_past_the_given_range_saturate_and_below_it_vanish() -> None:
    form = nvfp4_given(torch.tensor(1.0))
    assert form.quantize(torch.tensor([[1e6, -1e6]])).dequantize().tolist() == [[2688, -2688]]
    assert form.quantize(torch.tensor([[1e-4, -1e-4]])).dequantize().abs().tolist() == [[0, 0]]


def test_decoding_multiplies_all_scales() -> None:
    codes = torch.full((1, 8), 0x21, dtype=torch.uint8)
    scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    packed = Packed(NVFP4, torch.Size((1, 16)), (codes, scale, torch.tensor([[0.25]])))
    assert packed.dequantize()[0, :2].tolist() == [0.25, 0.5]


def test_products_are_read_with_four_bits_each_code_under_each_scale() -> None:
    codes = torch.arange(16).repeat_interleave(8).to(torch.uint8).view(8, 16) * 17
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # the last is 448
    x = torch.stack([codes.view(1, -1)] * 127)
    parts = (x, scale[:, None, None].expand(127, 1, 16).contiguous(), torch.full((127, 1, 1), 0.5))
    exact, found = (
        Packed(form, torch.Size((127, 1, 256)), parts).dequantize() for form in (NVFP4, NVFP4_E4M3)
    )
    fraction, exponent = torch.frexp(exact.double())
    assert torch.equal(found.double(), torch.ldexp((fraction * 16).round() / 16, exponent))
    assert not torch.equal(found, exact) and NVFP4_E4M3 != NVFP4


def test_what_nvfp4_wrote_is_written_the_same_to_be_read_in_e4m3() -> None:
    x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(7))
    wanted, stored = NVFP4_E4M3.quantize(x), NVFP4.quantize(x)
    again = NVFP4_E4M3.quantize(stored.dequantize())
    assert torch.equal(again.dequantize(), wanted.dequantize())
    loss = float((wanted.dequantize() - stored.dequantize()).norm() / stored.dequantize().norm())
    assert 0.02 < loss < 0.0225


def test_a_static_format_needs_its_constant() -> None:
    assert NVFP4_STATIC.given is not None and NVFP4_STATIC.row_wise and not NVFP4.row_wise
    assert NVFP4_STATIC.given(torch.tensor([0.1])) == NVFP4_STATIC, "bound or not, one format"
    with pytest.raises(ValueError, match=r"nvfp4_static has no scale of its own; bind .*nvfp4_static.given"):
        NVFP4_STATIC.quantize(torch.ones(1, 16))
