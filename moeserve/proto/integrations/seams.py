"""Modules of transformers whose experts do not use its experts interface, and how each asks a service.

A seam says which submodules hold the experts' weights, and makes the module's `forward` anew: rows, choice
and weights are what the module's own code had of its own router. The table is `SEAMS`, by class name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

Ask = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows [T, H], ids [T, K] int64, -1 = none, and weights [T, K] -> mixed rows [T, H]."""

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Seam:
    """How one class of modules is put behind a service."""

    forward: Callable[[Any, Ask], Forward]  # (module, ask) -> what the module does from now on
    count: str  # the attribute that holds E
    hidden: str  # the attribute that holds H
    holders: tuple[str, ...] = (
        "",
    )  # submodules whose weights are the experts'; "": the module and all below it


def as_interface(module: Any, ask: Ask) -> Forward:
    """Modules that are called as those of the interface are: rows, ids, weights."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return ask(rows, top_k_index, top_k_weights).reshape(hidden_states.shape)

    return forward


def with_zero_experts(module: Any, ask: Ask) -> Forward:
    """LongCat's: ids from `num_routed_experts` on return the row as it is."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        beyond = top_k_index >= module.num_routed_experts
        mixed = ask(hidden_states, top_k_index.masked_fill(beyond, -1), top_k_weights.masked_fill(beyond, 0))
        own = (top_k_weights * beyond).sum(-1, keepdim=True).to(hidden_states.dtype)
        return cast(Tensor, mixed + own * hidden_states)

    return forward


def weighted_rows(module: Any, ask: Ask) -> Forward:
    """Llama 4's block: the weight multiplies the row before its expert, whose answer then counts with 1."""

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden_states.reshape(-1, module.hidden_dim)
        scores, logits = module.router(rows)
        weights, ids = scores.topk(module.top_k, dim=-1)
        routed = torch.zeros_like(rows)
        for choice in range(module.top_k):
            one = torch.full_like(ids, -1)
            one[:, 0] = ids[:, choice]
            routed += ask(rows * weights[:, choice, None], one, (one >= 0).to(weights.dtype))
        return module.shared_expert(rows).add_(routed), logits

    return forward


def by_own_router(module: Any, ask: Ask) -> Forward:
    """gpt-oss' block where transformers keeps MXFP4: kernels there choose too, as its router does."""

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden_states.reshape(-1, module.router.hidden_dim)
        logits, weights, ids = module.router(rows)
        return ask(rows, ids, weights).reshape(hidden_states.shape), logits

    return forward


def sorted_rows(module: Any, ask: Ask) -> Forward:
    """JetMoE's MLP: its router returns choices sorted by expert, and the model adds a bias to every row."""

    def forward(layer_input: Tensor) -> Tensor:
        rows = layer_input.reshape(-1, module.input_size)
        order, _, gates, counts, _ = module.router(rows)
        ids, weights = torch.empty_like(order), torch.empty_like(gates)
        sizes = torch.tensor(counts, device=order.device)
        ids[order] = torch.arange(len(counts), device=order.device).repeat_interleave(sizes)
        weights[order] = gates
        choice = (len(rows), module.router.top_k)
        mixed = ask(rows, ids.reshape(choice), weights.reshape(choice))
        return cast(Tensor, (mixed + module.bias).reshape(layer_input.shape))

    return forward


def one_hot(module: Any, ask: Ask) -> Forward:
    """Switch Transformers': a choice is a row of a mask, all zero where the expert was full."""

    def forward(hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
        chosen = selected_experts.argmax(-1).masked_fill(selected_experts.sum(-1) == 0, -1)
        return ask(hidden_states, chosen, routing_weights.masked_fill(chosen < 0, 0))

    return forward


def in_any_column(module: Any, ask: Ask) -> Forward:
    """NLLB-MoE's: ids in as many columns as there are experts, most of them again and with weight zero."""

    def forward(hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
        whole = router_probs.new_zeros(len(hidden_states), module.num_experts)
        whole.scatter_add_(1, router_mask.long(), router_probs)
        weights, ids = whole.topk(2, dim=-1)
        dropped = 0.0 if module.training else module.moe_token_dropout
        return ask(hidden_states, ids.masked_fill(weights == 0, -1), weights * (1 - dropped))

    return forward


SEAMS: dict[str, Seam] = {
    "DbrxExperts": Seam(as_interface, "num_experts", "hidden_size"),
    "JetMoeMoE": Seam(
        sorted_rows, "input_linear.num_experts", "input_size", ("input_linear", "output_linear")
    ),
    "Llama4TextMoe": Seam(weighted_rows, "num_experts", "hidden_dim", ("experts",)),
    "LongcatFlashExperts": Seam(with_zero_experts, "num_routed_experts", "hidden_size"),
    "Mxfp4GptOssMLP": Seam(by_own_router, "router.num_experts", "router.hidden_dim", ("experts",)),
    "NllbMoeExperts": Seam(in_any_column, "num_experts", "expert_0.fc1.in_features"),
    "Step3p7Experts": Seam(as_interface, "num_experts", "hidden_dim"),
    "SwitchTransformersExperts": Seam(one_hot, "num_experts", "expert_0.wi.in_features"),
}
"""The table of modules by class name; a new one is one line here."""


def seam_of(module: Module) -> Seam | None:
    """Returns the seam of a module; None for modules that have none, or have the interface."""
    return SEAMS.get(type(module).__name__)
