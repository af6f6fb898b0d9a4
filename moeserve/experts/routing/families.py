"""Gates of model families: `gate_for` builds one from a model's Hugging Face config by its `model_type`.

A gate computes what the family's own router in transformers computes, on the logits which that router
returns; `tests/families/test_routers.py` compares the two. Routers that logits alone do not determine,
and those of families that are not here, leave the choice to the model (`Gate.by_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moeserve.experts.routing.gate import Gate
from moeserve.experts.routing.methods import method_of

Config = Mapping[str, Any]

COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K_KEYS = (
    *("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts"),
    *("moe_k", "moe_topk", "moe_top_k"),
)


def gate_for(config: Config) -> Gate:
    """The gate of a model's MoE layers by its Hugging Face config (`config.json`), without its bias yet.

    A multimodal config is read at its `text_config`. A family that is not in `FAMILIES` has a gate that says
    so where it is asked to route (`by_model`). ValueError: a missing key, a value that the family's router
    cannot have.
    """
    family = str(config.get("model_type"))
    if family not in FAMILIES and family not in BY_MODEL and isinstance(config.get("text_config"), Mapping):
        return gate_for(config["text_config"])
    if family in FAMILIES:
        return FAMILIES[family](config)
    return _chosen_by_model(config, BY_MODEL.get(family, f"no router is known for model_type {family!r}"))


def _chosen_by_model(config: Config, why: str) -> Gate:
    return Gate("TopK", *_counts(config), by_model=why)


def _counts(config: Config) -> tuple[int, int]:
    return _required(config, *COUNT_KEYS), _required(config, *TOP_K_KEYS)


def _required(config: Config, *keys: str) -> int:
    for key in keys:
        if config.get(key) is not None:
            value = config[key]
            return max(map(int, value)) if isinstance(value, list) else int(value)
    raise ValueError(f"the config of {config.get('model_type')} has none of the keys {', '.join(keys)}")


def _expect(config: Config, key: str, *, only: str | bool) -> None:
    got = config.get(key, only)
    if got != only:
        raise ValueError(
            f"{config.get('model_type')} with {key}={got!r} is not supported, only {key}={only!r}"
        )


def _first(config: Config, *keys: str, default: Any) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _number(config: Config, key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"the config of {config.get('model_type')} has {key}={value!r}, which must be a number"
        )
    return float(value)


def _softmax(config: Config, *, renormalize: bool) -> Gate:
    method = method_of("softmax", renormalize=renormalize, biased=False, groups=None, scaling=None)
    return Gate(method, *_counts(config))


def _mixtral(config: Config) -> Gate:
    return _softmax(config, renormalize=True)


def _jamba(config: Config) -> Gate:
    return replace(_softmax(config, renormalize=False), logits_dtype_weights=True)


def _qwen_moe(*, default: bool | None) -> Callable[[Config], Gate]:
    """Softmax of all, renormalized by `norm_topk_prob`, `default` where it is absent; None: always."""

    def gate(config: Config) -> Gate:
        norm = True if default is None else bool(config.get("norm_topk_prob", default))
        return replace(_softmax(config, renormalize=norm), logits_dtype_weights=True)

    return gate


def _deepseek_v2(config: Config) -> Gate:
    _expect(config, "scoring_func", only="softmax")
    # transformers ignores this key and others obey it, so a model that sets it has no one right answer
    _expect(config, "norm_topk_prob", only=False)
    scaling = _number(config, "routed_scaling_factor", 1.0)
    if config.get("topk_method", "greedy") == "greedy":
        return replace(_softmax(config, renormalize=False), scaling=scaling)
    _expect(config, "topk_method", only="group_limited_greedy")
    groups, kept = _required(config, "n_group"), _required(config, "topk_group")
    return Gate("DeepSeekV2", *_counts(config), groups, kept, scaling, renormalize=False)


def _grouped_sigmoid(
    groups: int = 1, kept: int = 1, scaling: float = 1.0, *, norm: bool = True, scales: bool = True
) -> Callable[[Config], Gate]:
    """DeepSeek-V3's router, with what absent keys mean; without `scales` the model scales what comes out."""

    def gate(config: Config) -> Gate:
        _expect(config, "scoring_func", only="sigmoid")
        _expect(config, "topk_method", only="noaux_tc")
        default = {"n_group": groups, "topk_group": kept, **config}
        grouped = "num_expert_group" if "num_expert_group" in config else "n_group"
        chosen = _required(default, grouped), _required(default, "topk_group")
        factor = _number(config, "routed_scaling_factor", scaling) if scales else 1.0
        renormalize = bool(_first(config, "moe_renormalize", "norm_topk_prob", default=norm))
        method = method_of("sigmoid", renormalize=renormalize, biased=True, groups=chosen[0], scaling=factor)
        numbers = (*_counts(config), *chosen, factor)
        return Gate(method, *numbers, scoring="sigmoid", renormalize=renormalize, biased=True)

    return gate


