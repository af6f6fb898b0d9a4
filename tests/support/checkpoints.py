"""Makes tiny checkpoints with transformers' own classes: fixed seed, weights so large that experts matter.

from checkpoints import make_checkpoint

model = make_checkpoint("qwen3_moe", tmp_path, dtype=torch.float32)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeserve.quant.formats.fp8 import FP8_BLOCK

DEVIATION = 0.15  # with transformers' own 0.02 the experts change no greedy token
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
VOCABULARY = 256 + len(SPECIAL_TOKENS)
INDEX = "model.safetensors.index.json"

_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_GROUPED = {
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
}
_V4 = {
    "num_key_value_heads": 1,
    "q_lora_rank": 16,
    "partial_rotary_factor": 0.5,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["hash_moe", "moe"],
    "hc_mult": 2,
    "n_shared_experts": 1,
}

CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2",
        _MLA | _GROUPED | {"topk_method": "group_limited_greedy", "num_key_value_heads": 4},
    ),
    "deepseek_v3": ("DeepseekV3", _MLA | _GROUPED | {"num_key_value_heads": 4}),
    "deepseek_v4": ("DeepseekV4", _V4),
    "glm4_moe": ("Glm4Moe", _GROUPED | {"n_group": 1}),
    "gpt_oss": ("GptOss", {"sliding_window": 64}),
    "llama4_text": ("Llama4", {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 1}),
    "minimax_m2": ("MiniMaxM2", {}),
    "mixtral": ("Mixtral", {}),
    "olmoe": ("Olmoe", {}),
    "qwen2_moe": ("Qwen2Moe", {"intermediate_size": 96, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3Moe", {"intermediate_size": 96, "norm_topk_prob": True}),
}
"""transformers' class prefix and the keys a family adds or sets otherwise, by model_type."""

INNER_KEY = dict.fromkeys(("gpt_oss", "llama4_text", "minimax_m2", "mixtral", "olmoe"), "intermediate_size")
EXPERTS_KEY = dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v4", "glm4_moe"), "n_routed_experts")
EXPERTS_KEY |= dict.fromkeys(("olmoe", "qwen2_moe", "qwen3_moe"), "num_experts")

