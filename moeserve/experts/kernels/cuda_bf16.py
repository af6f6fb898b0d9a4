"""Our own Hopper kernels for bf16, in CUDA C++ that reads weights in panels.

A step of very few rows is one launch of `cuda/few.cu`. In others `cuda/prefill_wide.cu` shares rows over a
cluster and activates in the first GEMM: in narrow tiles while reading weights is the limit, and in wide ones
where the tensor cores are. All add up in float32, and round what the activation gives to bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.experts.kernel import KernelEntry, KernelFamily
from moeserve.experts.kernels.cuda import few
from moeserve.experts.kernels.cuda.steps import FUSED_ACTIVATIONS
from moeserve.experts.kernels.support.hopper import FORM, PanelKernel, as_bf16, few_step
from moeserve.experts.kernels.tiles import kernel_ranges
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP

if TYPE_CHECKING:
    from moeserve.experts.kernels.cuda.prefill_wide import Width

FAMILY = KernelFamily("cuda_bf16", partial(kernel_ranges, "cuda_bf16"))


class CudaBf16Few(PanelKernel):
    """The whole step in one launch; slots without rows cost nothing."""

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        return few_step(self._spec, batch, tokens, self._sides("bf16", slots))


class CudaBf16Some(PanelKernel):
    """Two grouped GEMMs in tiles of at most 32 rows of a slot."""

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        from moeserve.experts.kernels.cuda.prefill_wide import WidePrefillStep, WideWeights

        spec, x = self._spec, as_bf16(tokens)
        step = WidePrefillStep(batch, x.shape[0], self._width())
        gate_up, down = (
            WideWeights(slots[f"{side}.codes"], slots.get(f"{side}_bias")) for side in ("gate_up", "down")
        )
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype)

    def _width(self) -> Width:
        from moeserve.experts.kernels.cuda.prefill_wide import NARROW

        return NARROW


class CudaBf16Many(CudaBf16Some):
    """Two grouped GEMMs in tiles of at most 256 rows of a slot."""

    def _width(self) -> Width:
        from moeserve.experts.kernels.cuda.prefill_wide import WIDE

        return WIDE


MANY = KernelEntry(
    name="cuda_bf16_many",
    build=CudaBf16Many,
    schemes=frozenset({Scheme(BF16, BF16)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=FUSED_ACTIVATIONS,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(8, 8),
    apart=True,
    verified=("sm90",),
    form=FORM,
    family=FAMILY,
)
SOME = replace(MANY, name="cuda_bf16_some", build=CudaBf16Some)
FEW = replace(
    MANY,
    name="cuda_bf16_few",
    build=CudaBf16Few,
    multiple_of=(8, few.INNER_MULTIPLE),
    most_slots=few.MOST_SLOTS,
)
ENTRIES = (FEW, SOME, MANY)