def _ungrouped_if_absent(config: Config) -> Gate:
    """A.X K2's: DeepSeek-V3's router, whose groups may be null."""
    plain = {key: value for key, value in config.items() if value is not None}
    return _grouped_sigmoid(1, 1, 2.5)(plain)


def _biased_sigmoid(key: str = "", scaling: float = 1.0) -> Callable[[Config], Gate]:
    """Sigmoid with a correction bias, renormalized, scaled by the config's `key`."""

    def gate(config: Config) -> Gate:
        _expect(config, "scoring_func", only="sigmoid")
        factor = _number(config, key, scaling) if key else 1.0
        method = method_of("sigmoid", renormalize=True, biased=True, groups=None, scaling=factor)
        numbers = _counts(config)
        return Gate(method, *numbers, scaling=factor, scoring="sigmoid", renormalize=True, biased=True)

    return gate


def _biased_softmax(config: Config) -> Gate:
    return Gate("Unspecified", *_counts(config), scoring="softmax", renormalize=True, biased=True)


def _deepseek_v4(config: Config) -> Gate:
    _expect(config, "scoring_func", only="sqrtsoftplus")
    # transformers renormalizes whatever this key says
    _expect(config, "norm_topk_prob", only=True)
    scaling = _number(config, "routed_scaling_factor", 1.5)
    return Gate("DeepseekV4", *_counts(config), scaling=scaling, logits_dtype_scores=True)


def _minimax_m2(config: Config) -> Gate:
    _expect(config, "scoring_func", only="sigmoid")
    _expect(config, "use_routing_bias", only=True)
    return Gate("MiniMax2", *_counts(config))


def _softmax_of_chosen(config: Config) -> Gate:
    return Gate("Renormalize", *_counts(config), logits_dtype_weights=True)


def _privacy_filter(config: Config) -> Gate:
    experts, top_k = _counts(config)
    return Gate("Renormalize", experts, top_k, scaling=1 / top_k)


def _cohere2(config: Config) -> Gate:
    kind = config.get("expert_selection_fn", "softmax")
    if kind == "softmax":
        return _softmax_of_chosen(config)
    _expect(config, "expert_selection_fn", only="sigmoid")
    renormalize = bool(config.get("norm_topk_prob", True))
    return replace(_sigmoid(config, renormalize=renormalize), logits_dtype_weights=True)


def _sigmoid(config: Config, *, renormalize: bool) -> Gate:
    return Gate("SigmoidRenorm" if renormalize else "Sigmoid", *_counts(config))


def _flint(config: Config) -> Gate:
    return _sigmoid(config, renormalize=bool(config.get("norm_topk_prob", True)))


def _lfm2(config: Config) -> Gate:
    """Sigmoid; its bias may be absent, and its sum has an epsilon that float32 sees."""
    biased, norm = bool(config.get("use_expert_bias", True)), bool(config.get("norm_topk_prob", True))
    scaling = _number(config, "routed_scaling_factor", 1.0)
    plain = Gate("Unspecified", *_counts(config), scoring="sigmoid", renormalize=norm, biased=biased)
    return replace(plain, scaling=scaling, epsilon=1e-6)


def _mistral4(config: Config) -> Gate:
    groups, scaling = _first(config, "n_group", default=1), _number(config, "routed_scaling_factor", 1.0)
    if groups > 1:
        return _chosen_by_model(
            config, f"n_group={groups}: its router ranks groups by the sum of two softmax scores"
        )
    return replace(_softmax(config, renormalize=bool(config.get("norm_topk_prob", True))), scaling=scaling)


