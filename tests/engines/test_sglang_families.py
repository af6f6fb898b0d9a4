"""SGLang's engine with its experts behind a service against SGLang alone, as in test_vllm_families.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors
from engine_models import DTYPES, FLOAT32, apart, prompts, read_config
from engine_runs import NEW_TOKENS, REQUESTS, answered, generate_as_alone, house_of, strike, until

from moeserve.proto.client import MoeClient

FAILURES = 4

FAMILIES = ("qwen3_moe", "mixtral", "olmoe")
ALONE = {"gpt_oss": "GptOssForCausalLM requires one of", "deepseek_v3": "rope_scaling"}
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
    assert (
        f"{len(tensors_of_experts(model.path))} tensors of experts were left in their files"
        in told.found["said"]
    )


def tensors_of_experts(path: Path) -> list[str]:
    """Names of experts' tensors in a checkpoint of one file."""
    with safetensors.safe_open(path / "model.safetensors", framework="pt") as file:
        names: list[str] = list(file.keys())
    return [name for name in names if ".experts." in name]


def test_ranks_killed_and_stopped_while_sglang_generates_change_nothing(
    engine_model: Any, run_sglang: Any, tmp_path: Path
) -> None:
    model, options = engine_model("qwen3_moe", "float32"), {"dtype": "float32", "disable_radix_cache": True}
    alone = answered(run_sglang, model.path, None, options=options)["rounds"][0]
    going = tmp_path / "going"
    going.touch()
    with (
        house_of(model.path, step__timeout_seconds=3.0) as house,
        MoeClient(house.address, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        job = {"options": options, "while": str(going)}
        running = pool.submit(lambda: answered(run_sglang, model.path, house.address, **job))

        def check() -> None:
            assert not running.done(), running.result()["said"][-3000:]

        try:
            for failure in range(FAILURES):
                before = client.status()
                until(lambda b=before: client.status().steps > b.steps + NEW_TOKENS, check, 400)  # type: ignore[misc]
                strike(house.pid(failure % 2), stopped=failure % 4 >= 2)
                until(lambda b=before: client.status().generation > b.generation, check)  # type: ignore[misc]
        finally:
            going.unlink()
        found = running.result()
    for answers in found["rounds"]:
        told = apart(answers, alone)
        assert told.within(FLOAT32) and not told.ties, told
    print(f"{FAILURES} failures, {len(found['rounds'])} rounds of {REQUESTS} requests, all as alone")


@pytest.mark.parametrize("family", ALONE)
def test_what_sglang_cannot_run_on_a_cpu_fails_with_its_own_error(
    engine_model: Any, run_sglang: Any, family: str
) -> None:
    model = engine_model(family, "bfloat16")
    alone = run_sglang(model.path, None, options={"dtype": "bfloat16"})
    assert alone.get("failed") and ALONE[family] in alone["said"], alone["said"][-3000:]
