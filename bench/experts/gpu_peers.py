"""Peers on the experts of one rank: other systems' kernels on the same weights, rows and ids, where they are
installed.

vLLM 0.20.2's Triton, Marlin, DeepGEMM and triton_kernels experts compute the whole MLP, from hidden states to
the weighted sum. A library that has only GEMMs is called through our row for it, between our grouping and
our sum. `GEMMS_ONLY` is less: DeepGEMM on rows that are grouped, aligned and rounded before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.experts import gpu_rows
from bench.experts.gpu_models import DIFFERENT, Held, Inputs
from moeserve.experts.batch import ExpertWeights
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.quant.format import Scheme
from moeserve.quant.formats import BF16

os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")  # else vLLM's rows have powers of two for scales

Call = Callable[[], Tensor | None]
"""What is timed; its answer `[T, H]`, or None where it is less than an answer."""

Made = Callable[[Inputs], Call]
"""A peer with its weights, for some rows."""


def library(name: str, held: Held, weights: ExpertWeights) -> Made:
    """Our row for a library, on bf16 rows: its GEMMs, our activation, our grouping and sum around them."""
    entry, scheme = KERNELS[name], Scheme(weights.gate_up.format, BF16)
    kernel = entry.build(KernelSpec(scheme, held.shape, torch.bfloat16))
    prepared = kernel.prepare(weights)

    def made(inputs: Inputs) -> Call:
        def call() -> Tensor:
            rows = (inputs.hidden, inputs.ids, held.experts, BF16, entry.row_align)
            batch, places = gpu_rows.group(*rows)
            return gpu_rows.home(kernel.apply(prepared, batch), places, inputs.weights)

        return call

    return made


def vllm_bf16(held: Held, weights: ExpertWeights) -> Made:
    """vLLM's Triton kernel in bf16."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    gate_up, down = weights.gate_up.parts[0], weights.down.parts[0]
    return lambda inputs: lambda: fused_experts(inputs.hidden, gate_up, down, inputs.weights, inputs.ids)


def vllm_fp8(held: Held, weights: ExpertWeights) -> Made:
    """vLLM's Triton kernel for 128x128 blocks; it rounds the rows itself."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    (gate_up, gate_up_scale), (down, down_scale) = weights.gate_up.parts, weights.down.parts
    quantized = fp8_w8a8_moe_quant_config(w1_scale=gate_up_scale, w2_scale=down_scale, block_shape=[128, 128])
    return lambda inputs: (
        lambda: fused_experts(
            inputs.hidden, gate_up, down, inputs.weights, inputs.ids, quant_config=quantized
        )
    )


def vllm_deep_gemm(held: Held, weights: ExpertWeights) -> Made:
    """vLLM's experts on DeepGEMM: it rounds, groups and aligns the rows, and sums them home."""
    from vllm.model_executor.layers.fused_moe import config as vllm
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
        make_moe_prepare_and_finalize_no_dp_ep,
    )
    from vllm.v1.worker.workspace import init_workspace_manager

    (gate_up, gate_up_scale), (down, down_scale) = weights.gate_up.parts, weights.down.parts
    layer = vllm.FusedMoEConfig(
        num_experts=held.experts,
        experts_per_token=held.top_k,
        hidden_dim=held.shape.hidden,
        intermediate_size_per_partition=held.shape.inner,
        num_local_experts=held.experts,
        num_logical_experts=held.experts,
        activation=MoEActivation.SILU,
        device="cuda",
        routing_method=vllm.RoutingMethodType.Default,
        moe_parallel_config=vllm.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    quantized = vllm.fp8_w8a8_moe_quant_config(
        w1_scale=gate_up_scale, w2_scale=down_scale, block_shape=[128, 128]
    )
    init_workspace_manager(torch.device("cuda"))
    kernel = FusedMoEKernel(
        make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False), DeepGemmExperts(layer, quantized)
    )

    def made(inputs: Inputs) -> Call:
        given = (inputs.hidden, gate_up, down, inputs.weights, inputs.ids)
        return lambda: kernel.apply(*given, MoEActivation.SILU, held.experts, None, False)

    return made


