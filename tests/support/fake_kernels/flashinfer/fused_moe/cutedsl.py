"""`cute_dsl_fused_moe`: up and gate rows in runs of 64, scales as a view of the tensor cores' tiles."""

from __future__ import annotations

import torch
from fake_formulas import activated, e8m0, fp4, from_sixty_fours, routed, spread, unswizzled
from torch import Tensor

from flashinfer.fused_moe.core import ActivationType
from moeserve.quant.formats.mx import MXFP8
from moeserve.quant.formats.nvfp4 import nvfp4_given

LARGEST = torch.finfo(torch.float32).max


def cute_dsl_fused_moe(
    x: Tensor,
    x_sf: Tensor | None,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    w1_weight: Tensor,
    w1_weight_sf: Tensor,
    w1_alpha: Tensor,
    fc2_input_scale: Tensor | None,
    w2_weight: Tensor,
    w2_weight_sf: Tensor,
    w2_alpha: Tensor,
    num_experts: int,
    top_k: int,
    num_local_experts: int | None = None,
    local_expert_offset: int = 0,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fused_finalize: bool = True,
    moe_output: Tensor | None = None,
    aux_stream: object = None,
    enable_pdl: bool = True,
    activation_type: int = ActivationType.Swiglu.value,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float = LARGEST,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    quant_mode: str = "w4a4",
    per_token_scale: Tensor | None = None,
    tactic: tuple[object, ...] | None = None,
    localized_weights: list[object] | None = None,
    localized_streams: list[object] | None = None,
    localized_sm_count: int | None = None,
    localized_memset_stream: object = None,
    localized_allow_nonlocalized: bool = False,
    autotune_use_cuda_graph: bool = False,
) -> Tensor:
    slots = len(w1_weight)
    assert top_k == 1 and num_local_experts == slots < num_experts and local_expert_offset == 0
    assert int(token_selected_experts.max()) < num_experts and (token_final_scales == 1).all()
    assert (fc2_input_scale is not None) == (quant_mode == "w4a4")
    group = 32 if quant_mode == "w4a8" else 16
    name = ActivationType(activation_type).name
    gate_up = _weights(w1_weight, w1_weight_sf, group)
    gate_up = gate_up if name == "Relu2" else from_sixty_fours(gate_up)
    down = _weights(w2_weight, w2_weight_sf, group)
    rows = _rows(x, x_sf, quant_mode)
    plain = (swiglu_alpha, swiglu_beta, swiglu_limit) == (1.0, 0.0, LARGEST)
    parameters = None if plain else (swiglu_alpha, swiglu_beta, swiglu_limit)

    def expert(slot: int, own: Tensor) -> Tensor:
        inner = activated(name, own @ gate_up[slot].T * w1_alpha[slot], parameters)
        if fc2_input_scale is not None:
            assert fc2_input_scale.shape == (1,)
            inner = nvfp4_given(1 / fc2_input_scale).quantize(inner).dequantize() * fc2_input_scale
        elif quant_mode == "w4a8":
            inner = MXFP8.quantize(inner).dequantize()
        return inner @ down[slot].T * w2_alpha[slot]

    return routed(rows, token_selected_experts, slots, expert, down.shape[1]).to(output_dtype)


def _rows(x: Tensor, x_sf: Tensor | None, mode: str) -> Tensor:
    if mode == "w4a16":
        assert x.dtype == torch.bfloat16 and x_sf is None
        return x.float()
    assert x_sf is not None
    if mode == "w4a8":
        assert x.dtype == torch.float8_e4m3fn and x_sf.dtype == torch.uint8
        assert x_sf.shape == (len(x), x.shape[1] // 32)
        return x.float() * spread(e8m0(x_sf), 32)
    assert x.dtype == torch.uint8 and x_sf.shape == (len(x), x.shape[1] // 8, 1)
    return fp4(x) * spread(x_sf[..., 0].float(), 16)


def _weights(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    values = fp4(codes)
    e, n, k = values.shape
    high, wide = -(-n // 128), -(-k // (4 * group))
    assert scale.dtype == torch.uint8
    assert scale.shape == (32, 4, high, 4, wide, e)
    assert scale.stride() == (16, 4, wide * 512, 1, 512, high * wide * 512)
    found = unswizzled(scale.permute(5, 2, 4, 0, 1, 3).contiguous(), n, k // group)
    return values * spread(e8m0(found) if group == 32 else found.view(torch.float8_e4m3fn).float(), group)
