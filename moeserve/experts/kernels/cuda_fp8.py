"""Our own Hopper kernel for FP8 in steps of any size, in CUDA C++ that reads weights in panels.

A step of few rows is one launch of `cuda/few.py`. From some on, `cuda/prefill.py` shares rows over a
cluster, activates and rounds in the first GEMM. Experts that these do not fit are `triton_fp8`'s, weights and
all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.hopper import few_form, flat, fused, in_panels, step_for
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.experts.kernels.triton_fp8 import TritonFp8
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

INNER_MULTIPLE = 64
"""What the inner size must be a multiple of for gate and up columns to meet in one tile."""


class CudaFp8:
    """Two grouped GEMMs on E4M3 codes; the sums of each 128 of K are scaled and added in float32."""

    def __init__(self, spec: KernelSpec) -> None:
        fits = fused(spec) and spec.shape.inner % INNER_MULTIPLE == 0
        self._spec, self._other = spec, None if fits else TritonFp8(spec)

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes in panels and canonical scales. ValueError: the weights do not fit the kernel's spec."""
        if self._other is not None:
            return self._other.prepare(weights)
        return in_panels(self._spec.fit(weights).tensors())

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        if self._other is not None:
            return self._other.apply(prepared, batch)
        shape, spec, tokens = batch.tokens.shape, self._spec, flat(batch.tokens)
        if batch.slots == 0 or tokens.shape[0] == 0:
            return torch.empty(shape, dtype=spec.out_dtype, device=tokens.device)
        few = self._few(prepared, batch, tokens)
        return (self._many(prepared, batch, tokens) if few is None else few).view(shape)

    def _few(self, prepared: Prepared, batch: ExpertBatch, tokens: Packed) -> Tensor | None:
        from moeserve.experts.kernels.cuda import few
        from moeserve.experts.kernels.triton.grouped import Weights

        spec, slot = self._spec, prepared.per_slot
        form = few_form("fp8", spec, batch, tokens)
        if form is None:
            return None
        sides = [
            Weights("fp8", slot[f"{side}.codes"], slot[f"{side}.scale"], None, slot.get(f"{side}_bias"), n)
            for side, n in (("gate_up", spec.shape.gate_up_rows), ("down", spec.shape.hidden))
        ]
        scales = tokens.parts[1] if tokens.format == FP8_GROUP else None
        return few.step(form, (tokens.parts[0], scales), batch, sides, spec.shape)

    def _many(self, prepared: Prepared, batch: ExpertBatch, tokens: Packed) -> Tensor:
        from moeserve.experts.kernels.cuda.prefill import PrefillStep, Weights

        spec, slot = self._spec, prepared.per_slot
        step = PrefillStep(batch, tokens.shape[0])
        if tokens.format == FP8_GROUP:
            x = step.rows(*tokens.parts)
        else:
            rounded = step_for("fp8", batch, tokens).round(tokens.parts[0])
            assert rounded.scale is not None
            x = step.rows(rounded.values, rounded.scale[:, : tokens.shape[0]].t())
        gate_up, down = (
            Weights(slot[f"{side}.codes"], slot[f"{side}.scale"], slot.get(f"{side}_bias"))
            for side in ("gate_up", "down")
        )
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype)


ENTRY = KernelEntry(
    name="cuda_fp8",
    build=CudaFp8,
    schemes=frozenset({Scheme(FP8_BLOCK, FP8_GROUP)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(16, 16),
    e4m3_sums=frozenset({Scheme(FP8_BLOCK, FP8_GROUP)}),
    verified=("sm90",),
)