def deep_gemm(held: Held, weights: ExpertWeights) -> Made:
    """DeepGEMM's two GEMMs: masked for few rows an expert, contiguous for many."""
    import deep_gemm as library

    sides = [tuple(weights.gate_up.parts), tuple(weights.down.parts)]

    def made(inputs: Inputs) -> Call:
        counts = torch.bincount(inputs.ids.flatten().long(), minlength=held.experts)
        if inputs.ids.numel() > 128 * held.experts:
            aligned = -(-counts // 128) * 128
            experts = torch.arange(held.experts, dtype=torch.int32, device="cuda").repeat_interleave(aligned)
            rows, extra = (len(experts),), (experts,)
            gemm = library.m_grouped_fp8_gemm_nt_contiguous
        else:
            rows = (held.experts, -(-int(counts.max()) // 64) * 64)
            extra = (counts.int(), -(-inputs.ids.numel() // held.experts))
            gemm = library.m_grouped_fp8_gemm_nt_masked
        given = [(_rounded((*rows, w[0].shape[-1])), w, _room((*rows, w[0].shape[1]))) for w in sides]

        def call() -> None:
            for x, side, out in given:
                gemm(x, side, out, *extra)

        return call

    return made


def _rounded(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random E4M3 rows and their scales of 128, in the column order that the library multiplies from."""
    codes = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand((*shape[:-1], shape[-1] // 128), device="cuda")
    return codes, scale.mT.contiguous().mT


def _room(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def marlin(held: Held, weights: ExpertWeights) -> Made:
    """vLLM's Marlin kernel: four-bit weights, bf16 rows. A layer of gpt-oss is grown with zeros for it."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.fused_marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    oai = held.shape.activation.name == "swigluoai"
    hidden, inner = (_up(held.shape.hidden, 256), _up(held.shape.inner, 128)) if oai else _sizes(held)
    few = weights.rows(slice(0, DIFFERENT))
    operands = _marlin_operands(few, hidden, inner, interleaved=oai)
    slots = torch.arange(held.experts, device="cuda") % few.experts
    operands = {name: None if t is None else _picked(t, slots) for name, t in operands.items()}
    options: dict[str, Any] = {
        "quant_type_id": scalar_types.float4_e2m1f.id,
        "global_num_experts": held.experts,
        "activation": MoEActivation.SWIGLUOAI if oai else MoEActivation.SILU,
        "moe_sum": _custom_ops.moe_sum,
        "global_scale1": operands["global1"],
        "global_scale2": operands["global2"],
    }
    matrices = [operands[name] for name in ("w1", "w2", "bias1", "bias2", "scale1", "scale2")]

    def made(inputs: Inputs) -> Call:
        x = torch.nn.functional.pad(inputs.hidden, (0, hidden - inputs.hidden.shape[1]))
        width, summed = inputs.hidden.shape[1], torch.empty_like(x)

        def call() -> Tensor:  # its sum is written into what it is given, and nothing is returned
            fused_marlin_moe(x, *matrices, inputs.weights, inputs.ids, output=summed, **options)
            return summed[:, :width]

        return call

    return made


def _picked(t: Tensor, slots: Tensor) -> Tensor:
    """`t[slots]`, of any dtype."""
    return t.view(torch.uint8)[slots].contiguous().view(t.dtype) if t.itemsize == 1 else t[slots].contiguous()


def _marlin_operands(
    few: ExpertWeights, hidden: int, inner: int, *, interleaved: bool
) -> dict[str, Tensor | None]:
    """Marlin's own form of some experts, by vLLM's converters."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as convert

    layer = SimpleNamespace(
        num_experts=few.experts,
        hidden_size=hidden,
        intermediate_size_per_partition=inner,
        params_dtype=torch.bfloat16,
    )
    if few.gate_up.format.name.startswith("nvfp4"):
        (w1, s1, g1), (w2, s2, g2) = few.gate_up.parts, few.down.parts
        g1, g2 = (g.reshape(few.experts, -1)[:, 0].contiguous() for g in (g1, g2))
        found = convert.prepare_nvfp4_moe_layer_for_marlin(layer, w1, s1, g1, w2, s2, g2, True)
        names = ("w1", "scale1", "global1", "w2", "scale2", "global2")
        return dict.fromkeys(("bias1", "bias2")) | dict(zip(names, found, strict=True))
    (w1, s1), (w2, s2), (b1, b2) = few.gate_up.parts, few.down.parts, (few.gate_up_bias, few.down_bias)
    if interleaved:
        w1, s1, b1 = (
            None if t is None else _woven(t, inner, columns)
            for t, columns in ((w1, hidden // 2), (s1, hidden // 32), (b1, None))
        )
        w2, s2, b2 = _grown(w2, hidden, inner // 2), _grown(s2, hidden, inner // 32), _grown(b2, hidden)
    found = convert.prepare_moe_mxfp4_layer_for_marlin(layer, w1, w2, s1, s2, b1, b2)
    names = ("w1", "w2", "scale1", "scale2", "bias1", "bias2")
    return dict.fromkeys(("global1", "global2")) | dict(zip(names, found, strict=True))


def _woven(t: Tensor, inner: int, columns: int | None) -> Tensor:
    """Gate and up rows by turns, each grown to `inner` rows (and `columns`) with zeros."""
    gate, up = (_grown(half, inner, columns) for half in t.chunk(2, dim=1))
    return torch.stack([gate, up], dim=2).flatten(1, 2).contiguous()


def _grown(t: Tensor | None, rows: int, columns: int | None = None) -> Tensor | None:
    """`t [e, N]` or `[e, N, K]` with zeros after its rows and columns."""
    if t is None:
        return None
    more = [0, rows - t.shape[1]] if columns is None else [0, columns - t.shape[2], 0, rows - t.shape[1]]
    return torch.nn.functional.pad(t, more)


def _sizes(held: Held) -> tuple[int, int]:
    return held.shape.hidden, held.shape.inner


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def vllm_triton_kernels(held: Held, weights: ExpertWeights) -> Made:
    """triton_kernels as vLLM runs gpt-oss: gate and up rows by turns, the activation in the first GEMM."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as library
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    inner = held.shape.inner
    (w1, s1), (w2, s2) = weights.gate_up.parts, weights.down.parts
    sides = [_swizzle_mxfp4(_woven(w1, inner, None), _woven(s1, inner, None)), _swizzle_mxfp4(w2, s2)]
    scales = [PrecisionConfig(weight_scale=s, flex_ctx=FlexCtx(rhs_data=flex)) for _, flex, s in sides]
    assert weights.gate_up_bias is not None
    config = mxfp4_w4a16_moe_quant_config(
        *scales, w1_bias=_woven(weights.gate_up_bias, inner, None), w2_bias=weights.down_bias
    )

    def made(inputs: Inputs) -> Call:
        def call() -> Tensor:
            routing = library.make_routing_data(inputs.ids, inputs.weights, held.experts)
            out = torch.empty_like(inputs.hidden)
            operands = (out, inputs.hidden, sides[0][0], sides[1][0], *routing)
            return library.triton_kernel_fused_experts(*operands, topk=held.top_k, quant_config=config)

        return call

    return made


@dataclass(frozen=True)
class Peer:
    """One of them, and where it takes part."""

    make: Callable[[Held, ExpertWeights], Made]
    needs: tuple[str, ...] = ("vllm",)  # modules
    least: int = 1  # tokens
    activations: tuple[str, ...] = ("silu", "swigluoai")
    whole: bool = True  # from hidden states to the weighted sum


GEMMS_ONLY = "DeepGEMM, two GEMMs only"
ALIGNED = 128
"""Rows that DeepGEMM's segments are aligned to; vLLM takes its Triton kernel below."""

PEERS: dict[str, dict[str, Peer]] = {
    "nvfp4": {"vLLM Marlin": Peer(marlin)},
    "mxfp4": {
        "vLLM Marlin": Peer(marlin),
        "vLLM triton_kernels": Peer(
            vllm_triton_kernels, needs=("vllm", "triton_kernels"), activations=("swigluoai",)
        ),
        "triton_kernels": Peer(partial(library, "triton_kernels"), needs=("triton_kernels",)),
    },
    "nvfp4_fp8": {"vLLM Marlin, bf16 rows": Peer(marlin)},
    "mxfp4_fp8": {"vLLM Marlin, bf16 rows": Peer(marlin)},
    "nvfp4_e4m3_fp8": {"vLLM Marlin, bf16 rows": Peer(marlin)},
    "fp8": {
        "vLLM Triton": Peer(vllm_fp8),
        "vLLM DeepGEMM": Peer(vllm_deep_gemm, needs=("vllm", "deep_gemm"), least=ALIGNED),
        GEMMS_ONLY: Peer(deep_gemm, needs=("deep_gemm",), least=512, whole=False),
    },
    "bf16": {
        "vLLM Triton": Peer(vllm_bf16),
        "torch grouped_mm": Peer(partial(library, "torch_grouped_mm"), needs=()),
        "DeepGEMM": Peer(partial(library, "deep_gemm"), needs=("deep_gemm",), least=ALIGNED),
    },
}
"""By kind of experts, the peers by name."""


def peers_for(held: Held, kind: str) -> dict[str, Peer]:
    """The peers that compute `kind` for `held`, and are importable."""
    return {
        name: peer
        for name, peer in PEERS[kind].items()
        if held.shape.activation.name in peer.activations and all(map(find_spec, peer.needs))
    }


def missing(held: Held, kind: str) -> list[str]:
    """Names of those that are not importable here."""
    there = peers_for(held, kind)
    names = (name for name, peer in PEERS[kind].items() if held.shape.activation.name in peer.activations)
    return [name for name in names if name not in there]
