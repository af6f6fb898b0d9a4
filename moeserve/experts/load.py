"""Expert load: the `Load` value that policies and dashboards read, and the `LoadMeter` that counts it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Load:
    """Tokens each logical expert got over some window: `tokens [L, E]` float64."""

    tokens: NDArray[np.float64]

    def __add__(self, other: Load) -> Load:
        return Load(self.tokens + other.tokens)


class LoadMeter:
    """Counts tokens by logical expert on the device, without a host synchronisation.

    A lane counts what its own rows chose; the sum over lanes is the load.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros((layers, experts), dtype=torch.int64, device=device)

    def count(self, layer: int, experts: Tensor) -> None:
        """Adds the chosen `experts [T, K]` of one step; ids below 0 or out of range are not counted."""
        flat = experts.flatten().long()
        known = (flat >= 0) & (flat < self._counts.shape[1])
        self._counts[layer].index_add_(0, torch.where(known, flat, 0), known.long())

    def read(self) -> Load:
        """What was counted since the start; this copies to the host."""
        return Load(self._counts.cpu().numpy().astype(np.float64))
