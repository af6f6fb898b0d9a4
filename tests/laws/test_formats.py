"""Laws of number formats: rounding twice changes nothing, wire rows travel alone, edges and zeros stay."""

import pytest
import torch
from made_experts import fresh_seed
from torch import Tensor
from worked_formats import worked

from moeserve.quant.bits import unpack_nibbles
from moeserve.quant.format import WHOLE, Format, Packed
from moeserve.quant.formats import FORMATS, STATIC, format_named

BOUND = {name: form.given(torch.tensor(0.5)) for name, form in STATIC.items() if form.given is not None}
"""Static formats, with a constant that puts the sample into their range."""

EVERY = FORMATS | BOUND
ALL = [pytest.param(form, id=name) for name, form in EVERY.items()]
ROW_WISE = [pytest.param(form, id=name) for name, form in EVERY.items() if form.row_wise]

WRITTEN_FINER = {"nvfp4_e4m3"}
"""Formats that keep what another one writes, and read it rounded: what was read is written otherwise."""

SHAPES = [(1, 1), (3, 128), (129, 257), (256, 384), (2, 130, 140), (0, 128), (128, 0), (0, 5, 7), (2, 0, 128)]


pytestmark = pytest.mark.usefixtures("one_thread")
"""The tensors are small, and threads that wait for each other cost more than they save."""


def sample(shape: tuple[int, ...]) -> Tensor:
    """Values of magnitude 2^-6 to 2^6, both signs."""
    generator = torch.Generator().manual_seed(fresh_seed())
    magnitude = torch.exp2(torch.rand(shape, generator=generator) * 12 - 6)
    return magnitude * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)


def raw(tensor: Tensor) -> Tensor:
    """The bytes of each element, as integers that compare bit for bit."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(words[tensor.dtype.itemsize])


def assert_same(a: Packed, b: Packed) -> None:
    assert (a.format, a.shape) == (b.format, b.shape)
    for part, left, right in zip(a.format.parts, a.parts, b.parts, strict=True):
        assert torch.equal(raw(left), raw(right)), part.name


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_dtypes_and_bytes_are_those_declared(form: Format, shape: tuple[int, ...]) -> None:
    packed = form.quantize(sample(shape))
    assert [(part.dtype, part.shape) for part in form.empty(shape).parts] == [
        (t.dtype, t.shape) for t in packed.parts
    ]
    assert all(t.contiguous().view(torch.uint8).numel() == t.nbytes for t in packed.parts)
    assert packed.dequantize().shape == torch.Size(shape)
    assert packed.dequantize().dtype == torch.float32
    assert packed.nbytes == form.nbytes(shape)


def settled(form: Format, x: Tensor) -> Tensor:
    """`x` without rows that a zero point leaves one code short of the range: theirs is another scale then.

    It takes a smallest value halfway between two codes, to a part in 10^5.
    """
    if all(part.name != "zero" for part in form.parts) or x.numel() == 0:
        return x
    group = x.shape[-1] if form.block[1] == WHOLE else int(form.block[1])
    codes = form.quantize(x).parts[0]
    groups = (unpack_nibbles(codes, x.shape[-1]) if form.bits == 4 else codes).int().split(group, -1)
    ranges = [own.amax(-1, keepdim=True) - own.amin(-1, keepdim=True) for own in groups]
    short = torch.stack(ranges) == 2**form.bits - 2
    return torch.where(short.any(0), 1.0, x)


@pytest.mark.parametrize("form", [each for each in ALL if each.id not in WRITTEN_FINER])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_rounded_stays_as_it_is(form: Format, shape: tuple[int, ...]) -> None:
    """Codes repeat bit for bit; a scale may move by the last bit of the division that makes it."""
    once = form.quantize(settled(form, sample(shape)))
    twice = form.quantize(once.dequantize())
    torch.testing.assert_close(twice.dequantize(), once.dequantize(), rtol=2**-21, atol=0.0)
    if worked(form).settles_late:
        once, twice = twice, form.quantize(twice.dequantize())
    assert torch.equal(raw(once.parts[0]), raw(twice.parts[0]))
    for part, left, right in zip(form.parts[1:], once.parts[1:], twice.parts[1:], strict=True):
        torch.testing.assert_close(left.float(), right.float(), rtol=2**-22, atol=0.0, msg=part.name)


@pytest.mark.parametrize("form", ALL)
def test_worked_bytes(form: Format) -> None:
    """Codes byte for byte, scales to a float32; a row's codes beyond the example are those of zeros."""
    example = worked(form)
    held = form if form.given is None else form.given(torch.tensor(example.given))
    packed = held.quantize(torch.tensor([example.row]))
    found = raw(packed.parts[0]).view(torch.uint8)[0].numpy().tobytes().hex()
    assert found.startswith(example.codes) and not found[len(example.codes) :].strip("0")
    scales = [part.float().flatten().tolist() for part in packed.parts[1:]]
    if form.parts[-1].name == "order":
        assert not any(scales.pop()), "all columns are in the first group"
    assert scales == [pytest.approx(values, rel=1e-6) for values in example.scales]


