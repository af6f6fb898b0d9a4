"""Experts quantized while they are loaded: equal to the format's own encoding of the whole weights."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from quantized import INNER, PRODUCERS, Producer, write
from quantized_tensors import plain

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.checkpoints.load_as import ALIASES
from moeserve.quant.formats import FORMATS
from moeserve.quant.schemes import SCHEMES

PLAIN = Producer("plain", "bf16", None, plain)
HALF = INNER // 2

MEANT = dict(ALIASES) | {"int8_per_channel_weight_only": "int8_channel x bf16"}

POSSIBLE = {name: name for name in ALIASES} | {
    name: name
    for name, scheme in SCHEMES.items()
    if scheme.activations.given is None and "act_order" not in name and scheme.weights.name in FORMATS
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_weights_are_the_encoding_of_the_whole(name: str, tmp_path: Path) -> None:
    meant = write(tmp_path, PLAIN)
    checkpoint = Checkpoint(tmp_path, load_as=name)
    form = checkpoint.scheme(1).weights
    assert checkpoint.scheme(1).name == MEANT.get(name, name)
    read = checkpoint.experts(1, [2])
    gate_up, down = (form.quantize(matrix).dequantize() for matrix in meant[1, 2])
    assert torch.equal(read.gate_up.dequantize()[0], gate_up)
    assert torch.equal(read.down.dequantize()[0], down)
    for index in range(2):
        part, own = checkpoint.experts(1, [2], part=(index, 2)), slice(index * HALF, (index + 1) * HALF)
        rows = torch.cat((gate_up[:INNER][own], gate_up[INNER:][own]))
        assert torch.equal(part.gate_up.dequantize()[0], rows)
        assert torch.equal(part.down.dequantize()[0], down[:, own])


@pytest.mark.parametrize("name", ["ct NVFP4", "modelopt FP8", "gptq act order", "ct W4A16_ASYM", "awq"])
def test_quantized_experts_are_brought_to_another_format(name: str, tmp_path: Path) -> None:
    meant = write(tmp_path, PRODUCERS[name])
    checkpoint = Checkpoint(tmp_path, load_as="fp8_per_block")
    assert checkpoint.scheme(0).name == "fp8_block128 x fp8_group128"
    read = checkpoint.experts(0, [1, 0])
    form = FORMATS["fp8_block128"]
    assert torch.equal(read.gate_up.dequantize()[0], form.quantize(meant[0, 1][0]).dequantize())
    assert torch.equal(read.down.dequantize()[1], form.quantize(meant[0, 0][1]).dequantize())
    assert read.input_scale is None
    half = checkpoint.experts(0, [1], part=(1, 2))
    assert torch.equal(half.down.dequantize()[0], read.down.dequantize()[0][:, HALF:])


def test_the_same_weights_with_other_activations_are_not_touched(tmp_path: Path) -> None:
    meant = write(tmp_path, PRODUCERS["ct NVFP4"])
    checkpoint = Checkpoint(tmp_path, load_as="nvfp4")
    assert checkpoint.scheme(0).name == "nvfp4 x bf16"
    read = checkpoint.experts(0, [1])
    assert torch.equal(read.gate_up.dequantize()[0], meant[0, 1][0])
    assert read.input_scale is None


def test_it_travels_to_another_process(tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    checkpoint = pickle.loads(pickle.dumps(Checkpoint(tmp_path, load_as="mxfp8")))
    assert checkpoint.scheme(0).name == "mxfp8"


@pytest.mark.parametrize(
    "name", ["fp9", "nvfp4 x nvfp4_static", "int4_group32_act_order", "fp8_channel x fp8_static"]
)
def test_what_weights_do_not_tell_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    with pytest.raises(ValueError, match=f"experts cannot be loaded as '{name}'; known: fp8, fp8_per_tensor"):
        Checkpoint(tmp_path, load_as=name)


def test_slices_may_not_cut_a_block_of_the_new_format(tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    with pytest.raises(ValueError, match="which must be a multiple of 128, a block of fp8_block128"):
        Checkpoint(tmp_path, load_as="fp8_per_block").shape(0, 4)


@pytest.mark.parametrize(("name", "group"), [("int4_group128", 128), ("mxfp4 x bf16", 32)])
def test_sizes_that_are_no_multiple_of_a_group_are_refused_before_anything_is_read(
    name: str, group: int, tmp_path: Path
) -> None:
    make_checkpoint("qwen3_moe", tmp_path, inner=group // 2)
    said = f"must be a multiple of {group}, a group of {name.split()[0]}, for experts to be loaded so"
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(tmp_path, load_as=name)
