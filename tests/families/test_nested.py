"""Text models inside others: under any prefix, and any key that ends in `_config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_families import families

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.families import family_of

WHOLE = [
    ("glm4v_moe_text", "model.language_model.", ("text_config",), "glm4v_moe"),
    ("deepseek_v3", "language_model.model.", ("text_config",), "kimi_k25"),
    ("qwen3_omni_moe_text", "thinker.model.", ("thinker_config", "text_config"), "qwen3_omni_moe"),
    ("nemotron_h", "language_model.backbone.", ("llm_config",), "nemotron_h_omni"),
    ("qwen3_moe", "language_model.model.", ("some_other_config",), "next_months_whole"),
]


@pytest.mark.parametrize(("family", "prefix", "keys", "whole"), WHOLE, ids=lambda each: str(each))
def test_a_text_model_is_found_under_any_prefix_and_key(
    tmp_path: Path, family: str, prefix: str, keys: tuple[str, ...], whole: str
) -> None:
    families()[family].model().save_pretrained(tmp_path)
    expected = Checkpoint(tmp_path)
    theirs = expected.experts(expected.layers[0], [0, 3]).down.dequantize().clone()
    weights = load_file(tmp_path / "model.safetensors")
    tail = ".experts.0."
    beside = {
        f"vision_tower.layers.0.mlp{tail}{name.partition(tail)[2]}": tensor.clone()
        for name, tensor in weights.items()
        if tail in name
    }
    moved = {
        prefix + name[name.index("layers.") :]: tensor.clone()
        for name, tensor in weights.items()
        if "layers." in name
    }
    save_file(moved | beside, tmp_path / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    for key in reversed(keys):
        config = {key: config, "vision_config": {"model_type": "seen", "num_experts": 3}}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"model_type": whole, "architectures": ["Whole"]})
    )
    found = Checkpoint(tmp_path)
    assert (found.model_type, found.layers, found.architecture) == (family, expected.layers, "Whole")
    assert found.experts(found.layers[0], [0, 3]).down.dequantize().equal(theirs)


@pytest.mark.parametrize(
    ("architecture", "family"), [("MiniMaxM2ForCausalLM", "minimax_m2"), ("MiniMaxForCausalLM", "minimax")]
)
def test_minimax_m2_under_the_name_of_minimax(architecture: str, family: str) -> None:
    entry, _ = family_of({"model_type": "minimax", "architectures": [architecture], "num_local_experts": 8})
    assert entry.model_type == family
