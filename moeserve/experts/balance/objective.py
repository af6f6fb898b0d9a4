"""What a rank's work is measured in: the cost of holding one replica of an expert, by phase.

Prefill is bound by arithmetic, so work is tokens. A small decode batch is bound by reading weights, so work
is the experts that are active at all; between them a replica costs the longer of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.experts.balance.cost import CostModel

Floats = NDArray[np.float64]
ReplicaCost = Callable[[Floats, Floats], Floats]
"""`(tokens [L, E], copies [L, E]) -> cost of one of the copies [L, E]`, in any unit."""


@dataclass(frozen=True)
class Tokens:
    """Prefill: the tokens a replica gets, an expert's load spread evenly over its replicas."""

    def __call__(self, tokens: Floats, copies: Floats) -> Floats:
        return tokens / copies


@dataclass(frozen=True)
class ActiveExperts:
    """Decode: the chance that a replica gets any of a step's `step_tokens` tokens (of all lanes), top
    `top_k`.

    Tokens are taken as independent draws; then one expert's chance is 1 - (1 - f / copies)^T, with f the
    share of tokens that choose it.
    """

    step_tokens: int
    top_k: int

    def __call__(self, tokens: Floats, copies: Floats) -> Floats:
        chosen = chosen_share(tokens, self.top_k)
        return np.asarray(-np.expm1(self.step_tokens * np.log1p(-np.minimum(chosen / copies, 1 - 1e-12))))


@dataclass(frozen=True)
class StepTime:
    """Either phase: seconds of a replica in a step, the longer of reading it and computing its rows."""

    model: CostModel
    step_tokens: int

    def __call__(self, tokens: Floats, copies: Floats) -> Floats:
        active = ActiveExperts(self.step_tokens, self.model.top_k)(tokens, copies)
        rows = chosen_share(tokens, self.model.top_k) * self.step_tokens / copies
        return np.maximum(active * self.model.read_seconds, rows * self.model.row_seconds)


def chosen_share(tokens: Floats, top_k: int) -> Floats:
    """The share of tokens that choose each expert, `[L, E]`, from loads `[L, E]`; zero in a layer without
    load.
    """
    total = tokens.sum(axis=-1, keepdims=True)
    return np.minimum(tokens * top_k / np.where(total > 0, total, 1.0), 1.0)
