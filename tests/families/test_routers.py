"""The gate of every family against its own router in transformers, on ten thousand rows, ties included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import EXPERTS, HIDDEN, TinyFamily, families
from torch import Tensor
from torch.nn import Module

from moeserve.checkpoints.families import FAMILIES, family_of
from moeserve.experts.routing.families import BY_MODEL, gate_for
from moeserve.experts.routing.families import FAMILIES as GATES
from moeserve.experts.routing.gate import Gate

ROWS = 10_000
TIED = 2_000
"""Rows whose logits are multiples of a quarter, so that many are equal."""

ROUTED = sorted(set(GATES) - {"kimi_k2"})  # transformers reads Kimi-K2 as DeepSeek-V3
GROUPED = {"n_group": 4, "topk_group": 2}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    **{family: [{}, GROUPED] for family in ("axk1", "beam", "deepseek_v3", "dots1", "glm4_moe")},
    "axk2": [{"n_group": None, "topk_group": None}, {"n_group": 4, "topk_group": 2}],
    "bailing_hybrid": [{}, {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}],
    "cohere2_moe": [{}, {"expert_selection_fn": "sigmoid"}],
    "deepseek_v4": [{"mlp_layer_types": ["moe"] * 3}],
    "deepseek_v2": [
        {"routed_scaling_factor": 16.0},
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ],
    "flint": [{}, {"norm_topk_prob": False}],
    "lfm2_moe": [{}, {"use_expert_bias": False}, {"norm_topk_prob": False}],
    "mistral4": [{}, {"routed_scaling_factor": 2.5}],
    "qwen3_moe": [{}, {"norm_topk_prob": True}],
}
CASES = [(family, settings) for family in ROUTED for settings in SETTINGS.get(family, [{}])]


def router_of(model: Module) -> Module:
    """The router of the last layer with experts: the only module that holds a matrix [E, H]."""
    found = [
        module
        for name, module in model.named_modules()
        if any(
            tuple(weight.shape) == (EXPERTS, HIDDEN)
            for weight in module._parameters.values()
            if weight is not None
        )
        and not any(part in name for part in ("vision_moe", "self_attention", "experts"))
    ]
    return found[-1]


def chosen_by(family: TinyFamily, model: Module, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights `[T, K]` that a family's own router gives for `logits [T, E]`.

    Its matrix becomes one that picks the first E numbers of a row, so that a row's logits are these numbers.
    """
    router = router_of(model)
    matrix = next(
        weight for weight in router._parameters.values() if tuple(weight.shape) == (EXPERTS, HIDDEN)
    )
    with torch.no_grad():
        matrix.copy_(torch.eye(EXPERTS, HIDDEN))
        for name, bias in router.named_parameters(recurse=False):
            if name == "bias":
                bias.zero_()
    rows = torch.nn.functional.pad(logits, (0, HIDDEN - EXPERTS))
    return OWN_CALLS.get(family.model_type, _called)(model, router, rows)


