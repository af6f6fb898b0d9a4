"""Experts in formats that vLLM has no kernel for on a CPU: attention is plain, and the service computes them.

The reference is vLLM alone on the same checkpoint with its experts decoded. These schemes do not round
activations, so it must answer the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, quantize_fp8_block, rewrite
from engine_models import FLOAT32, HIDDEN, apart
from engine_runs import answered, answered_behind, house_of
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.cli import main

FORMATS = ("nvfp4", "mxfp4", "int4")
OPTIONS = {"dtype": "float32", "enable_prefix_caching": False}


def decoded(source: Path, quantized: Path, to: Path) -> None:
    """Copies `source` with the numbers that the experts of `quantized` mean."""
    checkpoint = Checkpoint(quantized)
    own: dict[str, Tensor] = {}
    for layer in checkpoint.layers:
        held = checkpoint.experts(layer, range(checkpoint.num_experts))
        gate_up, down = held.gate_up.dequantize(), held.down.dequantize()
        for expert in range(checkpoint.num_experts):
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up = gate_up[expert].chunk(2)
            own |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
            own[f"{stem}.down_proj.weight"] = down[expert]
    shutil.copytree(source, to)

    def replaced(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert own.keys() <= tensors.keys()
        return tensors | {name: tensor.to(tensors[name].dtype).clone() for name, tensor in own.items()}

    rewrite(to, replaced)


@pytest.mark.parametrize("form", FORMATS)
def test_quantized_experts_answer_as_vllm_alone_on_what_they_mean(
    engine_model: Any, run_vllm: Any, tmp_path: Path, form: str
) -> None:
    source = engine_model("qwen3_moe", "float32").path
    assert main(["quantize", str(source), str(tmp_path / form), "--to", form, "--quiet"]) == 0
    for extra in ("tokenizer.json", "tokenizer_config.json"):
        if not (tmp_path / form / extra).exists():
            shutil.copy(source / extra, tmp_path / form / extra)
    decoded(source, tmp_path / form, tmp_path / "decoded")
    alone = answered(run_vllm, tmp_path / "decoded", None, options=OPTIONS)
    found = answered_behind(run_vllm, tmp_path / form, options=OPTIONS)
    told = apart(found["rounds"][0], alone["rounds"][0])
    print(f"{form}: {told.most:.2g}")
    assert told.within(FLOAT32) and not told.ties, told
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
