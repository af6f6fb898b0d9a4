"""Our own Hopper kernel for FP8: E4M3 weights scaled by 128x128 blocks, rows rounded in groups of 128."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, Prepared
from moeserve.experts.kernels.support.hopper import HopperKernel, step_for
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP


class TritonFp8(HopperKernel):
    """Two grouped GEMMs on E4M3 codes; the sums of each 128 of K are scaled and added in float32."""

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """The canonical codes and scales. ValueError: the weights do not fit the kernel's spec."""
        return Prepared({name: t.contiguous() for name, t in self._spec.fit(weights).tensors().items()})

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        from moeserve.experts.kernels.triton.grouped import GroupedRows, GroupedWeights, scale_storage

        (rows, width), spec = tokens.shape, self._spec
        gate_up, down = (
            GroupedWeights(
                "fp8", codes, slots[f"{side}.scale"], None, slots.get(f"{side}_bias"), codes.shape[1]
            )
            for side in ("gate_up", "down")
            for codes in (slots[f"{side}.codes"],)
        )
        step = step_for("fp8", batch, tokens)
        if tokens.format == FP8_GROUP:
            scale = scale_storage(width, rows, tokens.device)
            scale[:, :rows].copy_(tokens.parts[1].t())
            x = GroupedRows(tokens.parts[0], scale)
        else:
            x = step.round(tokens.parts[0])
        between = step.gemm(x, gate_up, torch.float32)
        inner = step.activate(between, spec.shape, fp8=True)
        return step.gemm(inner, down, spec.out_dtype)


ENTRY = KernelEntry(
    name="triton_fp8",
    build=TritonFp8,
    schemes=frozenset({Scheme(FP8_BLOCK, FP8_GROUP)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton"}),
    multiple_of=(16, 16),
    e4m3_sums=frozenset({Scheme(FP8_BLOCK, FP8_GROUP)}),
    apart=True,
    verified=("sm90",),
)
