"""The TensorRT-LLM calls that take chosen experts: packed choices, shuffled weights, one call a kind."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
from fake_formulas import (
    activated,
    e8m0,
    fp4,
    from_turns,
    gate_first,
    parameters_of,
    routed,
    spread,
    unblocked,
    unshuffled,
    unswizzled,
)
from torch import Tensor

from flashinfer import SfLayout
from flashinfer.fused_moe.core import ActivationType
from moeserve.quant.formats.fp8 import FP8_GROUP, fp8_given
from moeserve.quant.formats.mx import MXFP8
from moeserve.quant.formats.nvfp4 import nvfp4_given


class WeightLayout(IntEnum):
    MajorK = 0
    MajorMn = 1
    BlockMajorK = 2


class Fp8QuantizationType(IntEnum):
    NoneFp8 = 0
    DeepSeekFp8 = 1
    MxFp8 = 2
    PerTensorFp8 = 3


Rounding = Callable[[int, Tensor], Tensor]


def _gated(activation_type: int) -> bool:
    return activation_type != ActivationType.Relu2


def _experts(
    topk_ids: Tensor,
    x: Tensor,
    sides: tuple[Tensor, Tensor],
    activation_type: int,
    swiglu: tuple[Tensor | None, Tensor | None, Tensor | None],
    inner: Rounding,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """What all calls do once rows and weights are values: ids above the weights' bits, weights 1."""
    gate_up, down = sides
    assert topk_ids.dtype == torch.int32 and topk_ids.shape == (len(x), 1)
    assert ((topk_ids & 0xFFFF) == 0x3F80).all(), "the weight is 1 in bf16"

    def expert(slot: int, rows: Tensor) -> Tensor:
        between = rows @ gate_up[slot].T
        between = between if biases[0] is None else between + biases[0][slot]
        middle = activated(ActivationType(activation_type).name, between, parameters_of(slot, *swiglu))
        answer = inner(slot, middle) @ down[slot].T
        return answer if biases[1] is None else answer + biases[1][slot]

    return routed(x, topk_ids >> 16, len(down), expert, down.shape[1]).bfloat16()


def _check(
    num_experts: int, top_k: int, local_expert_offset: int, local: int, ids: Tensor, codes: Tensor
) -> None:
    assert num_experts % 4 == 0 and top_k == 1 and local_expert_offset == 0 and local == len(codes)
    assert int((ids >> 16).max()) < num_experts


