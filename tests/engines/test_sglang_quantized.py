"""Experts in formats that SGLang has no kernel for on a CPU, as in test_vllm_quantized.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_models import FLOAT32, apart
from engine_quantized import assert_as_with_rounding, write_decoded, write_quantized
from engine_runs import answered, answered_behind

OPTIONS = {"dtype": "float32", "disable_radix_cache": True}


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "int4"])
def test_quantized_experts_answer_as_sglang_alone_on_what_they_mean(
    engine_model: Any, run_sglang: Any, tmp_path: Path, form: str
) -> None:
    source = engine_model("qwen3_moe", "float32").path
    write_quantized(source, tmp_path / form, form)
    write_decoded(source, tmp_path / form, tmp_path / "decoded")
    alone = answered(run_sglang, tmp_path / "decoded", None, options=OPTIONS)
    found = answered_behind(run_sglang, tmp_path / form, options=OPTIONS)
    told = apart(found["rounds"][0], alone["rounds"][0])
    print(f"{form}: {told.most:.2g}")
    assert told.within(FLOAT32) and not told.ties, told


def test_fp8_blocks_answer_as_transformers_with_their_rounding(
    engine_model: Any, run_sglang: Any, tmp_path: Path
) -> None:
    source = engine_model("qwen3_moe", "float32").path
    write_quantized(source, tmp_path / "fp8", "fp8_block")
    found = answered_behind(run_sglang, tmp_path / "fp8", options=OPTIONS)
    assert_as_with_rounding(found, source, tmp_path / "fp8")
