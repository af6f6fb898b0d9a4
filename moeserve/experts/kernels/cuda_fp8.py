"""Our own Hopper kernels for FP8, in CUDA C++ that reads weights in panels.

A step of few rows is one launch of `cuda/few.cu`. With more, `cuda/prefill.cu` shares rows over a cluster,
and activates and rounds in the first GEMM. Both multiply E4M3 codes; the sums of each 128 of K are scaled and
added in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.experts.kernel import KernelEntry, KernelFamily
from moeserve.experts.kernels.cuda import few
from moeserve.experts.kernels.cuda.steps import FUSED_ACTIVATIONS
from moeserve.experts.kernels.support.hopper import FORM, PanelKernel, few_step, step_for
from moeserve.experts.kernels.tiles import kernel_ranges
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

INNER_MULTIPLE = 64
"""What the inner size must be a multiple of for gate and up columns to meet in one tile."""

FAMILY = KernelFamily("cuda_fp8", partial(kernel_ranges, "cuda_fp8"))


class CudaFp8Few(PanelKernel):
    """The whole step in one launch; slots without rows cost nothing."""

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        return few_step(self._spec, batch, tokens, self._sides("fp8", slots))


class CudaFp8Many(PanelKernel):
    """Two grouped GEMMs in tiles of at most 128 rows of a slot."""

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        from moeserve.experts.kernels.cuda.prefill import PrefillStep, PrefillWeights

        spec = self._spec
        step = PrefillStep(batch, tokens.shape[0])
        if tokens.format == FP8_GROUP:
            x = step.rows(*tokens.parts)
        else:
            rounded = step_for("fp8", batch, tokens).round(tokens.parts[0])
            assert rounded.scale is not None
            x = step.rows(rounded.values, rounded.scale[:, : tokens.shape[0]].t())
        gate_up, down = (
            PrefillWeights(slots[f"{side}.codes"], slots[f"{side}.scale"], slots.get(f"{side}_bias"))
            for side in ("gate_up", "down")
        )
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype)


MANY = KernelEntry(
    name="cuda_fp8_many",
    build=CudaFp8Many,
    schemes=frozenset({Scheme(FP8_BLOCK, FP8_GROUP)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=FUSED_ACTIVATIONS,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(16, INNER_MULTIPLE),
    e4m3_sums=frozenset({Scheme(FP8_BLOCK, FP8_GROUP)}),
    apart=True,
    verified=("sm90",),
    form=FORM,
    family=FAMILY,
)
FEW = replace(MANY, name="cuda_fp8_few", build=CudaFp8Few, most_slots=few.MOST_SLOTS)
ENTRIES = (FEW, MANY)
