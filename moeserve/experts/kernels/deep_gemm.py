# mypy: disable-error-code="import-not-found"
"""Experts on DeepGEMM: FP8 in 128x128 blocks, bf16, and on Blackwell MXFP4 and MXFP8 weights.

RAGGED rows take its contiguous layout: segments start at multiples of 128 rows and every row names its slot,
-1 after the last segment. PADDED rows take its masked layout, with the counts. Both read them on the device.

On Hopper scales stay float32; Blackwell wants the powers of two of UE8M0, four exponents in a word, so a
scheme with any other scale has no kernel there. The package compiles its kernels at first use with nvcc, for
each N and K. Below 128 rows or 512 columns other kernels are faster; what it computes is right there too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.support.library import LibraryStep, biases
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_BLOCK_UE8M0, FP8_GROUP, FP8_GROUP_UE8M0
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.layouts import layout_named
from moeserve.quant.layouts.deep_gemm import ColumnMajor
from moeserve.quant.layouts.words import Words

ALIGN = 128
"""Rows that a segment is aligned to: the package's own alignment, unless a process sets it lower."""

EXPECTED_ROWS = 64
"""Rows a slot that tiles of PADDED batches are chosen for where nobody says how many are likely."""

PACKED = layout_named("deep_gemm_ue8m0")


def packs_scales(device: torch.device) -> bool:
    """Whether the tensor cores of `device` take scales as packed exponents."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


class DeepGemm:
    """Two grouped GEMMs with float32 sums and bf16 outputs; between them the activation, rounded."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes as stored; scales as stored on Hopper, as packed exponents by column on Blackwell.

        ValueError: the weights do not fit the kernel's spec.
        """
        fitted = self._spec.fit(weights)
        tensors = biases(fitted)
        for side, packed in (("gate_up", fitted.gate_up), ("down", fitted.down)):
            form = packed.format
            exponents = form in (MXFP4, MXFP8) or (form == FP8_BLOCK_UE8M0 and packs_scales(packed.device))
            names = [part.name for part in form.parts]
            parts = PACKED.pack(packed) if exponents else dict(zip(names, packed.parts, strict=True))
            tensors |= {f"{side}.{name}": part.contiguous() for name, part in parts.items()}
        return Prepared(tensors)

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined.

        ValueError: the package was told to align segments to rows that 128 is no multiple of.
        """
        spec, weights, shape = self._spec, prepared.per_slot, batch.tokens.shape
        step = LibraryStep(batch)
        if step.empty:
            return torch.empty(shape, dtype=spec.out_dtype, device=batch.tokens.device)
        form = spec.scheme.activations
        x = (step.plain(), None) if form == BF16 else step.rounded(form)
        between = _gemm(step, x, weights, "gate_up")
        inner = step.activated(between, spec.shape, torch.bfloat16 if form == BF16 else torch.float32)
        y = (inner, None) if form == BF16 else step.round(inner, form)
        return _gemm(step, y, weights, "down").to(spec.out_dtype).view(shape)


Rows = tuple[Tensor, Tensor | None]
"""Values or codes, and the codes' scales."""


def _gemm(step: LibraryStep, rows: Rows, weights: Mapping[str, Tensor], side: str) -> Tensor:
    """`[R, N]` bf16: each row times the weights of its slot, plus the bias."""
    batch, codes, scale = step.batch, weights[f"{side}.codes"], weights.get(f"{side}.scale")
    if batch.grouping is Grouping.PADDED:
        rows = tuple(part if part is None else part.view(*batch.tokens.shape[:2], -1) for part in rows)  # type: ignore[assignment]
    out = torch.empty((*rows[0].shape[:-1], codes.shape[1]), dtype=torch.bfloat16, device=codes.device)
    if scale is None or rows[1] is None:
        _call(rows[0], codes, out, step, {})
    else:
        a, b, recipes = _scaled((rows[0], rows[1]), codes, scale)
        _call(a, b, out, step, recipes)
    bias = weights.get(f"{side}_bias")
    flat = out.view(-1, out.shape[-1])
    return flat if bias is None else flat + bias[step.slots(0)]


Scaled = tuple[Tensor, Tensor]


def _scaled(rows: Scaled, codes: Tensor, scale: Tensor) -> tuple[Scaled, Scaled, dict[str, tuple[int, int]]]:
    """Returns both operands as the package reads them, and the rows and columns that share a scale."""
    x, x_scale = rows
    exponents = scale.dtype == torch.int32
    if x_scale.dtype == torch.uint8:  # of 32 columns: four to a word
        x_scale = _by_column(ColumnMajor().forward(Words().forward(x_scale)), x.shape[-2])
    b_scale = _by_column(scale, codes.shape[1]) if exponents else scale
    b = codes.view(torch.int8) if codes.dtype == torch.uint8 else codes
    columns = 32 if rows[1].dtype == torch.uint8 else 128
    recipes = {"recipe_a": (1, columns), "recipe_b": (1 if exponents else 128, columns)}
    return (x, x_scale), (b, b_scale), recipes


def _by_column(words: Tensor, rows: int) -> Tensor:
    """Columns of packed scales `[..., G, aligned rows]` as the view `[..., rows, G]`, with its strides exact.

    The package checks strides of axes of size 1 too, which torch leaves open.
    """
    *lead, columns, aligned = words.shape
    strides = [columns * aligned] * len(lead)
    return words.contiguous().as_strided((*lead, rows, columns), (*strides, 1, aligned))


def _call(a: Any, b: Any, out: Tensor, step: LibraryStep, recipes: Mapping[str, Any]) -> None:
    """The package's grouped GEMM for the batch's grouping, into `out`; of bf16 where there is no recipe."""
    import deep_gemm

    batch, plain = step.batch, not recipes
    if batch.grouping is Grouping.PADDED:
        gemm = (
            deep_gemm.m_grouped_bf16_gemm_nt_masked if plain else deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked
        )
        gemm(a, b, out, batch.counts, min(out.shape[1], ceil(batch.likely or EXPECTED_ROWS)), **recipes)
        return
    own = deep_gemm.get_mk_alignment_for_contiguous_layout()
    if ALIGN % own:
        raise ValueError(f"deep_gemm aligns segments to {own} rows; set an alignment that divides {ALIGN}")
    if plain:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, out, step.segments(-1))
    else:
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, out, step.segments(-1), **recipes)


BF16_SCHEME = Scheme(BF16, BF16)
EXPONENTS = Scheme(FP8_BLOCK_UE8M0, FP8_GROUP_UE8M0)
HOPPER = frozenset({Scheme(FP8_BLOCK, FP8_GROUP), EXPONENTS, BF16_SCHEME})
BLACKWELL = frozenset({EXPONENTS, Scheme(MXFP4, MXFP8), Scheme(MXFP8, MXFP8), BF16_SCHEME})

ENTRY = KernelEntry(
    name="deep_gemm",
    build=DeepGemm,
    schemes=HOPPER | BLACKWELL,
    fewer_schemes={"sm90": HOPPER, "sm100": BLACKWELL, "sm103": BLACKWELL},
    eats=frozenset({BF16, FP8_GROUP, FP8_GROUP_UE8M0, MXFP8}),
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm90", "sm100", "sm103"}),
    modules=frozenset({"deep_gemm"}),
    multiple_of=(128, 128),
    row_align=ALIGN,
    bf16_sums=True,
    e4m3_sums=HOPPER,
    verified=("sm90",),
)
