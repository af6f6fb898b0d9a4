"""Laws of number formats: rounding twice changes nothing, wire rows travel alone, edges and zeros stay."""

import pytest
import torch
from made_experts import fresh_seed
from torch import Tensor

from moeserve.quant.format import WHOLE, Format, Packed
from moeserve.quant.formats import FORMATS, format_named

ALL = [pytest.param(form, id=name) for name, form in FORMATS.items()]
ROW_WISE = [pytest.param(form, id=name) for name, form in FORMATS.items() if form.row_wise]

SHAPES = [(1, 1), (3, 128), (129, 257), (256, 384), (2, 130, 140), (0, 128), (128, 0), (0, 5, 7), (2, 0, 128)]


def sample(shape: tuple[int, ...]) -> Tensor:
    """Values over twelve powers of two, both signs."""
    generator = torch.Generator().manual_seed(fresh_seed())
    return torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-6, 7, shape, generator=generator)
    )


def raw(tensor: Tensor) -> Tensor:
    """The bytes of each element, as integers that compare bit for bit."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(words[tensor.dtype.itemsize])


def assert_same(a: Packed, b: Packed) -> None:
    assert (a.format, a.shape) == (b.format, b.shape)
    for part, left, right in zip(a.format.parts, a.parts, b.parts, strict=True):
        assert torch.equal(raw(left), raw(right)), part.name


def spread_finest(form: Format, packed: Packed) -> Tensor:
    """The finest scale over each element, or ones."""
    if len(form.parts) == 1:
        return torch.ones(packed.shape)
    rows, columns = (
        size if span == WHOLE else int(span) for span, size in zip(form.block, packed.shape[-2:], strict=True)
    )
    scale = packed.parts[1].float()
    wide = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : packed.shape[-2], : packed.shape[-1]]


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_dtypes_and_bytes_are_those_declared(form: Format, shape: tuple[int, ...]) -> None:
    packed = form.quantize(sample(shape))
    assert [(part.dtype, part.shape) for part in form.empty(shape).parts] == [
        (t.dtype, t.shape) for t in packed.parts
    ]
    assert packed.dequantize().shape == torch.Size(shape)
    assert packed.dequantize().dtype == torch.float32
    assert packed.nbytes == form.nbytes(shape)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_rounded_stays_as_it_is(form: Format, shape: tuple[int, ...]) -> None:
    """Codes repeat bit for bit; a scale may move by the last bit of the division that makes it."""
    once = form.quantize(sample(shape))
    twice = form.quantize(once.dequantize())
    assert torch.equal(raw(once.parts[0]), raw(twice.parts[0]))
    for part, left, right in zip(form.parts[1:], once.parts[1:], twice.parts[1:], strict=True):
        torch.testing.assert_close(left.float(), right.float(), rtol=2**-22, atol=0.0, msg=part.name)


@pytest.mark.parametrize("form", ALL)
def test_the_error_is_at_most_half_a_step(form: Format) -> None:
    """Half the distance of two codes: a part of the value, or of the scale where codes are subnormal."""
    x = sample((257, 384))
    packed = form.quantize(x)
    step = torch.finfo(form.dtype).eps
    smallest = torch.finfo(form.dtype).smallest_normal * step * spread_finest(form, packed)
    error = (packed.dequantize() - x).abs()
    assert bool((error <= torch.maximum(x.abs() * step, smallest) / 2 * (1 + 1e-5)).all())


@pytest.mark.parametrize("form", ALL)
def test_matrices_of_a_stack_are_alone(form: Format) -> None:
    x = sample((3, 130, 140))
    stack = form.quantize(x)
    for i in range(3):
        assert_same(stack.rows(slice(i, i + 1)), form.quantize(x[i : i + 1]))
    picked = torch.tensor([2, 0])
    assert_same(stack.rows(picked), form.quantize(x[picked]))
    assert stack.rows(slice(0, 0)).shape == torch.Size((0, 130, 140))


@pytest.mark.parametrize("form", ROW_WISE)
def test_rows_travel_alone(form: Format) -> None:
    x = sample((37, 200))
    picked = torch.tensor([5, 0, 36, 5])
    assert_same(form.quantize(x).rows(picked), form.quantize(x[picked]))
    x[3] *= 1e4
    assert torch.equal(form.quantize(x).rows(slice(4, 37)).dequantize(), form.quantize(x[4:]).dequantize())


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if not form.row_wise], ids=repr)
def test_rows_that_share_a_scale_cannot_be_taken(form: Format) -> None:
    with pytest.raises(ValueError, match=f"rows of {form} share a scale"):
        form.quantize(sample((4, 128))).rows(slice(0, 1))


@pytest.mark.parametrize("form", ALL)
def test_zeros_are_zeros(form: Format) -> None:
    """All of a matrix, and one block beside others."""
    assert not form.quantize(torch.zeros(130, 260)).dequantize().any()
    x = sample((256, 256))
    x[:128, 128:] = 0
    packed = form.quantize(x)
    assert not packed.dequantize()[:128, 128:].any()
    assert all(bool(part.float().isfinite().all()) for part in packed.parts)


@pytest.mark.parametrize("form", ALL)
def test_nan_is_kept_and_stays_in_its_block(form: Format) -> None:
    x = sample((256, 256))
    x[3, 130] = float("nan")
    back = form.quantize(x).dequantize()
    assert back[3, 130].isnan()
    rows, columns = form.block
    elsewhere = torch.ones(256, 256, dtype=torch.bool)
    block = (
        slice(3 // rows * rows, 3 // rows * rows + rows),
        slice(130 // int(columns) * int(columns), None),
    )
    elsewhere[block] = False
    assert not back[elsewhere].isnan().any()


@pytest.mark.parametrize("form", ALL)
def test_an_edge_block_is_smaller_not_padded(form: Format) -> None:
    """The last rows and columns have a scale of their own, from their own values."""
    rows, columns = (1 if span == WHOLE else int(span) for span in form.block)
    x = sample((rows + 1, columns + 1))
    x[:rows, :columns] *= 1e3
    corner = form.quantize(x).dequantize()[rows:, columns:]
    assert torch.equal(corner, form.quantize(x[rows:, columns:]).dequantize())


@pytest.mark.parametrize("form", ALL)
def test_parts_of_another_dtype_or_shape_are_named(form: Format) -> None:
    packed = form.quantize(sample((256, 256)))
    for position, part in enumerate(form.parts):
        wrong = list(packed.parts)
        wrong[position] = torch.zeros(3, 3, dtype=torch.int64)
        with pytest.raises(
            ValueError, match=rf"{form} {part.name} of a \[256, 256\] tensor .* found torch.int64 \[3, 3\]"
        ):
            Packed(form, packed.shape, tuple(wrong))
    with pytest.raises(ValueError, match=f"{form} has parts .* {len(form.parts) + 1} were given"):
        Packed(form, packed.shape, (*packed.parts, packed.parts[0]))


def test_the_table_is_keyed_by_name() -> None:
    assert all(form.name == name and format_named(name) is form for name, form in FORMATS.items())
    with pytest.raises(ValueError, match="unknown number format 'fp7'; known: bf16, fp16"):
        format_named("fp7")
