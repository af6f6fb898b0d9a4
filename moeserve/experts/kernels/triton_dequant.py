"""Our own portable kernel: weights of every format stay as they are stored and decode tile by tile.

It runs on any NVIDIA GPU that Triton compiles bf16 products for. Where a kernel of the table is written for
one scheme and one architecture, that one is faster; this one is why every scheme has a kernel on a GPU.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import PLAIN, KernelRow, KernelSpec, Prepared
from moeserve.experts.kernels.hopper import flat
from moeserve.experts.kernels.stored import ROUNDINGS, Rounding, Stored, product_dtype
from moeserve.experts.kernels.torch_reference import COMPUTED, ROW_WISE
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats import FORMATS
from moeserve.quant.formats.floats import BF16, FP16, FP32
from moeserve.quant.schemes import SCHEMES

if TYPE_CHECKING:
    from moeserve.experts.kernels.device.dequant_step import Rows, Side, Step


class TritonDequant:
    """Two grouped GEMMs on stored codes; rows are rounded on the device as their format says."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._stored = Stored.of(spec.scheme.weights)
        self._rounding = ROUNDINGS.get(spec.scheme.activations)

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """The canonical tensors, as they are stored. ValueError: they do not fit the kernel's spec."""
        return Prepared({name: t.contiguous() for name, t in self._spec.fit(weights).tensors().items()})

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        from moeserve.experts.kernels.device.dequant_step import Rows, Step, cut_for

        shape, spec, slot = batch.tokens.shape, self._spec, prepared.per_slot
        tokens = flat(batch.tokens)
        capacity = tokens.shape[0]
        if batch.slots == 0 or capacity == 0:
            return torch.empty(shape, dtype=spec.out_dtype, device=tokens.device)
        step = Step(batch, capacity, cut_for(batch.rows_a_slot))
        dtype = product_dtype(self._stored, spec.scheme.activations, fp8_products(tokens.device))
        x = self._rows(step, tokens, slot.get("input_scale"), dtype)
        rounding = self._rounding
        plain = dtype if rounding is None else torch.float32  # what stands between GEMM and rounding
        between = step.gemm(x, self._side(prepared, "gate_up"), spec.shape.gate_up_rows, plain)
        inner = step.activate(between, spec.shape, plain)
        y = Rows(inner) if rounding is None else step.round(inner, rounding, slot.get("inner_scale"), dtype)
        return step.gemm(y, self._side(prepared, "down"), spec.shape.hidden, spec.out_dtype).view(shape)

    def _rows(self, step: Step, tokens: Packed, given: Tensor | None, dtype: torch.dtype) -> Rows:
        """Rows as the first GEMM reads them; those that travelled in the scheme's own format are not rounded
        again.
        """
        from moeserve.experts.kernels.device.dequant_step import Rows

        rounding = self._rounding
        if rounding is None:
            return Rows(_values(tokens).to(dtype))
        if tokens.format == self._spec.scheme.activations:
            return _as_they_came(tokens, rounding, dtype)
        return step.round(_values(tokens), rounding, given, dtype)

    def _side(self, prepared: Prepared, side: str) -> Side:
        from moeserve.experts.kernels.device.dequant_step import Side

        names = [part.name for part in self._spec.scheme.weights.parts]
        parts = {name: prepared.per_slot[f"{side}.{name}"] for name in names}
        return Side(self._stored, parts, prepared.per_slot.get(f"{side}_bias"))


def _values(tokens: Packed) -> Tensor:
    """Rows as plain floats, contiguous: decoded rows of an odd width are a view of wider ones."""
    return tokens.parts[0] if tokens.format in PLAIN else tokens.dequantize().contiguous()


def _as_they_came(tokens: Packed, rounding: Rounding, dtype: torch.dtype) -> Rows:
    """Rows in the scheme's activation format: codes and scales, or values where block scales are in them."""
    from moeserve.experts.kernels.device.dequant_step import Rows

    if rounding.x_span < 0:
        return Rows(_values(tokens).to(dtype))
    codes, scale = tokens.parts
    return Rows(codes.to(dtype), scale, rounding.x_span)


def fp8_products(device: torch.device) -> frozenset[str]:
    """The 8-bit floats that tensor cores of `device` multiply as they are."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return frozenset({"e4m3"} if able else ())


ROW = KernelRow(
    name="triton_dequant",
    build=TritonDequant,
    schemes=frozenset(scheme for scheme in SCHEMES.values() if scheme.weights != FP32)
    | {Scheme(w, a) for w, a in product(FORMATS.values(), (BF16, FP16)) if w not in PLAIN},
    eats=ROW_WISE,
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"}),
    modules=frozenset({"triton"}),
    verified=("sm90",),
)
