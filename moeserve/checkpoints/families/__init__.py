"""The table of model families, `FAMILIES`, and who belongs to which: `family_of`.

Most families are read by the rules of config.py and names.py alone; an entry says what those cannot know. A
family that is not here is read from its class where transformers is installed and has it (derived.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moeserve.checkpoints.families.config import (
    Config,
    check_counts,
    counts_experts,
    flat,
    nested_configs,
    required,
    sparse_layers,
)
from moeserve.checkpoints.families.derived import derived_family
from moeserve.checkpoints.families.family import ModelFamily, ungated
from moeserve.checkpoints.store import CheckpointError
from moeserve.experts.activation import NO_MUL, Activation

__all__ = ["ALIASES", "FAMILIES", "PLAIN", "REFUSED", "ModelFamily", "family_of", "text_config"]


def _swigluoai(config: Config, _: int) -> Activation:
    return Activation("swigluoai", limit=config.get("swiglu_limit"), alpha=config.get("swiglu_alpha"))


def _limited_silu(config: Config, _: int) -> Activation:
    return Activation("silu", limit=config.get("swiglu_limit", 10.0))


def _silu(_: Config, __: int) -> Activation:
    return Activation("silu")


def _softcapped(config: Config, _: int) -> Activation:
    """Inkling 2 bounds gate and up by tanh, which is situ with these bounds."""
    gate, up = config.get("mlp_gate_softcap", 4.0), config.get("mlp_up_softcap", 25.0)
    return Activation("situ", beta=gate, linear_beta=up)


def _step_limit(config: Config, layer: int) -> Activation:
    limits = config.get("swiglu_limits") or []
    limit = limits[layer] if layer < len(limits) else None
    return Activation("swiglustep", limit=limit) if limit else Activation("silu")


def _relu(_: Config, __: int) -> Activation:
    return Activation("relu" + NO_MUL)


def _text_inner(config: Config) -> int:
    """ERNIE-VL lists the sizes of text's and of vision's experts."""
    sizes = config.get("moe_intermediate_size")
    one = {"moe_intermediate_size": sizes[0] if isinstance(sizes, list) else sizes}
    return required(one, "moe_intermediate_size")


def _after_dense(default: int) -> Callable[[Config, int], frozenset[int] | None]:
    """Layers after the first dense ones, of which there are `default` where the config does not say."""
    return lambda config, depth: sparse_layers({"first_k_dense_replace": default, **config}, depth)


def _all_layers(_: Config, depth: int) -> frozenset[int] | None:
    return frozenset(range(depth))


def _by_names(_: Config, __: int) -> frozenset[int] | None:
    return None


def _by_size(key: str) -> Callable[[Config], int]:
    return lambda config: required(config, key)


def _hash_layers(config: Config, layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return bool(layer < config.get("num_hash_layers", 3))
    return bool(layer < len(kinds) and kinds[layer] == "hash_moe")


PLAIN = (
    *("afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2_text", "dots1"),
    *(
        "dots3_note_text",
        "ernie4_5_moe",
        "exaone_moe",
        "flint",
        "glm4_moe_lite",
        "glm4v_moe_text",
        "glm_moe_dsa",
    ),
    *(
        "hunyuan_v1_moe",
        "hy_v3",
        "inkling_text",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "mellum",
        "mimo_v2_flash",
    ),
    *(
        "mistral4",
        "mistral_large4_text",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_omni_moe_talker_text",
    ),
    *("qwen3_omni_moe_text", "qwen3_vl_moe_text", "solar_open", "unlimited_ocr_text"),
)
"""Families of which the config and the tensors' names say everything, in the `mlp` of a layer."""

EVERY_LAYER = ("flex_olmo", "olmoe", "qwen3_5_moe_text", "qwen4_exp_text")
"""Families like those, which have no key for dense layers, as they have none."""

_W = ("w1", "w3", "w2")
_SPARSE: dict[str, Any] = {"block": "block_sparse_moe"}
_TWO_STACKS: dict[str, Any] = {"activation": _relu, "layers": _by_names, "stacks": ("encoder", "decoder")}

