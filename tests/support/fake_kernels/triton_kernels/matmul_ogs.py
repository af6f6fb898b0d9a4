"""`matmul_ogs` of a ragged batch, with weights that decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from fake_formulas import e8m0, fp4, spread

from triton_kernels.tensor import FP4, RaggedTensorMetadata, Tensor


@dataclass
class RoutingData:
    gate_scal: torch.Tensor | None
    expt_hist: torch.Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: RaggedTensorMetadata | None = None
    expected_tokens_per_expt: int | None = None


@dataclass(frozen=True)
class FlexCtx:
    lhs_data: Any = None
    rhs_data: Any = None
    out_data: Any = None
    acc_data: Any = None


@dataclass
class PrecisionConfig:
    max_num_imprecise_acc: int | None = None
    allow_tf32: bool = True
    flex_ctx: FlexCtx = field(default_factory=FlexCtx)
    acc_scale: float = 1.0
    flexpoint_saturate_inf: bool = False
    report_quantization_err_fn: Any = None
    act_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    out_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    enforce_bitwise_invariance: bool = False


def matmul_ogs(
    x: torch.Tensor,
    w: Tensor,
    bias: torch.Tensor | None,
    routing_data: RoutingData | None = None,
    gather_indx: Any = None,
    scatter_indx: Any = None,
    precision_config: PrecisionConfig | None = None,
    betas: torch.Tensor | None = None,
    gammas: torch.Tensor | None = None,
    out_alpha: float | None = None,
    y: torch.Tensor | None = None,
    fused_comm: Any = None,
    fused_activation: Any = None,
    epilogue: Any = None,
    y_acc_in: torch.Tensor | None = None,
    inner_routing_data: Any = None,
) -> torch.Tensor:
    assert x.dtype == torch.bfloat16 and w.dtype is FP4 and w.shape is not None
    assert routing_data is not None and precision_config is not None
    assert routing_data.n_expts_act == 1 and routing_data.expt_data is not None
    scale = precision_config.weight_scale
    assert scale is not None and scale.dtype == torch.uint8
    e, k, n = w.shape
    codes = w.storage.layout.unswizzle_data(w.storage.data)
    bytes_ = scale.storage.layout.unswizzle_data(scale.storage.data)
    weights = (fp4(codes.mT) * spread(e8m0(bytes_.mT), 32)).mT
    assert weights.shape == (e, k, n) and routing_data.n_expts_tot == e
    out = torch.full((len(x), n), torch.nan, dtype=precision_config.out_dtype)
    offsets = routing_data.expt_data.slice_offs.tolist()
    for slot in range(e):
        own = slice(offsets[slot], offsets[slot + 1])
        answer = x[own].float() @ weights[slot]
        out[own] = (answer if bias is None else answer + bias[slot]).to(out.dtype)
    return out
