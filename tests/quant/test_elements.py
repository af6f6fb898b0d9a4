"""Element encodings: every code, the thresholds, and a million values beside another library's casts."""

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, pack_sextets, sextet_bytes, sextet_words, unpack_nibbles
from moeserve.quant.elements import (
    E2M1,
    E2M3,
    E3M2,
    FP8_LARGEST,
    Minifloat,
    decode_e8m0,
    decode_fp8,
    encode_fp8,
    reciprocal_e8m0,
)

ml_dtypes = pytest.importorskip("ml_dtypes")

MINIFLOATS = {E2M1: "float4_e2m1fn", E3M2: "float6_e3m2fn", E2M3: "float6_e2m3fn"}
VALUES = 1_000_000


def values(largest: float) -> Tensor:
    """A million: uniform in the range, over all magnitudes, past the largest, and float32 of random bits."""
    random = torch.Generator().manual_seed(20)
    quarter = VALUES // 4
    uniform = (torch.rand(quarter, generator=random) * 2 - 1) * largest
    wide = torch.randn(quarter, generator=random) * torch.exp2(
        torch.rand(quarter, generator=random) * 30 - 20
    )
    past = torch.randn(quarter, generator=random) * largest
    halves = torch.randint(-4096, 4096, (quarter,), generator=random) * largest / 4096
    return torch.cat((uniform, wide, past, halves))


@pytest.mark.parametrize("element", MINIFLOATS, ids=lambda element: element.name)
def test_minifloats_equal_another_library_on_a_million_values(element: Minifloat) -> None:
    """Zero mismatches but one rule: an exact -0 has code 0 here."""
    x = values(element.largest)
    theirs = np.clip(x.numpy(), -element.largest, element.largest).astype(
        getattr(ml_dtypes, MINIFLOATS[element])
    )
    ours = element.encode(x).numpy()
    assert ((ours != theirs.view(np.uint8)) & (x.numpy() != 0)).sum() == 0
    assert not ours[x.numpy() == 0].any()
    assert np.array_equal(element.values().numpy()[ours], theirs.astype(np.float32))


@pytest.mark.parametrize("dtype", FP8_LARGEST, ids=str)
def test_fp8_equals_another_library_on_a_million_values(dtype: torch.dtype) -> None:
    x = values(FP8_LARGEST[dtype])
    clipped = np.clip(x.numpy(), -FP8_LARGEST[dtype], FP8_LARGEST[dtype])
    theirs = clipped.astype(getattr(ml_dtypes, str(dtype).removeprefix("torch.")))
    ours = encode_fp8(x, dtype)
    assert np.array_equal(ours.view(torch.uint8).numpy(), theirs.view(np.uint8))
    assert np.array_equal(decode_fp8(ours).numpy(), theirs.astype(np.float32))


