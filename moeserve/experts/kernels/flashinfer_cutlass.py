# mypy: disable-error-code="import-not-found"
"""Experts on FlashInfer's CUTLASS kernel: bf16, FP8, MXFP4 and NVFP4, by architecture.

It wants up rows above gate rows. Rows of FP8 blocks and of NVFP4 are rounded inside the kernel, each with its
own slot's scale where that is static; static FP8 and MXFP8 rows before it. MXFP4 sizes are rounded up to
128. On Hopper a block scale near zero gives NaN, so block scales are at least 1e-10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.support.flashinfer import SwiGLU, static_scales, up_first
from moeserve.experts.kernels.support.library import LibraryStep, laid_out, padded, rounded_up
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP, FP8_STATIC, FP8_TENSOR
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_STATIC

PADDING = "mxfp4_flashinfer_cutlass"
SMALLEST_SCALE = 1e-10

PLAIN = Scheme(BF16, BF16)
FP8 = Scheme(FP8_TENSOR, FP8_STATIC)
BLOCKS = Scheme(FP8_BLOCK, FP8_GROUP)
W4A16 = Scheme(MXFP4, BF16)
W4A8 = Scheme(MXFP4, MXFP8)
FP4 = Scheme(NVFP4, NVFP4_STATIC)

SCALES = {W4A16: "sm90_mixed_mxfp4", W4A8: "scales_128x4", FP4: "scales_128x4"}
"""Layouts of weights that have block scales of their own."""

ACTIVATIONS = {
    "silu": "Swiglu",
    "swigluoai": "Swiglu",
    "swigluoai_uninterleave": "Swiglu",
    "gelu_tanh": "GegluTanh",
    "relu2_no_mul": "Relu2",
}
"""Our names to those of the library's `ActivationType`."""


