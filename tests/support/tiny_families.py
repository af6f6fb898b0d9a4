"""Every model family of the installed transformers that has experts, and a tiny seeded model of each.

A family is a `model_type` whose config class counts experts (`families`); nothing is listed by hand. Sizes
that most families name alike are in `SIZES`; what one family needs besides is a line of `OWN`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
HIDDEN, INNER, EXPERTS, TOP_K, VOCABULARY = 64, 32, 8, 2, 256

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "out_hidden_size"), HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), INNER),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 96),
    **dict.fromkeys(COUNTS, EXPERTS),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk", "moe_top_k"),
        TOP_K,
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim", "v_head_dim", "qk_rope_head_dim"),
        16,
    ),
    **dict.fromkeys(
        ("qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "qk_head_dim"), 32),
    **dict.fromkeys(
        (
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "shared_experts_intermediate_size",
            "share_expert_dim",
        ),
        INNER,
    ),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_num_heads", "ssm_state_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "sliding_window"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "mamba_expand", "n_groups", "index_n_heads"), 2),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_expert_group", "mamba_n_groups", "first_k_dense_replace"), 1
    ),
    "mamba_chunk_size": 8,
    "index_topk": 8,
    "hidden_size_per_layer_input": 16,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Keys of a config -> what they are in a tiny model; applied where a config class has the key."""

_OMIT = object()
"""Stands for a key of `SIZES` that a family computes from others."""

_HEADS = {"num_key_value_heads": 4}  # latent attention has as many as there are heads
_STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

