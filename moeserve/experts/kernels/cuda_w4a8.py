"""Our own Hopper kernel for four-bit weights and FP8 rows: codes become E4M3 in registers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, Prepared
from moeserve.experts.kernels.cuda.steps import FUSED_ACTIVATIONS
from moeserve.experts.kernels.support.hopper import HopperKernel
from moeserve.quant.bits import unpack_nibbles
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4_E4M3
from moeserve.quant.layouts.hopper_w4a8 import pack_blocks

HIGHEST, SPAN = 12, 10
"""The E4M3 exponent field of a row's largest scale, and how many powers of two below it are kept."""

NAN = 1 << 12
"""As an exponent, beyond all others."""


class CudaW4A8(HopperKernel):
    """Two grouped GEMMs in E4M3: a code times its block's scale, then a float32 a row of the weights."""

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes and scales in the order a warp group reads them, and one float32 a row that all of it shares.

        A block whose scale is under 2^-10 of its row's largest reads as zero. ValueError: the weights do not
        fit the kernel's spec.
        """
        fitted = self._spec.fit(weights)
        tensors: dict[str, Tensor] = {}
        for side, packed in (("gate_up", fitted.gate_up), ("down", fitted.down)):
            tensors |= {f"{side}.{name}": t for name, t in pack(packed).items()}
        biases = {"gate_up_bias": fitted.gate_up_bias, "down_bias": fitted.down_bias}
        return Prepared(tensors | {name: bias for name, bias in biases.items() if bias is not None})

    def _rows(self, slots: Mapping[str, Tensor], batch: ExpertBatch, tokens: Packed) -> Tensor:
        from moeserve.experts.kernels.cuda.prefill_codes import CodesStep, plan_for, weights_of

        spec = self._spec
        span = spec.scheme.weights.parts[1].columns
        step = CodesStep(batch, tokens.shape[0], plan_for(f"fp8_{span}", batch))
        x = step.rows(*tokens.parts) if tokens.format == FP8_GROUP else step.round(tokens.parts[0])
        inner = step.gate_up(x, weights_of(slots, "gate_up"), spec.shape.activation, spec.shape.inner)
        return step.down(inner, weights_of(slots, "down"), spec.shape.hidden, spec.out_dtype)


def pack(packed: Packed) -> dict[str, Tensor]:
    """`codes [e, N / 64, K / 128, 4352]` uint8 and `row_scale [e, N]` float32 of one side; NVFP4: 4608."""
    codes, scale, row_scale = folded(packed)
    return {"codes": pack_blocks(codes, scale, int(packed.format.parts[1].columns)), "row_scale": row_scale}


def folded(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[e, N, K]`, scale bytes `[e, N, groups]` as `scales_of` says, and the rows' factors `[e, N]`."""
    scale, absent, row_scale = scales_of(packed)
    codes = unpack_nibbles(packed.parts[0], packed.shape[-1])
    span = int(packed.format.parts[1].columns)
    turned, gone = (t.repeat_interleave(span, dim=-1)[..., : codes.shape[2]] for t in (scale >> 7, absent))
    return torch.where(gone, turned << 3, codes), scale, row_scale  # zero once signs are turned round


def scales_of(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Scale bytes `[e, N, groups]`, where there is nothing to keep, and the rows' factors `[e, N]`.

    A byte is the E4M3 of the scale over the row's factor. It has bit 7 where 3/2 of that, rounded to E4M3, is
    four codes above it and not five; all signs of its codes are then turned round.
    """
    exponent, eighths = _powers(packed)
    largest = exponent.amax(dim=-1, keepdim=True)
    below = largest - exponent
    four = (eighths == 0) | (eighths >= 6)
    scale = (HIGHEST - below.clamp_max(SPAN)) * 8 + eighths + four * 128
    factor = torch.exp2((largest.squeeze(-1) - (HIGHEST - 7)).double()).float()
    if len(packed.parts) == 3:
        factor = factor * packed.parts[2].squeeze(-1)
    factor = torch.where((exponent == NAN).any(dim=-1), torch.nan, factor)
    return scale.to(torch.uint8), below > SPAN, factor


def _powers(packed: Packed) -> tuple[Tensor, Tensor]:
    """Scales (1 + eighths / 8) 2^exponent, int32 `[e, N, groups]`; of NaN the exponent `NAN`, of 0 `-NAN`."""
    power = packed.parts[1]
    if packed.format == MXFP4:
        exponent = power.view(torch.uint8).int() - 127
        return exponent.masked_fill_(exponent == 128, NAN), torch.zeros_like(exponent)
    values = power.float()
    fraction, exponent = torch.frexp(values)
    exponent = exponent.sub_(1).masked_fill_(values.isnan(), NAN).masked_fill_(values == 0, -NAN)
    return exponent, (fraction.nan_to_num_(nan=0.5) * 16 - 8).int().clamp_min_(0)


SCHEMES = frozenset({Scheme(MXFP4, FP8_GROUP), Scheme(NVFP4_E4M3, FP8_GROUP)})

ENTRY = KernelEntry(
    name="cuda_w4a8",
    build=CudaW4A8,
    schemes=SCHEMES,
    e4m3_sums=SCHEMES,
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=FUSED_ACTIVATIONS,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(32, 64),
    apart=True,
    verified=("sm90",),
)