def trtllm_bf16_routed_moe(
    topk_ids: Tensor,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm2_weights: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = WeightLayout.BlockMajorK,
    do_finalize: bool = True,
    enable_pdl: bool = True,
    gemm1_lora_delta: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu.value,
    routing_replay_out: Tensor | None = None,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    _check(num_experts, top_k, local_expert_offset, local_num_experts, topk_ids, gemm1_weights)
    assert use_shuffled_weight and weight_layout == WeightLayout.BlockMajorK
    assert hidden_states.dtype == gemm1_weights.dtype == torch.bfloat16
    gate_up, down = (unshuffled(unblocked(side), 32).float() for side in (gemm1_weights, gemm2_weights))
    gate_up = from_turns(gate_up) if _gated(activation_type) else gate_up
    assert down.shape[2] == intermediate_size
    swiglu = (gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    return _experts(topk_ids, hidden_states.float(), (gate_up, down), activation_type, swiglu, lambda _, y: y)


def trtllm_fp8_per_tensor_scale_routed_moe(
    topk_ids: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    output1_scales_scalar: Tensor,
    output1_scales_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    output2_scales_scalar: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu.value,
    routing_replay_out: Tensor | None = None,
    output: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
) -> Tensor:
    _check(num_experts, top_k, local_expert_offset, local_num_experts, topk_ids, gemm1_weights)
    assert not use_routing_scales_on_input and gemm1_clamp_limit is None
    assert hidden_states.dtype == gemm1_weights.dtype == torch.float8_e4m3fn
    gate_up, down = (unshuffled(side, 32).float() for side in (gemm1_weights, gemm2_weights))
    gate_up = from_turns(gate_up) if _gated(activation_type) else gate_up
    alpha = output1_scales_gate_scalar
    quant = output1_scales_scalar / alpha if _gated(activation_type) else output1_scales_scalar
    sides = (gate_up * alpha[:, None, None], down * (output2_scales_scalar * quant)[:, None, None])

    def inner(slot: int, y: Tensor) -> Tensor:
        return fp8_given(1 / quant[slot]).quantize(y).dequantize()

    return _experts(topk_ids, hidden_states.float(), sides, activation_type, (None, None, None), inner)


def trtllm_fp8_block_scale_routed_moe(
    topk_ids: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: Fp8QuantizationType = Fp8QuantizationType.DeepSeekFp8,
    activation_type: int = ActivationType.Swiglu.value,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> list[Tensor]:
    _check(num_experts, top_k, local_expert_offset, local_num_experts, topk_ids, gemm1_weights)
    assert use_shuffled_weight and hidden_states.dtype == gemm1_weights.dtype == torch.float8_e4m3fn
    gated, swiglu = _gated(activation_type), (gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    if fp8_quantization_type == Fp8QuantizationType.DeepSeekFp8:
        assert weight_layout == WeightLayout.BlockMajorK
        x = hidden_states.float() * spread(hidden_states_scale.T, 128)
        gate_up, down = (unshuffled(unblocked(side), 16).float() for side in (gemm1_weights, gemm2_weights))
        gate_up = gate_up * spread(gemm1_weights_scale, 128, 128)
        sides = (gate_first(gate_up) if gated else gate_up, down * spread(gemm2_weights_scale, 128, 128))
        return [
            _experts(
                topk_ids, x, sides, activation_type, swiglu, lambda _, y: FP8_GROUP.quantize(y).dequantize()
            )
        ]
    assert fp8_quantization_type == Fp8QuantizationType.MxFp8 and weight_layout == WeightLayout.MajorK
    assert hidden_states_scale.dtype == torch.uint8
    x = hidden_states.float() * spread(e8m0(hidden_states_scale), 32)
    sides = (
        _block_scaled(gemm1_weights.float(), gemm1_weights_scale, 32, gated),
        _block_scaled(gemm2_weights.float(), gemm2_weights_scale, 32, False),
    )
    return [
        _experts(topk_ids, x, sides, activation_type, swiglu, lambda _, y: MXFP8.quantize(y).dequantize())
    ]


def trtllm_fp4_block_scale_routed_moe(
    topk_ids: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm1_bias: Tensor | None,
    gemm1_alpha: Tensor | None,
    gemm1_beta: Tensor | None,
    gemm1_clamp_limit: Tensor | None,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    gemm2_bias: Tensor | None,
    output1_scale_scalar: Tensor | None,
    output1_scale_gate_scalar: Tensor | None,
    output2_scale_scalar: Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    per_token_scale: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    gemm1_lora_delta: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    num_fused_shared_experts: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[Tensor]:
    _check(num_experts, top_k, local_expert_offset, local_num_experts, topk_ids, gemm1_weights)
    assert gemm1_weights.dtype == torch.uint8
    rounded = hidden_states_scale is not None
    assert hidden_states_scale_layout == (SfLayout.layout_linear if rounded else None)
    assert gemm1_weights_scale.dtype == gemm2_weights_scale.dtype == torch.float8_e4m3fn
    gated, group = _gated(activation_type), 16 if output1_scale_scalar is not None else 32
    gate_up = _block_scaled(fp4(gemm1_weights), gemm1_weights_scale, group, gated)
    down = _block_scaled(fp4(gemm2_weights), gemm2_weights_scale, group, False)
    inner: Rounding = lambda _, y: y  # noqa: E731
    if output1_scale_scalar is not None:
        assert output1_scale_gate_scalar is not None and output2_scale_scalar is not None
        assert hidden_states.dtype == torch.uint8 and hidden_states_scale is not None
        x = fp4(hidden_states) * spread(hidden_states_scale.float(), 16)
        alpha = output1_scale_gate_scalar
        quant = output1_scale_scalar / alpha if gated else output1_scale_scalar
        gate_up, down = gate_up * alpha[:, None, None], down * (output2_scale_scalar * quant)[:, None, None]
        inner = lambda slot, y: nvfp4_given(1 / quant[slot]).quantize(y).dequantize()  # noqa: E731
    elif hidden_states_scale is None:
        assert hidden_states.dtype == torch.bfloat16
        x = hidden_states.float()
    else:
        assert hidden_states_scale.dtype == torch.float8_e4m3fn
        x = hidden_states.float() * spread(e8m0(hidden_states_scale), 32)
        inner = lambda _, y: MXFP8.quantize(y).dequantize()  # noqa: E731
    biases = (
        None if gemm1_bias is None else from_turns(unshuffled(gemm1_bias, 32)),
        None if gemm2_bias is None else unshuffled(gemm2_bias, 32),
    )
    swiglu = (gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    return [_experts(topk_ids, x, (gate_up, down), activation_type, swiglu, inner, biases)]


def _block_scaled(values: Tensor, scale: Tensor, group: int, gated: bool) -> Tensor:
    """Shuffled rows of values with scales that went the same way and were then tiled."""
    found = unswizzled(scale, values.shape[1], values.shape[2] // group)
    factor = e8m0(found) if group == 32 else found.view(torch.float8_e4m3fn).float()
    rows = unshuffled(values * spread(factor, group), 32)
    return from_turns(rows) if gated else rows
