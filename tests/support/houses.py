"""Whole services for tests: a tiny checkpoint served by ranks, and what one process computes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.proto import moe_pb2
from moeserve.proto.tensors import encode, plain
from moeserve.quant.format import Format
from moeserve.quant.formats.floats import FLOATS
from moeserve.runtime.config import Config

EP4 = {"parallel__data_parallel_size": 4, "parallel__enable_expert_parallel": True}
TP4 = {"parallel__tensor_parallel_size": 4}
DP2_TP2 = {"parallel__data_parallel_size": 2, "parallel__tensor_parallel_size": 2}


def house_config(path: Path, **values: Any) -> Config:
    """A configuration for tests: CPU, loopback, free ports; `values` are keys with `__` for the dot.

    No call is refused because calls before it took long at a lane, as they do on busy cores.
    """
    given = {key.replace("__", "."): value for key, value in values.items()}
    base = {"model.checkpoint": str(path), "server.port": 0, "server.metrics_port": 0, "plan.device": "cpu"}
    patient = {"step.timeout_seconds": 20.0, "server.queue_seconds": 60.0}
    return Config().with_values(base | patient | given)


class Alone:
    """The same experts in one process, straight from the formulas: what four ranks have to answer."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = Checkpoint(path)
        self._experts = {
            layer: self.checkpoint.experts(layer, range(self.checkpoint.num_experts))
            for layer in self.checkpoint.layers
        }

    def batch(self, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random hidden states, chosen experts and weights, float32."""
        random = torch.Generator().manual_seed(seed)
        checkpoint = self.checkpoint
        hidden = torch.randn(rows, checkpoint.hidden, generator=random)
        scores = torch.rand(rows, checkpoint.num_experts, generator=random)
        weights, experts = scores.topk(checkpoint.top_k)
        return hidden, experts.int(), weights

    def forward(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Mixed expert output, float32 sums; activations rounded as the scheme says."""
        held, act = self._experts[layer], self.checkpoint.shape(layer).activation
        form = self.checkpoint.scheme(layer).activations
        gate_up, down = held.gate_up.dequantize(), held.down.dequantize()
        first = torch.zeros(gate_up.shape[:2]) if held.gate_up_bias is None else held.gate_up_bias.float()
        second = torch.zeros(down.shape[:2]) if held.down_bias is None else held.down_bias.float()
        answer = torch.zeros_like(hidden)
        for row, (ids, shares) in enumerate(zip(experts.tolist(), weights.tolist(), strict=True)):
            for expert, share in zip(ids, shares, strict=True):
                if expert >= 0:
                    x = rounded(hidden[row], form, held.input_scale, expert)
                    inner = act.apply(gate_up[expert] @ x + first[expert])
                    y = rounded(inner, form, held.inner_scale, expert)
                    answer[row] += share * (down[expert] @ y + second[expert])
        return answer


def rounded(row: Tensor, form: Format, scales: Tensor | None, expert: int) -> Tensor:
    """A row rounded as the scheme says; a static format takes the expert's scale. Plain floats stay."""
    if form in FLOATS.values():
        return row
    if form.given is not None and scales is not None:
        form = form.given(scales[expert])
    return form.quantize(row[None]).dequantize()[0]


def request_of(layer: int, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> moe_pb2.ForwardRequest:
    """The same call as a message."""
    hidden, ids, weights = (encode(plain(tensor, "tensor")) for tensor in batch)
    return moe_pb2.ForwardRequest(layer=layer, hidden=hidden, choice=moe_pb2.Choice(ids=ids, weights=weights))
