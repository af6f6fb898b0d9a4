"""What config.json says of experts under the keys that model families use: counts, sizes, layers, activation.

Families name alike things in several ways. Each reader here knows all of them, and raises CheckpointError for
a value that cannot be meant, so that a family without an entry of its own is read by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moeserve.checkpoints.store import CheckpointError
from moeserve.experts.routing.families import COUNT_KEYS as EXPERT_COUNT_KEYS
from moeserve.experts.routing.families import TOP_K_KEYS

__all__ = ["EXPERT_COUNT_KEYS", "TOP_K_KEYS", "Config", "required"]

Config = Mapping[str, Any]

INNER_KEYS = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")
ALL_INNER_KEYS = (
    "intermediate_size",
    "ffn_hidden_size",
    "d_ff",
    "encoder_ffn_dim",
)  # of every MLP, dense or not
HIDDEN_KEYS = ("moe_latent_size", "moe_hidden_size", "hidden_size", "d_model")  # of an expert's rows
DEPTH_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "encoder_layers")
MOST_LAYERS, MOST_EXPERTS = 1 << 12, 1 << 16  # no model is near, and each costs work at once
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")

_BESIDE = re.compile(
    r"vision|visual|audio|talker|code2wav|speech|encoder_config|quantization|attn|generation"
)
INHERITED = ("architectures", "dtype", "torch_dtype", "quantization_config", "compression_config")
"""Keys that a nested config has from the one around it where it lacks them."""


def required(config: Config, *keys: str) -> int:
    """Returns the whole number that the config has under one of `keys`.

    A list of equal numbers, one a layer or a modality, is that number. Raises CheckpointError where none is
    there, two differ, or the value is no count.
    """
    found: dict[str, Any] = {key: _one(key, config[key]) for key in keys if config.get(key) is not None}
    if not found:
        raise CheckpointError(f"config.json of {config.get('model_type')} has no key {' or '.join(keys)}")
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {key} must be a positive whole number, found {value!r}")
    if len(set(found.values())) > 1:
        listed = " and ".join(f"{key}={value}" for key, value in found.items())
        raise CheckpointError(f"config.json: {listed} differ, and mean the same")
    return int(next(iter(found.values())))


def first(config: Config, *keys: str, usual: str) -> int:
    """Returns the number under the first of `keys` that the config has.

    Raises CheckpointError as `required`; where the config has none, it names the `usual` one.
    """
    return required(config, next((key for key in keys if config.get(key) is not None), usual))


def _one(key: str, value: object) -> object:
    if not isinstance(value, list) or not value:
        return value
    if any(entry != value[0] for entry in value):
        raise CheckpointError(
            f"config.json: {key}={value} differs by layer, and one number serves all layers"
        )
    return value[0]


def check_counts(config: Config) -> None:
    """Raises CheckpointError for more layers or experts than any model has."""
    for keys, most, what in (
        (DEPTH_KEYS, MOST_LAYERS, "layers"),
        (EXPERT_COUNT_KEYS, MOST_EXPERTS, "experts a layer"),
    ):
        for key in keys:
            entries = config[key] if isinstance(config.get(key), list) else [config.get(key)]
            if any(isinstance(entry, int) and entry > most for entry in entries):
                raise CheckpointError(
                    f"config.json: {key}={config[key]} is wrong: at most {most} {what} are read"
                )


def counts_experts(config: Config) -> bool:
    """Whether a config, or its `ffn_config`, has a key for how many experts there are."""
    return any(flat(config).get(key) is not None for key in EXPERT_COUNT_KEYS)


def flat(config: Config) -> Config:
    """Returns a config with the keys of its `ffn_config` (DBRX), which are the experts', beside its own."""
    nested = config.get("ffn_config")
    return {**nested, **config} if isinstance(nested, Mapping) else config


def nested_configs(config: Config) -> Iterator[Config]:
    """Returns a config and, after it, those of its text parts at any depth, each with what it inherits.

    Configs of towers beside the text decoder (vision, audio, a talker) are left out.
    """
    yield config
    inherited = {key: config[key] for key in INHERITED if config.get(key) is not None}
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("_config") and not _BESIDE.search(key):
            own = {name: entry for name, entry in value.items() if entry is not None}
            yield from nested_configs(inherited | own)


