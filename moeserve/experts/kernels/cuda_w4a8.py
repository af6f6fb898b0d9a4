"""Our own Hopper kernel for four-bit weights and FP8 rows: codes become E4M3 in registers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels import codes as device_codes
from moeserve.experts.kernels.hopper import flat
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4_E4M3

ROWS, DEPTH = 64, 128
"""A block of codes is 64 rows x 128."""

HIGHEST, SPAN = 12, 10
"""The E4M3 exponent field of a row's largest scale, and how many powers of two below it are kept."""

NAN = 1 << 12
"""As an exponent, beyond all others."""


class CudaW4A8:
    """Two grouped GEMMs in E4M3: a code times its block's scale, then a float32 a row of the weights."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

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

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        from moeserve.experts.kernels.cuda.prefill_codes import CodesStep, plan_for, weights_of

        spec, slot, tokens = self._spec, prepared.per_slot, flat(batch.tokens)
        if batch.slots == 0 or tokens.shape[0] == 0:
            return torch.empty(batch.tokens.shape, dtype=spec.out_dtype, device=tokens.device)
        span = spec.scheme.weights.parts[1].columns
        step = CodesStep(batch, tokens.shape[0], plan_for(f"fp8_{span}", batch))
        x = step.rows(*tokens.parts) if tokens.format == FP8_GROUP else step.round(tokens.parts[0])
        inner = step.gate_up(x, weights_of(slot, "gate_up"), spec.shape.activation, spec.shape.inner)
        rows = step.down(inner, weights_of(slot, "down"), spec.shape.hidden, spec.out_dtype)
        return rows.view(batch.tokens.shape)


def pack(packed: Packed) -> dict[str, Tensor]:
    """`codes [e, N / 64, K / 128, 4352]` uint8 and `row_scale [e, N]` float32 of one side; NVFP4: 4608.

    A block of codes and their scales is padded with zeros. In the first 4096 bytes a thread finds its codes
    of a row, 8 of each 32 of K, in 16 that follow each other; then come 4 or 8 scales a row.
    """
    scale, absent, row_scale = scales_of(packed)
    codes = device_codes.nibbles(packed.parts[0])
    span = int(packed.format.parts[1].columns)
    turned, gone = (t.repeat_interleave(span, dim=-1)[..., : codes.shape[2]] for t in (scale >> 7, absent))
    codes = (codes ^ turned << 3).masked_fill_(gone, 0)
    codes = F.pad(codes, (0, -codes.shape[2] % DEPTH, 0, -codes.shape[1] % ROWS))
    e, n, k = codes.shape
    # warp, row 3, row 0-2, block of K, 32 of it, half, lane % 4, code
    held = codes.view(e, n // ROWS, 4, 2, 8, k // DEPTH, 4, 2, 4, 4)
    words = _bytes(held.permute(0, 1, 5, 2, 3, 4, 8, 6, 7, 9).flatten(-2))
    scale = F.pad(scale, (0, k // span - scale.shape[2], 0, n - scale.shape[1]))
    blocks = scale.view(e, n // ROWS, ROWS, k // DEPTH, DEPTH // span).transpose(2, 3)
    return {"codes": torch.cat((words.flatten(3), blocks.flatten(3)), -1), "row_scale": row_scale}


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


def _bytes(eight: Tensor) -> Tensor:
    """Codes `[..., 8]` below 16 -> `[..., 4]` bytes.

    Their nibbles hold magnitudes in order, of which 3 and 4 (codes 5 and 6) change places; bit 7 of byte i is
    the sign of code i, bit 3 that of code 4 + i.
    """
    magnitude, sign = eight & 7, eight & 8
    magnitude ^= (magnitude >> 2 & (magnitude >> 1 ^ magnitude) & 1) * 3
    low = magnitude[..., 0::2] | sign[..., 4:]
    high = magnitude[..., 1::2] | sign[..., :4]
    return low | high << 4


SCHEMES = frozenset({Scheme(MXFP4, FP8_GROUP), Scheme(NVFP4_E4M3, FP8_GROUP)})

ENTRY = KernelEntry(
    name="cuda_w4a8",
    build=CudaW4A8,
    schemes=SCHEMES,
    e4m3_sums=SCHEMES,
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=frozenset({"silu", "swigluoai", "swigluoai_uninterleave"}),
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(32, 64),
    verified=("sm90",),
)
