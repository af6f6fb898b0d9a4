"""What cannot be read is refused when it is opened, by the name of the file, the tensor or the config key."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import INDEX, edit_config, make_checkpoint, quantize_fp8_block, rewrite
from safetensors.torch import load_file, save_file

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
SCALE = f"{GATE}_scale_inv"
Damage = Callable[[Path], None]


def drop(path: Path) -> None:
    rewrite(path, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != GATE})


def drop_layer(path: Path) -> None:
    rewrite(path, lambda tensors: {n: t for n, t in tensors.items() if "layers.1.mlp.experts" not in n})


def store(name: str, change: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Damage:
    """Adds or replaces the tensor `name`."""
    return lambda path: rewrite(path, lambda tensors: tensors | {name: change(tensors)})


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def truncate_header(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def scribble(path: Path) -> None:
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]" + b"{not a header")


def no_dtype(path: Path) -> None:
    edit_config(path, dtype=None, torch_dtype=None)
    rewrite(path, lambda tensors: {name: tensor.to(torch.int8) for name, tensor in tensors.items()})


def config(**keys: object) -> Damage:
    return lambda path: edit_config(path, **keys)


def write(name: str, text: str) -> Damage:
    return lambda path: (path / name).write_text(text) and None


PLAIN: dict[str, tuple[Damage, str]] = {
    "missing tensor": (drop, f"layer 1 (fp32) misses tensor {GATE}"),
    "missing layer": (drop_layer, "layer 1 misses tensor model.layers.1.mlp.experts.0.gate_proj.weight"),
    "wrong shape": (
        store(GATE, lambda t: t[GATE][:, :60]),
        f"tensor {GATE} must have shape [128, 64], found [128, 60]",
    ),
    "wrong dtype": (
        store(GATE, lambda t: t[GATE].to(torch.int8)),
        f"tensor {GATE} must be F32 or F16 or BF16, found I8",
    ),
    "unexpected tensor": (
        store(SCALE, lambda t: torch.ones(1, 1)),
        f"layer 1 (fp32) has the unexpected tensor {SCALE}; a projection has weight",
    ),
    "unknown projection": (
        store("model.layers.1.mlp.experts.3.side_proj.weight", lambda t: t[GATE].clone()),
        "tensor model.layers.1.mlp.experts.3.side_proj.weight is none of an expert's projections w1, w3, w2",
    ),
    "one expert too many": (
        store(GATE.replace("experts.3", "experts.8"), lambda t: t[GATE].clone()),
        "model.layers.1.mlp.experts.8 is one too many: config.json declares 8 experts",
    ),
    "two spellings": (
        store(GATE.replace("gate_proj", "w1"), lambda t: t[GATE].clone()),
        "layer 1 names its experts in more than one way",
    ),
    "stacked and apart": (
        store("model.layers.1.mlp.experts.gate_up_proj", lambda t: torch.zeros(8, 256, 64)),
        "layer 1 names its experts in more than one way",
    ),
    "LoRA tensors": (
        store(GATE.replace("weight", "lora_A.weight"), lambda t: torch.zeros(4, 64)),
        "belongs to a LoRA adapter, which is not served: merge it first",
    ),
    "LoRA adapter": (write("adapter_config.json", "{}"), "is a LoRA adapter, which is not served"),
    "no number of layers": (
        config(num_hidden_layers=10**9),
        "config.json: num_hidden_layers=1000000000 is wrong: at most 4096 layers are read",
    ),
    "no number of experts": (
        config(num_experts=10**9),
        "config.json: num_experts=1000000000 is wrong: at most 65536 experts a layer are read",
    ),
    "no number of layers of a family that its class tells of": (
        config(model_type="olmoe2", num_hidden_layers=[10**9]),
        "config.json: num_hidden_layers=[1000000000] is wrong: at most 4096 layers are read",
    ),
    "zero-experts": (
        config(zero_expert_num=4),
        "zero_expert_num=4: zero-experts of qwen3_moe are not served",
    ),
    "truncated data": (truncate, "model.safetensors is truncated: its header declares"),
    "truncated header": (truncate_header, "model.safetensors is truncated: 100 bytes do not hold its header"),
    "not safetensors": (scribble, "model.safetensors is not a safetensors file: its header cannot be read"),
    "no tensors": (lambda path: (path / "model.safetensors").unlink(), "has no *.safetensors file and no"),
    "no config": (lambda path: (path / "config.json").unlink(), "cannot read"),
    "config no JSON": (write("config.json", "{"), "config.json is not JSON"),
    "config no object": (write("config.json", "[]"), "config.json must hold a JSON object, found list"),
    "unknown architecture": (
        config(model_type="next_month", architectures=["NextMonthForCausalLM"]),
        "unknown architecture ['NextMonthForCausalLM'] (model_type 'next_month'); ",
    ),
    "key missing": (config(hidden_size=None), "config.json of qwen3_moe has no key hidden_size"),
    "no expert count": (
        config(num_experts=None, num_local_experts=None),
        "config.json of qwen3_moe has no key num_local_experts or num_experts or n_routed_experts",
    ),
    "two expert counts": (
        config(num_experts=16, num_local_experts=8),
        "num_local_experts=8 and num_experts=16 differ",
    ),
    "count is no number": (
        config(hidden_size="64"),
        "config.json: hidden_size must be a positive whole number, found '64'",
    ),
    "no dtype": (no_dtype, "config.json has no key dtype (or torch_dtype), and no tensor is float32, "),
    "odd dtype": (config(dtype="int8"), "dtype must be one of float32, bfloat16, float16, found 'int8'"),
    "dense layer with experts": (
        config(mlp_only_layers=[1]),
        "layer 1 is dense by config.json, but has model.layers.1.mlp.experts.0.down_proj.weight",
    ),
    "no layer with experts": (config(mlp_only_layers=[0, 1]), "is dense by config.json"),
    "unknown quantization": (
        config(quantization_config={"quant_method": "aqlm", "bits": 4}),
        "quantization quant_method='aqlm' is not supported as configured; supported: no quantization_config",
    ),
    "quantization in its own file": (write("quantize_config.json", '{"quant_method": "aqlm"}'), "'aqlm'"),
    "quantization no object": (
        config(quantization_config="fp8"),
        "quantization_config must be an object, found 'fp8'",
    ),
}


@pytest.mark.parametrize("case", PLAIN)
def test_damage_is_named(case: str, tmp_path: Path) -> None:
    damage, message = PLAIN[case]
    make_checkpoint("qwen3_moe", tmp_path)
    Checkpoint(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint(tmp_path)


def quantization(**keys: object) -> Damage:
    def change(path: Path) -> None:
        settings = json.loads((path / "config.json").read_text())["quantization_config"] | keys
        edit_config(
            path, quantization_config={key: value for key, value in settings.items() if value is not None}
        )

    return change


FP8: dict[str, tuple[Damage, str]] = {
    "no scale": (
        lambda path: rewrite(path, lambda t: {name: tensor for name, tensor in t.items() if name != SCALE}),
        f"layer 1 (fp8_block128) misses tensor {SCALE}",
    ),
    "scale shape": (
        store(SCALE, lambda t: torch.ones(2, 1)),
        f"tensor {SCALE} must have shape [1, 1], found [2, 1]",
    ),
    "scale dtype": (
        store(SCALE, lambda t: torch.ones(1, 1, dtype=torch.float16)),
        f"tensor {SCALE} must be F32 or BF16 or F8_E8M0, found F16",
    ),
    "not quantized": (
        store(GATE, lambda t: t[GATE].float()),
        f"tensor {GATE} must be F8_E4M3, found F32",
    ),
    "static activations": (quantization(activation_scheme="static"), "activation_scheme='static' is not"),
    "no activation scheme": (quantization(activation_scheme=None), "has no key activation_scheme"),
    "other blocks": (quantization(weight_block_size=[64, 64]), "weight_block_size=[64, 64] is not supported"),
    "one block size": (quantization(weight_block_size=[128]), "weight_block_size=[128] is not supported"),
    "no blocks": (quantization(weight_block_size=None), "layer 0 (fp8_channel) misses tensor"),
}


@pytest.mark.parametrize("case", FP8)
def test_damaged_fp8_is_named(case: str, tmp_path: Path) -> None:
    damage, message = FP8[case]
    make_checkpoint("qwen3_moe", tmp_path)
    quantize_fp8_block(tmp_path)
    Checkpoint(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (-0.5, "-0.5")])
def test_bad_scales_are_found_when_read(value: float, shown: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    quantize_fp8_block(tmp_path)
    store(SCALE, lambda t: torch.full((1, 1), value))(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.experts(1, [2])
    with pytest.raises(
        CheckpointError, match=f"{SCALE} must be finite and not negative, found {re.escape(shown)}"
    ):
        checkpoint.experts(1, [2, 3])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, shards=3)
    lost = tmp_path / "model-00002-of-00003.safetensors"
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"shard {re.escape(str(lost))} is missing"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    found = f"duplicate tensor {name}: it stands twice, in {first.name} and {second.name}"
    with pytest.raises(CheckpointError, match=re.escape(found)):
        Checkpoint(tmp_path)


def test_files_without_an_index_may_not_repeat_a_tensor(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"duplicate tensor .* model.safetensors and other.safetensors"):
        Checkpoint(tmp_path)


def test_a_header_may_not_repeat_a_tensor(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    fields = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = f'{{"a":{fields},"a":{fields}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(
        CheckpointError, match=r"duplicate tensor a: .* twice, in the header of model.safetensors"
    ):
        Checkpoint(tmp_path)


def test_a_header_must_agree_with_itself(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(
        CheckpointError, match=re.escape("tensor a of") + ".*" + re.escape("F32 [2], 8 bytes, but has 4")
    ):
        Checkpoint(tmp_path)


def test_the_index_must_place_tensors_where_they_are(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][GATE] = "model-00001-of-00002.safetensors"
    other = dict(index["weight_map"]) | {"ghost": "model-00001-of-00002.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": other}))
    with pytest.raises(CheckpointError, match=r"index.json places tensor \S+ in \S+, which does not hold it"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_an_index_needs_a_weight_map(text: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="needs a weight_map"):
        Checkpoint(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere/config.json: No such file"):
        Checkpoint(tmp_path / "nowhere")


def test_stacks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, fused=True, hidden=64, inner=32)
    down = "model.layers.0.block_sparse_moe.experts.down_proj"
    store(down, lambda t: t[down].mT)(tmp_path)
    with pytest.raises(CheckpointError, match="contradict each other: one of them is transposed"):
        Checkpoint(tmp_path)


def test_a_stack_of_another_size_is_refused(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, fused=True)
    edit_config(tmp_path, num_local_experts=4)
    found = r"experts.gate_up_proj must have shape \[4, 256, 64\], found \[8, 256, 64\]"
    with pytest.raises(CheckpointError, match=found):
        Checkpoint(tmp_path)


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path)
    bias = "model.layers.0.mlp.experts.down_proj_bias"
    rewrite(tmp_path, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != bias})
    with pytest.raises(CheckpointError, match=f"misses tensor {bias}"):
        Checkpoint(tmp_path)


def test_a_bias_of_another_shape_is_named(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path)
    bias = "model.layers.0.mlp.experts.down_proj_bias"
    store(bias, lambda t: torch.zeros(8, 3))(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{bias} must have shape \[8, 64\], found \[8, 3\]"):
        Checkpoint(tmp_path)


CORRECTION = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_a_missing_correction_bias_is_named(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    rewrite(tmp_path, lambda tensors: {n: tensor for n, tensor in tensors.items() if n != CORRECTION})
    with pytest.raises(CheckpointError, match="layer 1 misses tensor e_score_correction_bias"):
        Checkpoint(tmp_path).gate(1)


def test_a_correction_bias_of_another_shape_is_named(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    store(CORRECTION, lambda t: torch.zeros(9))(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{CORRECTION} must have shape \[8\], found \[9\]"):
        Checkpoint(tmp_path).gate(1)


def test_what_is_asked_for_must_be_there(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v2", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"layer 0 has no experts; layers with experts: \[1\]"):
        checkpoint.experts(0, [0])
    for expert in (-1, 8):
        with pytest.raises(ValueError, match=f"expert {expert} of layer 1 must be between 0 and 7"):
            checkpoint.experts(1, [expert])
    with pytest.raises(ValueError, match=r"part=\(2, 2\) must be \(index, of\) with 0 <= index < of"):
        checkpoint.experts(1, [0], part=(2, 2))


def test_sizes_that_do_not_divide_are_named(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    with pytest.raises(ValueError, match="I=128 must be a multiple of slices=3"):
        Checkpoint(tmp_path).experts(0, [0], part=(0, 3))


@pytest.mark.parametrize(("inner", "slices"), [(192, 2), (256, 4)])
def test_slices_may_not_cut_a_block(inner: int, slices: int, tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, inner=inner)
    quantize_fp8_block(tmp_path)
    rows = f"I={inner} over slices={slices} is {inner // slices} gate and up rows a slice"
    found = f"{rows}, which must be a multiple of 128, a block of fp8_"
    with pytest.raises(ValueError, match=found):
        Checkpoint(tmp_path).shape(0, slices)
