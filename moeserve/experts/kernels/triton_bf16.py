"""Our own Hopper kernel for bf16 weights and rows: a persistent grouped GEMM fed by bulk tensor copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, Prepared
from moeserve.experts.kernels.support.hopper import HopperKernel, as_bf16, step_for
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP


class TritonBf16(HopperKernel):
    """Two grouped GEMMs in bf16 with float32 sums; between them the activation, rounded to bf16."""

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """`gate_up [e, 2I, H]` and `down [e, H, I]` bf16, and float32 biases if any.

        ValueError: the weights do not fit the kernel's spec.
        """
        fitted = self._spec.fit(weights).tensors()
        return Prepared({name.removesuffix(".codes"): t.contiguous() for name, t in fitted.items()})

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        from moeserve.experts.kernels.triton.grouped import GroupedRows, GroupedWeights

        gate_up, down = (
            GroupedWeights("bf16", slots[side], None, None, slots.get(f"{side}_bias"), slots[side].shape[1])
            for side in ("gate_up", "down")
        )
        step = step_for("bf16", batch, tokens)
        between = step.gemm(GroupedRows(as_bf16(tokens)), gate_up, torch.bfloat16)
        inner = step.activate(between, self._spec.shape, fp8=False)
        return step.gemm(inner, down, self._spec.out_dtype)


ENTRY = KernelEntry(
    name="triton_bf16",
    build=TritonBf16,
    schemes=frozenset({Scheme(BF16, BF16)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton"}),
    multiple_of=(8, 8),
    apart=True,
    verified=("sm90",),
)