FAMILIES: dict[str, ModelFamily] = {
    entry.model_type: entry
    for entry in (
        *(ModelFamily(name) for name in PLAIN),
        *(ModelFamily(name, layers=_all_layers) for name in EVERY_LAYER),
        ModelFamily("aria_text", stacked=True, transposed=True),
        ModelFamily("dbrx", block="ffn", layers=_all_layers, stacked=True),
        ModelFamily("deepseek_v2", layers=_after_dense(0)),
        ModelFamily("deepseek_v3", layers=_after_dense(3)),
        ModelFamily("deepseek_v32", layers=_after_dense(3)),
        ModelFamily(
            "deepseek_v4",
            block="ffn",
            spelling=_W,
            activation=_limited_silu,
            by_token=_hash_layers,
            layers=_all_layers,
        ),
        ModelFamily("diffusion_gemma_text", block="", stacked=True),
        ModelFamily("ernie4_5_vl_moe_text", inner=_text_inner, others_after=True),
        ModelFamily("gemma4_text", block="", stacked=True),
        ModelFamily("glm4_moe", layers=_after_dense(1)),
        ModelFamily("glm5_next_text", activation=_limited_silu),
        ModelFamily(
            "gpt_oss",
            activation=_swigluoai,
            layers=_all_layers,
            stacked=True,
            transposed=True,
            interleaved=True,
            bias=True,
        ),
        *(
            ModelFamily(f"granitemoe{kind}", stacked=True, **_SPARSE)
            for kind in ("", "_swa", "hybrid", "shared")
        ),
        ModelFamily("hy_v4", activation=_limited_silu),
        ModelFamily("inkling2_text", activation=_softcapped, stacked=True),
        ModelFamily("jamba", block="feed_forward"),
        ModelFamily("jetmoe", layers=_all_layers, stacked=True),
        ModelFamily("kimi_k2", layers=_after_dense(3)),
        ModelFamily("lfm2_moe", block="feed_forward", spelling=_W, activation=_silu),
        ModelFamily(
            "llama4_text",
            block="feed_forward",
            inner=_by_size("intermediate_size"),
            stacked=True,
            transposed=True,
        ),
        ModelFamily("longcat_flash", others_after=True),
        *(
            ModelFamily(name, spelling=_W, layers=_all_layers, **_SPARSE)
            for name in ("minimax", "minimax_m2", "mixtral", "phimoe")
        ),
        ModelFamily("minimax_m3_vl_text", activation=_swigluoai, stacked=True),
        ModelFamily("muse_spark_text", stacked=True),
        ModelFamily("nemotron_h", block="mixer", activation=ungated),
        ModelFamily("nllb-moe", block="ffn", bias=True, given={"num_experts_per_tok": 2}, **_TWO_STACKS),
        ModelFamily("openai_privacy_filter", activation=_swigluoai, stacked=True, transposed=True, bias=True),
        ModelFamily("step3p5", block="moe", activation=_step_limit, stacked=True),
        ModelFamily("switch_transformers", given={"num_experts_per_tok": 1}, **_TWO_STACKS),
        ModelFamily("zaya", stacked=True),
    )
}
"""The table of families by the `model_type` of the text config; a new one is a name in `PLAIN` or a line."""

ALIASES = {"MiniMaxM2ForCausalLM": ("minimax", "minimax_m2")}
"""Architectures whose files name another family's `model_type`, and the one that is meant."""

REFUSED = {
    "doge": "its experts are pairs of vectors that product keys look up, without matrices",
    "vitpose_backbone": "the data set of an image chooses its experts, each a part of one matrix",
    "dots3_note_vision_encoder": "its layers differ in their number of experts; a tower beside a decoder",
}
"""Families of transformers that count experts and cannot be served, with the reason."""


def family_of(config: Config) -> tuple[ModelFamily, Config]:
    """Returns the family of a model and the config of its text part, with the keys of a nested `ffn_config`.

    Raises CheckpointError, with what is supported, for a family that is not known and cannot be derived, and
    for a number of layers or experts that no model has.
    """
    parts = [_meant(part) for part in nested_configs(config)]
    for part in parts:
        check_counts(flat(part))
    for part in parts:
        if part.get("model_type") in FAMILIES:
            family = FAMILIES[str(part["model_type"])]
            return family, {**family.given, **flat(part)}
    for part in parts:
        if part.get("model_type") in REFUSED:
            kind = str(part["model_type"])
            raise CheckpointError(f"model_type {kind!r} cannot be served: {REFUSED[kind]}")
    counting = next((part for part in parts if counts_experts(part)), None)
    if counting is not None:
        return derived_family(counting, tuple(FAMILIES)), flat(counting)
    found = f"unknown architecture {config.get('architectures')} (model_type {config.get('model_type')!r})"
    known = ", ".join(sorted(FAMILIES))
    raise CheckpointError(f"{found}, and no key that counts experts; supported: {known}")


def text_config(config: Config) -> Config:
    """Returns the config whose family is known, this one or one nested in it; `config` where none is."""
    parts = (_meant(part) for part in nested_configs(config))
    return next((part for part in parts if part.get("model_type") in FAMILIES), config)


def _meant(config: Config) -> Config:
    """Returns a config under the `model_type` that its architecture is of."""
    for architecture in config.get("architectures") or ():
        named, meant = ALIASES.get(architecture, (None, None))
        if config.get("model_type") == named and meant is not None:
            return {**config, "model_type": meant}
    return config
