"""The table of model families, `FAMILIES`: which layers have experts, their size, activation, orientation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moeserve.checkpoints.store import CheckpointError
from moeserve.experts.activation import Activation

Config = Mapping[str, Any]

EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token")


def required(config: Config, *keys: str) -> int:
    """Returns the whole number that the config has under one of `keys`.

    Raises CheckpointError where none is there, two differ, or the value is no count.
    """
    found = {key: config[key] for key in keys if config.get(key) is not None}
    if not found:
        raise CheckpointError(f"config.json of {config.get('model_type')} has no key {' or '.join(keys)}")
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {key} must be a positive whole number, found {value!r}")
    if len(set(found.values())) > 1:
        listed = " and ".join(f"{key}={value}" for key, value in found.items())
        raise CheckpointError(f"config.json: {listed} differ, and mean the same")
    return int(next(iter(found.values())))


def _silu(config: Config) -> Activation:
    return Activation(str(config.get("hidden_act", "silu")))


def _swigluoai(config: Config) -> Activation:
    return Activation("swigluoai", limit=config.get("swiglu_limit"), alpha=config.get("swiglu_alpha"))


def _limited_silu(config: Config) -> Activation:
    return Activation(str(config.get("hidden_act", "silu")), limit=config.get("swiglu_limit", 10.0))


def _every(_: Config, __: int) -> bool:
    return True


def _none(_: Config, __: int) -> bool:
    return False


def _sparse_step(config: Config, layer: int) -> bool:
    step = config.get("decoder_sparse_step", 1)
    return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % step == 0


def _after_dense(default: int) -> Callable[[Config, int], bool]:
    def has_experts(config: Config, layer: int) -> bool:
        frequency = config.get("moe_layer_freq") or 1
        if isinstance(frequency, list):  # one number a layer
            if layer >= len(frequency):
                found = f"moe_layer_freq has {len(frequency)} entries, and layer {layer} needs one"
                raise CheckpointError(f"config.json: {found}: one a layer")
            return bool(frequency[layer])
        dense = config.get("first_k_dense_replace", default) or 0
        return bool(layer >= dense and layer % frequency == 0)

    return has_experts


def _interleaved_layers(config: Config, layer: int) -> bool:
    if config.get("moe_layers") is not None:
        return layer in config["moe_layers"]
    return bool((layer + 1) % config.get("interleave_moe_layer_step", 1) == 0)


def _hash_layers(config: Config, layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return bool(layer < config.get("num_hash_layers", 3))
    return bool(layer < len(kinds) and kinds[layer] == "hash_moe")


@dataclass(frozen=True)
class ModelFamily:
    """One model family: how its config and the names of its experts' tensors are read, in any storage.

    `block` and `spelling` (gate, up, down) are as transformers writes them; reading accepts every known one.
    Defaults of absent config keys are those of transformers 5.23.
    """

    model_type: str
    block: str = "mlp"
    spelling: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    inner_key: str = "moe_intermediate_size"
    has_experts: Callable[[Config, int], bool] = _every
    by_token: Callable[[Config, int], bool] = _none  # a layer whose experts a table chooses by token id
    activation: Callable[[Config], Activation] = _silu
    stacked: bool = False  # transformers writes one tensor for all experts
    transposed: bool = False  # stacked tensors are [E, H, 2I] and [E, I, H]
    interleaved: bool = False  # stacked gate and up rows stand as g0, u0, g1, u1, ...
    bias: bool = False


_W = ("w1", "w3", "w2")

FAMILIES: dict[str, ModelFamily] = {
    entry.model_type: entry
    for entry in (
        ModelFamily("deepseek_v2", has_experts=_after_dense(0)),
        ModelFamily("deepseek_v3", has_experts=_after_dense(3)),
        ModelFamily("deepseek_v4", block="ffn", spelling=_W, activation=_limited_silu, by_token=_hash_layers),
        ModelFamily("glm4_moe", has_experts=_after_dense(1)),
        ModelFamily(
            "gpt_oss",
            inner_key="intermediate_size",
            activation=_swigluoai,
            stacked=True,
            transposed=True,
            interleaved=True,
            bias=True,
        ),
        ModelFamily("kimi_k2", has_experts=_after_dense(3)),
        ModelFamily(
            "llama4_text",
            block="feed_forward",
            inner_key="intermediate_size",
            has_experts=_interleaved_layers,
            stacked=True,
            transposed=True,
        ),
        ModelFamily("minimax_m2", block="block_sparse_moe", spelling=_W, inner_key="intermediate_size"),
        ModelFamily("mixtral", block="block_sparse_moe", spelling=_W, inner_key="intermediate_size"),
        ModelFamily("olmoe", inner_key="intermediate_size"),
        ModelFamily("qwen2_moe", has_experts=_sparse_step),
        ModelFamily("qwen3_moe", has_experts=_sparse_step),
    )
}
"""The table of families by the `model_type` of the text config; a new one is one line here."""


NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which configs of several modalities have that of their text part, or of what has a text part."""

INHERITED = ("architectures", "dtype", "torch_dtype", "quantization_config", "compression_config")
"""Keys that a nested config has from the one around it where it lacks them."""


def text_config(config: Config) -> Config:
    """Returns the config whose family is known: this one, or the first of those nested in it at any depth.

    Returns `config` itself where none is.
    """
    return next((found for found in _nested(config) if found.get("model_type") in FAMILIES), config)


def _nested(config: Config) -> Iterator[Config]:
    """Returns a config and, after it, those nested in it, each with what it inherits."""
    yield config
    inherited = {key: config[key] for key in INHERITED if config.get(key) is not None}
    for key in NESTED:
        if isinstance(config.get(key), Mapping):
            own = {name: value for name, value in config[key].items() if value is not None}
            yield from _nested(inherited | own)


def family_of(config: Config) -> tuple[ModelFamily, Config]:
    """Returns the family of a model and the config of its text part.

    Raises CheckpointError, with what is supported, for a family that is not known.
    """
    config = text_config(config)
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"unknown architecture {architectures} (model_type {model_type!r}); supported: {known}"
        )
    return FAMILIES[str(model_type)], config