_EXPERT = re.compile(
    r"(?P<stem>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>w[123]|(?:gate|up|down)_proj)\.weight(?P<scale>_scale_inv)?"
)
_ROLES = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def make_checkpoint(
    family: str,
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    fused: bool | str = False,
    shards: int | None = None,
    hidden: int = 64,
    inner: int = 128,
    experts: int = 8,
    top_k: int = 2,
    layers: int = 2,
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Writes a `family` model (a key of CONFIGS) to `path` and returns it, in eval mode, on the CPU.

    `fused` writes [E, 2I, H] and [E, H, I] tensors instead of one a projection; "transposed" [E, H, 2I] and
    [E, I, H]. `shards` spreads the tensors over so many files with an index. `overrides` are config keys.
    """
    model = make_model(
        family,
        dtype=dtype,
        seed=seed,
        hidden=hidden,
        **{
            INNER_KEY.get(family, "moe_intermediate_size"): inner,
            EXPERTS_KEY.get(family, "num_local_experts"): experts,
            "num_experts_per_tok": 1 if family == "llama4_text" else top_k,
            "num_hidden_layers": layers,
        }
        | overrides,
    )
    transformers.logging.disable_progress_bar()
    model.save_pretrained(path)
    if fused:
        rewrite(path, lambda tensors: fuse(tensors, transposed=fused == "transposed"))
    if shards:
        shard(path, shards)
    return model


def make_model(
    family: str, *, dtype: torch.dtype, seed: int, hidden: int, **settings: Any
) -> transformers.PreTrainedModel:
    """A `family` model with random weights of the seed; `settings` are keys of its transformers config."""
    prefix, special = CONFIGS[family]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    common = (
        {"hidden_size": hidden, "max_position_embeddings": 512, "tie_word_embeddings": False} | heads | tokens
    )
    config_class = getattr(transformers, prefix + ("TextConfig" if family == "llama4_text" else "Config"))
    config = config_class(**(common | dict(special) | settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(dtype).eval()
        with torch.no_grad():
            for name, weight in (*model.named_parameters(), *model.named_buffers()):
                if weight.is_floating_point() and (weight.dim() > 1 or name.endswith("bias")):
                    weight.normal_(0, DEVIATION)
    return model


def experts_of(model: transformers.PreTrainedModel, layer: int) -> tuple[Tensor, Tensor]:
    """What transformers computes with in `layer`: gate_up [E, 2I, H], gate rows first, and down [E, H, I]."""
    block = model.model.layers[layer]
    module = next(
        m for name, m in block.named_modules() if name.endswith("experts") and hasattr(m, "gate_up_proj")
    )
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if model.config.model_type in ("gpt_oss", "llama4_text"):
        gate_up, down = gate_up.mT, down.mT
    if model.config.model_type == "gpt_oss":
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
    return gate_up, down


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replaces the tensors of a single-file checkpoint by what `change` makes of them."""
    file = path / "model.safetensors"
    changed = change(load_file(file))
    save_file(
        {name: tensor.contiguous() for name, tensor in changed.items()}, file, metadata={"format": "pt"}
    )


def edit_config(path: Path, **keys: Any) -> None:
    """Sets keys of config.json; None removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def fuse(tensors: dict[str, Tensor], *, transposed: bool) -> dict[str, Tensor]:
    """Stacks a layer's projections: `experts.gate_up_proj`, `experts.gate_up_proj_scale_inv`."""
    rest, layers = {}, {}
    for name, tensor in tensors.items():
        if found := _EXPERT.fullmatch(name):
            roles = layers.setdefault(
                (found["stem"], found["scale"] or ""), {"gate": {}, "up": {}, "down": {}}
            )
            roles[_ROLES[found["projection"]]][int(found["expert"])] = tensor
        else:
            rest[name] = tensor
    for (stem, scale), roles in layers.items():
        gate, up, down = (torch.stack([role[e] for e in sorted(role)]) for role in roles.values())
        gate_up = torch.cat((gate, up), dim=1)
        rest[f"{stem}.gate_up_proj{scale}"] = gate_up.mT if transposed else gate_up
        rest[f"{stem}.down_proj{scale}"] = down.mT if transposed else down
    return rest


def unfuse(tensors: dict[str, Tensor], *, interleaved: bool) -> dict[str, Tensor]:
    """Splits [E, H, 2I] and [E, I, H] tensors, and their biases: `experts.3.gate_proj.weight` and so on."""
    rest = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?", name)
        if found is None:
            rest[name] = tensor
            continue
        stem, side, suffix = found[1], found[2], "bias" if found[3] else "weight"
        for expert, matrix in enumerate(tensor if found[3] else tensor.mT):
            pieces = {"down": matrix}
            if side == "gate_up":
                gate, up = (matrix[::2], matrix[1::2]) if interleaved else matrix.chunk(2)
                pieces = {"gate": gate, "up": up}
            for role, piece in pieces.items():
                rest[f"{stem}.{expert}.{role}_proj.{suffix}"] = piece.clone()
    return rest


def quantize_fp8_block(
    path: Path, scale_dtype: torch.dtype = torch.float32, only_layer: int | None = None
) -> None:
    """Stores the experts as DeepSeek does: E4M3 weights, and a `weight_scale_inv` for each 128x128 block."""
    wanted = "layers." if only_layer is None else f"layers.{only_layer}."

    def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = dict(tensors)
        for name in filter(_EXPERT.fullmatch, tensors):
            if wanted in name:
                codes, scale = FP8_BLOCK.quantize(tensors[name].float()).parts
                changed |= {name: codes, f"{name}_scale_inv": scale.to(scale_dtype)}
        return changed

    rewrite(path, quantize)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    edit_config(path, quantization_config=settings | {"weight_block_size": [128, 128]})


def shard(path: Path, count: int) -> None:
    """Spreads a single-file checkpoint over `count` files with an index."""
    tensors = load_file(path / "model.safetensors")
    files = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    placed = {name: files[position % count] for position, name in enumerate(sorted(tensors))}
    for file in files:
        save_file(
            {name: tensors[name] for name in placed if placed[name] == file}, path / file, {"format": "pt"}
        )
    total = sum(tensor.nbytes for tensor in tensors.values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": placed}))
    (path / "model.safetensors").unlink()


def make_tokenizer(path: Path) -> transformers.PreTrainedTokenizerFast:
    """Writes a byte-level tokenizer of VOCABULARY tokens: each byte is a token, nothing is trained."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos
    )
    fast.save_pretrained(path)
    return fast