class FlashInferCutlass:
    """One call for both GEMMs and the activation between them; answers in bf16."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._shape = rounded_up(spec.shape, PADDING) if spec.scheme.weights == MXFP4 else spec.shape

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes, scales and biases with up rows first, in the layouts the kernel reads.

        ValueError: the weights do not fit the kernel's spec.
        """
        fitted, scheme = self._spec.fit(weights), self._spec.scheme
        if scheme.weights == MXFP4:
            fitted = padded(fitted, PADDING)
        own = (SCALES[scheme],) if scheme in SCALES else ()
        first = ("up_gate",) if self._shape.activation.gated else ()
        sides = {"gate_up": laid_out(fitted.gate_up, *first, *own), "down": laid_out(fitted.down, *own)}
        tensors = {f"{side}.codes": parts["codes"].contiguous() for side, parts in sides.items()}
        tensors |= self._scales(sides, fitted)
        if fitted.gate_up_bias is not None and fitted.down_bias is not None:
            bias = up_first(fitted.gate_up_bias) if self._shape.activation.gated else fitted.gate_up_bias
            tensors |= {"gate_up_bias": bias.bfloat16(), "down_bias": fitted.down_bias.bfloat16()}
        device = fitted.gate_up.device
        return Prepared(tensors, {"one": torch.ones((), device=device)} if scheme == FP8 else {})

    def _scales(self, sides: Mapping[str, Mapping[str, Tensor]], weights: ExpertWeights) -> dict[str, Tensor]:
        scheme = self._spec.scheme
        scales = {f"{side}.scale": parts["scale"] for side, parts in sides.items() if "scale" in parts}
        if scheme == BLOCKS:
            return {name: scale.clamp_min(SMALLEST_SCALE) for name, scale in scales.items()}
        if scheme == FP8:
            return static_scales(weights.tensors(), (scales["gate_up.scale"], scales["down.scale"]))
        if scheme == FP4:
            alpha = (sides["gate_up"]["global_scale"], sides["down"]["global_scale"])
            return scales | static_scales(weights.tensors(), alpha)
        return scales

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        from flashinfer.fused_moe import cutlass_fused_moe

        spec, weights, step = self._spec, prepared.per_slot, LibraryStep(batch)
        outputs = torch.empty(
            (step.capacity, self._shape.hidden), dtype=torch.bfloat16, device=batch.tokens.device
        )
        if not step.empty:
            cutlass_fused_moe(
                token_selected_experts=step.slots(batch.slots)[:, None],
                token_final_scales=torch.ones((step.capacity, 1), device=outputs.device),
                fc1_expert_weights=self._codes(weights["gate_up.codes"]),
                fc2_expert_weights=self._codes(weights["down.codes"]),
                output_dtype=torch.bfloat16,
                quant_scales=self._quant_scales(prepared),
                fc1_expert_biases=weights.get("gate_up_bias"),
                fc2_expert_biases=weights.get("down_bias"),
                output=outputs,
                **self._rows(step, weights),
                **self._activation(batch.slots, outputs.device),
                **self._kind(),
            )
        return outputs[:, : spec.shape.hidden].to(spec.out_dtype).view(batch.tokens.shape)

    def _codes(self, codes: Tensor) -> Tensor:
        """Four-bit codes as the words that tell the library which kernel to take."""
        return codes.view(torch.int64) if self._spec.scheme in (W4A8, FP4) else codes

    def _quant_scales(self, prepared: Prepared) -> list[Tensor]:
        scheme, of = self._spec.scheme, prepared.per_slot
        if scheme == PLAIN:
            return []
        if scheme == FP8:
            return [of["gate_up_alpha"], of["inner_quant"], of["down_alpha"], prepared.shared["one"]]
        gate_up, down = of["gate_up.scale"], of["down.scale"]
        if scheme == BLOCKS:
            return [gate_up, down]
        words = [scale.view(torch.uint8).view(torch.int32) for scale in (gate_up, down)]
        if scheme == W4A16:
            return words
        if scheme == W4A8:
            ones = torch.ones(gate_up.shape[0], device=gate_up.device)
            return [words[0], ones, words[1], ones]
        return [
            of["input_quant"], words[0], of["gate_up_alpha"], of["inner_quant"], words[1], of["down_alpha"]
        ]  # fmt: skip

    def _rows(self, step: LibraryStep, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """The rows, rounded where the kernel does not do it."""
        scheme, more = self._spec.scheme, self._shape.hidden - self._spec.shape.hidden
        if scheme == FP8:
            return {"input": step.rounded(FP8_STATIC, weights["input_scale"])[0]}
        if scheme != W4A8:
            return {"input": F.pad(step.plain(), (0, more)) if more else step.plain()}
        codes, scale = step.round(F.pad(step.plain(), (0, more)), MXFP8) if more else step.rounded(MXFP8)
        return {"input": codes, "input_sf": scale.contiguous(), "swizzled_input_sf": False}

    def _activation(self, slots: int, device: torch.device) -> dict[str, Any]:
        from flashinfer.fused_moe.core import ActivationType

        activation = self._shape.activation
        found: dict[str, Any] = {"activation_type": ActivationType[ACTIVATIONS[activation.name]]}
        swiglu = SwiGLU.of(activation)
        if swiglu is not None:
            names = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
            found |= dict(zip(names, swiglu.per_slot(slots, device), strict=True))
        return found

    def _kind(self) -> dict[str, bool]:
        flags = {
            BLOCKS: "use_deepseek_fp8_block_scale",
            W4A16: "use_w4_group_scaling",
            W4A8: "use_mxfp8_act_scaling",
        }
        return {flags[self._spec.scheme]: True} if self._spec.scheme in flags else {}


HOPPER = frozenset({PLAIN, FP8, BLOCKS, W4A16})
BLACKWELL = frozenset({PLAIN, FP8, W4A8, FP4})
GATED = frozenset(ACTIVATIONS) - {"relu2_no_mul"}

ENTRY = KernelEntry(
    name="flashinfer_cutlass",
    build=FlashInferCutlass,
    schemes=HOPPER | BLACKWELL,
    fewer_schemes={
        "sm90": HOPPER,
        **dict.fromkeys(("sm100", "sm103", "sm120"), BLACKWELL),
    },
    bf16_answers=True,
    e4m3_sums=frozenset({FP8, BLOCKS}),
    eats=frozenset({BF16, MXFP8}),
    groupings=frozenset(Grouping),
    activations=frozenset(ACTIVATIONS),
    fewer_activations={W4A16: GATED, W4A8: GATED},
    unbiased=frozenset({FP8, BLOCKS, FP4}),
    archs=frozenset({"sm90", "sm100", "sm103", "sm120"}),
    modules=frozenset({"flashinfer"}),
    multiple_of=(128, 128),
    looser={PLAIN: (8, 128), FP8: (16, 128), W4A16: (32, 32), W4A8: (32, 32), FP4: (64, 64)},
)
