"""`fused_moe`, whose rows are rounded within, by method."""

from __future__ import annotations

import torch
from fake_formulas import activated, e8m0, fp4, routed, spread
from torch import Tensor

from aiter import ActivationType, QuantType
from aiter.ops.shuffle import unshuffled
from aiter.utility import fp4_utils
from moeserve.quant.formats.fp8 import FP8_GROUP, FP8_TOKEN
from moeserve.quant.formats.mx import MXFP4

ROUNDED = {
    QuantType.per_Token: FP8_TOKEN,
    QuantType.per_128x128: FP8_GROUP,
    QuantType.per_1x32: MXFP4,
}


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    assert hidden_states.dtype == torch.bfloat16 and (topk_weight == 1).all()
    assert topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32
    assert expert_mask is not None and expert_mask.dtype == torch.int32
    assert expert_mask.tolist() == [1] * len(w1) + [0] and int(topk_ids.max()) <= len(w1)
    gate_up, down = _weights(w1, w1_scale, quant_type), _weights(w2, w2_scale, quant_type)
    form = ROUNDED.get(quant_type)

    def rounded(rows: Tensor) -> Tensor:
        return rows if form is None else form.quantize(rows).dequantize()

    def expert(slot: int, rows: Tensor) -> Tensor:
        inner = activated(activation.name, rounded(rows) @ gate_up[slot].T)
        return rounded(inner) @ down[slot].T

    return routed(hidden_states.float(), topk_ids, len(w1), expert, w2.shape[1]).bfloat16()


def _weights(w: Tensor, scale: Tensor | None, kind: QuantType) -> Tensor:
    assert w.is_shuffled, "weights lie in tiles"
    if kind == QuantType.No:
        assert scale is None
        return unshuffled(w).float()
    assert scale is not None
    if kind == QuantType.per_1x32:
        assert w.dtype == torch.float4_e2m1fn_x2
        values = fp4(unshuffled(w.view(torch.uint8)))
        n, k = values.shape[1:]
        bytes_ = torch.stack([fp4_utils.unshuffled(one, n, k // 32) for one in scale])
        return values * spread(e8m0(bytes_), 32)
    values = unshuffled(w).float()
    if kind == QuantType.per_Token:
        assert scale.shape == (*w.shape[:2], 1)
        return values * scale
    return values * spread(scale, 128, 128)
