"""Laws of the tables: one dialect claims a config, and families mean what transformers means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, make_model
from quantized import PRODUCERS

from moeserve.checkpoints.dialects import DIALECTS, FAMILIES, dialect_for, family_of
from moeserve.checkpoints.dialects.dialect import Storage
from moeserve.checkpoints.families.config import required
from moeserve.checkpoints.names import LayerNames, Spelling, correction_biases, expert_layers
from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import StoredTensor
from moeserve.experts.routing.families import BY_MODEL
from moeserve.experts.routing.families import FAMILIES as GATES
from moeserve.quant.format import WHOLE, Format, Part, Scheme
from moeserve.quant.formats.floats import BF16

DEEPSEEK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

CLAIMS: list[tuple[dict[str, Any] | None, str]] = [
    (None, "plain"),
    (DEEPSEEK, "fp8_block"),
    (DEEPSEEK | {"scale_fmt": "ue8m0"}, "fp8_block"),
    (DEEPSEEK | {"modules_to_not_convert": ["lm_head"]}, "fp8_block"),
    (DEEPSEEK | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"]}, "fp8_block"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "mxfp4_blocks"),
    *((entry.config, entry.dialect) for entry in PRODUCERS.values() if "expert_dtype" not in entry.model),
]
"""Quantization configs as published models have them, and the dialect that must claim each."""

REFUSED: list[dict[str, Any]] = [
    {"quant_method": "bitsandbytes"},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
    {"quant_method": None},
    {"bits": 4},
    {},
    DEEPSEEK | {"quant_method": "FP8"},
]


def layer_names(module: str) -> LayerNames:
    return LayerNames(module, Spelling(("gate_proj", "up_proj", "down_proj")), frozenset({0}), frozenset())


LAYER = layer_names("model.layers.0.mlp")


def name_of(config: dict[str, Any] | None) -> str:
    return str(config)[:60]


@pytest.mark.parametrize(("config", "name"), CLAIMS, ids=name_of)
def test_exactly_one_dialect_claims_a_config(config: dict[str, Any] | None, name: str) -> None:
    assert [entry.name for entry in DIALECTS.values() if entry.claims(config)] == [name]
    assert dialect_for(config) is DIALECTS[name]


@pytest.mark.parametrize("config", REFUSED, ids=name_of)
def test_a_config_that_nobody_claims_is_refused_with_what_is_supported(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="is not supported as configured; supported: ") as error:
        dialect_for(config)
    assert repr(config.get("quant_method")) in str(error.value)
    assert all(entry.reads in str(error.value) for entry in DIALECTS.values())


@pytest.mark.parametrize("entry", DIALECTS.values(), ids=DIALECTS)
def test_every_dialect_is_tried(entry: Any) -> None:
    claimed = [config for config, name in CLAIMS if name == entry.name]
    assert claimed, f"CLAIMS needs a config that {entry.name} claims"
    for config in claimed:
        storage = entry.storage(config or {}, torch.bfloat16, LAYER)
        assert len({tensor.suffix for tensor in storage.everything}) == len(storage.everything)


def test_fp8_leaves_out_what_the_config_lists() -> None:
    entry = DIALECTS["fp8_block"]
    listed = DEEPSEEK | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.experts"]}
    assert entry.skips(listed, layer_names("model.layers.1.mlp"))
    assert not entry.skips(listed, layer_names("model.layers.10.mlp"))
    assert not entry.skips(listed, layer_names("model.layers.0.mlp"))
    one = DEEPSEEK | {"ignored_layers": ["language_model.model.layers.1.mlp.experts.0.gate_proj"]}
    assert entry.skips(one, layer_names("model.layers.1.mlp"))
    assert not entry.skips(DEEPSEEK, layer_names("model.layers.1.mlp"))


def test_a_scale_of_the_whole_matrix_must_be_shared() -> None:
    codes = Part("codes", torch.float8_e4m3fn, 1, 1)
    whole = Format(
        "whole", 8, (codes, Part("scale", torch.float32, WHOLE, WHOLE)), lambda x: (x,), lambda p, _: p[0]
    )
    with pytest.raises(ValueError, match="whole has scale for all rows at once, so a tensor must be shared"):
        Storage(Scheme(whole, BF16), ())
    scale = StoredTensor("scale", (torch.float32,), WHOLE, WHOLE, shared=True)
    assert Storage(Scheme(whole, BF16), (scale,)).everything == (scale,)


@pytest.mark.parametrize(
    ("suffix", "apart", "stacked"),
    [
        ("weight", "experts.0.down_proj.weight", "experts.down_proj"),
        ("weight_scale_inv", "experts.0.down_proj.weight_scale_inv", "experts.down_proj_scale_inv"),
        ("blocks", "experts.0.down_proj.blocks", "experts.down_proj_blocks"),
    ],
)
def test_tensor_names_apart_and_stacked(suffix: str, apart: str, stacked: str) -> None:
    tensor = StoredTensor(suffix, (torch.uint8,))
    assert tensor.name("experts.0.down_proj", stacked=False) == apart
    assert tensor.name("experts.down_proj", stacked=True) == stacked


def test_every_family_has_a_router() -> None:
    assert set(FAMILIES) <= set(GATES) | set(BY_MODEL)


SMALL = {"num_experts_per_tok": 1}

LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {"first_k_dense_replace": 2}),
    ("deepseek_v2", {"first_k_dense_replace": 0}),
    ("deepseek_v3", {"first_k_dense_replace": 3}),
    ("glm4_moe", {"first_k_dense_replace": 1}),
    ("llama4_text", {"interleave_moe_layer_step": 2}),
    ("llama4_text", {"interleave_moe_layer_step": 3}),
    ("llama4_text", {"moe_layers": [1, 2]}),
    ("mixtral", {}),
    ("gpt_oss", {}),
    ("minimax_m2", {}),
    ("olmoe", {}),
    ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"decoder_sparse_step": 3}),
    ("qwen3_moe", {"mlp_only_layers": [0, 4]}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
]


@pytest.mark.parametrize(("family", "settings"), LAYERS, ids=str)
def test_layers_with_experts_are_those_of_transformers(family: str, settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = make_model(
            family, dtype=torch.float32, seed=0, hidden=64, num_hidden_layers=6, **SMALL | settings
        )
    expected = [
        number
        for number, layer in enumerate(model.model.layers)
        if any(name.endswith(".experts") for name, _ in layer.named_modules())
    ]
    written = model.config.to_dict()
    assert sorted(FAMILIES[family].layers(written, 6) or ()) == expected


@pytest.mark.parametrize(
    ("model_type", "dense"), [("deepseek_v2", 0), ("deepseek_v3", 3), ("kimi_k2", 3), ("glm4_moe", 1)]
)
def test_dense_layers_default_as_in_transformers(model_type: str, dense: int) -> None:
    assert sorted(FAMILIES[model_type].layers({}, 6) or ()) == list(range(dense, 6))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_family_of_what_transformers_writes(family: str) -> None:
    with torch.device("meta"):
        model = make_model(family, dtype=torch.float32, seed=0, hidden=64, num_hidden_layers=2, **SMALL)
    entry, config = family_of(model.config.to_dict())
    assert entry.model_type == family
    assert entry.inner(config) > 0
    assert entry.activation(config, 0).gated


def test_a_text_model_inside_another_is_found() -> None:
    text = {"model_type": "deepseek_v3", "hidden_size": 64}
    entry, config = family_of({"model_type": "kimi_k25", "text_config": text})
    assert entry.model_type == "deepseek_v3"
    assert config["hidden_size"] == 64


def test_equal_expert_counts_under_two_keys_are_one() -> None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    assert required({"num_experts": 8, "n_routed_experts": 8}, *keys) == 8
    with pytest.raises(CheckpointError, match="num_local_experts=8 and num_experts=4 differ"):
        required({"num_experts": 4, "num_local_experts": 8}, *keys)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
def test_a_count_must_be_one(value: object) -> None:
    with pytest.raises(CheckpointError, match="hidden_size must be a positive whole number"):
        required({"hidden_size": value}, "hidden_size")


def test_names_of_shared_experts_and_other_parts_are_not_experts() -> None:
    names = [
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "vision_model.layers.0.mlp.experts.0.up_proj.weight",
    ]
    assert expert_layers(names) == {}
    found = expert_layers([*names, "model.layers.12.mlp.experts.7.up_proj.weight"])
    assert list(found) == [12]
    assert found[12].module == "model.layers.12.mlp"
    assert found[12].experts == {7}


@pytest.mark.parametrize(
    "name", ["mlp.gate.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"]
)
def test_correction_biases_stand_in_two_places(name: str) -> None:
    assert correction_biases([f"model.layers.4.{name}"]) == {4: f"model.layers.4.{name}"}


def test_a_gates_bias_is_a_correction_where_inkling_2_has_it() -> None:
    ours = ["model.llm.layers.4.mlp.gate.bias", "llm.layers.5.mlp.gate.bias"]
    others = ["model.layers.6.mlp.gate.bias", "model.llm.layers.7.mlp.up_proj.bias", "llm.mlp.gate.bias"]
    assert correction_biases(ours + others) == {4: ours[0], 5: ours[1]}


def test_a_gates_bias_is_a_correction_where_deepseek_v4_has_it() -> None:
    names = ["layers.4.ffn.gate.bias", "model.layers.5.ffn.gate.bias", "model.layers.6.mlp.gate.bias"]
    assert correction_biases(names) == {4: names[0], 5: names[1]}
    assert list(expert_layers(["layers.4.ffn.experts.0.w1.scale", "mtp.0.ffn.experts.0.w1.scale"])) == [4]
