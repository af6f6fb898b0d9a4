# mypy: disable-error-code="import-not-found"
"""Experts on FlashInfer's TensorRT-LLM kernels for Blackwell: bf16, FP8, MXFP8, MXFP4 and NVFP4.

Each kind of weights has a call of its own, in the form that takes chosen experts. Weights are laid out for
the transposed product: up rows first, rows shuffled for its epilogue (`quant/layouts/trtllm.py`). A choice is
one int32: the slot above the bf16 bits of its weight, 1. Rows outside the segments choose the first expert
after this rank's. MXFP4 sizes are rounded up to 256.

An NVFP4 row is rounded with its own slot's scale, which the sums are multiplied by. Only MXFP4 takes biases.
With NVFP4 and static FP8 the kernels clamp sums before they are scaled, so a limit is refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels.support.flashinfer import SwiGLU, static_scales
from moeserve.experts.kernels.support.library import LibraryStep, laid_out, padded, rounded_up
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP, FP8_STATIC, FP8_TENSOR
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_STATIC
from moeserve.quant.layouts.trtllm import TILE_128, TURNS

PADDING = "mxfp4_trtllm"
ONE = 0x3F80
"""1 in bf16."""
EXPERTS_IN_FOURS = 4
RENORMALIZE = 1
"""The library's code of a routing method; rows come with their choice made, so none is computed."""

PLAIN = Scheme(BF16, BF16)
FP8 = Scheme(FP8_TENSOR, FP8_STATIC)
BLOCKS = Scheme(FP8_BLOCK, FP8_GROUP)
MX8 = Scheme(MXFP8, MXFP8)
W4A16 = Scheme(MXFP4, BF16)
W4A8 = Scheme(MXFP4, MXFP8)
FP4 = Scheme(NVFP4, NVFP4_STATIC)

BLOCK_SCALED = ("trtllm_fp4_gate_up", "trtllm_fp4_down")
LAYOUTS: Mapping[Format, tuple[tuple[str, ...], tuple[str, ...]]] = {
    BF16: (("trtllm_bf16_gate_up",), ("trtllm_bf16_down",)),
    FP8_TENSOR: (("up_gate_by_turns", "trtllm_rows_128"), ("trtllm_rows_128",)),
    FP8_BLOCK: (("trtllm_fp8_gate_up",), ("trtllm_fp8_down",)),
    **{form: ((name,), (other,)) for form in (MXFP8, MXFP4, NVFP4) for name, other in (BLOCK_SCALED,)},
}
"""Layouts of gated weights; the gate_up of others is laid out as a down."""

ACTIVATIONS = {
    "silu": "Swiglu",
    "swigluoai": "Swiglu",
    "swigluoai_uninterleave": "Swiglu",
    "relu2_no_mul": "Relu2",
}
"""Our names to those of the library's `ActivationType`."""


