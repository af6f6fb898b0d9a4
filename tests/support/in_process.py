"""A service in this process: experts read by `Checkpoint`, mixed by plain arithmetic; counts its calls."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.proto import moe_pb2


class InProcess:
    """Experts of the checkpoint at `path`, damaged where `scale` or `halves` is not 1.

    `scale` multiplies what experts answer, `halves` every other number between their GEMMs.
    """

    def __init__(self, path: str | Path, *, scale: float = 1.0, halves: float = 1.0) -> None:
        self.checkpoint, self.scale, self.halves = Checkpoint(path), scale, halves
        self.calls: Counter[int] = Counter()
        self._weights = cache(self._read)

    def _read(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """gate_up `[E, N, H]`, its bias `[E, N]`, down `[E, H, I]` and its bias `[E, H]`, float32."""
        shape, count = self.checkpoint.shape(layer), self.checkpoint.num_experts
        read = self.checkpoint.experts(layer, range(count))
        gate_up, down = read.gate_up.dequantize().float(), read.down.dequantize().float()
        biases = [
            torch.zeros(count, rows) if bias is None else bias
            for bias, rows in ((read.gate_up_bias, shape.gate_up_rows), (read.down_bias, shape.hidden))
        ]
        return gate_up, biases[0], down, biases[1]

    @torch.no_grad()
    def forward(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """One layer's experts, mixed: `[T, H]` in the dtype of `hidden`."""
        if experts.shape[1] != self.checkpoint.top_k:
            raise ValueError(f"ids {list(experts.shape)} must have {self.checkpoint.top_k} columns")
        self.calls[layer] += 1
        activation = self.checkpoint.shape(layer).activation
        gate_up, gate_up_bias, down, down_bias = self._weights(layer)
        mixed = torch.zeros(hidden.shape, dtype=torch.float32)
        for expert in experts.unique().tolist():
            if expert < 0:
                continue
            rows, columns = torch.where(experts == expert)
            inner = activation.apply(hidden[rows].float() @ gate_up[expert].T + gate_up_bias[expert])
            inner[:, ::2] *= self.halves
            answer = inner @ down[expert].T + down_bias[expert]
            mixed.index_add_(0, rows, self.scale * answer * weights[rows, columns, None].float())
        return mixed.to(hidden.dtype)

    def model(self) -> moe_pb2.GetModelReply:
        """The description of the model that is served."""
        checkpoint = self.checkpoint
        sizes = {"experts": checkpoint.num_experts, "top_k": checkpoint.top_k, "hidden": checkpoint.hidden}
        layers = [moe_pb2.LayerInfo(layer=layer, **sizes) for layer in checkpoint.layers]
        return moe_pb2.GetModelReply(model="tiny", architecture=checkpoint.architecture, layers=layers)
