"""Stacked experts: gpt-oss' blocks with interleaved rows and biases, and other formats in fused tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config
from quantized import EXPERTS, INNER, LAYERS, PRODUCERS, write
from quantized_tensors import E2M1, plain, power
from safetensors.torch import load_file, save_file

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.quant.schemes import SCHEMES

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


BLOCKS, SCALES = (f"model.layers.0.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))

DAMAGED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "no scales": (SCALES, lambda t: None, f"misses tensor {SCALES}"),
    "no blocks": (BLOCKS, lambda t: None, f"misses tensor {BLOCKS}"),
    "dtype of blocks": (BLOCKS, lambda t: t.float(), f"tensor {BLOCKS} must be U8, found F32"),
    "dtype of scales": (SCALES, lambda t: t.bfloat16(), f"tensor {SCALES} must be U8, found BF16"),
    "shape of blocks": (BLOCKS, lambda t: t.flatten(-2), f"tensor {BLOCKS} must have shape "),
    "shape of scales": (SCALES, lambda t: t[:, :-1].contiguous(), f"tensor {SCALES} must have shape "),
    "a scale of NaN": (SCALES, lambda t: torch.full_like(t, 255), f"scale {SCALES} must be a power of two"),
}


@pytest.mark.parametrize(("name", "change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_mxfp4_blocks_are_named(
    name: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors = write_gpt_oss(tmp_path)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint(tmp_path).experts(0, [1])


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


GATE_UP, DOWN = ("model.layers.{}.mlp.experts." + name for name in ("gate_up_proj", "down_proj"))


def write_scales_beside(
    path: Path, name: str = "fp8 block", suffix: str = "weight_scale_inv"
) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """FP8 blocks as transformers writes them: weights by expert, the scales of all experts in one tensor."""
    expected = write(path, PRODUCERS[name], (HIDDEN_EVEN, INNER))
    file = path / "model.safetensors"
    found = load_file(file)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([found.pop(f"{stem}.{e}.{role}_proj.{suffix}") for e in range(EXPERTS)])
            for role in ("gate", "up", "down")
        )
        found[f"{GATE_UP.format(layer)}_scale_inv"] = torch.cat((gate, up), dim=1)
        found[f"{DOWN.format(layer)}_scale_inv"] = down
    save_file(found, file)
    return expected


HIDDEN_EVEN = 384


@pytest.mark.parametrize(
    ("name", "suffix", "width"),
    [("fp8 block", "weight_scale_inv", 4), ("fp8 block with powers of two", "scale", 1)],
)
def test_scales_of_all_experts_may_stand_beside_the_weights(
    name: str, suffix: str, width: int, tmp_path: Path
) -> None:
    expected = write_scales_beside(tmp_path, name, suffix)
    checkpoint = Checkpoint(tmp_path)
    scales = (HIDDEN_EVEN // 128) * (3 * INNER // 128) * width
    assert checkpoint.expert_nbytes(1) == 3 * HIDDEN_EVEN * INNER + scales
    read = checkpoint.experts(1, [2, 0])
    for position, expert in enumerate((2, 0)):
        assert torch.equal(read.gate_up.dequantize()[position], expected[1, expert][0])
        assert torch.equal(read.down.dequantize()[position], expected[1, expert][1])
    (gate, up), own = expected[0, 1][0].chunk(2), slice(INNER // 2, None)
    second = checkpoint.experts(0, [1], part=(1, 2))
    assert torch.equal(second.gate_up.dequantize()[0], torch.cat((gate[own], up[own])))
    assert torch.equal(second.down.dequantize()[0], expected[0, 1][1][:, own])


def test_one_scale_of_gate_and_up_may_stand_beside_the_weights(tmp_path: Path) -> None:
    """FP8 without blocks as transformers writes it."""
    write(tmp_path, PRODUCERS["fp8 tensor dynamic"])
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name.endswith("weight")}
    for layer in range(LAYERS):
        for place, scale in ((GATE_UP, 0.5), (DOWN, 0.25)):
            tensors[f"{place.format(layer)}_scale_inv"] = (
                torch.arange(1.0, EXPERTS + 1).view(-1, 1, 1) * scale
            )
    save_file(tensors, file)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.scheme(0).name == "fp8_channel x fp8_token"
    assert checkpoint.expert_nbytes(0) == 3 * INNER * 256 + 8
    read, stem = checkpoint.experts(1, [2]), "model.layers.1.mlp.experts.2"
    gate, up, down = (tensors[f"{stem}.{role}_proj.weight"].float() for role in ("gate", "up", "down"))
    assert torch.equal(read.gate_up.dequantize()[0], torch.cat((gate, up)) * 1.5)
    assert torch.equal(read.down.dequantize()[0], down * 0.75)


BESIDE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "missing": (f"{DOWN}_scale_inv", lambda t: None, "misses tensor "),
    "shape": (f"{GATE_UP}_scale_inv", lambda t: t[:, :-1].contiguous(), "must have shape [3, 4, 3], found"),
    "dtype": (f"{DOWN}_scale_inv", lambda t: t.half(), "must be F32 or BF16 or F8_E8M0, found F16"),
    "negative": (f"{GATE_UP}_scale_inv", lambda t: -t, "must be finite and not negative, found -"),
    "unexpected": (f"{DOWN}_scale_two", lambda t: t, "has the unexpected tensor "),
    "weights too": (DOWN, lambda t: t, "names its experts in more than one way"),
}


@pytest.mark.parametrize(("name", "change", "message"), BESIDE.values(), ids=BESIDE)
def test_damaged_scales_beside_the_weights_are_named(
    name: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    write_scales_beside(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, place = load_file(file), name.format(1)
    changed = change(tensors.pop(place, torch.ones(1)))
    save_file(tensors | ({} if changed is None else {place: changed}), file)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        Checkpoint(tmp_path).experts(1, [2])
    assert place in str(error.value)


UNEVEN = ("fp8 block", "ct FP8_BLOCK", "modelopt fp8_pb_wo")


@pytest.mark.parametrize("inner", [224, 100])
@pytest.mark.parametrize("name", UNEVEN)
def test_blocks_at_the_edge_are_smaller(name: str, inner: int, tmp_path: Path) -> None:
    """Rows of up begin within a block of gate_up, and columns of down end within one."""
    expected = write(tmp_path, PRODUCERS[name], (160, inner))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.scheme(0) == SCHEMES["fp8_group128"]
    read = checkpoint.experts(1, [2])
    assert torch.equal(read.gate_up.dequantize()[0], expected[1, 2][0])
    assert torch.equal(read.down.dequantize()[0], expected[1, 2][1])
    with pytest.raises(ValueError, match=f"I={inner} over slices=2 is {inner // 2} gate and up rows a slice"):
        checkpoint.shape(0, 2)


def test_blocks_that_only_end_within_h_stay_blocks(tmp_path: Path) -> None:
    expected = write(tmp_path, PRODUCERS["ct FP8_BLOCK"], (160, 256))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.scheme(0).name == "fp8_block128 x fp8_group128"
    second = checkpoint.experts(0, [1], part=(1, 2))
    assert torch.equal(second.down.dequantize()[0], expected[0, 1][1][:, 128:])


def test_quark_leaves_stacked_experts_as_they_are(tmp_path: Path) -> None:
    """It quantizes linear modules, and a tensor of all experts is none."""
    expected = write(tmp_path, replace(PRODUCERS["quark fp6_e3m2"], make=plain))
    file = tmp_path / "model.safetensors"
    apart, stacked = load_file(file), {}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([apart[f"{stem}.{e}.{role}_proj.weight"] for e in range(EXPERTS)])
            for role in ("gate", "up", "down")
        )
        stacked |= {GATE_UP.format(layer): torch.cat((gate, up), dim=1), DOWN.format(layer): down}
    save_file(stacked, file)
    checkpoint = Checkpoint(tmp_path)
    assert (checkpoint.dialect.name, checkpoint.scheme(1).name) == ("quark", "bf16")
    assert torch.equal(checkpoint.experts(1, [2]).down.dequantize()[0], expected[1, 2][1])


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
