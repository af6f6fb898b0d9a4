"""Experts in formats that SGLang has no kernel for on a CPU, in bf16: it refuses such checkpoints in float32.

The truth is SGLang alone, in float32, on what the weights mean. How far bf16 brings SGLang alone from that
bounds how far the service may be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, quantize_fp8_block
from engine_models import HIDDEN
from engine_quantized import assert_as_what_they_mean, assert_as_with_rounding, write_quantized
from engine_runs import answered, house_of

OPTIONS = {"dtype": "bfloat16", "disable_radix_cache": True}


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "int4"])
def test_quantized_experts_answer_as_sglang_alone_on_what_they_mean(
    engine_model: Any, run_sglang: Any, tmp_path: Path, form: str
) -> None:
    assert_as_what_they_mean(run_sglang, OPTIONS, engine_model("qwen3_moe", "bfloat16").path, tmp_path, form)


def test_fp8_blocks_answer_as_transformers_with_their_rounding(
    engine_model: Any, run_sglang: Any, tmp_path: Path
) -> None:
    """In float32, so SGLang reads the checkpoint that was quantized, and the service the quantized one.

    In bf16 nothing could be told: rows that differ by its rounding fall to so many other E4M3 codes that
    answers are as far apart as without any rounding of activations.
    """
    source = engine_model("qwen3_moe", "float32").path
    write_quantized(source, tmp_path / "fp8", "fp8_block")
    with house_of(tmp_path / "fp8") as house:
        found = answered(run_sglang, source, house.address, options=OPTIONS | {"dtype": "float32"})
    assert_as_with_rounding(found, source, tmp_path / "fp8")


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
