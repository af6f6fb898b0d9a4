"""Our own Hopper kernel for four-bit weights and FP8 rows: codes become E4M3 in shared memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelRow, KernelSpec, Prepared
from moeserve.experts.kernels.device import codes as device_codes
from moeserve.experts.kernels.hopper import flat, step_for
from moeserve.experts.nvrtc import NEEDED_MODULE
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4

ROWS, DEPTH, GROUP = 64, 128, 16
RECORD = ROWS * DEPTH // 2 + ROWS * DEPTH // GROUP
"""Bytes of 64 rows x 128 codes and their scales."""

HIGHEST, SPAN = 12, 10
"""The E4M3 exponent field of a row's largest scale, and how many powers of two below it are kept."""


class CudaW4A8:
    """Two grouped GEMMs in E4M3: a code times its block's scale, then a float32 a row of the weights."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Records of codes and scales, and one float32 a row that all of it shares.

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
        from moeserve.experts.kernels.device.prefill import Step, Weights

        spec, slot, tokens = self._spec, prepared.per_slot, flat(batch.tokens)
        if batch.slots == 0 or tokens.shape[0] == 0:
            return torch.empty(batch.tokens.shape, dtype=spec.out_dtype, device=tokens.device)
        step = Step(batch, tokens.shape[0])
        if tokens.format == FP8_GROUP:
            x = step.rows(*tokens.parts)
        else:
            few = step_for("fp8", batch, tokens).round(tokens.parts[0])
            assert few.scale is not None
            x = step.rows(few.values, few.scale[:, : tokens.shape[0]].t())
        gate_up, down = (
            Weights("fp4", slot[f"{side}.records"], slot[f"{side}.row_scale"], slot.get(f"{side}_bias"))
            for side in ("gate_up", "down")
        )
        inner = step.gate_up(x, gate_up, spec.shape.activation, spec.shape.inner)
        return step.down(inner, down, spec.shape.hidden, spec.out_dtype).view(batch.tokens.shape)


def pack(packed: Packed) -> dict[str, Tensor]:
    """`records [e, N / 64, K / 128, 4608]` uint8 and `row_scale [e, N]` float32 of one side.

    A record is 64 rows of 64 bytes of codes, then 64 rows of 8 scales, each of 16 codes.
    """
    codes = device_codes.nibbles(packed.parts[0])
    scale, absent, row_scale = scales_of(packed)
    codes = codes.masked_fill(absent.repeat_interleave(GROUP, dim=-1)[..., : codes.shape[-1]], 0)
    blocks = [_blocks(_bytes(codes), DEPTH // 2), _blocks(scale, DEPTH // GROUP)]
    return {"records": torch.cat(blocks, dim=-1).contiguous(), "row_scale": row_scale}


def scales_of(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Scale bytes `[e, N, K / 16]`, where there is nothing to keep, and the rows' factors `[e, N]`.

    A byte is the E4M3 of the scale over the row's factor; its top bit says that three halves of it round up.
    """
    power = packed.parts[1].view(torch.uint8)
    largest = power.amax(dim=-1, keepdim=True).int()
    below = largest - power.int()
    scale = (HIGHEST - below.clamp_max(SPAN)) * 8
    factor = torch.exp2((largest.squeeze(-1) - 127 - (HIGHEST - 7)).double()).float()
    factor = torch.where((power == 255).any(dim=-1), torch.nan, factor)
    scale, below = (t.repeat_interleave(2, dim=-1) for t in (scale, below))
    return scale.to(torch.uint8), below > SPAN, factor


def _bytes(codes: Tensor) -> Tensor:
    """`codes [e, N, K]` below 16 -> `[e, N, K / 2]` bytes, of which four hold eight codes."""
    padded = F.pad(codes, (0, -codes.shape[-1] % 8))
    eight = padded.view(*padded.shape[:-1], padded.shape[-1] // 8, 8)
    magnitude, sign = eight & 7, eight & 8
    low = magnitude[..., 0::2] | sign[..., 4:]
    high = magnitude[..., 1::2] | sign[..., :4]
    return (low | high << 4).flatten(-2)


def _blocks(rows: Tensor, width: int) -> Tensor:
    """`[e, N, W]` bytes -> `[e, N / 64, W / width, 64 width]`, padded with zeros."""
    padded = F.pad(rows, (0, -rows.shape[2] % width, 0, -rows.shape[1] % ROWS))
    e, n, w = padded.shape
    return padded.view(e, n // ROWS, ROWS, w // width, width).transpose(2, 3).flatten(-2)


ROW = KernelRow(
    name="cuda_w4a8",
    build=CudaW4A8,
    schemes=frozenset({Scheme(MXFP4, FP8_GROUP)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=frozenset({"silu", "swigluoai", "swigluoai_uninterleave"}),
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(32, 64),
    verified=("sm90",),
)
