"""Our own portable kernel: weights of every format stay in their codes and decode tile by tile.

It runs on any NVIDIA GPU that Triton compiles bf16 products for. Where a kernel of the table is written for
one scheme and one architecture, that one is faster; this one is why every scheme has a kernel on a GPU.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import PLAIN, KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.support.hopper import flat
from moeserve.experts.kernels.torch_reference import COMPUTED, ROW_WISE
from moeserve.experts.kernels.triton import words as device_words
from moeserve.experts.kernels.triton.stored import ROUNDINGS, SUMMED, Rounding, Stored, product_dtype
from moeserve.quant.act_order import in_order
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import BF16, FP16
from moeserve.quant.formats.nvfp4 import NVFP4_E4M3
from moeserve.quant.layouts.word_codes import element_of
from moeserve.quant.schemes import SCHEMES

if TYPE_CHECKING:
    from moeserve.experts.kernels.triton.dequant_step import DequantRows, DequantStep, Side


class TritonDequant:
    """Two grouped GEMMs on stored codes; rows are rounded on the device as their format says."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._rounding = ROUNDINGS.get(spec.scheme.activations)
        self._stored = Stored.of(spec.scheme.weights, exact=self._rounding is not None)

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes in words where products take them so, see `device/words.py`, else as they are stored.

        Columns with activation order are sorted by their groups, and `columns` has their places. ValueError:
        the weights do not fit the kernel's spec, or groups with activation order are not all of one size.
        """
        fitted = self._spec.fit(weights)
        tensors: dict[str, Tensor] = {}
        for side, packed in (("gate_up", fitted.gate_up), ("down", fitted.down)):
            tensors |= {f"{side}.{name}": t for name, t in self._prepared(packed).items()}
        whole = ("gate_up_bias", "down_bias", "input_scale", "inner_scale")
        return Prepared(tensors | {name: t for name, t in fitted.tensors().items() if name in whole})

    def _prepared(self, packed: Packed) -> dict[str, Tensor]:
        """Returns one side's tensors as the kernel reads them."""
        columns = {}
        if self._stored.ordered:
            packed, places = in_order(packed)
            columns = {"columns": places.int()}
        dtype = self._dtype(packed.device)
        if device_words.holds(self._stored, dtype):
            return device_words.of_packed(self._stored, packed, dtype) | columns
        parts = zip(packed.format.parts, packed.parts, strict=True)
        return {part.name: t.contiguous() for part, t in parts} | columns

    def _dtype(self, device: torch.device) -> torch.dtype:
        """Returns the dtype of the products' operands."""
        return product_dtype(self._stored, self._spec.scheme.activations, fp8_products(device))

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        from moeserve.experts.kernels.triton.dequant_step import DequantRows, DequantStep, cut_for

        shape, spec, slot = batch.tokens.shape, self._spec, prepared.per_slot
        tokens = flat(batch.tokens)
        capacity = tokens.shape[0]
        if batch.slots == 0 or capacity == 0:
            return torch.empty(shape, dtype=spec.out_dtype, device=tokens.device)
        dtype = self._dtype(tokens.device)
        words = device_words.holds(self._stored, dtype)
        rounding = self._rounding
        scaled = self._stored.blocks or (rounding is not None and rounding.x_span > 0)  # sums, step by step
        step = DequantStep(
            batch, capacity, cut_for(batch.rows_a_slot, words=words and not scaled and roomy(tokens.device))
        )
        x = self._rows(step, tokens, slot.get("input_scale"), dtype)
        plain = dtype if rounding is None else torch.float32  # what stands between GEMM and rounding
        between = step.gemm(x, self._side(prepared, "gate_up", words=words), spec.shape.gate_up_rows, plain)
        inner = step.activate(between, spec.shape, plain)
        y = (
            DequantRows(inner)
            if rounding is None
            else step.round(inner, rounding, slot.get("inner_scale"), dtype)
        )
        return step.gemm(
            y, self._side(prepared, "down", words=words), spec.shape.hidden, spec.out_dtype
        ).view(shape)

    def _rows(
        self, step: DequantStep, tokens: Packed, given: Tensor | None, dtype: torch.dtype
    ) -> DequantRows:
        """Rows as the first GEMM reads them; those that travelled in the scheme's own format are not rounded
        again.
        """
        from moeserve.experts.kernels.triton.dequant_step import DequantRows

        rounding = self._rounding
        if rounding is None:
            return DequantRows(_values(tokens).to(dtype))
        if tokens.format == self._spec.scheme.activations:
            return _as_they_came(tokens, rounding, dtype)
        return step.round(_values(tokens), rounding, given, dtype)

    def _side(self, prepared: Prepared, side: str, *, words: bool) -> Side:
        from moeserve.experts.kernels.triton.dequant_step import Side

        slot = prepared.per_slot
        parts = {name.removeprefix(f"{side}."): t for name, t in slot.items() if name.startswith(f"{side}.")}
        return Side(self._stored, parts, words, slot.get(f"{side}_bias"))


