"""Weights that are reloaded while vLLM runs: which passes see them, and what becomes of prefix caches."""

from __future__ import annotations

from typing import Any

import pytest
from engine_models import FLOAT32, EngineModel, apart, prompts
from engine_runs import answered, answered_behind

OPTIONS = {"dtype": "float32", "enable_prefix_caching": True, "block_size": 32}
LONG = [2 * ids + ids[:40] for ids in prompts(16)[12:]]  # of several blocks


@pytest.fixture(scope="module")
def with_new_weights(engine_model: Any, run_vllm: Any) -> list[dict[str, Any]]:
    """What vLLM alone answers with the weights that the service is reloaded with."""
    scaled = engine_model("qwen3_moe", "float32").scaled
    alone = answered(run_vllm, scaled, None, options=OPTIONS, prompts=LONG)
    answers: list[dict[str, Any]] = alone["rounds"][0]
    return answers


def served(run_vllm: Any, model: EngineModel, **job: Any) -> dict[str, Any]:
    """What vLLM wrote behind a service."""
    return answered_behind(run_vllm, model.path, options=OPTIONS, **job)


@pytest.mark.parametrize("caches", ["recompute", "keep"])
def test_prefixes_of_old_weights_are_kept_or_forgotten_as_the_policy_says(
    engine_model: Any, run_vllm: Any, with_new_weights: list[dict[str, Any]], caches: str
) -> None:
    model = engine_model("qwen3_moe", "float32")
    found = served(
        run_vllm,
        model,
        prompts=LONG,
        rounds=[None, None, str(model.scaled)],
        pause=3.0,
        environ={"MOESERVE_EXPERTS_CACHES": caches},
    )
    first, second, third = found["rounds"]
    assert apart(second, first).within(FLOAT32)
    assert all(answer["cached"] >= 32 for answer in second), "prefixes are cached while nothing changes"
    told = apart(third, with_new_weights)
    if caches == "recompute":
        assert all(answer["cached"] == 0 for answer in third)
        assert told.within(FLOAT32) and not told.ties, told
    else:
        assert all(answer["cached"] >= 32 for answer in third)
        assert not told.within(FLOAT32), "keys and values of the old weights were used on"


def test_reloads_in_the_middle_of_generation_are_seen_and_no_forward_pass_mixes_two(
    engine_model: Any, run_vllm: Any
) -> None:
    model = engine_model("qwen3_moe", "float32")
    found = served(
        run_vllm,
        model,
        sampling={"max_tokens": 100, "logprobs": 1},
        rounds=[None] * 3,
        reloads=[str(model.scaled), str(model.path)],
    )
    (worker,) = found["workers"]
    passes = [set(versions) for versions in found["passes"]]
    assert len({version for versions in passes for version in versions}) >= 3, (
        "reloads were seen while it ran"
    )
    mixed = [versions for versions in passes if len(versions) > 1]
    assert len(mixed) == worker["repeated"], "a pass that saw two versions was run again"
    answered = [answer for answers in found["rounds"] for answer in answers]
    assert all(len(answer["tokens"]) == 100 for answer in answered)
    print(f"{len(passes)} forward passes, {len(mixed)} of them run again")
