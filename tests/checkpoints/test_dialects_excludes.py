"""What the config leaves out is unquantized, by the rules of each producer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import EXPERTS, PRODUCERS, write
from quantized_configs import GPTQ, compressed
from quantized_tensors import plain
from safetensors.torch import load_file, save_file

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.dialects import dialect_for
from moeserve.checkpoints.names import LayerNames, Spelling


def names(module: str = "model.layers.1.mlp", experts: int = 2) -> LayerNames:
    spelling = ("gate_proj", "up_proj", "down_proj")
    return LayerNames(module, Spelling(spelling), frozenset(range(experts)), frozenset())


MODELOPT = [
    ([], False),
    (["lm_head", "model.layers.1.mlp.gate", "model.layers.1.self_attn*"], False),
    (["model.layers.1.mlp.experts"], True),
    (["model.layers.1.mlp.experts*"], True),
    (["model.layers.1.mlp.experts.0.gate_proj"], True),
    (["model.layers.10.mlp.experts"], False),
    (["model.layers.1.mlp"], True),
    (["layers.1"], True),
    (["model.layers.1*"], True),
    (["model.layers.1.*"], True),
    (["*mlp.experts"], True),
    (["*.mlp.*"], True),
    (["model.layers.?.mlp*"], True),
    (["model.layers.[02].mlp*"], False),
    (["mlp"], True),
]


@pytest.mark.parametrize(("entries", "left_out"), MODELOPT, ids=str)
def test_modelopt(entries: list[str], left_out: bool) -> None:
    flat: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": entries}
    assert dialect_for(flat).skips(flat, names()) is left_out
    quantization = {"quant_algo": "FP8", "exclude_modules": entries}
    nested: dict[str, Any] = {"quantization": quantization}
    assert dialect_for(nested).skips(nested, names()) is left_out


@pytest.mark.parametrize("entry", ["layers.1", "model.layers.1*", "model.layers.1"])
def test_a_number_at_the_end_of_an_entry_is_that_number(entry: str) -> None:
    flat = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [entry]}
    assert dialect_for(flat).skips(flat, names("model.layers.1.mlp"))
    assert not dialect_for(flat).skips(flat, names("model.layers.10.mlp"))


def test_modelopt_reads_names_below_a_language_model() -> None:
    flat = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.1.mlp.*"]}
    assert dialect_for(flat).skips(flat, names("language_model.model.layers.1.mlp"))


COMPRESSED = [
    (["lm_head", "re:.*mlp.gate$"], False),
    (["re:.*experts.*"], True),
    (["re:model.layers.1.mlp"], True),
    (["re:layers.1.mlp"], False),  # a pattern must fit from the start
    (["model.layers.1.mlp.experts"], True),
    (["model.layers.1"], False),
    ([f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in (0, 1) for p in ("gate", "up", "down")], True),
]


@pytest.mark.parametrize(("entries", "left_out"), COMPRESSED, ids=str)
def test_compressed_tensors(entries: list[str], left_out: bool) -> None:
    config = compressed("float-quantized", {"num_bits": 8, "type": "float"}, ignore=entries)
    assert dialect_for(config).skips(config, names()) is left_out


TARGETS = [
    (["Linear"], True),
    (["re:.*experts.*"], True),
    (["re:.*self_attn.*"], False),
    (["Embedding"], False),
    (["re:.*gate_proj", "re:.*up_proj", "re:.*down_proj"], True),
]


@pytest.mark.parametrize(("targets", "meant"), TARGETS, ids=str)
def test_targets_of_compressed_tensors(targets: list[str], meant: bool) -> None:
    config = compressed("float-quantized", {"num_bits": 8, "type": "float"})
    config["config_groups"]["group_0"]["targets"] = targets
    assert dialect_for(config).skips(config, names()) is not meant


def test_a_name_is_a_better_target_than_a_class() -> None:
    config = compressed("float-quantized", {"num_bits": 4, "type": "float"})
    better = compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32})
    config["config_groups"]["group_1"] = better["config_groups"]["group_0"] | {"targets": ["re:.*experts.*"]}
    assert dialect_for(config).storage(config, torch.bfloat16, names()).scheme.weights.name == "mxfp8"


GPTQ_RULES = [
    ({}, False),
    ({"dynamic": {r"-:.*\.experts\.": {}}}, True),
    ({"dynamic": {r"-:.*self_attn": {}}}, False),
    ({"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.gate"]]}, True),
    (
        {"modules_in_block_to_quantize": [f"{p}_proj" for p in ("gate", "up", "down")]},
        False,
    ),
]


@pytest.mark.parametrize(("rule", "left_out"), GPTQ_RULES, ids=str)
def test_gptq(rule: dict[str, Any], left_out: bool) -> None:
    config = GPTQ | rule
    assert dialect_for(config).skips(config, names()) is left_out


def test_dynamic_rules_of_gptq_change_numbers() -> None:
    config = GPTQ | {"dynamic": {r"+:.*experts": {"group_size": 32}, ".*": {"bits": 8}}}
    assert dialect_for(config).storage(config, torch.float16, names()).scheme.name == "int4_group32 x fp16"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("awq", {"modules_to_not_convert": ["layers.0.mlp"]}),
        ("quark fp4", {"exclude": ["model.layers.0.mlp.experts.*"]}),
        ("ct MXFP8", {"ignore": ["re:model.layers.0.mlp.experts"]}),
        ("modelopt NVFP4", {"ignore": ["model.layers.0*"]}),
        ("fp8 tensor static", {"ignored_layers": ["model.layers.0.mlp.experts"]}),
        ("gptq", {"dynamic": {r"-:model.layers.0": {}}}),
    ],
)
def test_a_layer_that_is_left_out_is_read_as_it_is(name: str, entry: dict[str, Any], tmp_path: Path) -> None:
    producer = PRODUCERS[name]
    (tmp_path / "plain").mkdir()
    unquantized = write(tmp_path / "plain", replace(producer, config=None, make=plain))
    quantized = write(tmp_path, replace(producer, config=dict(producer.config or {}) | entry))
    first = {n: t for n, t in load_file(tmp_path / "plain" / "model.safetensors").items() if "layers.0" in n}
    second = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if "layers.1" in n}
    save_file(first | second, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.scheme(0).name == "bf16"
    assert checkpoint.scheme(1).name == producer.scheme
    for layer, meant in ((0, unquantized), (1, quantized)):
        read = checkpoint.experts(layer, range(EXPERTS))
        for expert in range(EXPERTS):
            assert torch.equal(read.gate_up.dequantize()[expert], meant[layer, expert][0])
        assert (read.input_scale is None) or layer == 1
