"""What the rows for FlashInfer's fused kernels share: rows with one expert each, and SwiGLU's parameters.

Those kernels take tokens with the experts they chose, and weight and sum the answers. Each row of a batch is
handed over as a token with one expert, its slot, and weight 1: so they map rows to rows, any placement and
any number of replicas included. A row outside the segments names an expert that this rank does not hold.
The calls are those of FlashInfer 0.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.experts.activation import Activation


@dataclass(frozen=True)
class SwiGLU:
    """`clamp(gate) * sigmoid(alpha * clamp(gate)) * (clamp(up) + beta)`; no limit: nothing is clamped."""

    alpha: float
    beta: float
    limit: float | None

    @classmethod
    def of(cls, activation: Activation) -> SwiGLU | None:
        """The parameters where they are not those of plain SiLU, else None."""
        if activation.name == "silu":
            return None if activation.limit is None else cls(1.0, 0.0, activation.limit)
        if activation.alpha is None or activation.beta is None:
            return None
        return cls(activation.alpha, activation.beta, activation.limit)

    def per_slot(self, slots: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """alpha, beta and limit as float32 `[slots]` each."""
        alpha, beta = (torch.full((slots,), value, device=device) for value in (self.alpha, self.beta))
        return alpha, beta, None if self.limit is None else torch.full((slots,), self.limit, device=device)


def up_first(bias: Tensor) -> Tensor:
    """A bias `[e, 2I]`, gate first, with the halves exchanged."""
    return bias.view(len(bias), 2, bias.shape[1] // 2).flip(1).flatten(1)


def static_scales(per_slot: Mapping[str, Tensor], alpha: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Scales of statically rounded rows folded into those of the weights, float32 `[e]` each.

    `alpha`: the weights' own scales of gate_up and of down. `input_quant` and `inner_quant` multiply rows
    before they are rounded; `gate_up_alpha` and `down_alpha` multiply sums of codes.
    """
    gate_up, down = alpha
    return {
        "input_scale": per_slot["input_scale"].clone(),
        "input_quant": per_slot["input_scale"].reciprocal(),
        "inner_quant": per_slot["inner_scale"].reciprocal(),
        "gate_up_alpha": gate_up.flatten() * per_slot["input_scale"],
        "down_alpha": down.flatten() * per_slot["inner_scale"],
    }
