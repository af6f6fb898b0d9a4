"""Kimi-K2 and K2.5 as the hub has them: configs that name remote code, none of which is there, or run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from in_process import InProcess
from tiny_families import answers, families
from transformers import AutoModelForImageTextToText
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.proto.integrations.transformers import load

TOKENS = torch.randint(4, 250, (2, 9), generator=torch.Generator().manual_seed(3))
REMOTE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}


@pytest.fixture
def text() -> Any:
    """A tiny DeepSeek-V3, which is what Kimi-K2 is."""
    return families()["deepseek_v3"].model()


def edit(folder: Path, **changed: Any) -> None:
    """Changes keys of a folder's config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


def test_kimi_k2_is_loaded_without_its_remote_code(tmp_path: Path, text: Any) -> None:
    text.save_pretrained(tmp_path)
    edit(tmp_path, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], auto_map=REMOTE)
    service = InProcess(tmp_path)
    assert service.checkpoint.model_type == "kimi_k2"
    loaded = load(str(tmp_path), service, dtype=torch.float32)
    assert type(loaded).__name__ == "DeepseekV3ForCausalLM"
    torch.testing.assert_close(answers(loaded, TOKENS), answers(text, TOKENS), rtol=0, atol=1e-4)
    assert sorted(service.calls) == list(service.checkpoint.layers) == [1, 2]
    damaged = load(str(tmp_path), InProcess(tmp_path, scale=1.05), dtype=torch.float32)
    assert (answers(damaged, TOKENS) - answers(text, TOKENS)).abs().max() > 1e-4


@torch.no_grad()
def test_kimi_k25_is_loaded_without_its_remote_code(tmp_path: Path, text: Any) -> None:
    vision = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2}
    config = Kimi_K25Config(
        text_config=text.config.to_dict(), vision_config=vision, projection_hidden_size=64
    )
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    whole = Kimi_K25ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    names = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    edit(
        tmp_path,
        architectures=["KimiK25ForConditionalGeneration"],
        auto_map={"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        text_config=written["text_config"] | names | {"auto_map": REMOTE},
    )
    checkpoint = Checkpoint(tmp_path)
    assert (checkpoint.model_type, checkpoint.layers) == ("kimi_k2", (1, 2))
    service = InProcess(tmp_path)
    loaded = load(str(tmp_path), service, cls=AutoModelForImageTextToText, dtype=torch.float32)
    assert type(loaded) is Kimi_K25ForConditionalGeneration
    alone, found = (model(input_ids=TOKENS, use_cache=False).logits for model in (whole, loaded))
    torch.testing.assert_close(alone, answers(text, TOKENS), rtol=0, atol=1e-4)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-4)
    assert sorted(service.calls) == [1, 2]


def test_transformers_alone_would_not_know_kimi_k2(tmp_path: Path, text: Any) -> None:
    """What `READ_AS` is for; when this fails, transformers has the name, and `READ_AS` can go."""
    text.save_pretrained(tmp_path)
    edit(tmp_path, model_type="kimi_k2")
    with pytest.raises(ValueError, match="kimi_k2"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
