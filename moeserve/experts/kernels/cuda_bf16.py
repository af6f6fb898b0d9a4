"""Our own Hopper kernel for bf16 in steps of any size, in CUDA C++ that reads weights in panels.

A step of very few rows is one launch of `cuda/few.py`. In others `cuda/prefill_wide.py` shares rows over
a cluster and activates in the first GEMM; how many rows stand in a tile depends on whether the tensor cores
are the limit, or reading weights is. Experts with an activation that these do not compute are
`triton_bf16`'s, weights and all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.hopper import few_form, flat, fused, in_panels
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.experts.kernels.triton_bf16 import TritonBf16
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP

MANY_ROWS = 26
"""Rows a slot from which on wide tiles are the faster ones on an H200."""


class CudaBf16:
    """Two grouped GEMMs in bf16 with float32 sums; between them the activation, rounded to bf16."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec, self._other = spec, None if fused(spec) else TritonBf16(spec)

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Values in panels, and float32 biases if any. ValueError: the weights do not fit the spec."""
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
        x = tokens.parts[0] if tokens.format == BF16 else tokens.dequantize().bfloat16()
        few = self._few(prepared, batch, x)
        return (self._some(prepared, batch, x) if few is None else few).view(shape)

    def _few(self, prepared: Prepared, batch: ExpertBatch, x: Tensor) -> Tensor | None:
        from moeserve.experts.kernels.cuda import few
        from moeserve.experts.kernels.triton.grouped import Weights

        spec, slot = self._spec, prepared.per_slot
        form = few_form("bf16", spec, batch, batch.tokens)
        if form is None:
            return None
        sides = [
            Weights("bf16", slot[f"{side}.codes"], None, None, slot.get(f"{side}_bias"), n)
            for side, n in (("gate_up", spec.shape.gate_up_rows), ("down", spec.shape.hidden))
        ]
        return few.step(form, (x, None), batch, sides, spec.shape)

    def _some(self, prepared: Prepared, batch: ExpertBatch, x: Tensor) -> Tensor:
        from moeserve.experts.kernels.cuda.prefill_wide import NARROW, WIDE, Weights, WidePrefillStep

        spec, slot = self._spec, prepared.per_slot
        step = WidePrefillStep(batch, x.shape[0], WIDE if batch.rows_a_slot >= MANY_ROWS else NARROW)
        gate_up, down = (
            Weights(slot[f"{side}.codes"], slot.get(f"{side}_bias")) for side in ("gate_up", "down")
        )
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype)


ENTRY = KernelEntry(
    name="cuda_bf16",
    build=CudaBf16,
    schemes=frozenset({Scheme(BF16, BF16)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(8, 8),
    verified=("sm90",),
)
