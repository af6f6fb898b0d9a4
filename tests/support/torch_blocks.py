"""A small model on a GPU whose experts are elsewhere, and its CUDA graph."""

from __future__ import annotations

import torch
from houses import Alone
from torch import Tensor, nn

from moeserve.torch import MoeExperts, Way


class Block(nn.Module):
    """Two layers: a router, routed experts elsewhere, something shared meanwhile, and the residual."""

    def __init__(self, way: Way, alone: Alone) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate = nn.Linear(alone.checkpoint.hidden, alone.checkpoint.num_experts, bias=False)
        self.layers = nn.ModuleList(MoeExperts(way, layer) for layer in (0, 1))
        self.top_k = alone.checkpoint.top_k
        self.to("cuda", torch.bfloat16)

    def forward(self, hidden: Tensor) -> Tensor:
        for experts in self.layers:
            weights, ids = self.gate(hidden).float().softmax(-1).topk(self.top_k)
            ticket = experts.submit(hidden, ids, weights)
            shared = self.gate(hidden).sum(-1, keepdim=True).relu()
            hidden = hidden + experts.wait(ticket) + shared
        return hidden


def recorded(block: Block, static: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a forward pass over `static`, and its answer's place."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        block(static)  # its kernels are loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=side):
        out = block(static)
    return graph, out