def _values(tokens: Packed) -> Tensor:
    """Rows as plain floats, contiguous: decoded rows of an odd width are a view of wider ones."""
    return tokens.parts[0] if tokens.format in PLAIN else tokens.dequantize().contiguous()


def _as_they_came(tokens: Packed, rounding: Rounding, dtype: torch.dtype) -> DequantRows:
    """Rows in the scheme's activation format: codes and scales, or values where block scales are in them."""
    from moeserve.experts.kernels.triton.dequant_step import DequantRows

    if rounding.x_span < 0:
        return DequantRows(_values(tokens).to(dtype))
    codes, scale, *zero = tokens.parts
    return DequantRows((codes.float() - zero[0] if zero else codes).to(dtype), scale, rounding.x_span)


def fp8_products(device: torch.device) -> frozenset[str]:
    """The 8-bit floats that tensor cores of `device` multiply as they are."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return frozenset({"e4m3"} if able else ())


ROOMY = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})


def roomy(device: torch.device) -> bool:
    """Whether a block of `device` may have 160 KiB of shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ROOMY


UNREAD = frozenset(form for form in FORMATS.values() if element_of(form) is None) | {NVFP4_E4M3}
"""Weights that it does not decode: codes whose element has no name in `word_codes.py`, float32, and NVFP4
that is rounded for products in E4M3, where these are in bf16."""

COMPUTED_SCHEMES = frozenset(scheme for scheme in SCHEMES.values() if scheme.weights not in UNREAD) | {
    Scheme(w, a) for w, a in product(FORMATS.values(), (BF16, FP16)) if w not in PLAIN | UNREAD
}


def _products() -> dict[Scheme, torch.dtype]:
    """What is multiplied where tensor cores take E4M3."""
    return {
        s: product_dtype(Stored.of(s.weights), s.activations, frozenset({"e4m3"})) for s in COMPUTED_SCHEMES
    }


def _rounded_products() -> dict[Scheme, Format]:
    """Floats that elements times float32 scales, or rows of fp16, are rounded to before products."""
    floats = {torch.bfloat16: BF16, torch.float16: FP16}
    rounded = {}
    for scheme, dtype in _products().items():
        stored = Stored.of(scheme.weights, exact=scheme.activations in ROUNDINGS)
        scales_sums = stored.blocks if device_words.holds(stored, dtype) else stored.span % SUMMED == 0
        fine = stored.fine is not None and stored.fine.dtype == torch.float32 and not scales_sums
        if dtype in floats and (fine or (scheme.activations == FP16 and dtype == torch.bfloat16)):
            rounded[scheme] = floats[dtype]
    return rounded


ENTRY = KernelEntry(
    name="triton_dequant",
    build=TritonDequant,
    schemes=COMPUTED_SCHEMES,
    e4m3_sums=frozenset(s for s, dtype in _products().items() if dtype == torch.float8_e4m3fn),
    rounded_products=_rounded_products(),
    eats=ROW_WISE,
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"}),
    modules=frozenset({"triton"}),
    apart=True,
    verified=("sm90",),
)
