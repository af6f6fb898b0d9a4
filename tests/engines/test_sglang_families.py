"""SGLang's engine with its experts behind a service against SGLang alone, as in test_vllm_families.py."""

from __future__ import annotations

from typing import Any

import pytest
from engine_models import DTYPES, prompts, read_config
from engine_runs import NEW_TOKENS, REQUESTS, generate_as_alone

FAMILIES = ("qwen3_moe", "mixtral", "olmoe")
ALONE = {"gpt_oss": "sinks", "deepseek_v3": "rope_scaling"}
"""Families that SGLang itself cannot run on a CPU, and a word of its own error."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_sglang_generates_what_it_does_alone_and_damaged_experts_are_seen(
    engine_model: Any, run_sglang: Any, family: str, dtype: str
) -> None:
    model = engine_model(family, dtype)
    options = {"dtype": dtype, "disable_radix_cache": True}
    told = generate_as_alone(run_sglang, model, options)
    config = read_config(model.path)
    rows = sum(len(ids) for ids in prompts(REQUESTS)) + REQUESTS * (NEW_TOKENS - 1)
    least = config["num_hidden_layers"] * rows * told.rounds * config["num_experts_per_tok"]
    assert told.computed >= least, "every row was computed by the service, the engine's own trials besides"


@pytest.mark.parametrize("family", ALONE)
def test_what_sglang_cannot_run_on_a_cpu_fails_with_its_own_error(
    engine_model: Any, run_sglang: Any, family: str
) -> None:
    model = engine_model(family, "bfloat16")
    alone = run_sglang(model.path, None, options={"dtype": "bfloat16"})
    assert alone.get("failed") and ALONE[family] in alone["said"], alone["said"][-3000:]
