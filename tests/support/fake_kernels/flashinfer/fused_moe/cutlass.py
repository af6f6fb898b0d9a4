"""`cutlass_fused_moe`, which tells schemes by dtypes and flags; gate and up are stored up first."""

from __future__ import annotations

import torch
from fake_formulas import activated, e8m0, fp4, gate_first, parameters_of, routed, spread, unswizzled
from torch import Tensor

from flashinfer.fused_moe.core import ActivationType
from moeserve.quant.formats.fp8 import FP8_GROUP, fp8_given
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.formats.nvfp4 import nvfp4_given
from moeserve.quant.layouts.sm90_mixed import SM90_MIXED_MXFP4


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    input_sf: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: ActivationType = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: list[int] | None = None,
    workspace_buffer: Tensor | None = None,
    *,
    clamped_relu2_limit: Tensor | None = None,
    situ_beta: Tensor | None = None,
    situ_linear_beta: Tensor | None = None,
    backend: str = "cutlass",
) -> Tensor:
    slots, width = fc2_expert_weights.shape[:2]
    assert token_selected_experts.dtype == torch.int32 and token_selected_experts.shape == (len(input), 1)
    assert token_final_scales.dtype == torch.float32 and (token_final_scales == 1).all()
    assert output is not None and output.shape == (len(input), width) and output.dtype == output_dtype
    for bias in (fc1_expert_biases, fc2_expert_biases):
        assert bias is None or bias.dtype == output_dtype
    gated = activation_type != ActivationType.Relu2
    flags = (use_deepseek_fp8_block_scale, use_w4_group_scaling, use_mxfp8_act_scaling)
    assert sum(flags) <= 1
    kind = _kind(input, fc1_expert_weights, flags)
    gate_up, down = kind.weights(fc1_expert_weights, fc2_expert_weights, quant_scales)
    if gated:
        gate_up = gate_first(gate_up)

    def expert(slot: int, index: Tensor) -> Tensor:
        rows = kind.rows(input, input_sf, quant_scales, slot, index.long().flatten())
        between = rows @ gate_up[slot].T
        if fc1_expert_biases is not None:
            bias = gate_first(fc1_expert_biases) if gated else fc1_expert_biases
            between = between + bias[slot].float()
        parameters = parameters_of(slot, swiglu_alpha, swiglu_beta, swiglu_limit)
        inner = activated(activation_type.name, between, parameters)
        answer = kind.inner(inner, quant_scales, slot) @ down[slot].T
        return answer if fc2_expert_biases is None else answer + fc2_expert_biases[slot].float()

    index = torch.arange(len(input))[:, None]
    output.copy_(routed(index, token_selected_experts, slots, expert, width))
    assert input_sf is None or not swizzled_input_sf
    return output


