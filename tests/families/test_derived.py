"""Families read from their class: as the table has them, and next month's, which no table has."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from in_process import InProcess
from tiny_families import HIDDEN, INNER, answers, families
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.checkpoints.families import FAMILIES, family_of
from moeserve.checkpoints.families.config import depth_of
from moeserve.checkpoints.families.derived import derived_family
from moeserve.proto.integrations.transformers import attach

TOKENS = torch.randint(4, 250, (2, 7), generator=torch.Generator().manual_seed(3))
WITHOUT_INTERFACE = {
    *("dbrx", "jetmoe", "llama4_text", "longcat_flash", "nllb-moe", "step3p5", "switch_transformers")
}
UNLIKE = {
    "ernie4_5_vl_moe_text": "of text and of vision",  # each layer has two modules of experts
    "inkling2_text": "situ",  # its bounds are values of a module that is called, which are not tried
}
"""Families whose class does not tell what the table says, with what it lacks."""


@pytest.mark.parametrize("name", sorted(set(families()) & set(FAMILIES) - WITHOUT_INTERFACE - set(UNLIKE)))
def test_the_class_says_what_the_table_says(name: str) -> None:
    family, config = family_of(json.loads(json.dumps(families()[name].config().to_dict(), default=str)))
    found, depth = derived_family(config, ()), depth_of(config)
    flags = ("transposed", "interleaved", "bias")
    assert [getattr(found, flag) for flag in flags] == [getattr(family, flag) for flag in flags]
    layers = found.layers(config, depth)
    assert layers and family.layers(config, depth) in (None, layers)
    assert found.inner(config) == family.inner(config)
    for layer in layers:
        assert found.activation(config, layer) == family.activation(config, layer)


class NextMonthConfig(transformers.Qwen3MoeConfig):
    model_type = "next_month"


class NextMonthForCausalLM(transformers.Qwen3MoeForCausalLM):
    config_class = NextMonthConfig


@pytest.fixture
def next_month() -> Iterator[Any]:
    """A model of a family that transformers has and no table here has."""
    transformers.AutoConfig.register("next_month", NextMonthConfig)
    transformers.AutoModelForCausalLM.register(NextMonthConfig, NextMonthForCausalLM)
    sizes = families()["qwen3_moe"].config().to_dict() | {"mlp_only_layers": [0], "model_type": "next_month"}
    torch.manual_seed(0)
    yield NextMonthForCausalLM(NextMonthConfig.from_dict(sizes)).eval()
    CONFIG_MAPPING._extra_content.pop("next_month")
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(NextMonthConfig)


def test_next_months_family_loads_by_itself(tmp_path: Path, next_month: Any) -> None:
    alone = answers(next_month, TOKENS)
    next_month.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert (checkpoint.model_type, checkpoint.family.derived) == ("next_month", True)
    assert (checkpoint.layers, checkpoint.inner, checkpoint.hidden) == ((1, 2), INNER, HIDDEN)
    gate = checkpoint.gate(1)
    assert "no router is known for model_type 'next_month'" in gate.by_model
    service = InProcess(tmp_path)
    attach(next_month, service)
    torch.testing.assert_close(answers(next_month, TOKENS), alone, rtol=0, atol=1e-4)
    assert sorted(service.calls) == [1, 2]


def test_a_gate_that_no_activation_computes_is_named(
    tmp_path: Path, next_month: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_month.save_pretrained(tmp_path)

    def odd(module: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.sin() * up

    monkeypatch.setattr(qwen3.Qwen3MoeExperts, "_apply_gate", odd)
    with pytest.raises(CheckpointError, match=r"what Qwen3MoeExperts .hidden_act 'silu'. computes between"):
        Checkpoint(tmp_path)


def test_without_transformers_it_is_said(
    tmp_path: Path, next_month: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_month.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"its class could tell .* but transformers is not installed"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "month_after", "num_experts": 4},
            "transformers .* does not have it: a later one may",
        ),
        ({"model_type": "llama"}, "no key that counts experts"),
        (
            {"model_type": "doge", "num_experts": 4},
            "model_type 'doge' cannot be served: its experts are pairs",
        ),
        ({"model_type": "mixtral_2", "num_experts": None}, "no key that counts experts; supported: afmoe"),
    ],
)
def test_what_cannot_be_read_is_told(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        family_of(config)