class FlashInferTrtllm:
    """One call for both GEMMs and the activation between them; answers in bf16."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._shape = rounded_up(spec.shape, PADDING) if spec.scheme.weights == MXFP4 else spec.shape

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """Codes and scales laid out for the kernels, and float32 biases shuffled as their rows.

        ValueError: the weights do not fit the kernel's spec.
        """
        fitted, scheme = self._spec.fit(weights), self._spec.scheme
        if scheme.weights == MXFP4:
            fitted = padded(fitted, PADDING)
        gate_up, down = LAYOUTS[scheme.weights]
        sides = {
            "gate_up": laid_out(fitted.gate_up, *(gate_up if self._shape.activation.gated else down)),
            "down": laid_out(fitted.down, *down),
        }
        parts = {f"{side}.{name}": part for side, found in sides.items() for name, part in found.items()}
        tensors = {name: part.contiguous() for name, part in parts.items() if not _whole(name, scheme)}
        if scheme in (FP8, FP4):
            scale = "scale" if scheme == FP8 else "global_scale"
            alpha = (sides["gate_up"][scale], sides["down"][scale])
            tensors |= self._epilogue(static_scales(fitted.tensors(), alpha))
        if fitted.gate_up_bias is not None and fitted.down_bias is not None:
            tensors["gate_up_bias"] = _moved(fitted.gate_up_bias, (*TURNS, TILE_128))
            tensors["down_bias"] = _moved(fitted.down_bias, (TILE_128,))
        return Prepared(tensors)

    def _epilogue(self, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Static scales as the epilogues multiply them: what is not gated is only rounded again there."""
        gated = self._shape.activation.gated
        out = scales["gate_up_alpha"] * scales["inner_quant"] if gated else scales["inner_quant"]
        kept = {name: scales[name] for name in ("input_scale", "gate_up_alpha", "down_alpha")}
        return {**kept, "gate_up_out": out.clone()}

    def apply(self, prepared: Prepared, batch: ExpertBatch) -> Tensor:
        """RAGGED -> `[Rmax, H]`, PADDED -> `[e, C, H]`; rows outside the segments are undefined."""
        spec, step = self._spec, LibraryStep(batch)
        if step.empty:
            return torch.empty(batch.tokens.shape, dtype=spec.out_dtype, device=batch.tokens.device)
        outputs = self._call(step, prepared.per_slot)
        return outputs[:, : spec.shape.hidden].to(spec.out_dtype).view(batch.tokens.shape)

    def _call(self, step: LibraryStep, weights: Mapping[str, Tensor]) -> Tensor:
        from flashinfer import fused_moe

        calls = {
            PLAIN: fused_moe.trtllm_bf16_routed_moe,
            FP8: fused_moe.trtllm_fp8_per_tensor_scale_routed_moe,
            BLOCKS: fused_moe.trtllm_fp8_block_scale_routed_moe,
            MX8: fused_moe.trtllm_fp8_block_scale_routed_moe,
        }
        call = calls.get(self._spec.scheme, fused_moe.trtllm_fp4_block_scale_routed_moe)
        found = call(
            gemm1_weights=weights["gate_up.codes"],
            gemm2_weights=weights["down.codes"],
            **self._routing(step),
            **self._rows(step, weights),
            **self._scales(weights),
            **self._activation(step),
        )
        outputs: Tensor = found[0] if isinstance(found, list) else found
        return outputs

    def _routing(self, step: LibraryStep) -> dict[str, Any]:
        """Each row's slot, and the sizes that every call takes."""
        slots = step.batch.slots
        common = {
            "topk_ids": (step.slots(slots)[:, None] << 16) | ONE,
            "num_experts": (slots // EXPERTS_IN_FOURS + 1) * EXPERTS_IN_FOURS,
            "top_k": 1,
            "n_group": None,
            "topk_group": None,
            "intermediate_size": self._shape.inner,
            "local_expert_offset": 0,
            "local_num_experts": slots,
            "routed_scaling_factor": None,
            "routing_method_type": RENORMALIZE,
        }
        return common if self._spec.scheme == PLAIN else {**common, "routing_bias": None}

    def _rows(self, step: LibraryStep, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """The rows, rounded, with their scales in the kernels' order: FP8 blocks by column, others by row."""
        scheme, more = self._spec.scheme, self._shape.hidden - self._spec.shape.hidden
        form = scheme.activations
        if form == BF16:
            rows = F.pad(step.plain(), (0, more)) if more else step.plain()
            return {"hidden_states": rows} | ({} if scheme == PLAIN else {"hidden_states_scale": None})
        if more:
            codes, scale = step.round(F.pad(step.plain(), (0, more)), form)
        else:
            codes, scale = step.rounded(form, weights.get("input_scale"))
        if scheme == FP8:
            return {"hidden_states": codes, "use_routing_scales_on_input": False}
        if scheme == BLOCKS:
            return {"hidden_states": codes, "hidden_states_scale": scale.t().contiguous()}
        if scheme == MX8:
            return {"hidden_states": codes, "hidden_states_scale": scale.contiguous()}
        from flashinfer import SfLayout

        return {
            "hidden_states": codes,
            "hidden_states_scale": scale.contiguous().view(torch.float8_e4m3fn),
            "hidden_states_scale_layout": SfLayout.layout_linear,
        }

    def _scales(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Scales, biases and layouts of the weights, as each call names them."""
        from flashinfer.fused_moe import Fp8QuantizationType, WeightLayout

        scheme = self._spec.scheme
        if scheme == PLAIN:
            return {"use_shuffled_weight": True, "weight_layout": WeightLayout.BlockMajorK}
        if scheme == FP8:
            return {
                "output1_scales_scalar": weights["gate_up_out"],
                "output1_scales_gate_scalar": weights["gate_up_alpha"],
                "output2_scales_scalar": weights["down_alpha"],
            }
        gate_up, down = weights["gate_up.scale"], weights["down.scale"]
        if scheme in (BLOCKS, MX8):
            kind, layout = (
                (Fp8QuantizationType.DeepSeekFp8, WeightLayout.BlockMajorK)
                if scheme == BLOCKS
                else (Fp8QuantizationType.MxFp8, WeightLayout.MajorK)
            )
            named = {"gemm1_weights_scale": gate_up, "gemm2_weights_scale": down}
            how = {"use_shuffled_weight": True, "weight_layout": layout, "fp8_quantization_type": kind}
            return named | how
        return {
            "gemm1_weights_scale": gate_up.view(torch.float8_e4m3fn),
            "gemm2_weights_scale": down.view(torch.float8_e4m3fn),
            "gemm1_bias": weights.get("gate_up_bias"),
            "gemm2_bias": weights.get("down_bias"),
            "output1_scale_scalar": weights.get("gate_up_out"),
            "output1_scale_gate_scalar": weights.get("gate_up_alpha"),
            "output2_scale_scalar": weights.get("down_alpha"),
        }

    def _activation(self, step: LibraryStep) -> dict[str, Any]:
        from flashinfer.fused_moe.core import ActivationType

        scheme, activation = self._spec.scheme, self._shape.activation
        found: dict[str, Any] = {"activation_type": ActivationType[ACTIVATIONS[activation.name]].value}
        swiglu = SwiGLU.of(activation)
        if swiglu is None and scheme in (W4A16, W4A8, FP4):
            return found | dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))
        if swiglu is None:
            return found
        alpha, beta, limit = swiglu.per_slot(step.batch.slots, step.tokens.device)
        return found | {"gemm1_alpha": alpha, "gemm1_beta": beta, "gemm1_clamp_limit": limit}


def _whole(name: str, scheme: Scheme) -> bool:
    """Whether a part is one number a matrix, which the epilogues' scales hold."""
    return name.endswith("global_scale") or (scheme == FP8 and name.endswith("scale"))


def _moved(bias: Tensor, moves: tuple[Any, ...]) -> Tensor:
    """A bias `[e, N]` in the order of its matrix' rows."""
    rows = bias[..., None]
    for move in moves:
        rows = move.forward(rows)
    return rows.squeeze(-1).contiguous()


SCHEMES = frozenset({PLAIN, FP8, BLOCKS, MX8, W4A16, W4A8, FP4})
GATED = frozenset({"silu", "swigluoai", "swigluoai_uninterleave"})
STATIC = {"silu", "relu2_no_mul"}

ENTRY = KernelEntry(
    name="flashinfer_trtllm",
    build=FlashInferTrtllm,
    schemes=SCHEMES,
    bf16_answers=True,
    eats=frozenset({BF16, FP8_GROUP, MXFP8}),
    groupings=frozenset(Grouping),
    activations=frozenset(ACTIVATIONS),
    fewer_activations={
        PLAIN: frozenset(STATIC),
        FP8: frozenset(STATIC),
        FP4: frozenset(STATIC),
        W4A16: GATED,
        W4A8: GATED,
    },
    settings={scheme: frozenset(Activation(name) for name in STATIC) for scheme in (FP8, FP4)},
    unbiased=SCHEMES - {W4A16, W4A8},
    most_slots=2044,
    archs=frozenset({"sm100", "sm103"}),
    modules=frozenset({"flashinfer"}),
    multiple_of=(256, 256),
    looser={
        PLAIN: (128, 128),
        FP8: (128, 128),
        BLOCKS: (128, 128),
        MX8: (128, 128),
        W4A16: (32, 32),
        W4A8: (32, 32),
        FP4: (256, 128),
    },
)