class _Plain:
    """bf16 weights and rows."""

    def weights(self, fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> tuple[Tensor, Tensor]:
        assert fc1.dtype == fc2.dtype == torch.bfloat16 and not scales
        return fc1.float(), fc2.float()

    def rows(self, x: Tensor, sf: Tensor | None, scales: list[Tensor], slot: int, index: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16 and sf is None
        return x[index].float()

    def inner(self, inner: Tensor, scales: list[Tensor], slot: int) -> Tensor:
        return inner


class _Fp8(_Plain):
    """Static FP8: [fc1 dequant [e], fc2 quant [e], fc2 dequant [e], fc1 input dequant []]."""

    def weights(self, fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> tuple[Tensor, Tensor]:
        first, quant, second, scalar = scales
        assert first.shape == quant.shape == second.shape == fc1.shape[:1] and scalar.shape == ()
        return fc1.float() * first[:, None, None], fc2.float() * (second * quant)[:, None, None]

    def rows(self, x: Tensor, sf: Tensor | None, scales: list[Tensor], slot: int, index: Tensor) -> Tensor:
        assert x.dtype == torch.float8_e4m3fn
        return x[index].float()

    def inner(self, inner: Tensor, scales: list[Tensor], slot: int) -> Tensor:
        return fp8_given(1 / scales[1][slot]).quantize(inner).dequantize()


class _Blocks(_Plain):
    """FP8 in 128x128 blocks; rows are rounded within."""

    def weights(self, fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> tuple[Tensor, Tensor]:
        assert len(scales) == 2 and fc1.dtype == torch.float8_e4m3fn
        return fc1.float() * spread(scales[0], 128, 128), fc2.float() * spread(scales[1], 128, 128)

    def rows(self, x: Tensor, sf: Tensor | None, scales: list[Tensor], slot: int, index: Tensor) -> Tensor:
        return self.inner(super().rows(x, sf, scales, slot, index), scales, slot)

    def inner(self, inner: Tensor, scales: list[Tensor], slot: int) -> Tensor:
        return FP8_GROUP.quantize(inner).dequantize()


class _W4A16(_Plain):
    """Hopper's mixed-input MXFP4, whose bits are checked where the layout is."""

    def weights(self, fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> tuple[Tensor, Tensor]:
        def decoded(codes: Tensor, scale: Tensor) -> Tensor:
            assert codes.dtype == torch.uint8 and scale.dtype == torch.int32
            e, n, half = codes.shape
            like = MXFP4.empty((e, n, 2 * half), "meta")
            return SM90_MIXED_MXFP4.unpack(
                {"codes": codes, "scale": scale.view(torch.uint8)}, like
            ).dequantize()

        return decoded(fc1, scales[0]), decoded(fc2, scales[1])


class _W4A8(_Plain):
    """MXFP4 weights in words of 64 bits, MXFP8 rows with scales row by row."""

    def weights(self, fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> tuple[Tensor, Tensor]:
        assert all((one == 1).all() and one.shape == fc1.shape[:1] for one in scales[1::2])
        return _words(fc1, scales[0], 32), _words(fc2, scales[2], 32)

    def rows(self, x: Tensor, sf: Tensor | None, scales: list[Tensor], slot: int, index: Tensor) -> Tensor:
        assert x.dtype == torch.float8_e4m3fn and sf is not None and sf.dtype == torch.uint8
        return x[index].float() * spread(e8m0(sf[index]), 32)

    def inner(self, inner: Tensor, scales: list[Tensor], slot: int) -> Tensor:
        return MXFP8.quantize(inner).dequantize()


class _Fp4(_Plain):
    """NVFP4: [input quant, blocks, dequant, inner quant, blocks, dequant], a value a slot; bf16 rows."""

    def weights(self, fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> tuple[Tensor, Tensor]:
        quant, first, alpha, inner_quant, second, beta = scales
        assert all(one.shape == fc1.shape[:1] for one in (quant, alpha, inner_quant, beta))
        gate_up, down = _words(fc1, first, 16), _words(fc2, second, 16)
        return gate_up * (alpha * quant)[:, None, None], down * (beta * inner_quant)[:, None, None]

    def rows(self, x: Tensor, sf: Tensor | None, scales: list[Tensor], slot: int, index: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        return nvfp4_given(1 / scales[0][slot]).quantize(x[index].float()).dequantize()

    def inner(self, inner: Tensor, scales: list[Tensor], slot: int) -> Tensor:
        return nvfp4_given(1 / scales[3][slot]).quantize(inner).dequantize()


def _words(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Four-bit weights with scales in 128 x 4 tiles, both as words."""
    assert codes.dtype == torch.int64 and scale.dtype == torch.int32 and scale.ndim == 3
    values = fp4(codes)
    found = unswizzled(scale.view(torch.uint8), values.shape[1], values.shape[2] // group)
    return values * spread(e8m0(found) if group == 32 else found.view(torch.float8_e4m3fn).float(), group)


def _kind(x: Tensor, fc1: Tensor, flags: tuple[bool, bool, bool]) -> _Plain:
    blocks, group, mx = flags
    if blocks:
        return _Blocks()
    if group:
        return _W4A16()
    if fc1.dtype == torch.int64:
        return _W4A8() if mx else _Fp4()
    return _Fp8() if fc1.dtype == torch.float8_e4m3fn else _Plain()
