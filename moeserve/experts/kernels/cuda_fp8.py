"""Our own Hopper kernel for FP8 in steps of any size: many rows go through CUDA C++, few through Triton.

From a few rows a step on, `device/prefill.cu` shares rows over a cluster, activates and rounds in the first
GEMM; below, `triton_fp8` is the faster one.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.experts.kernel import KernelRow, KernelSpec, Prepared
from moeserve.experts.kernels.hopper import BySize, flat, step_for
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.experts.kernels.triton_fp8 import TritonFp8
from moeserve.experts.nvrtc import NEEDED_MODULE
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

MANY_ROWS = 32
"""Rows of a step from which on the CUDA kernel is the faster one on an H200."""

INNER_MULTIPLE = 64
"""What the inner size must be a multiple of for gate and up columns to meet in one tile."""


class CudaFp8(BySize):
    """Two grouped GEMMs on E4M3 codes; the sums of each 128 of K are scaled and added in float32."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec, TritonFp8(spec))

    def _is_for(self, batch: ExpertBatch) -> bool:
        from moeserve.experts.kernels.device.steps import FUSED_ACTIVATIONS

        shape = self._spec.shape
        fits = shape.activation.name in FUSED_ACTIVATIONS and shape.inner % INNER_MULTIPLE == 0
        return fits and batch.rows_a_slot * batch.slots >= MANY_ROWS

    def _apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        from moeserve.experts.kernels.device.prefill import Step, Weights

        spec, slot, tokens = self._spec, prepared.per_slot, flat(batch.tokens)
        step = Step(batch, tokens.shape[0])
        if tokens.format == FP8_GROUP:
            x = step.rows(*tokens.parts)
        else:
            few = step_for("fp8", batch, tokens).round(tokens.parts[0])
            assert few.scale is not None
            x = step.rows(few.values, few.scale[:, : tokens.shape[0]].t())
        gate_up, down = (
            Weights(slot[f"{side}.codes"], slot[f"{side}.scale"], slot.get(f"{side}_bias"))
            for side in ("gate_up", "down")
        )
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype)


ROW = KernelRow(
    name="cuda_fp8",
    build=CudaFp8,
    schemes=frozenset({Scheme(FP8_BLOCK, FP8_GROUP)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(16, 16),
    verified=("sm90",),
)