OWN: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _HEADS),
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": _HEADS | {"zero_expert_num": 4},
    **dict.fromkeys(("mistral_large4_text",), _HEADS),
    "bailing_hybrid": _HEADS | {"num_hidden_layers": 4, "layer_group_size": 2},
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"moe_num_experts": EXPERTS, "moe_top_k": TOP_K, "ffn_hidden_size": INNER},
    },
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts_per_tok": TOP_K,
        "rope_parameters": _DEFAULT_ROPE,
    },
    "deepseek_v2": _HEADS | {"num_experts_per_tok": TOP_K},
    "diffusion_gemma_text": {"num_experts": EXPERTS, "top_k_experts": TOP_K, "moe_intermediate_size": INNER},
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_shared_experts": 1},
    "dots3_note_text": _HEADS
    | {"swa_" + key: value for key, value in SIZES.items() if key in ("q_lora_rank", "kv_lora_rank")}
    | {"swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "head_dim": 32},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [INNER, INNER],
        "rope_parameters": _DEFAULT_ROPE | {"mrope_section": [2, 2, 4]},
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "num_experts": EXPERTS,
        "top_k_experts": TOP_K,
        "moe_intermediate_size": INNER,
    },
    "glm4_moe_lite": _HEADS,
    "glm4v_moe_text": {
        "rope_parameters": _DEFAULT_ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    },
    "glm5_next_text": _HEADS | {"num_hidden_layers": 4, "index_kpool": 4, "qk_rope_head_dim": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": [TOP_K, TOP_K, TOP_K]},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": _HEADS | {"num_hidden_layers": 5},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1},
    "mistral4": _HEADS | {"head_dim": _OMIT, "rope_parameters": _OMIT},
    "nemotron_h": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "muse_spark_text": {"moe_hidden_size": 48},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": INNER},
    "qwen4_exp_text": {
        "num_hidden_layers": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "nllb-moe": {
        **{f"{stack}_{key}": size for stack in ("encoder", "decoder") for key, size in _STACK.items()},
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "moe_token_dropout": 0.2,
    },
    "step3p5": {
        "sliding_window": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "swiglu_limits": [0.0, 0.0, 0.25],
    },
    "switch_transformers": {
        "d_ff": 96,
        "d_kv": 16,
        "num_decoder_layers": 2,
        "num_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 4,
        "decoder_start_token_id": 0,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family's tiny config needs beside `SIZES`, by `model_type`."""


@dataclass(frozen=True)
class TinyFamily:
    """One family with experts, as transformers has it."""

    model_type: str
    package: str  # its folder in transformers.models
    config_class: type[PreTrainedConfig]

    def config(self) -> PreTrainedConfig:
        """Its config with the sizes of a tiny model."""
        whole = self.config_class()
        whole.__dict__["allow_global_per_layer_attribute_access"] = True
        sizes = {
            key: size
            for key, size in SIZES.items()
            if not isinstance(getattr(whole, key, None), (list, dict, type(None)))
        }
        wanted = sizes | dict(OWN.get(self.model_type, {}))
        return self.config_class(**{key: value for key, value in wanted.items() if value is not _OMIT})

    def model_class(self) -> type[PreTrainedModel]:
        """Its text model, with a head for tokens where there is one."""
        for mapping in (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
            modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
            modeling_auto.MODEL_MAPPING,
        ):
            if self.config_class in mapping:
                return mapping[self.config_class]
        modeling = importlib.import_module(f"transformers.models.{self.package}.modeling_{self.package}")
        own = [
            found
            for name, found in vars(modeling).items()
            if inspect.isclass(found)
            and issubclass(found, PreTrainedModel)
            and getattr(found, "config_class", None) is self.config_class
            and not name.endswith("PreTrainedModel")
        ]
        return own[-1]

    def model(self, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A tiny model, seeded, whose experts take a large part in what it answers."""
        torch.manual_seed(seed)
        model = self.model_class()(self.config()).to(dtype).eval()
        with torch.no_grad():
            for name, weight in model.state_dict().items():  # buffers that are not saved stay what they are
                if weight.is_floating_point() and (weight.dim() > 1 or CHOOSES.search(name)):
                    weight.normal_(0, DEVIATION)
        return model


CHOOSES = re.compile(r"e_score_correction_bias|expert_bias|per_expert_scale")
"""Numbers of a router that a new model has alike for all experts."""

DEVIATION = 0.15  # of weights that are drawn


@torch.no_grad()
def answers(model: Any, tokens: Tensor) -> Tensor:
    """What a model answers to `tokens [B, S]`: logits [B, S, V], or hidden states where it has no head."""
    if model.config.is_encoder_decoder:
        found = model(input_ids=tokens, decoder_input_ids=tokens)
    elif _speaks(model):
        table = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
        found = model(inputs_embeds=table[tokens], use_cache=False)
    else:
        found = model(input_ids=tokens, use_cache=False)
    return found.logits if "logits" in found else found.last_hidden_state


def _speaks(model: Any) -> bool:
    """Whether a model hears no tokens but what another model made of them (a talker)."""
    return type(model).__name__.endswith("TalkerModel")


@torch.no_grad()
def greedy(model: Any, tokens: Tensor, count: int) -> Tensor:
    """`tokens [B, S]` and `count` more, each the likeliest; by a fixed head where a model has none."""
    for _ in range(count):
        tokens = torch.cat((tokens, likeliest(answers(model, tokens))[:, -1:]), dim=1)
    return tokens


def likeliest(answered: Tensor) -> Tensor:
    """The likeliest token `[B, S]` after each, no special one; by a fixed head where a model has none."""
    if answered.shape[-1] != VOCABULARY:
        head = torch.randn(answered.shape[-1], VOCABULARY, generator=torch.Generator().manual_seed(2))
        answered = answered @ head
    return answered[..., 4:].argmax(-1) + 4


@cache
def families() -> Mapping[str, TinyFamily]:
    """Every family of the installed transformers whose config counts experts, by `model_type`."""
    found: dict[str, TinyFamily] = {}
    for config_class in _config_classes():
        named = {"ffn_config"} & set(_keys(config_class)) or set(COUNTS) & set(_keys(config_class))
        if named and config_class.model_type:
            package = config_class.__module__.split(".")[-2]
            found.setdefault(
                config_class.model_type, TinyFamily(config_class.model_type, package, config_class)
            )
    return found


def _keys(config_class: type[PreTrainedConfig]) -> set[str]:
    return set(getattr(config_class, "__annotations__", {})) | set(config_class.attribute_map)


def _config_classes() -> Iterator[type[PreTrainedConfig]]:
    folder = Path(transformers.models.__file__).parent
    for file in sorted(folder.glob("*/configuration_*.py")):
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for found in vars(module).values():
            if (
                inspect.isclass(found)
                and issubclass(found, PreTrainedConfig)
                and found.__module__ == module.__name__
            ):
                yield found
