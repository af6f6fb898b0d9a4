"""Our own Hopper kernel for bf16 in steps of any size: many rows go through CUDA C++, few through Gluon.

Above some rows a slot the tensor cores are the limit, and `device/prefill_wide.cu` shares rows over a
cluster and activates in the first GEMM; below, reading weights is, and `triton_bf16` is as fast.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelRow, KernelSpec, Prepared
from moeserve.experts.kernels.hopper import flat
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.experts.kernels.triton_bf16 import TritonBf16
from moeserve.experts.nvrtc import NEEDED_MODULE
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP

MANY_ROWS = 64
"""Rows a slot from which on the CUDA kernel is the faster one on an H200."""


class CudaBf16:
    """Two grouped GEMMs in bf16 with float32 sums; between them the activation, rounded to bf16."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._few = TritonBf16(spec)

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """`gate_up [e, 2I, H]` and `down [e, H, I]` bf16, and float32 biases if any.

        ValueError: the weights do not fit the kernel's spec.
        """
        return self._few.prepare(weights)

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        rows = batch.tokens.shape[:-1].numel()
        if rows == 0 or batch.slots == 0 or batch.rows_a_slot < MANY_ROWS or not self._fits:
            return self._few.apply(prepared, batch)
        return self._apply(prepared, batch)

    @property
    def _fits(self) -> bool:
        from moeserve.experts.kernels.device.steps import FUSED_ACTIVATIONS

        return self._spec.shape.activation.name in FUSED_ACTIVATIONS

    def _apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        from moeserve.experts.kernels.device.prefill_wide import Step, Weights

        spec, slot, tokens = self._spec, prepared.per_slot, flat(batch.tokens)
        x = tokens.parts[0] if tokens.format == BF16 else tokens.dequantize().bfloat16()
        step = Step(batch, tokens.shape[0])
        gate_up, down = (Weights(slot[side], slot.get(f"{side}_bias")) for side in ("gate_up", "down"))
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype).view(batch.tokens.shape)


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
