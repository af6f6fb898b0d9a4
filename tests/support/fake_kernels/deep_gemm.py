"""A stand-in for the package deep_gemm: its grouped GEMMs' signatures, their checks, their arithmetic."""

from __future__ import annotations

import torch
from fake_formulas import fp4, spread
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def get_mk_alignment_for_contiguous_layout() -> int:
    return 128


def _scales(scale: Tensor, rows: int, columns: int, recipe: tuple[int, int]) -> Tensor:
    """Scales of every element, from floats or from packed exponents by column."""
    high, wide = recipe
    assert scale.shape[-2] == -(-rows // high)
    if scale.dtype == torch.int32:
        assert scale.stride(-2) == 1 and scale.stride(-1) == -(-rows // 4) * 4, "packed scales lie by column"
        exponents = torch.stack([scale >> shift & 255 for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
        scale = torch.exp2(exponents[..., : columns // wide].float() - 127)
    assert scale.dtype == torch.float32
    return spread(scale, wide, high)[..., :rows, :columns]


def _values(pair: Pair, recipe: tuple[int, int]) -> Tensor:
    codes, scale = pair
    if codes.dtype == torch.int8:
        values = fp4(codes)
    else:
        assert codes.dtype == torch.float8_e4m3fn
        values = codes.float()
    return values * _scales(scale, *values.shape[-2:], recipe)


def _contiguous(a: Tensor, b: Tensor, d: Tensor, grouped_layout: Tensor) -> None:
    assert grouped_layout.dtype == torch.int32 and grouped_layout.shape == a.shape[:1]
    assert d.dtype == torch.bfloat16 and d.shape == (a.shape[0], b.shape[1])
    for start in range(0, a.shape[0], 128):
        block = slice(start, start + 128)
        slot = int(grouped_layout[start])
        assert (grouped_layout[block] == slot).all(), "a block of 128 rows belongs to one group"
        if slot >= 0:
            d[block] = (a[block] @ b[slot].T).bfloat16()


def _masked(a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
    assert masked_m.dtype == torch.int32 and masked_m.shape == a.shape[:1] and expected_m > 0
    for slot, count in enumerate(masked_m.tolist()):
        d[slot, :count] = (a[slot, :count] @ b[slot].T).bfloat16()


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    assert recipe is None and recipe_a and recipe_b and not use_psum_layout
    _contiguous(_values(a, recipe_a), _values(b, recipe_b), d, grouped_layout)


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    assert recipe is None and recipe_a and recipe_b
    _masked(_values(a, recipe_a), _values(b, recipe_b), d, masked_m, expected_m)


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    assert a.dtype == b.dtype == torch.bfloat16
    _contiguous(a.float(), b.float(), d, grouped_layout)


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int, compiled_dims: str = "nk"
) -> None:
    assert a.dtype == b.dtype == torch.bfloat16
    _masked(a.float(), b.float(), d, masked_m, expected_m)
