"""Routing methods: how a router's logits become chosen experts and weights, as a table (`ROUTINGS`).

A method is three steps, all float32: a score function maps the logits [T, E] to scores, `choose` picks K
experts a token by them, `weigh` turns the scores of the chosen [T, K] into weights. What a layer sets (bias,
groups, scaling) is in its `Gate`. The names are those of vLLM's and FlashInfer's `RoutingMethodType`, which
number them differently, so only names are used; DeepSeekV2 and the two simulations have no number there. A
custom function is a method of its own: one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

RENORMALIZE_EPSILON = 1e-20
"""Keeps a sum of zero weights from dividing by zero (as DeepSeek-V3); lost in the rounding of other sums."""


class GateSettings(Protocol):
    """What a routing method reads of a layer's gate."""

    @property
    def experts(self) -> int:
        """E, the logical experts of the layer."""

    @property
    def top_k(self) -> int:
        """K, the experts that a token chooses."""

    @property
    def groups(self) -> int:
        """Equal runs of neighbouring experts; 1 where there are no groups."""

    @property
    def topk_groups(self) -> int:
        """Groups that a token may choose from."""

    @property
    def renormalize(self) -> bool | None:
        """Whether a token's weights are divided by their sum."""

    @property
    def epsilon(self) -> float:
        """Added to the sum that weights are divided by."""

    @property
    def bias(self) -> Tensor | None:
        """The correction bias `[E]` float32, where there is one."""


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    return functional.softplus(logits).sqrt()


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}
"""Scoring functions by name: logits [T, E] float32 -> scores [T, E]."""


def top(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of each row, largest first, equals by rising id: [.., N] -> [.., count]."""
    # topk leaves the order of equal values open, and with it the answer of a batch of identical rows
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def choose_by_score(scores: Tensor, gate: GateSettings) -> Tensor:
    """Top K of score + correction bias, within the best groups: [T, E] -> ids [T, K] int64.

    A group's score is its best expert, or with a bias the sum of its two best (DeepSeek-V2, DeepSeek-V3).
    """
    choice = scores if gate.bias is None else scores + gate.bias
    if gate.groups > 1:
        grouped = choice.reshape(-1, gate.groups, gate.experts // gate.groups)  # [T, groups, E / groups]
        best = grouped.amax(-1) if gate.bias is None else grouped.topk(2, dim=-1).values.sum(-1)
        dropped = torch.ones_like(best, dtype=torch.bool).scatter_(
            -1, top(best, gate.topk_groups), value=False
        )
        choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
    return top(choice, gate.top_k)


def choose_uniformly(scores: Tensor, gate: GateSettings) -> Tensor:
    """Simulation: K independent ids, each expert equally likely, repetition possible."""
    return torch.randint(gate.experts, (scores.shape[0], gate.top_k), device=scores.device)


def choose_normally(scores: Tensor, gate: GateSettings) -> Tensor:
    """Simulation: K independent ids floor(sigmoid(normal) x E), so that the middle ids are hot."""
    drawn = torch.randn(scores.shape[0], gate.top_k, device=scores.device).sigmoid() * gate.experts
    return drawn.long().clamp(max=gate.experts - 1)


def weigh_by_score(chosen: Tensor, gate: GateSettings) -> Tensor:
    """The chosen scores, divided by their sum if the gate renormalizes."""
    return chosen / (chosen.sum(-1, keepdim=True) + gate.epsilon) if gate.renormalize else chosen


def weigh_softmax(chosen: Tensor, _: GateSettings) -> Tensor:
    """Softmax over the K chosen."""
    return chosen.softmax(dim=-1)


def weigh_sigmoid(chosen: Tensor, _: GateSettings) -> Tensor:
    """Sigmoid of each chosen logit."""
    return chosen.sigmoid()


def weigh_ones(chosen: Tensor, _: GateSettings) -> Tensor:
    """Simulation: weight 1 for each."""
    return torch.ones_like(chosen)


def weigh_normally(chosen: Tensor, _: GateSettings) -> Tensor:
    """Simulation: absolute values of normal draws, divided by their sum."""
    drawn = torch.randn_like(chosen).abs()
    return drawn / drawn.sum(-1, keepdim=True)


@dataclass(frozen=True)
class RoutingMethod:
    """One routing method: what it fixes of a gate (None: the gate says), what it takes, and its steps."""

    scoring: str | None
    renormalize: bool | None = False
    biased: bool | None = False  # has a correction bias, which takes part in choosing and not in the weights
    grouped: bool = False  # may choose among groups of experts
    scaled: bool = True  # may scale the weights after renormalizing
    largest_top_k: int | None = None
    choose: Callable[[Tensor, GateSettings], Tensor] = choose_by_score
    weigh: Callable[[Tensor, GateSettings], Tensor] = weigh_by_score


ROUTINGS: Mapping[str, RoutingMethod] = {
    "Default": RoutingMethod("softmax"),
    "Renormalize": RoutingMethod("logits", renormalize=True, weigh=weigh_softmax),
    "RenormalizeNaive": RoutingMethod("softmax", renormalize=True),
    "TopK": RoutingMethod("logits", scaled=False),
    "Sigmoid": RoutingMethod("sigmoid"),
    "SigmoidRenorm": RoutingMethod("sigmoid", renormalize=True),
    "Llama4": RoutingMethod("logits", scaled=False, largest_top_k=1, weigh=weigh_sigmoid),
    "DeepSeekV2": RoutingMethod("softmax", renormalize=None, grouped=True),
    "DeepSeekV3": RoutingMethod("sigmoid", renormalize=True, biased=True, grouped=True),
    "MiniMax2": RoutingMethod("sigmoid", renormalize=True, biased=True, scaled=False),
    "DeepseekV4": RoutingMethod("sqrtsoftplus", renormalize=True, biased=True),
    "Unspecified": RoutingMethod(None, renormalize=None, biased=None, grouped=True),
    "uniform_random": RoutingMethod("logits", scaled=False, choose=choose_uniformly, weigh=weigh_ones),
    "normal_routing": RoutingMethod("logits", scaled=False, choose=choose_normally, weigh=weigh_normally),
}
"""Every routing method by name. Unspecified is any other combination of scoring, bias, groups and scaling."""


def method_of(
    scoring: str, *, renormalize: bool, biased: bool, groups: int | None, scaling: float | None
) -> str:
    """The name of the routing method with these settings; Unspecified where no other has all of them.

    `groups` None or 0 means that the model has no grouped routing; 1 is grouped routing with one group.
    """
    if scoring == "sqrtsoftplus":
        return "DeepseekV4" if renormalize and not groups else "Unspecified"
    if biased:
        if scoring != "sigmoid" or not renormalize:
            return "Unspecified"
        if groups:
            return "DeepSeekV3"
        return "MiniMax2" if scaling in (None, 1.0) else "Unspecified"
    if groups is not None and groups > 1:
        return "DeepSeekV2" if scoring == "softmax" else "Unspecified"
    if scoring == "sigmoid":
        return "SigmoidRenorm" if renormalize else "Sigmoid"
    if scoring == "softmax":
        return "RenormalizeNaive" if renormalize else "Default"
    return "Unspecified"
