"""vLLM with its experts behind a service against vLLM alone: tokens, and log-probabilities at every position.

A service whose down projections are 5 % too large, or one of whose experts is gone, must not pass: the same
check fails with each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engine_models import (
    FLOAT32,
    VLLM_FAMILIES,
    apart,
    by_transformers,
    make_dbrx,
    moe_layers,
    prompts,
    read_config,
)
from engine_runs import NEW_TOKENS, REQUESTS, answered, answered_behind, generate_as_alone, house_of

from moeserve.proto.client import MoeClient

CASES = [
    pytest.param(family, dtype, eager, id=f"{family}-{dtype}-{'eager' if eager else 'compiled'}")
    for family in VLLM_FAMILIES
    for dtype, eager in (("float32", True), ("bfloat16", True))
] + [
    pytest.param(family, "float32", False, id=f"{family}-float32-compiled")
    for family in ("qwen3_moe", "deepseek_v3")
]
CASES += [
    pytest.param("llama4_text", "float32", True, id="llama4_text-float32-eager")
]  # weights on the input
SHARED = ("deepseek_v3", "glm4_moe", "llama4_text", "qwen2_moe")
"""Families with shared experts, which vLLM computes while the service answers."""


@pytest.mark.parametrize(("family", "dtype", "eager"), CASES)
def test_vllm_generates_what_it_does_alone_and_damaged_experts_are_seen(
    engine_model: Any, run_vllm: Any, family: str, dtype: str, eager: bool
) -> None:
    model = engine_model(family, dtype)
    options = {"dtype": dtype, "enforce_eager": eager, "enable_prefix_caching": False}
    told = generate_as_alone(run_vllm, model, options)
    alone, found = told.alone, told.found
    # one call a MoE layer and forward pass, of three rounds
    (worker,) = found["workers"]
    layers = moe_layers(model.path)
    assert worker["calls"] == layers * NEW_TOKENS * told.rounds
    assert worker["begun"] == (worker["calls"] if family in SHARED else 0)
    # and a step of the service; rows of a first pass may be more than one step takes
    assert worker["calls"] <= told.steps <= worker["calls"] + layers * told.rounds
    config = read_config(model.path)
    rows = sum(len(ids) for ids in prompts(REQUESTS)) + REQUESTS * (NEW_TOKENS - 1)
    assert worker["rows"] == layers * rows * told.rounds
    assert told.computed == worker["rows"] * config["num_experts_per_tok"], (
        "the service counts each row once an expert"
    )
    # nothing of experts: neither held nor read
    assert worker["experts"] == {}
    read = [name for name in found["read"] if ".experts." in name]
    assert read == [] and [name for name in alone["read"] if ".experts." in name]
    (held,) = [worker["experts"] for worker in alone["workers"]]
    assert sum(held.values()) > 0


def test_the_transformers_fallback_asks_too(engine_model: Any, run_vllm: Any) -> None:
    model = engine_model("qwen3_moe", "float32")
    options = {"dtype": "float32", "model_impl": "transformers", "enable_prefix_caching": False}
    alone = answered(run_vllm, model.path, None, options=options)
    found = answered_behind(run_vllm, model.path, options=options)
    told = apart(found["rounds"][0], alone["rounds"][0])
    assert told.within(FLOAT32) and not told.ties, told
    (worker,) = found["workers"]
    assert worker["calls"] == moe_layers(model.path) * NEW_TOKENS and worker["experts"] == {}
    assert [name for name in found["read"] if ".experts." in name] == []


def test_a_device_lane_instead_of_messages_changes_nothing(engine_model: Any, run_vllm: Any) -> None:
    model = engine_model("qwen3_moe", "float32")
    options = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False}
    alone = answered(run_vllm, model.path, None, options=options)["rounds"][0]
    with house_of(model.path) as house, MoeClient(house.address) as client:
        found = answered(
            run_vllm,
            model.path,
            house.address,
            options=options,
            rounds=[None, str(model.scaled)],
            environ={"MOESERVE_EXPERTS_MODE": "attached"},
        )
        # 16 requests are 424 rows at first, of which the lane takes 256 at once
        assert client.status().steps == moe_layers(model.path) * (NEW_TOKENS + 1) * 2
    right, scaled = (apart(answers, alone) for answers in found["rounds"])
    print(f"device lane: right {right.most:.2g}, x 1.05 {scaled.most:.2g}")
    assert right.within(FLOAT32) and not right.ties, right
    assert not scaled.within(FLOAT32), scaled


def test_dbrx_which_vllm_alone_cannot_load_generates_what_transformers_does(
    run_vllm: Any, tmp_path: Path
) -> None:
    """vLLM's loader of DBRX names parameters that its experts do not have; behind a service it reads none."""
    model = make_dbrx(tmp_path)
    options = {"dtype": "float32", "enable_prefix_caching": False}
    alone = run_vllm(model.path, None, options=options)
    assert alone.get("failed") and "KeyError: 'blocks.0.ffn.experts.w13_weight'" in alone["said"]
    expected = by_transformers(model.path, prompts(REQUESTS), NEW_TOKENS)
    with house_of(model.path) as house:
        rounds = [None, str(model.scaled), str(model.zeroed)]
        found = answered(run_vllm, model.path, house.address, options=options, rounds=rounds)
    right, scaled, zeroed = (apart(answers, expected) for answers in found["rounds"])
    print(f"dbrx: right {right.most:.2g}, x 1.05 {scaled.most:.2g}, zeroed {zeroed.most:.2g}")
    assert right.within(FLOAT32) and not right.ties, right
    assert not scaled.within(FLOAT32) and not zeroed.within(FLOAT32)
    (worker,) = found["workers"]
    assert worker["calls"] == 2 * NEW_TOKENS * len(rounds) and worker["experts"] == {}
    assert [name for name in found["read"] if ".experts." in name] == []


def test_memory_is_that_of_a_model_without_experts(run_vllm: Any, tmp_path: Path) -> None:
    sizes = {"hidden": 256, "inner": 1024, "experts": 64, "top_k": 2}
    make_checkpoint("qwen3_moe", tmp_path, **sizes)
    experts = 2 * 64 * 3 * 256 * 1024 * 4
    short = {"prompts": prompts(2), "options": {"dtype": "float32"}}
    alone = answered(run_vllm, tmp_path, None, **short)
    found = answered_behind(run_vllm, tmp_path, **short)
    saved = alone["memory"] - found["memory"]
    print(f"{experts / 1e6:.0f} MB of experts, {saved / 1e6:.0f} MB less at the peak")
    assert saved >= 0.9 * experts