@pytest.mark.parametrize("dtype", FP8_LARGEST, ids=str)
@pytest.mark.parametrize("count", [256, 255], ids=["pairs", "singly"])
def test_every_fp8_code_decodes(dtype: torch.dtype, count: int) -> None:
    codes = torch.arange(count, dtype=torch.uint8)
    theirs = codes.numpy().view(getattr(ml_dtypes, str(dtype).removeprefix("torch."))).astype(np.float32)
    assert np.array_equal(decode_fp8(codes.view(dtype)).numpy(), theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", FP8_LARGEST, ids=str)
def test_fp8_saturates_and_keeps_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([1e9, -1e9, float("inf"), float("-inf"), float("nan")])
    back = decode_fp8(encode_fp8(x, dtype))
    largest = FP8_LARGEST[dtype]
    assert back[:4].tolist() == [largest, -largest, largest, -largest]
    assert back[4].isnan()


THRESHOLDS = [  # of E2M1: largest magnitude that gives each code, smallest that gives the next
    (0.25, 0, 1),
    (0.75, 2, None),
    (1.25, 2, 3),
    (1.75, 4, None),
    (2.5, 4, 5),
    (3.5, 6, None),
    (5.0, 6, 7),
]


@pytest.mark.parametrize(("edge", "code", "above"), THRESHOLDS)
def test_e2m1_thresholds(edge: float, code: int, above: int | None) -> None:
    x = torch.tensor([edge])
    up, down = torch.nextafter(x, torch.tensor([9.0])), torch.nextafter(x, torch.tensor([0.0]))
    below = code if above is not None else code - 1
    found = E2M1.encode(torch.cat((down, x, up))).tolist()
    assert found == [below, code, above if above is not None else code]
    assert E2M1.encode(-torch.cat((down, x, up))).tolist() == [c + 8 for c in found]


def test_what_minifloats_do_with_zeros_and_what_they_lack() -> None:
    special = torch.tensor([0.0, -0.0, -1e-30, float("inf"), float("-inf"), float("nan"), 1e30])
    assert E2M1.encode(special).tolist() == [0, 0, 8, 7, 15, 7, 7]
    assert E3M2.encode(special).tolist() == [0, 0, 32, 31, 63, 31, 31]
    assert E2M3.encode(special).tolist() == [0, 0, 32, 31, 63, 31, 31]


@pytest.mark.parametrize(
    ("element", "largest", "normal", "subnormal"),
    [(E2M1, 6, 1, 0.5), (E3M2, 28, 0.25, 0.0625), (E2M3, 7.5, 1, 0.125)],
    ids=["e2m1", "e3m2", "e2m3"],
)
def test_ranges(element: Minifloat, largest: float, normal: float, subnormal: float) -> None:
    positive = element.values()[: 1 << (element.bits - 1)]
    assert (element.largest, positive[-1].item()) == (largest, largest)
    assert positive[1 << element.mantissa].item() == normal
    assert positive[1].item() == subnormal
    assert torch.equal(element.encode(element.values())[1:], torch.arange(1 << element.bits)[1:].int()) is (
        False
    )  # -0 alone does not come back
    assert element.encode(positive).tolist() == list(range(1 << (element.bits - 1)))


def test_e8m0_has_no_zero_and_one_nan() -> None:
    codes = torch.tensor([0, 1, 0x7E, 0x7F, 0x80, 0xFE, 0xFF], dtype=torch.uint8)
    powers = decode_e8m0(codes)
    assert powers[:6].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert powers[6].isnan()
    assert (powers * reciprocal_e8m0(codes))[:6].tolist() == [1.0] * 6
    every = torch.arange(256, dtype=torch.uint8)
    theirs = every.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(decode_e8m0(every).numpy(), theirs, equal_nan=True)


def test_the_even_column_stands_in_the_low_nibble() -> None:
    assert pack_nibbles(torch.tensor([[0, 1, 1, 2, 0xA, 3, 4, 7]])).tolist() == [[0x10, 0x21, 0x3A, 0x74]]
    assert pack_nibbles(torch.tensor([[1, 2, 3]])).tolist() == [[0x21, 0x03]]


@pytest.mark.parametrize("columns", [0, 1, 2, 3, 4, 5, 64])
def test_bits_come_back(columns: int) -> None:
    random = torch.Generator().manual_seed(columns)
    nibbles = torch.randint(0, 16, (2, 3, columns), generator=random, dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(nibbles), columns), nibbles)
    sextets = torch.randint(0, 64, (2, 3, columns), generator=random, dtype=torch.uint8)
    packed = pack_sextets(sextets)
    assert packed.shape == (2, 3, sextet_bytes(columns)) and packed.dtype == torch.uint8
    words = sextet_words(packed, columns)
    assert torch.equal(torch.stack((words & 63, words >> 6), -1).flatten(-2)[..., :columns], sextets.int())


def test_four_sextets_are_a_little_endian_word_of_24_bits() -> None:
    codes = [0x0A, 0x0E, 0x11, 0x12]
    word = sum(code << 6 * i for i, code in enumerate(codes))
    assert pack_sextets(torch.tensor([codes])).tolist() == [list(word.to_bytes(3, "little"))]