def _dbrx(config: Config) -> Gate:
    power = config.get("moe_normalize_expert_weights", 1.0)
    if power not in (None, 1.0):
        return _chosen_by_model(
            config,
            f"moe_normalize_expert_weights={power}: weights are divided by another norm than their sum",
        )
    return _softmax(config, renormalize=power is not None)


def _llama4(config: Config) -> Gate:
    return Gate("Llama4", *_counts(config), logits_dtype_weights=True, weight_on_input=True)


FAMILIES: Mapping[str, Callable[[Config], Gate]] = {
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_vl_moe_text"), _qwen_moe(default=None)),
    # the key is false in transformers where it is absent, although the published Qwen3-MoE files say true
    **dict.fromkeys(("flex_olmo", "olmoe", "qwen2_moe", "qwen3_moe"), _qwen_moe(default=False)),
    **dict.fromkeys(
        ("mellum", "qwen3_next", "qwen4_exp_text", "qwen3_omni_moe_text"), _qwen_moe(default=True)
    ),
    "qwen3_omni_moe_talker_text": _qwen_moe(default=False),
    **dict.fromkeys(("minimax", "mixtral"), _mixtral),
    "hunyuan_v1_moe": _mixtral,
    "jamba": _jamba,
    **dict.fromkeys(("deepseek_ocr2_text", "deepseek_v2", "unlimited_ocr_text"), _deepseek_v2),
    **dict.fromkeys(("axk1", "deepseek_v3", "deepseek_v32", "kimi_k2"), _grouped_sigmoid(8, 4, 2.5)),
    "bailing_hybrid": _grouped_sigmoid(8, 4, 2.5),
    "axk2": _ungrouped_if_absent,
    "beam": _grouped_sigmoid(8, 4, scales=False),
    "dots1": _grouped_sigmoid(norm=False),
    **dict.fromkeys(("dots3_note_text", "glm4_moe", "glm4v_moe_text", "mimo_v2_flash"), _grouped_sigmoid()),
    **dict.fromkeys(("nemotron_h", "solar_open"), _grouped_sigmoid()),
    **dict.fromkeys(("exaone_moe", "glm5_next_text", "glm_moe_dsa"), _grouped_sigmoid(scaling=2.5)),
    "glm4_moe_lite": _grouped_sigmoid(scaling=1.8),
    "hy_v4": _grouped_sigmoid(scaling=2.827),
    "kimi_linear": _grouped_sigmoid(scaling=2.446),
    "afmoe": _biased_sigmoid("route_scale"),
    "hy_v3": _biased_sigmoid("router_scaling_factor", 2.826),
    "inkling2_text": _biased_sigmoid("route_scale", 8.0),
    "muse_spark_text": _biased_sigmoid("routed_scaling_factor"),
    **dict.fromkeys(("laguna", "minimax_m3_vl_text", "step3p5"), _biased_sigmoid()),
    "minimax_m2": _minimax_m2,
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe_text"), _biased_softmax),
    "deepseek_v4": _deepseek_v4,
    **dict.fromkeys(("aria_text", "gpt_oss", "jetmoe"), _softmax_of_chosen),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), _softmax_of_chosen
    ),
    "openai_privacy_filter": _privacy_filter,
    "cohere2_moe": _cohere2,
    "flint": _flint,
    "lfm2_moe": _lfm2,
    **dict.fromkeys(("mistral4", "mistral_large4_text"), _mistral4),
    "dbrx": _dbrx,
    "llama4_text": _llama4,
}
"""Router settings by `model_type`; defaults of absent keys are those of transformers 5.23."""

_SCALES = "its router multiplies each expert's weight by a number that it has learned"
_CAPACITY = "its router drops tokens beyond an expert's capacity, which depends on the whole sequence"

BY_MODEL: Mapping[str, str] = {
    **dict.fromkeys(("gemma4_text", "diffusion_gemma_text"), _SCALES),
    "inkling_text": "its router weighs the experts that all tokens share together with those it chooses",
    "kolibri1": "its router chooses by logits plus a bias and weighs by their sigmoid",
    "longcat_flash": "some of the experts that its router knows compute nothing, and are the model's",
    "phimoe": "its router (sparsemixer) weighs each choice among the experts that are near it",
    **dict.fromkeys(("nllb-moe", "switch_transformers"), _CAPACITY),
    "zaya": "its router may choose no expert, and knows what earlier layers chose",
}
"""Families whose router is left to the model, with the reason."""
