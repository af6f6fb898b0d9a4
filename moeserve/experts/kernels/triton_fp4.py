"""Our own Hopper kernel for four-bit weights, NVFP4 and MXFP4, and bf16 rows: codes decode in registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, Prepared
from moeserve.experts.kernels.support.hopper import HopperKernel, as_bf16, step_for
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.quant.bits import unpack_nibbles
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4
from moeserve.quant.layouts.hopper_fp4 import HOPPER_FP4, pack_codes, pack_scales

if TYPE_CHECKING:
    from moeserve.experts.kernels.triton.grouped import GroupedWeights

FORM = HOPPER_FP4.name
"""The prepared form of codes and scales in the order in which a warp group reads them."""


class Fp4Kernel(HopperKernel):
    """A kernel on four-bit codes in the order in which a warp group reads them."""

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes and scales in the order a warp group reads them, and one float32 a row that all of it shares.

        ValueError: the weights do not fit the kernel's spec.
        """
        fitted = self._spec.fit(weights)
        tensors: dict[str, Tensor] = {}
        for side, packed in (("gate_up", fitted.gate_up), ("down", fitted.down)):
            tensors |= {f"{side}.{name}": t for name, t in _pack(packed).items()}
        biases = {"gate_up_bias": fitted.gate_up_bias, "down_bias": fitted.down_bias}
        return Prepared(tensors | {name: bias for name, bias in biases.items() if bias is not None})

    def _sides(self, slots: Mapping[str, Tensor]) -> list[GroupedWeights]:
        """Gate and up, and down, as `few.cu` and the grouped GEMM read them."""
        from moeserve.experts.kernels.triton.grouped import GroupedWeights

        return [
            GroupedWeights(
                "fp4",
                slots[f"{side}.codes"],
                slots[f"{side}.row_scale"],
                slots[f"{side}.scale"],
                slots.get(f"{side}_bias"),
                slots[f"{side}.row_scale"].shape[1],
            )
            for side in ("gate_up", "down")
        ]


class TritonFp4(Fp4Kernel):
    """Two grouped GEMMs in bf16, exact for these weights: a code times its block's scale has six bits."""

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        from moeserve.experts.kernels.triton.grouped import GroupedRows

        gate_up, down = self._sides(slots)
        step = step_for("fp4", batch, tokens)
        between = step.gemm(GroupedRows(as_bf16(tokens)), gate_up, torch.bfloat16)
        inner = step.activate(between, self._spec.shape, fp8=False)
        return step.gemm(inner, down, self._spec.out_dtype)


def _pack(packed: Packed) -> dict[str, Tensor]:
    """`codes`, `scale` and `row_scale [e, N]` of one side."""
    codes, scale, row_scale = folded(packed)
    return {"codes": pack_codes(codes), "scale": pack_scales(scale), "row_scale": row_scale}


def folded(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[e, N, K]`, their scales `[e, N, K / 16]` as bytes, and what those lack, float32 `[e, N]`.

    A byte has five bits of exponent and three of fraction; what all scales of a row share, the format's outer
    scale included, multiplies the finished sum. NVFP4 and MXFP4 differ in nothing else, so one kernel serves
    both, and no value is rounded.
    """
    codes = unpack_nibbles(packed.parts[0], packed.shape[-1])
    if packed.format == NVFP4:
        scale, absent, factor = from_e4m3(packed.parts[1])
        group = 16
        row_scale = (packed.parts[2].squeeze(-1) * factor).expand(*codes.shape[:2]).contiguous()
    else:
        scale, absent, row_scale = from_e8m0(packed.parts[1].view(torch.uint8))
        group = 32
        scale = scale.repeat_interleave(2, dim=-1)
    codes = codes.masked_fill(absent.repeat_interleave(group, dim=-1)[..., : codes.shape[-1]], 0)
    return codes, scale, row_scale


def from_e4m3(scales: Tensor) -> tuple[Tensor, Tensor, float]:
    """E4M3 block scales to bytes, where a scale is zero, and the factor they then lack."""
    mantissa, exponent = torch.frexp(scales.float())  # value = mantissa 2^exponent, mantissa in [1/2, 1)
    zero = scales.float() == 0
    byte = (exponent + 8) * 8 + (mantissa * 16 - 8).int()
    return torch.where(zero, 0, byte).to(torch.uint8), zero, 2.0**20


def from_e8m0(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E8M0 scales `[e, N, G]` to bytes, where one is under 2^-30 of its row's largest, and rows' factors."""
    largest = scales.amax(dim=-1, keepdim=True).int()
    below = largest - scales.int()
    byte = (30 - below).clamp_min(0) * 8
    factor = torch.exp2((largest.squeeze(-1) - 128).double()).float()
    factor = torch.where((scales == 255).any(dim=-1), torch.nan, factor)
    return byte.to(torch.uint8), below > 30, factor


ENTRY = KernelEntry(
    name="triton_fp4",
    build=TritonFp4,
    schemes=frozenset({Scheme(NVFP4, BF16), Scheme(MXFP4, BF16)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton"}),
    multiple_of=(32, 32),
    apart=True,
    verified=("sm90",),
    form=FORM,
)
