"""A stand-in for FlashInfer's fused kernels: their signatures, their checks, their arithmetic."""

from flashinfer.fused_moe.cutedsl import cute_dsl_fused_moe
from flashinfer.fused_moe.cutlass import cutlass_fused_moe
from flashinfer.fused_moe.trtllm import (
    Fp8QuantizationType,
    WeightLayout,
    trtllm_bf16_routed_moe,
    trtllm_fp4_block_scale_routed_moe,
    trtllm_fp8_block_scale_routed_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)

__all__ = [
    "Fp8QuantizationType",
    "WeightLayout",
    "cute_dsl_fused_moe",
    "cutlass_fused_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
]
