# mypy: disable-error-code="import-not-found"
"""Experts on FlashInfer's CuTe DSL kernels for Blackwell: NVFP4 and MXFP4 weights.

gate_up is laid out as 64 rows of up, 64 of gate, and so on; block scales as the tensor cores' tiles, of which
the kernels take a six-dimensional view. Sums go to bf16 with a float32 scale a slot.

The kernel rounds what stands between the GEMMs of NVFP4 x NVFP4 with one scale for all experts. Checkpoints
have one an expert: where they differ, `prepare` refuses, and a batch that meets differing ones, which moves
between ranks may bring, is answered with NaN. The other pairs round nothing with a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.support.flashinfer import SwiGLU, static_scales
from moeserve.experts.kernels.support.library import LibraryStep, laid_out
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_STATIC

W4A4 = Scheme(NVFP4, NVFP4_STATIC)
W4A16 = Scheme(NVFP4, BF16)
W4A8 = Scheme(MXFP4, MXFP8)

MODES = {W4A4: "w4a4", W4A16: "w4a16", W4A8: "w4a8"}
"""What the library calls each pair of formats."""

ACTIVATIONS = {
    "silu": "Swiglu",
    "swigluoai": "Swiglu",
    "swigluoai_uninterleave": "Swiglu",
    "relu2_no_mul": "Relu2",
}
"""Our names to those of the library's `ActivationType`."""

TILE = (32, 4, 4)
"""Scales of 128 rows and four groups, as they lie in memory."""


class FlashInferCuteDsl:
    """One call for both GEMMs and the activation between them; answers in bf16."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes and scales in the kernels' order, and the float32 scale of each slot's sums.

        ValueError: the weights do not fit the kernel's spec, or experts round their inner rows with
        different scales.
        """
        fitted, scheme = self._spec.fit(weights), self._spec.scheme
        first = ("up_gate_by_64",) if self._spec.shape.activation.gated else ()
        sides = {
            "gate_up": laid_out(fitted.gate_up, *first, "scales_128x4"),
            "down": laid_out(fitted.down, "scales_128x4"),
        }
        tensors = {
            f"{side}.{name}": parts[name].contiguous()
            for side, parts in sides.items()
            for name in ("codes", "scale")
        }
        ones = torch.ones(fitted.experts, device=fitted.gate_up.device)
        alpha = [parts["global_scale"] if scheme.weights == NVFP4 else ones for parts in sides.values()]
        if scheme == W4A4:
            _check_one_scale(fitted.inner_scale)
            return Prepared(tensors | static_scales(fitted.tensors(), (alpha[0], alpha[1])))
        gate_up, down = (scale.flatten().clone() for scale in alpha)
        return Prepared(tensors | {"gate_up_alpha": gate_up, "down_alpha": down})

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        from flashinfer.fused_moe import cute_dsl_fused_moe

        spec, weights, step = self._spec, prepared.per_slot, LibraryStep(batch)
        shape, slots = batch.tokens.shape, batch.slots
        if step.empty:
            return torch.empty(shape, dtype=spec.out_dtype, device=batch.tokens.device)
        x, x_sf = self._rows(step, weights)
        outputs: Tensor = cute_dsl_fused_moe(
            x=x,
            x_sf=x_sf,
            token_selected_experts=step.slots(slots)[:, None],
            token_final_scales=torch.ones((step.capacity, 1), device=x.device),
            w1_weight=weights["gate_up.codes"],
            w1_weight_sf=tiles(weights["gate_up.scale"]),
            w1_alpha=weights["gate_up_alpha"],
            fc2_input_scale=_inner_quant(weights, batch) if spec.scheme == W4A4 else None,
            w2_weight=weights["down.codes"],
            w2_weight_sf=tiles(weights["down.scale"]),
            w2_alpha=weights["down_alpha"],
            num_experts=slots + 1,
            top_k=1,
            num_local_experts=slots,
            local_expert_offset=0,
            quant_mode=MODES[spec.scheme],
            **self._activation(),
        )
        return outputs.to(spec.out_dtype).view(shape)

    def _rows(self, step: LibraryStep, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Rows and their block scales, which lie row by row."""
        if self._spec.scheme == W4A16:
            return step.plain(), None
        codes, scale = step.rounded(self._spec.scheme.activations, weights.get("input_scale"))
        return codes, scale.contiguous() if self._spec.scheme == W4A8 else scale.contiguous()[..., None]

    def _activation(self) -> dict[str, Any]:
        from flashinfer.fused_moe.core import ActivationType

        activation = self._spec.shape.activation
        found: dict[str, Any] = {"activation_type": ActivationType[ACTIVATIONS[activation.name]].value}
        swiglu = SwiGLU.of(activation)
        if swiglu is not None:
            found |= {"swiglu_alpha": swiglu.alpha, "swiglu_beta": swiglu.beta}
            found |= {} if swiglu.limit is None else {"swiglu_limit": swiglu.limit}
        return found


def tiles(scale: Tensor) -> Tensor:
    """Swizzled block scales `[e, N, G]` as bytes: the view `[32, 4, N / 128, 4, G / 4, e]` of their tiles."""
    e, rows, groups = scale.shape
    height, width = TILE[0] * TILE[1], TILE[2]
    return scale.view(torch.uint8).view(e, rows // height, groups // width, *TILE).permute(3, 4, 1, 5, 2, 0)


def _check_one_scale(scale: Tensor | None) -> None:
    if scale is not None and scale.numel() and bool((scale != scale[0]).any()):
        low, high = scale.min().item(), scale.max().item()
        raise ValueError(
            f"flashinfer_cutedsl rounds inner rows with one scale, and experts have {low} to {high}; "
            "name flashinfer_trtllm or flashinfer_cutlass, which take one an expert"
        )


def _inner_quant(weights: Mapping[str, Tensor], batch: ExpertBatch) -> Tensor:
    """The reciprocal of the inner scale that all slots with rows share, `[1]`; NaN where they differ."""
    quant, used = weights["inner_quant"], batch.counts > 0
    found = torch.where(used, quant, 0.0).amax(0, keepdim=True)
    return torch.where(((quant == found) | ~used).all(), found, torch.nan)


ENTRY = KernelEntry(
    name="flashinfer_cutedsl",
    build=FlashInferCuteDsl,
    schemes=frozenset(MODES),
    bf16_answers=True,
    eats=frozenset({BF16, MXFP8}),
    groupings=frozenset(Grouping),
    activations=frozenset(ACTIVATIONS),
    fewer_activations={W4A8: frozenset(ACTIVATIONS) - {"relu2_no_mul"}},
    unbiased=frozenset(MODES),
    archs=frozenset({"sm100", "sm103"}),
    modules=frozenset({"flashinfer"}),
    multiple_of=(128, 128),
)
