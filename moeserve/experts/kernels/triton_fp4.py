"""Our own Hopper kernels for four-bit weights, NVFP4 and MXFP4, and bf16 rows: codes decode in registers.

A step of very few rows is one launch of `cuda/few.py`, where that was measured to be faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels import codes as device_codes
from moeserve.experts.kernels.hopper import few_form, flat, step_for
from moeserve.experts.kernels.torch_reference import COMPUTED
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4


class TritonFp4:
    """Two grouped GEMMs in bf16, exact for these weights: a code times its block's scale has six bits."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

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

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        from moeserve.experts.kernels.cuda import few
        from moeserve.experts.kernels.triton.grouped import Rows, Weights

        shape, spec = batch.tokens.shape, self._spec
        tokens = flat(batch.tokens)
        if batch.slots == 0 or tokens.shape[0] == 0:
            return torch.empty(shape, dtype=spec.out_dtype, device=tokens.device)
        x = tokens.parts[0] if tokens.format == BF16 else tokens.dequantize().bfloat16()
        slot = prepared.per_slot
        sides = {
            side: Weights(
                "fp4",
                slot[f"{side}.codes"],
                slot[f"{side}.row_scale"],
                slot[f"{side}.scale"],
                slot.get(f"{side}_bias"),
                slot[f"{side}.row_scale"].shape[1],
            )
            for side in ("gate_up", "down")
        }
        if (form := few_form("fp4", spec, batch, tokens)) is not None:
            return few.step(form, (x, None), batch, list(sides.values()), spec.shape).view(shape)
        step = step_for("fp4", batch, tokens)
        between = step.gemm(Rows(x), sides["gate_up"], torch.bfloat16)
        inner = step.activate(between, spec.shape, fp8=False)
        return step.gemm(inner, sides["down"], spec.out_dtype).view(shape)


def _pack(packed: Packed) -> dict[str, Tensor]:
    """`codes`, `scale` and `row_scale [e, N]` of one side."""
    codes = device_codes.nibbles(packed.parts[0])
    if packed.format == NVFP4:
        scale, absent, factor = device_codes.from_e4m3(packed.parts[1])
        group = 16
        row_scale = (packed.parts[2].squeeze(-1) * factor).expand(*codes.shape[:2]).contiguous()
    else:
        scale, absent, row_scale = device_codes.from_e8m0(packed.parts[1].view(torch.uint8))
        group = 32
        scale = scale.repeat_interleave(2, dim=-1)
    codes = codes.masked_fill(absent.repeat_interleave(group, dim=-1)[..., : codes.shape[-1]], 0)
    return {
        "codes": device_codes.pack_codes(codes),
        "scale": device_codes.pack_scales(scale),
        "row_scale": row_scale,
    }


ENTRY = KernelEntry(
    name="triton_fp4",
    build=TritonFp4,
    schemes=frozenset({Scheme(NVFP4, BF16), Scheme(MXFP4, BF16)}),
    eats=frozenset({BF16, FP8_GROUP}),
    groupings=frozenset(Grouping),
    activations=COMPUTED,
    archs=frozenset({"sm90"}),
    modules=frozenset({"triton", NEEDED_MODULE}),
    multiple_of=(32, 32),
    verified=("sm90",),
)
