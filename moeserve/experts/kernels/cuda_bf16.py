"""Our own Hopper kernel for bf16 in steps of any size: many rows go through CUDA C++, few through Gluon.

Above some rows a slot the tensor cores are the limit, and `device/prefill_wide.cu` shares rows over a
cluster and activates in the first GEMM; below, reading weights is, and `triton_bf16` is as fast.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.experts.kernel import KernelRow, KernelSpec, Prepared
from moeserve.experts.kernels.hopper import BySize, flat
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.experts.kernels.triton_bf16 import TritonBf16
from moeserve.experts.nvrtc import NEEDED_MODULE
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP

MANY_ROWS = 64
"""Rows a slot from which on the CUDA kernel is the faster one on an H200."""


class CudaBf16(BySize):
    """Two grouped GEMMs in bf16 with float32 sums; between them the activation, rounded to bf16."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec, TritonBf16(spec))

    def _is_for(self, batch: ExpertBatch) -> bool:
        from moeserve.experts.kernels.device.steps import FUSED_ACTIVATIONS

        return batch.rows_a_slot >= MANY_ROWS and self._spec.shape.activation.name in FUSED_ACTIVATIONS

    def _apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        from moeserve.experts.kernels.device.prefill_wide import Step, Weights

        spec, slot, tokens = self._spec, prepared.per_slot, flat(batch.tokens)
        x = tokens.parts[0] if tokens.format == BF16 else tokens.dequantize().bfloat16()
        step = Step(batch, tokens.shape[0])
        gate_up, down = (Weights(slot[side], slot.get(f"{side}_bias")) for side in ("gate_up", "down"))
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype)


ROW = KernelRow(
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