@pytest.mark.parametrize("form", ALL)
def test_nothing_stays_nothing(form: Format) -> None:
    for shape in ((0, 128), (128, 0), (0, 0), (0, 5, 7), (2, 0, 128), (2, 128, 0)):
        packed = form.quantize(torch.empty(shape))
        assert packed.dequantize().shape == torch.Size(shape)
        assert_same(form.quantize(packed.dequantize()), packed)
        assert packed.rows(slice(0, 0)).shape[0] == 0 if len(shape) == 3 else True


@pytest.mark.parametrize("form", ALL)
def test_rounding_costs_what_its_codes_cost(form: Format) -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(fresh_seed()))
    held = form if form.given is None else form.given(x.abs().max() / SPAN[form.name])
    loss, bound = float((held.quantize(x).dequantize() - x).norm() / x.norm()), worked(form).loss
    assert (loss == 0) if bound == 0 else bound / 20 < loss <= bound


SPAN = {"fp8_static": 448, "int8_static": 127, "nvfp4_static": 2688}
"""Largest value that each static format holds at scale 1."""


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


@pytest.mark.parametrize("form", ALL)
def test_a_cut_has_the_values_of_the_whole(form: Format) -> None:
    """Tensor-parallel slices of stored matrices: rows of gate and up, columns of down."""
    packed = form.quantize(sample((2, 384, 500)))
    whole = packed.dequantize()
    assert torch.equal(packed.cut(slice(128, 256), slice(None)).dequantize(), whole[:, 128:256])
    if any(part.name == "order" for part in form.parts):
        with pytest.raises(ValueError, match=f"columns of {form} are not in the order of their groups"):
            packed.cut(slice(None), slice(0, 256))
        return
    assert torch.equal(packed.cut(slice(None), slice(128, 256)).dequantize(), whole[..., 128:256])
    assert torch.equal(packed.cut(slice(256, 384), slice(256, 500)).dequantize(), whole[:, 256:, 256:])
    assert packed.cut(slice(128, 128), slice(None)).shape == (2, 0, 500)


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        (
            "mxfp6_e3m2",
            2,
            "a cut at column 2 goes through mxfp6_e3m2 codes: multiples of 4/3 columns are whole",
        ),
        (
            "mxfp6_e3m2",
            4,
            "a cut at column 4 goes through mxfp6_e3m2 scale: multiples of 32 columns are whole",
        ),
        ("nvfp4", 40, "a cut at column 40 goes through nvfp4 scale: multiples of 16 columns are whole"),
        ("int4_channel", 3, "a cut at column 3 goes through int4_channel codes: multiples of 2 columns"),
    ],
)
def test_a_cut_through_a_block_is_named(name: str, columns: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FORMATS[name].quantize(sample((4, 128))).cut(slice(None), slice(0, columns))


@pytest.mark.parametrize("form", [form for form in EVERY.values() if not form.row_wise], ids=repr)
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
    """A format whose codes have no NaN gives it to the block's scale; without one, INT8 has nowhere to."""
    x = sample((256, 256))
    x[3, 130] = float("nan")
    back = form.quantize(x).dequantize()
    assert bool(back[3, 130].isnan()) != (form.name == "int8_static")
    rows, columns = (256 if span == WHOLE else int(span) for span in form.block)
    elsewhere = torch.ones(256, 256, dtype=torch.bool)
    top, left = 3 // rows * rows, 130 // columns * columns
    elsewhere[top : top + rows, left : left + columns] = False
    assert not back[elsewhere].isnan().any()


@pytest.mark.parametrize("form", ALL)
def test_infinity_never_becomes_a_value_of_the_other_sign(form: Format) -> None:
    x = sample((4, 256))
    x[1, 7], x[2, 9] = float("inf"), float("-inf")
    back = form.quantize(x).dequantize()
    assert not bool((back[1, 7] <= 0) | (back[2, 9] >= 0))


@pytest.mark.parametrize(
    "form",
    [form for form in EVERY.values() if all(WHOLE not in (p.rows, p.columns) for p in form.parts)],
    ids=repr,
)
def test_an_edge_block_is_smaller_not_padded(form: Format) -> None:
    """The last rows and columns have a scale of their own, from their own values."""
    rows, columns = (int(span) for span in form.block)
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
    assert not FORMATS.keys() & STATIC.keys()
    assert all(form.name == name and format_named(name) is form for name, form in FORMATS.items())
    with pytest.raises(ValueError, match="unknown number format 'fp7'; known: bf16, fp16, fp32"):
        format_named("fp7")
