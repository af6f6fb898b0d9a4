"""Makes tiny bf16 models of many families with random weights, for the producers to quantize.

    python sources.py OUT [NAME ...]

Needs torch and transformers only. Each model is of the family's own class, written by `save_pretrained`, with
weights from a fixed seed and a tokenizer of single bytes, which the producers ask for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPREAD = 0.15
"""Standard deviation of every matrix: larger than a fresh model's, so that activations do not vanish."""

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def sizes(hidden: int, inner: int, experts: int, layers: int = 1) -> dict[str, Any]:
    """Config keys that every family has."""
    return {
        "hidden_size": hidden,
        "head_dim": hidden // 4,
        "moe_intermediate_size": inner,
        "intermediate_size": inner,
        "num_experts": experts,
        "num_local_experts": experts,
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
    }


LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("Qwen3Moe", sizes(128, 64, 2)),
    "mixtral": ("Mixtral", sizes(64, 128, 2)),
    "square": ("Qwen3Moe", sizes(128, 128, 2)),
    "edge": ("Qwen3Moe", sizes(128, 192, 2)),
    "gptoss": ("GptOss", sizes(64, 96, 2)),
    "uneven": ("Qwen3Moe", sizes(64, 160, 2)),
    "wide": ("Qwen3Moe", sizes(256, 384, 8, 3) | {"mlp_only_layers": [0]}),
    "odd": ("Qwen3Moe", sizes(160, 224, 4, 2)),
    "mixtral-wide": ("Mixtral", sizes(256, 128, 4, 2)),
    "qwen2moe": ("Qwen2Moe", sizes(128, 256, 4, 2) | {"shared_expert_intermediate_size": 128}),
    "olmoe": ("Olmoe", sizes(128, 256, 4, 2) | {"num_key_value_heads": 4}),
    "deepseekv2": ("DeepseekV2", sizes(128, 256, 4, 2) | LATENT),
    "deepseekv3": ("DeepseekV3", sizes(128, 256, 4, 3) | LATENT),
    "glm4moe": ("Glm4Moe", sizes(128, 256, 4, 2) | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "minimaxm2": ("MiniMaxM2", sizes(128, 256, 4, 2)),
    "llama4": ("Llama4", sizes(128, 256, 4, 2) | {"interleave_moe_layer_step": 1}),
}
"""Class and config of each source by name: the first six are those that test data is made of."""


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of three special tokens and the 256 bytes."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<s>", "</s>", *sorted(letters)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def make(name: str, out: Path) -> None:
    """Writes the source `name` to `out / name`."""
    family, keys = SOURCES[name]
    text = "TextConfig" if family == "Llama4" else "Config"
    config = getattr(transformers, family + text)(**COMMON | keys)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD)
    model.save_pretrained(out / name)
    byte_tokenizer().save_pretrained(out / name)
    print(name, sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    for each in sys.argv[2:] or SOURCES:
        make(each, Path(sys.argv[1]))
