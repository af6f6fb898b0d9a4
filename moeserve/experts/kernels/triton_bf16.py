"""Our own Hopper kernels for bf16 weights and rows: a persistent grouped GEMM fed by bulk tensor copies."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.hopper import flat, step_for
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP


class TritonBf16:
    """Two grouped GEMMs in bf16 with float32 sums; between them the activation, rounded to bf16."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """`gate_up [e, 2I, H]` and `down [e, H, I]` bf16, and float32 biases if any.

        ValueError: the weights do not fit the kernel's spec.
        """
        fitted = self._spec.fit(weights).tensors()
        return Prepared({name.removesuffix(".codes"): t.contiguous() for name, t in fitted.items()})

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        from moeserve.experts.kernels.triton.grouped import Rows, Weights

        shape, spec = batch.tokens.shape, self._spec
        tokens = flat(batch.tokens)
        if batch.slots == 0 or tokens.shape[0] == 0:
            return torch.empty(shape, dtype=spec.out_dtype, device=tokens.device)
        x = tokens.parts[0] if tokens.format == BF16 else tokens.dequantize().bfloat16()
        slot = prepared.per_slot
        sides = {
            side: Weights("bf16", slot[side], None, None, slot.get(f"{side}_bias"), slot[side].shape[1])
            for side in ("gate_up", "down")
        }
        step = step_for("bf16", batch, tokens)
        between = step.gemm(Rows(x), sides["gate_up"], torch.bfloat16)
        inner = step.activate(between, spec.shape, fp8=False)
        return step.gemm(inner, sides["down"], spec.out_dtype).view(shape)


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
    verified=("sm90",),
)
