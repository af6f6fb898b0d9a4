"""`Sizes` of the served model, its random checkpoint, and batches for it."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.lib.checkpoint import Qwen3Moe
from moeserve.quant.format import Packed
from moeserve.quant.formats import FP8_BLOCK

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DISTINCT = 8  # random experts; the others are these with other scales


@dataclass(frozen=True)
class Sizes(Qwen3Moe):
    """A Qwen3-MoE-shaped model with FP8 experts."""

    def batch(self, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states bf16 `[T, H]`, experts int32 `[T, K]`, weights float32 `[T, K]`."""
        random = torch.Generator().manual_seed(seed)
        weights, experts = torch.rand(rows, self.experts, generator=random).softmax(1).topk(self.top_k)
        hidden = torch.randn(rows, self.hidden, generator=random).bfloat16()
        return hidden, experts.int(), weights

    def nbytes(self, rows: int) -> int:
        """Bytes of a request's tensors."""
        return rows * (2 * self.hidden + 8 * self.top_k)


@dataclass(frozen=True)
class Experts:
    """The random weights that all layers and experts are made of, and each one's own scale."""

    sizes: Sizes

    def stored(self, at: int) -> dict[str, tuple[Tensor, Tensor]]:
        """FP8 codes and block scales of one of the `DISTINCT` experts, by projection."""
        sizes, random = self.sizes, torch.Generator().manual_seed(at)
        made = {}
        for name, shape in sizes.projections.items():
            values = torch.randn(shape, generator=random) / shape[1] ** 0.5
            codes, scales = FP8_BLOCK.quantize(values).parts
            made[name] = codes, scales
        return made

    def scale(self, layer: int, expert: int) -> float:
        """What the scales of an expert of a layer are multiplied by: no two experts are alike."""
        return 1.0 + (expert * 7 + layer * 3) % 61 / 61

    def answer(self, layer: int, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The layer's answer in float32 for a few rows, from the stored weights; rows are not rounded."""
        hidden, experts, weights = batch
        answer = torch.zeros(hidden.shape)
        distinct = [
            {name: _decoded(codes, scales) for name, (codes, scales) in self.stored(at).items()}
            for at in range(DISTINCT)
        ]
        for row, (chosen, shares) in enumerate(zip(experts.tolist(), weights.tolist(), strict=True)):
            x = hidden[row].float()
            for expert, share in zip(chosen, shares, strict=True):
                own, scale = distinct[expert % DISTINCT], self.scale(layer, expert)
                inner = torch.nn.functional.silu(own["gate"] @ x * scale) * (own["up"] @ x * scale)
                answer[row] += share * scale * (own["down"] @ inner)
        return answer


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    return Packed(FP8_BLOCK, codes.shape, (codes, scales)).dequantize()


def write_checkpoint(folder: Path, sizes: Sizes) -> None:
    """Writes the checkpoint, a file a layer, straight as bytes: it is tens of gigabytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes.config(quantization=BLOCKS)))
    experts = Experts(sizes)
    stored = [experts.stored(at) for at in range(DISTINCT)]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda layer: _write_layer(folder, experts, stored, layer), range(sizes.layers))
        )
    index = {key: name for one in found for key, name in one.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_layer(
    folder: Path, experts: Experts, stored: list[dict[str, tuple[Tensor, Tensor]]], layer: int
) -> dict[str, str]:
    """Writes the file of one layer; returns its name by tensor."""
    name = f"model-{layer:05d}.safetensors"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces: list[Tensor] = []
    at = 0
    for expert in range(experts.sizes.experts):
        for projection, (codes, scales) in stored[expert % DISTINCT].items():
            key = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
            own = scales * experts.scale(layer, expert)
            for suffix, kind, tensor in (("", "F8_E4M3", codes), ("_scale_inv", "F32", own)):
                place = {"shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
                header[key + suffix] = {"dtype": kind} | place
                at += tensor.nbytes
                pieces.append(tensor)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / name, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in pieces:
            file.write(memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B"))
    return {key: name for key in header if not key.startswith("__")}
