"""Stacked experts: gpt-oss' blocks with interleaved rows and biases, and other formats in fused tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config
from quantized import EXPERTS, INNER, LAYERS, PRODUCERS, write
from quantized_tensors import E2M1, power
from safetensors.torch import load_file, save_file

from moeserve.experts.checkpoint import Checkpoint, CheckpointError

HIDDEN, SIZE, COUNT = 96, 128, 3


def write_gpt_oss(path: Path, **quantization: object) -> dict[str, torch.Tensor]:
    """Blocks and scales of one layer, drawn at random; returns the tensors."""
    config = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": SIZE,
        "num_local_experts": COUNT,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        | quantization,
    }
    (path / "config.json").write_text(json.dumps(config))
    own, tensors = np.random.default_rng(0), {}
    for name, rows, columns in (("gate_up_proj", 2 * SIZE, HIDDEN), ("down_proj", HIDDEN, SIZE)):
        stem = f"model.layers.0.mlp.experts.{name}"
        blocks = own.integers(0, 256, (COUNT, rows, columns // 32, 16)).astype(np.uint8)
        tensors[f"{stem}_blocks"] = torch.from_numpy(blocks)
        scales = own.integers(115, 125, (COUNT, rows, columns // 32)).astype(np.uint8)
        tensors[f"{stem}_scales"] = torch.from_numpy(scales)
        tensors[f"{stem}_bias"] = torch.from_numpy(own.normal(0, 1, (COUNT, rows))).bfloat16()
    save_file(tensors, path / "model.safetensors")
    return tensors


def meant(tensors: dict[str, torch.Tensor], name: str, expert: int) -> torch.Tensor:
    blocks, scales = (
        tensors[f"model.layers.0.mlp.experts.{name}_{part}"][expert] for part in ("blocks", "scales")
    )
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()  # [rows, K / 32, 32]
    return (E2M1[codes] * power(scales)[..., None]).flatten(1)


def test_gpt_oss_blocks_are_read_with_gate_first(tmp_path: Path) -> None:
    tensors = write_gpt_oss(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.dialect.name == "mxfp4_blocks"
    assert checkpoint.scheme(0).name == "mxfp4 x bf16"
    read = checkpoint.experts(0, [2, 1])
    for position, expert in enumerate((2, 1)):
        rows = meant(tensors, "gate_up_proj", expert)
        assert torch.equal(read.gate_up.dequantize()[position], torch.cat((rows[::2], rows[1::2])))
        assert torch.equal(read.down.dequantize()[position], meant(tensors, "down_proj", expert))
        bias = tensors["model.layers.0.mlp.experts.gate_up_proj_bias"][expert].float()
        assert read.gate_up_bias is not None
        assert torch.equal(read.gate_up_bias[position], torch.cat((bias[::2], bias[1::2])))


def test_slices_of_gpt_oss_blocks(tmp_path: Path) -> None:
    tensors = write_gpt_oss(tmp_path)
    rows, down = meant(tensors, "gate_up_proj", 1), meant(tensors, "down_proj", 1)
    for index in range(4):
        read, own = Checkpoint(tmp_path).experts(0, [1], part=(index, 4)), slice(32 * index, 32 * index + 32)
        assert torch.equal(read.gate_up.dequantize()[0], torch.cat((rows[::2][own], rows[1::2][own])))
        assert torch.equal(read.down.dequantize()[0], down[:, own])
        assert read.down_bias is not None
        assert bool(read.down_bias.any()) == (index == 0)


def test_slices_may_not_cut_a_block_of_32(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    with pytest.raises(ValueError, match="is 16 down columns a slice, which must be a multiple of 32"):
        Checkpoint(tmp_path).shape(0, 8)


def test_a_layer_of_gpt_oss_may_be_left_out(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path, modules_to_not_convert=["model.layers.0.mlp.experts"])
    with pytest.raises(
        CheckpointError, match=r"layer 0 \(bf16\) misses tensor model.layers.0.mlp.experts.down_proj"
    ):
        Checkpoint(tmp_path)


STACKABLE = (
    "fp8 block",
    "ct FP8_DYNAMIC",
    "ct W8A8",
    "ct MXFP4",
    "ct MXFP8",
    "ct W4A16 32",
    "quark fp6_e3m2",
)


@pytest.mark.parametrize("name", STACKABLE)
def test_experts_may_be_stacked(name: str, tmp_path: Path) -> None:
    expected = write(tmp_path, PRODUCERS[name])
    file = tmp_path / "model.safetensors"
    apart = load_file(file)
    stacked = {}
    suffixes = {key.split("proj.")[1] for key in apart} - {"weight_shape"}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.mlp.experts"
        for suffix in suffixes:
            rest = suffix.removeprefix("weight")
            gate, up, down = (
                torch.stack([apart[f"{stem}.{e}.{role}_proj.{suffix}"] for e in range(EXPERTS)])
                for role in ("gate", "up", "down")
            )
            stacked[f"{stem}.gate_up_proj{rest}"] = torch.cat((gate, up), dim=1)
            stacked[f"{stem}.down_proj{rest}"] = down
    save_file(stacked, file)
    edit_config(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    read = checkpoint.experts(1, [2])
    assert torch.equal(read.gate_up.dequantize()[0], expected[1, 2][0])
    assert torch.equal(read.down.dequantize()[0], expected[1, 2][1])
    second = checkpoint.experts(1, [2], part=(1, 2))
    assert torch.equal(second.down.dequantize()[0], expected[1, 2][1][:, INNER // 2 :])