def _called(model: Module, router: Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    _, weights, ids = router(rows)
    return ids, weights


def _with_bias(model: Module, router: Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The block holds the bias, and hands it to its router."""
    block = parent_of(model, router)
    held = dict(block.named_buffers(recurse=False)) | dict(block.named_parameters(recurse=False))
    bias = next((held[name] for name in ("expert_bias", "e_score_correction_bias") if name in held), None)
    _, weights, ids = router(rows, bias)
    return ids, weights


def _of_parent(model: Module, router: Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix is a linear layer within the router."""
    whole = parent_of(model, router)
    return _called(model, whole, rows)


def _afmoe(model: Module, router: Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    whole = parent_of(model, router)
    _, weights, ids = whole(rows[None], parent_of(model, whole).expert_bias)
    return ids, weights


def _dbrx(model: Module, router: Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    block = parent_of(model, parent_of(model, router))
    weights, ids = block.route_tokens_to_experts(router(rows))
    return ids, weights


def _jetmoe(model: Module, router: Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    whole = parent_of(model, router)
    order, _, gates, counts, _ = whole(rows)
    ids, weights = torch.empty_like(order), torch.empty_like(gates)
    ids[order] = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    weights[order] = gates
    return ids.reshape(len(rows), -1), weights.reshape(len(rows), -1)


def _llama4(model: Module, router: Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    scores, _ = router(rows)
    weights, ids = scores.topk(router.top_k, dim=-1)
    return ids, weights


def _muse(model: Module, router: Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Its router scales its logits, and returns them so."""
    return _called(model, router, rows / router.output_multiplier)


OWN_CALLS = {
    "afmoe": _afmoe,
    "dbrx": _dbrx,
    "hunyuan_v1_moe": _of_parent,
    **dict.fromkeys(("hy_v3", "lfm2_moe", "minimax_m2"), _with_bias),
    "jetmoe": _jetmoe,
    "llama4_text": _llama4,
    "muse_spark_text": _muse,
}
"""How routers are called that are not called with rows alone, or return something else."""


def parent_of(model: Module, child: Module) -> Any:
    """The module that holds `child`."""
    return next(module for module in model.modules() if any(below is child for below in module.children()))


def drawn() -> Tensor:
    """Logits [ROWS, E]; the last TIED rows have equal ones."""
    logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(11))
    logits[-TIED:] = (logits[-TIED:] * 4).round() / 4
    return logits


def with_settings(family: TinyFamily, settings: dict[str, Any]) -> Module:
    """The family's model with some keys of its config set."""
    config = family.config()
    for key, value in settings.items():
        setattr(config, key, value)
    torch.manual_seed(5)
    model = family.model_class()(config).eval()
    with torch.no_grad():
        for name, number in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                number.normal_(0, 0.2)
    return model


def gate_of(model: Module, folder: Path) -> Gate:
    """The gate by the config that the model writes, with the bias that the model has."""
    model.config.save_pretrained(folder)
    _, config = family_of(json.loads((folder / "config.json").read_text()))
    gate = gate_for(config)
    if not gate.biased:
        return gate
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    biases = [
        bias for name, bias in named.items() if name.endswith(("e_score_correction_bias", "expert_bias"))
    ]
    text = [bias for name, bias in named.items() if "text_moe" in name and name.endswith("correction_bias")]
    return gate.with_bias((text or biases)[-1].detach().reshape(-1)[:EXPERTS].clone())


@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
@torch.no_grad()
def test_logits_are_routed_as_by_the_family_itself(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    tiny = families()[family]
    model, logits = with_settings(tiny, settings), drawn()
    theirs, their_weights = chosen_by(tiny, model, logits)
    gate = gate_of(model, tmp_path)
    ours, weights = gate.route(logits)
    assert theirs.shape == ours.shape == (ROWS, gate.top_k)
    order, our_order = theirs.argsort(-1), ours.long().argsort(-1)
    theirs, ours = theirs.gather(-1, order), ours.long().gather(-1, our_order)
    alike = (theirs == ours).all(-1)
    # of equal scores transformers leaves open which is chosen; then the weights are equal all the same
    assert alike[:-TIED].all()
    assert alike[-TIED:].float().mean() > 0.5
    tolerance = 2e-7 * max(1.0, gate.scaling)
    kept = their_weights.float().gather(-1, order), weights.gather(-1, our_order)
    torch.testing.assert_close(kept[1][alike], kept[0][alike], rtol=0, atol=tolerance)
    if not gate.biased and gate.groups == 1:
        swapped = [each[~alike].sort(-1).values for each in kept]
        torch.testing.assert_close(swapped[1], swapped[0], rtol=0, atol=tolerance)


def test_every_family_is_routed_here_or_by_its_model() -> None:
    assert set(FAMILIES) == set(GATES) | set(BY_MODEL)
