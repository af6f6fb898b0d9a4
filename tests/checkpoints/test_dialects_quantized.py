"""What producers wrote is what is read: every weight of every dialect, bit for bit, whole and in slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized import EXPERTS, INNER, LAYERS, PRODUCERS, W_NAMES, Producer, write
from quantized_tensors import plain
from safetensors.torch import load_file, save_file

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.checkpoints.dialects import DIALECTS

every_producer = pytest.mark.parametrize("producer", PRODUCERS.values(), ids=PRODUCERS)
HALF = INNER // 2
DOWN = "model.layers.1.mlp.experts.2.down_proj"


def test_every_quantized_dialect_has_a_producer() -> None:
    assert {producer.dialect for producer in PRODUCERS.values()} == set(DIALECTS) - {"plain", "mxfp4_blocks"}


@every_producer
def test_weights_are_what_was_written(producer: Producer, tmp_path: Path) -> None:
    meant = write(tmp_path, producer)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.dialect.name == producer.dialect
    for layer in range(LAYERS):
        assert checkpoint.scheme(layer).name == producer.scheme
        read = checkpoint.experts(layer, [2, 0])
        gate_up, down = read.gate_up.dequantize(), read.down.dequantize()
        for position, expert in enumerate((2, 0)):
            assert torch.equal(gate_up[position], meant[layer, expert][0])
            assert torch.equal(down[position], meant[layer, expert][1])


@every_producer
def test_exactly_one_dialect_claims_what_it_writes(producer: Producer, tmp_path: Path) -> None:
    write(tmp_path, producer)
    config = Checkpoint(tmp_path).quantization
    assert [entry.name for entry in DIALECTS.values() if entry.claims(config)] == [producer.dialect]


@every_producer
def test_slices_are_the_expert_in_pieces(producer: Producer, tmp_path: Path) -> None:
    meant = write(tmp_path, producer)
    checkpoint = Checkpoint(tmp_path)
    slices = [checkpoint.experts(1, [1], part=(index, 2)) for index in range(2)]
    gate_up, down = meant[1, 1]
    gates = [s.gate_up.dequantize()[0] for s in slices]
    downs = [s.down.dequantize()[0] for s in slices]
    assert all(s.gate_up.format == checkpoint.scheme(1).weights for s in slices)
    if checkpoint.scheme(1).weights.name.endswith("act_order"):
        # the slices have other units of I than the first and the second half; their outputs add up the same
        for first in (0, HALF):
            found = sum(
                d.double() @ g[first : first + HALF].double() for d, g in zip(downs, gates, strict=True)
            )
            half = gate_up[:INNER] if first == 0 else gate_up[INNER:]
            torch.testing.assert_close(found, down.double() @ half.double(), rtol=1e-12, atol=1e-12)
        return
    for index in range(2):
        own = slice(index * HALF, (index + 1) * HALF)
        assert torch.equal(gates[index], torch.cat((gate_up[:INNER][own], gate_up[INNER:][own])))
        assert torch.equal(downs[index], down[:, own])


STATIC = {name: entry for name, entry in PRODUCERS.items() if entry.scheme.endswith("_static")}


@pytest.mark.parametrize("producer", STATIC.values(), ids=STATIC)
def test_static_scales_are_the_largest_of_a_layer(producer: Producer, tmp_path: Path) -> None:
    write(tmp_path, producer)
    tensors = load_file(tmp_path / "model.safetensors")
    divides = "input_global_scale" in "".join(tensors)
    suffix = "input_global_scale" if divides else "input_scale"
    for layer in range(LAYERS):
        own = {name: t for name, t in tensors.items() if f"layers.{layer}." in name and name.endswith(suffix)}
        scales = {name: (1 / t if divides else t).item() for name, t in own.items()}
        down = max(scale for name, scale in scales.items() if "down" in name)
        gate_up = max(scale for name, scale in scales.items() if "down" not in name)
        read = Checkpoint(tmp_path).experts(layer, [1, 2])
        assert read.input_scale is not None
        assert read.inner_scale is not None
        assert read.input_scale.tolist() == [gate_up] * 2
        assert read.inner_scale.tolist() == [down] * 2


@every_producer
def test_other_experts_have_no_static_scales(producer: Producer, tmp_path: Path) -> None:
    write(tmp_path, producer)
    read = Checkpoint(tmp_path).experts(0, [0])
    assert (
        (read.input_scale is not None)
        == (read.inner_scale is not None)
        == producer.scheme.endswith("_static")
    )


@every_producer
def test_every_tensor_of_a_projection_is_needed(producer: Producer, tmp_path: Path) -> None:
    write(tmp_path, producer)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for lost in [name for name in tensors if name.startswith(f"{DOWN}.")]:
        if lost.endswith("weight_shape") or (lost.endswith("g_idx") and "act_order" not in producer.scheme):
            continue  # these only inform
        save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file)
        with pytest.raises(CheckpointError, match=f"layer 1 .* misses tensor {lost}"):
            Checkpoint(tmp_path)


@every_producer
def test_every_tensor_is_checked_for_its_dtype_and_shape(producer: Producer, tmp_path: Path) -> None:
    write(tmp_path, producer)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.startswith(f"{DOWN}.")]:
        save_file(tensors | {name: torch.zeros(tensors[name].shape, dtype=torch.bool)}, file)
        with pytest.raises(CheckpointError, match=f"tensor {name} must be .*, found BOOL"):
            Checkpoint(tmp_path)
        save_file(tensors | {name: tensors[name].new_zeros(3, 5, 7)}, file)
        with pytest.raises(CheckpointError, match=rf"tensor {name} must have shape .*, found \[3, 5, 7\]"):
            Checkpoint(tmp_path)


@every_producer
def test_a_tensor_too_many_is_named(producer: Producer, tmp_path: Path) -> None:
    write(tmp_path, producer)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"{DOWN}.weight_extra": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=f"has the unexpected tensor {DOWN}.weight_extra; a "):
        Checkpoint(tmp_path)


def _spoiled(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.is_floating_point():
        return torch.full_like(tensor.float(), float("nan")).to(tensor.dtype)
    return torch.full_like(tensor, 255) if tensor.dtype == torch.uint8 else None


@every_producer
def test_a_scale_that_is_no_number_is_named(producer: Producer, tmp_path: Path) -> None:
    write(tmp_path, producer)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    spoiled = 0
    for name in [name for name in tensors if name.startswith(f"{DOWN}.") and "scale" in name]:
        if (changed := _spoiled(tensors[name])) is not None:
            save_file(tensors | {name: changed}, file)
            with pytest.raises(CheckpointError, match=f"scale {name} must be"):
                Checkpoint(tmp_path).experts(1, [2])
            spoiled += 1
    assert spoiled


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), W_NAMES], ids=str)
def test_experts_may_be_renamed(block: str, names: tuple[str, str, str], tmp_path: Path) -> None:
    entry = PRODUCERS["ct NVFP4"]
    model = {"model_type": "mixtral", "intermediate_size": INNER, "num_local_experts": EXPERTS}
    model |= {"num_experts": EXPERTS}
    renamed = Producer(entry.dialect, entry.scheme, entry.config, entry.make, None, names, block, model)
    meant = write(tmp_path, renamed)
    read = Checkpoint(tmp_path).experts(0, [1])
    assert torch.equal(read.gate_up.dequantize()[0], meant[0, 1][0])
    assert torch.equal(read.down.dequantize()[0], meant[0, 1][1])


def test_an_unquantized_checkpoint_is_written_alike(tmp_path: Path) -> None:
    meant = write(tmp_path, Producer("plain", "bf16", None, plain))
    read = Checkpoint(tmp_path).experts(1, [0])
    assert torch.equal(read.gate_up.dequantize()[0], meant[1, 0][0])
