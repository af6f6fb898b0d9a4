"""Checkpoints for real engines, damaged copies of them, and how far two runs' log-probabilities are apart.

Weights are random and large, so experts matter: `damaged` copies must be told from the original.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import DEVIATION, VOCABULARY, edit_config, make_checkpoint, make_tokenizer, rewrite
from houses import Alone
from in_process import InProcess
from torch import Tensor
from transformers import AutoModelForCausalLM, DbrxConfig, DbrxForCausalLM

from moeserve.proto.integrations.transformers import attach

VLLM_FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "qwen2_moe", "glm4_moe")
"""Families that vLLM runs on a CPU, by itself too."""

HIDDEN = 256  # heads of 64, which the engines' attention on a CPU takes
CHOOSING = {"experts": 8, "top_k": 2}
"""Of float32 checkpoints."""

ALL = {"experts": 4, "top_k": 4, "n_group": 1, "topk_group": 1}
"""Of bf16 checkpoints: every expert is chosen, so no rounding upstream changes a choice, only its weight."""

_MLA = {
    "head_dim": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": _MLA,
    "olmoe": {"num_key_value_heads": 4},  # as many as heads, as the published one has, and SGLang wants
}
IN_CONFIG: Mapping[str, Mapping[str, Any]] = {
    # transformers 5 does not save what engines read
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_DOWN = re.compile(r"\.experts\.(?:(?P<expert>\d+)\.)?(?:w2\.weight|mlp\.w2|down_proj(?:\.weight)?)$")


@dataclass(frozen=True)
class EngineModel:
    """A checkpoint, and copies with all down projections x 1.05 and with expert 1 zeroed, by folder."""

    family: str
    dtype: str
    path: Path
    scaled: Path
    zeroed: Path


def make_engine_model(family: str, dtype: str, folder: Path) -> EngineModel:
    """Writes the three checkpoints of a `family` (a key of checkpoints.CONFIGS), with a tokenizer."""
    model = EngineModel(family, dtype, folder / "model", folder / "scaled", folder / "zeroed")
    sizes: dict[str, Any] = dict(CHOOSING if dtype == "float32" else ALL)
    if family not in ("deepseek_v3", "glm4_moe"):
        sizes = {key: value for key, value in sizes.items() if "group" not in key}
    make_checkpoint(
        family, model.path, dtype=DTYPES[dtype], hidden=HIDDEN, **(sizes | dict(SPECIAL.get(family, {})))
    )
    edit_config(model.path, **IN_CONFIG.get(family, {}))
    make_tokenizer(model.path)
    damage(model.path, model.scaled, lambda down: down * 1.05, None)
    damage(model.path, model.zeroed, torch.zeros_like, 1)
    return model


def make_dbrx(folder: Path) -> EngineModel:
    """Writes a DBRX in float32, with a tokenizer, and its damaged copies."""
    model = EngineModel("dbrx", "float32", *(folder / name for name in ("model", "scaled", "zeroed")))
    config = DbrxConfig(
        d_model=HIDDEN,
        n_heads=4,
        n_layers=2,
        max_seq_len=512,
        vocab_size=VOCABULARY,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 128},
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = DbrxForCausalLM(config).eval()
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(0, DEVIATION)
    made.save_pretrained(model.path)
    make_tokenizer(model.path)
    damage(model.path, model.scaled, lambda down: down * 1.05, None)
    damage(model.path, model.zeroed, torch.zeros_like, 1)
    return model


@torch.no_grad()
def by_transformers(
    path: Path, asked: list[list[int]], new: int, service: Any = None
) -> list[dict[str, Any]]:
    """What transformers generates of each prompt alone, greedily in float32, as `apart` takes it.

    service: computes its experts, where there is one. Of such small models one thread computes faster.
    """
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if service is not None:
        attach(model, service)
    answers = []
    for ids in asked:
        tokens, positions, given, cache = [], [], ids, None
        for _ in range(new):
            found = model(torch.tensor([given]), past_key_values=cache, use_cache=True)
            likely, cache = found.logits[0, -1].log_softmax(-1).topk(20), found.past_key_values
            given = likely.indices[:1].tolist()
            tokens += given
            positions.append(
                dict(zip(map(str, likely.indices.tolist()), likely.values.tolist(), strict=True))
            )
        answers.append({"tokens": tokens, "logprobs": positions})
    return answers


class Rounding(InProcess):
    """A service that computes experts by the formulas, with activations rounded as the scheme says.

    nudge: hidden states are off by about so much of themselves first, as those of another program are.
    """

    def __init__(self, path: Path, *, nudge: float = 0.0) -> None:
        super().__init__(path)
        self._formulas, self._nudge = Alone(path), nudge
        self._random = torch.Generator().manual_seed(0)

    def forward(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """One layer's experts, mixed: [T, H] in the dtype of `hidden`."""
        off = 1 + self._nudge * torch.randn(hidden.shape, generator=self._random)
        return self._formulas.forward(layer, hidden * off, experts, weights)


