"""Experts in formats that vLLM has no kernel for on a CPU: attention is plain, and the service computes them.

The reference is vLLM alone on the same checkpoint with its experts decoded. These schemes do not round
activations, so it must answer the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, quantize_fp8_block
from engine_models import FLOAT32, HIDDEN, apart
from engine_quantized import (
    assert_as_what_they_mean,
    assert_as_with_rounding,
    write_decoded,
    write_quantized,
)
from engine_runs import answered, answered_behind, house_of

FORMATS = ("nvfp4", "mxfp4", "int4")
OPTIONS = {"dtype": "float32", "enable_prefix_caching": False}


@pytest.mark.parametrize("form", FORMATS)
def test_quantized_experts_answer_as_vllm_alone_on_what_they_mean(
    engine_model: Any, run_vllm: Any, tmp_path: Path, form: str
) -> None:
    source = engine_model("qwen3_moe", "float32").path
    write_quantized(source, tmp_path / form, form)
    write_decoded(source, tmp_path / form, tmp_path / "decoded")
    alone = answered(run_vllm, tmp_path / "decoded", None, options=OPTIONS)
    found = answered_behind(run_vllm, tmp_path / form, options=OPTIONS)
    told = apart(found["rounds"][0], alone["rounds"][0])
    print(f"{form}: {told.most:.2g}")
    assert told.within(FLOAT32) and not told.ties, told
    assert found["workers"][0]["experts"] == {}
    assert [name for name in found["read"] if ".experts." in name] == []


@pytest.mark.parametrize("form", FORMATS)
def test_quantized_experts_beside_attention_in_bf16(
    engine_model: Any, run_vllm: Any, tmp_path: Path, form: str
) -> None:
    source = engine_model("qwen3_moe", "bfloat16").path
    assert_as_what_they_mean(run_vllm, OPTIONS | {"dtype": "bfloat16"}, source, tmp_path, form)


def test_fp8_blocks_answer_as_transformers_with_their_rounding(
    engine_model: Any, run_vllm: Any, tmp_path: Path
) -> None:
    """FP8 blocks round activations in groups of 128, so vLLM on what the weights mean is no reference."""
    source = engine_model("qwen3_moe", "float32").path
    write_quantized(source, tmp_path / "fp8", "fp8_block")
    found = answered_behind(run_vllm, tmp_path / "fp8", options=OPTIONS)
    assert_as_with_rounding(found, source, tmp_path / "fp8")
    assert found["workers"][0]["experts"] == {}
    assert [name for name in found["read"] if ".experts." in name] == []


def test_a_checkpoint_whose_attention_vllm_cannot_run_is_refused_with_its_sentence(
    run_vllm: Any, tmp_path: Path
) -> None:
    make_checkpoint("qwen3_moe", tmp_path, hidden=HIDDEN)
    quantize_fp8_block(tmp_path)  # its config says so of every linear layer
    with house_of(tmp_path) as house:
        ended = run_vllm(tmp_path, house.address, options={"dtype": "bfloat16"})
    assert ended.get("failed")
    assert "vLLM cannot run the rest of this fp8 checkpoint here: Failed to find a kernel" in ended["said"]
    assert "as `moeserve quantize` writes it" in ended["said"]
