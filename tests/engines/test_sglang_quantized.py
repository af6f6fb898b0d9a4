"""Experts in formats that SGLang has no kernel for on a CPU, in bf16, since it refuses float32 for them.

The truth is SGLang alone, in float32, on what the weights mean. How far bf16 brings SGLang alone from that
bounds how far the service may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, quantize_fp8_block
from engine_models import HIDDEN, Bound, Rounding, apart, bound_by_float32, by_transformers, prompts
from engine_quantized import write_decoded, write_quantized
from engine_runs import NEW_TOKENS, REQUESTS, answered, answered_behind, house_of
from in_process import InProcess

OPTIONS = {"dtype": "bfloat16", "disable_radix_cache": True}


@dataclass(frozen=True)
class Answers:
    """What SGLang answers behind a service of a quantized checkpoint, what is true, and the bound."""

    found: list[dict[str, Any]]
    exact: list[dict[str, Any]]
    bound: Bound


def answers_in(form: str, source: Path, folder: Path, run_sglang: Any) -> Answers:
    """Writes `source` with its experts in `form`, and runs SGLang on it and on what it means."""
    write_quantized(source, folder / form, form)
    write_decoded(source, folder / form, folder / "decoded")
    alone = answered(run_sglang, folder / "decoded", None, options=OPTIONS)["rounds"][0]
    exact = answered(run_sglang, folder / "decoded", None, options=OPTIONS | {"dtype": "float32"})["rounds"][
        0
    ]
    found = answered_behind(run_sglang, folder / form, options=OPTIONS)["rounds"][0]
    return Answers(found, exact, bound_by_float32(apart(alone, exact)))


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "int4"])
def test_quantized_experts_answer_as_sglang_alone_on_what_they_mean(
    engine_model: Any, run_sglang: Any, tmp_path: Path, form: str
) -> None:
    source = engine_model("qwen3_moe", "bfloat16").path
    answers = answers_in(form, source, tmp_path, run_sglang)
    right = apart(answers.found, answers.exact)
    unquantized = apart(by_transformers(source, prompts(REQUESTS), NEW_TOKENS), answers.exact)
    print(
        f"{form}: {right.most:.2g} ({right.mean:.2g}), bound {answers.bound.most:.2g} "
        f"({answers.bound.mean:.2g}), not quantized {unquantized.most:.2g} ({unquantized.mean:.2g})"
    )
    assert right.within(answers.bound), right
    assert not unquantized.within(answers.bound), "what the format does to weights would not be seen"


def test_fp8_blocks_answer_as_transformers_with_their_rounding(
    engine_model: Any, run_sglang: Any, tmp_path: Path
) -> None:
    """FP8 blocks round activations in groups of 128, which SGLang on what the weights mean does not."""
    source = engine_model("qwen3_moe", "bfloat16").path
    answers = answers_in("fp8_block", source, tmp_path, run_sglang)
    folder, asked = tmp_path / "fp8_block", prompts(REQUESTS)
    rounded, plain = (
        by_transformers(source, asked, NEW_TOKENS, service)
        for service in (Rounding(folder), InProcess(folder))
    )
    right, missed = apart(answers.found, rounded), apart(plain, rounded)
    print(
        f"fp8_block: {right.most:.2g} ({right.mean:.2g}), bound {answers.bound.most:.2g} "
        f"({answers.bound.mean:.2g}), without rounding {missed.most:.2g} ({missed.mean:.2g})"
    )
    assert right.within(answers.bound), right
    assert not missed.within(answers.bound), "activations that are not rounded would not be seen"


def test_a_checkpoint_whose_attention_sglang_cannot_run_is_refused_with_its_sentence(
    run_sglang: Any, tmp_path: Path
) -> None:
    make_checkpoint("qwen3_moe", tmp_path, hidden=HIDDEN, dtype=torch.bfloat16)
    quantize_fp8_block(tmp_path)  # its config says so of every linear layer
    with house_of(tmp_path) as house:
        ended = run_sglang(tmp_path, house.address, options=OPTIONS)
    assert ended.get("failed")
    assert "SGLang cannot run the rest of this fp8 checkpoint here: 0 active drivers" in ended["said"]
    assert "as `moeserve quantize` writes it" in ended["said"]