def activation_name(config: Config) -> str:
    """Returns the name of the experts' activation: that of the config, else silu."""
    found = next((config[key] for key in ACTIVATION_KEYS if config.get(key)), None)
    found = found or (config.get("ffn_act_fn") or {}).get("name")
    return str(found or "silu")


def depth_of(config: Config) -> int:
    """Returns the number of decoder layers. Raises CheckpointError where no key tells it."""
    for key in ("layers_block_type", "hybrid_override_pattern"):
        if config.get(key):
            return len(config[key])
    return first(config, *DEPTH_KEYS, usual="num_hidden_layers")


def sparse_layers(config: Config, depth: int) -> frozenset[int] | None:
    """Returns the layers that have experts by the keys of the config; None where no key speaks of it.

    A key that lists layers is believed before keys that count them. Raises CheckpointError for a list that
    has no entry for a layer.
    """
    if config.get("enable_moe_block") is False:
        return frozenset()
    listed = next((rule for key, rule in _LISTS.items() if _speaks(config, key)), None)
    rules = [listed] if listed else [rule for key, rule in _NUMBERS.items() if config.get(key) is not None]
    if not rules:
        return None
    return frozenset(layer for layer in range(depth) if all(rule(config, layer) for rule in rules))


def _speaks(config: Config, key: str) -> bool:
    entries = config.get(key)
    if key in ("layers_block_type", "layer_types"):  # layers of their own for experts, as in Nemotron-H
        return isinstance(entries, list) and "moe" in entries
    return isinstance(entries, (list, str))


def _entry(config: Config, key: str, layer: int) -> object:
    entries = config[key]
    if layer >= len(entries):
        found = f"{key} has {len(entries)} entries, and layer {layer} needs one"
        raise CheckpointError(f"config.json: {found}: one a layer")
    return entries[layer]


def _is(key: str, kind: str) -> Callable[[Config, int], bool]:
    return lambda config, layer: _entry(config, key, layer) == kind


def _named(key: str) -> Callable[[Config, int], bool]:
    def rule(config: Config, layer: int) -> bool:
        named = config[key].split(",") if isinstance(config[key], str) else config[key]
        return layer in {int(number) for number in named}

    return rule


def _number(config: Config, key: str) -> int:
    value = config.get(key)
    value = value[0] if isinstance(value, list) and value else value  # of text, before other modalities
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config.json: {key} must be a whole number, found {value!r}")
    return value


def _every(key: str, offset: int) -> Callable[[Config, int], bool]:
    return lambda config, layer: (layer + offset) % max(1, _number(config, key)) == 0


def _period(config: Config, layer: int) -> bool:
    period = _number(config, "expert_layer_period")
    return layer % period == _number({"expert_layer_offset": 0, **config}, "expert_layer_offset")


_LISTS: Mapping[str, Callable[[Config, int], bool]] = {
    "mlp_layer_types": lambda config, layer: _entry(config, "mlp_layer_types", layer) != "dense",
    "hybrid_override_pattern": _is("hybrid_override_pattern", "E"),
    "layers_block_type": _is("layers_block_type", "moe"),
    "layer_types": _is("layer_types", "moe"),
    "moe_layers_enum": _named("moe_layers_enum"),
    "moe_layers": _named("moe_layers"),
    "moe_layer_freq": lambda config, layer: bool(_entry(config, "moe_layer_freq", layer)),
}
"""Keys that list which layers have experts; the first that a config has decides."""

_NUMBERS: Mapping[str, Callable[[Config, int], bool]] = {
    "moe_layer_freq": _every("moe_layer_freq", 0),
    "moe_layer_interval": _every("moe_layer_interval", 1),
    "decoder_sparse_step": _every("decoder_sparse_step", 1),
    "interleave_moe_layer_step": _every("interleave_moe_layer_step", 1),
    "expert_layer_period": _period,
    "first_k_dense_replace": lambda config, layer: layer >= _number(config, "first_k_dense_replace"),
    "num_dense_layers": lambda config, layer: layer >= _number(config, "num_dense_layers"),
    "moe_layer_start_index": lambda config, layer: layer >= _number(config, "moe_layer_start_index"),
    "moe_layer_end_index": lambda config, layer: (
        _number(config, "moe_layer_end_index") == -1 or layer <= _number(config, "moe_layer_end_index")
    ),
    "mlp_only_layers": lambda config, layer: layer not in config["mlp_only_layers"],
}
"""Keys that count layers up to, or between, those with experts; a layer has some where all of them agree."""