def damage(path: Path, to: Path, change: Any, expert: int | None) -> None:
    """Copies a checkpoint with the down projections of `expert`, or of all, changed."""
    shutil.copytree(path, to)

    def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = dict(tensors)
        for name, tensor in tensors.items():
            if not (match := _DOWN.search(name)):
                continue
            if name.endswith(".experts.mlp.w2"):  # DBRX's: rows of all experts, one below the other
                found[name] = tensor.clone()
                rows = tensor.shape[0] // read_config(path)["ffn_config"]["moe_num_experts"]
                which = slice(None) if expert is None else slice(expert * rows, (expert + 1) * rows)
                found[name][which] = change(tensor[which])
            elif match["expert"] is None:  # one tensor for all experts
                found[name] = tensor.clone()
                which = slice(None) if expert is None else slice(expert, expert + 1)
                found[name][which] = change(tensor[which])
            elif expert is None or int(match["expert"]) == expert:
                found[name] = change(tensor)
        assert any(not torch.equal(found[name], tensors[name]) for name in tensors), "nothing was damaged"
        return found

    rewrite(to, changed)


@dataclass(frozen=True)
class Bound:
    """How far log-probabilities may be apart: at any position, and the mean over positions of the largest."""

    most: float
    mean: float


FLOAT32 = Bound(2e-4, 5e-5)
"""Sums of products in another order; seen are 3e-5 at most."""


@dataclass(frozen=True)
class Apart:
    """How far two runs are apart, at positions before their tokens differ, among the top 20. ties: where the
    tokens differ, as (request, position, how much less probable the other token is there).
    """

    most: float
    mean: float
    ties: tuple[tuple[int, int, float], ...]
    shared: int  # fewest tokens that both have among their top 20 at a position
    positions: int

    def within(self, bound: Bound) -> bool:
        """Whether the bound holds, and tokens differ only where two are as near as it says."""
        near = all(margin <= 2 * bound.most for _, _, margin in self.ties)
        return near and self.shared >= 15 and self.most <= bound.most and self.mean <= bound.mean


def apart(found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> Apart:
    """Compares the answers of two runs, `tokens` and `logprobs` by position, until their tokens differ."""
    largest, fewest, ties = [], 20, []
    assert len(found) == len(alone)
    for request, (one, other) in enumerate(zip(found, alone, strict=True)):
        assert len(one["tokens"]) == len(other["tokens"])
        for position, (mine, theirs) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            shared = mine.keys() & theirs.keys()
            fewest = min(fewest, len(shared))
            largest.append(max((abs(mine[token] - theirs[token]) for token in shared), default=0.0))
            chosen, expected = str(one["tokens"][position]), str(other["tokens"][position])
            if chosen != expected:
                ties.append((request, position, theirs[expected] - theirs.get(chosen, -1e9)))
                break
    assert largest, "nothing was generated"
    return Apart(max(largest), sum(largest) / len(largest), tuple(ties), fewest, len(largest))


def bound_by_experts(told: Apart) -> Bound:
    """How far two runs in bf16 may be apart whose experts round at other places, and nothing else.

    told: the engine alone against itself with experts in float32, whose answers are rounded once. That is
    what the engine's own kernel adds. The service's adds as much, so the two are sqrt(2) times that apart; it
    rounds up to twice as often (each rank's sum, and rows on the wire), hence another sqrt(2).
    """
    return Bound(2.0 * told.most, 2.0 * told.mean)


def bound_by_float32(told: Apart) -> Bound:
    """The same for an engine whose experts alone cannot be computed in float32.

    told: the engine alone in bf16 against itself in float32, attention and all, with the same weights. Two
    runs that had nothing in common but the weights would be sqrt(2) times that apart; the largest of some
    hundred positions is another draw each time, hence 2 for it.
    """
    return Bound(2.0 * told.most, 2.0**0.5 * told.mean)


NUDGE = 1e-6
"""By how much of themselves two programs' hidden states in float32 differ where nothing is rounded."""


def bound_by_codes(told: Apart) -> Bound:
    """How far two runs in float32 may be apart whose experts round activations to few bits.

    told: transformers with that rounding, against itself with hidden states nudged by NUDGE. Few numbers lie
    so near to the middle of two codes that they fall to the other one; which ones is another draw each time,
    hence 4.
    """
    return Bound(FLOAT32.most + 4.0 * told.most, FLOAT32.mean + 4.0 * told.mean)


def prompts(count: int, vocabulary: int = 250) -> list[list[int]]:
    """Token ids of `count` prompts of different lengths."""
    return [[3 + (7 * i + 13 * j) % vocabulary for j in range(4 + 3 * i)] for i in range(count)]


def read_config(path: Path) -> dict[str, Any]:
    """The config of a checkpoint."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def moe_layers(path: Path) -> int:
    """Decoder layers of a checkpoint that have experts."""
    config = read_config(path)
    return int(config["num_hidden_layers"]) - int(config.get("first_k_dense_replace", 0))
