"""`CostModel`: what a step of one layer takes, from a handful of measured rates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Sizes of an expert and rates of a machine; the defaults are DeepSeek-V3 in FP8 on one host of H200.

    A layer's step is dispatch, experts, combine, one after the other, and as slow as its slowest rank:

    - experts: the longer of reading the weights of active experts and computing the rows. The rates are those
      of DeepGEMM's two grouped GEMMs with 64 experts on one H200: 758 us at 16 rows an expert, 2584 us at
      512.
    - wire: a latency, and the bytes a rank sends and receives over one link, the larger of both. A token goes
      once to each rank that holds a chosen expert, at `dispatch_bits` a value, and comes back in bf16.
      Latency and rate are those of FlashInfer's one-sided all-to-all on 4 x H200: 19 us at 1 token, 848 us at
      4096.

    Left out: permuting, launching, shared experts, attention, links between hosts (give their rate as
    `link_bytes` instead), and that a step's tokens are not independent draws.
    """

    hidden: int = 7168
    inner: int = 2048
    top_k: int = 8
    weight_bits: float = 8.0  # of one weight, its scales included
    dispatch_bits: float = 8.25
    read_bytes: float = 3.72e12  # of weights a second
    flops: float = 1.12e15
    link_bytes: float = 2.9e11  # a second, of one rank, one way
    latency: float = 19e-6  # of dispatch and combine together

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be more than 0")

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down."""
        return round(3 * self.hidden * self.inner * self.weight_bits / 8)

    @property
    def read_seconds(self) -> float:
        """Seconds to read one expert."""
        return self.expert_bytes / self.read_bytes

    @property
    def row_seconds(self) -> float:
        """Seconds to compute one row of one expert."""
        return 6 * self.hidden * self.inner / self.flops

    def wire_bytes(self, rank_share: Floats, rank_tokens: int) -> Floats:
        """Bytes over the busiest rank's link in one step of each layer, dispatch and combine, `[L]`.

        `rank_share [L, ranks]`: the part of all (token, expert) pairs each rank computes; each lane brings
        `rank_tokens` tokens. What stays on its own rank does not count.
        """
        ranks = rank_share.shape[1]
        reached = -np.expm1(self.top_k * np.log1p(-np.minimum(rank_share, 1 - 1e-12)))
        received = reached * rank_tokens * (ranks - 1)
        sent = (reached.sum(axis=1, keepdims=True) - reached) * rank_tokens
        each = self.hidden * (self.dispatch_bits / 8 + 2)
        return np.asarray(np.maximum(received, sent).max(axis=1) * each)

    def step_seconds(self, active: Floats, rows: Floats, wire: Floats) -> Floats:
        """Seconds of one step of each layer, `[L]`.

        `active [L, ranks]` experts that got a row and `rows [L, ranks]` they got; `wire [L]` bytes.
        """
        experts = np.maximum(active * self.read_seconds, rows * self.row_seconds).max(axis=1)
        on_wire = np.where(wire > 0, self.latency + wire / self.link_bytes, 0.0)
        return np.asarray(experts + on_wire)
