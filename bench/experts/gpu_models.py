"""What one rank of four holds of a layer of models that users run, weights made for it, and rows sent to it.

Experts are random, and there are only a few different ones: codes do not change the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertShape, ExpertWeights
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats import BF16, FP8_BLOCK
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_E4M3

SCHEMES = {
    "nvfp4": Scheme(NVFP4, BF16),
    "mxfp4": Scheme(MXFP4, BF16),
    "nvfp4_fp8": Scheme(NVFP4, FP8_GROUP),
    "mxfp4_fp8": Scheme(MXFP4, FP8_GROUP),
    "nvfp4_e4m3_fp8": Scheme(NVFP4_E4M3, FP8_GROUP),
    "fp8": Scheme(FP8_BLOCK, FP8_GROUP),
    "bf16": Scheme(BF16, BF16),
}
"""By the name of a kind of experts."""


@dataclass(frozen=True)
class Held:
    """A quarter of a layer's experts, and how tokens reach them."""

    name: str
    experts: int  # of the rank
    top_k: int  # of these that a token chooses, one it reaches
    shape: ExpertShape
    kinds: tuple[str, ...]  # that the model is run in
    tokens: tuple[int, ...] = (1, 32, 512, 16384)  # of all ranks, by default
    one_in: int = 1  # of so many tokens, one reaches the rank

    def rows(self, tokens: int) -> int:
        """How many of `tokens` reach the rank."""
        return max(1, tokens // self.one_in)

    def inputs(self, tokens: int) -> Inputs:
        """Returns the inputs, the same for every kind and peer: they have a seed of their own."""
        there = torch.Generator("cuda").manual_seed(tokens)
        rows, size = self.rows(tokens), self.shape.hidden
        hidden = torch.randn(rows, size, generator=there, device="cuda").bfloat16() * 0.5
        ids = torch.rand(rows, self.experts, generator=there, device="cuda").topk(self.top_k, 1).indices.int()
        return Inputs(hidden, ids, torch.rand(rows, self.top_k, generator=there, device="cuda"))

    def weights(self, kind: str) -> ExpertWeights:
        """Random experts of one kind."""
        form, shape = SCHEMES[kind].weights, self.shape
        biases: dict[str, Tensor] = {}
        if shape.bias:
            sizes = {"gate_up_bias": shape.gate_up_rows, "down_bias": shape.hidden}
            biases = {name: torch.randn(self.experts, size, device="cuda") for name, size in sizes.items()}
        return ExpertWeights(
            matrices(form, self.experts, shape.gate_up_rows, shape.hidden),
            matrices(form, self.experts, shape.hidden, shape.inner),
            **biases,
        )


@dataclass(frozen=True)
class Inputs:
    """What a model server would send."""

    hidden: Tensor  # [T, H] bf16
    ids: Tensor  # [T, K] int32
    weights: Tensor  # [T, K] float32


DIFFERENT = 3
"""Experts that differ from each other; slot e holds number e % DIFFERENT."""


def matrices(form: Format, experts: int, n: int, k: int) -> Packed:
    """Returns random matrices `[experts, n, k]`."""
    few = [form.quantize(torch.randn(1, n, k, device="cuda") * 2 / k**0.5) for _ in range(DIFFERENT)]
    whole = form.empty((experts, n, k), "cuda")
    for e in range(experts):
        for into, part in zip(whole.parts, few[e % DIFFERENT].parts, strict=True):
            into[e].view(torch.uint8).copy_(part[0].view(torch.uint8))
    return whole


_SILU = Activation("silu")
MODELS = {
    model.name: model
    for model in (
        Held(
            "deepseek-v3", 64, 2, ExpertShape(7168, 2048, _SILU),
            ("fp8", "nvfp4", "mxfp4", "mxfp4_fp8", "nvfp4_e4m3_fp8", "bf16", "nvfp4_fp8"),
            (1, 8, 32, 128, 512, 2048, 16384),
        ),
        Held("qwen3-235b", 32, 2, ExpertShape(4096, 1536, _SILU), ("fp8", "nvfp4", "bf16")),
        Held(
            "gpt-oss-120b", 32, 1, ExpertShape(2880, 2880, Activation("swigluoai"), bias=True), ("mxfp4",)
        ),
        Held(
            "mixtral-8x22b", 2, 1, ExpertShape(6144, 16384, _SILU), ("fp8", "nvfp4", "bf16"), one_in=2
        ),
        Held("kimi-k2", 96, 2, ExpertShape(7168, 2048, _SILU), ("fp8", "nvfp4")),
    )
}  # fmt: skip
"""By name. The first is what the aims are for."""
