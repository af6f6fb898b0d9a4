"""Checkpoints as people have them: what is read all the same, and what is told for what it is."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, experts_of, make_checkpoint, quantize_fp8_block, rewrite

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.checkpoints.names import expert_layers

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4997504848\n"
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def assert_reads(path: Path, model: torch.nn.Module) -> None:
    checkpoint = Checkpoint(path)
    for layer in checkpoint.layers:
        weights = checkpoint.experts(layer, range(checkpoint.num_experts))
        gate_up, down = experts_of(model, layer)
        assert torch.equal(weights.gate_up.parts[0], gate_up)
        assert torch.equal(weights.down.parts[0], down)


def told(path: Path) -> str:
    """The error that opening `path` raises."""
    with pytest.raises(CheckpointError) as raised:
        Checkpoint(path)
    return str(raised.value)


# what a folder holds


@pytest.mark.parametrize("file", ["model-00002-of-00003.safetensors", "model.safetensors.index.json"])
def test_a_git_lfs_pointer_is_told(file: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, shards=3)
    (tmp_path / file).write_text(POINTER)
    assert told(tmp_path) == (
        f"{tmp_path / file} is a Git LFS pointer, not the file of 4997504848 bytes that it stands for: "
        f"run `git lfs pull` in {tmp_path}"
    )


def only(path: Path, *names: str) -> None:
    """Leaves files called `names` in place of the weights."""
    (path / "model.safetensors").unlink()
    for name in names:
        (path / name).write_bytes(b"weights")


def test_pickled_weights_are_told(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    only(
        tmp_path, "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "training_args.bin"
    )
    assert told(tmp_path) == (
        f"{tmp_path} has no *.safetensors file; pytorch_model-00001-of-00002.bin and 1 more are pickled "
        f"weights, which are not read, as a pickle can run code: convert them once with transformers, "
        f"AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).save_pretrained(NEW_FOLDER)"
    )


def test_files_of_a_trainer_are_no_weights(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    only(tmp_path, "training_args.bin")
    assert "has no *.safetensors file and no" in told(tmp_path)


def test_gguf_files_are_told(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    only(tmp_path, "qwen3-Q4_K_M.gguf")
    (tmp_path / "config.json").unlink()  # such folders rarely have one
    found = "qwen3-Q4_K_M.gguf are GGUF files of llama.cpp, which are not read: give the safetensors"
    assert found in told(tmp_path)


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    assert told(file) == f"{file} is a file: give the folder that has config.json and safetensors"


def test_an_adapter_in_place_of_a_model_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert told(tmp_path) == (
        f"{tmp_path / 'adapter_config.json'} is a LoRA adapter, which is not served: "
        f"merge it into its model org/base first"
    )


def test_an_adapter_beside_a_model_is_told(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    files = "adapter_config.json and adapter_model.safetensors"
    assert told(tmp_path) == (
        f"{tmp_path / 'adapter_config.json'} is a LoRA adapter, which is not served: merge it into its "
        f"model first, or move {files} away to serve the model beside it alone"
    )
    for name in files.split(" and "):
        (tmp_path / name).unlink()
    Checkpoint(tmp_path)


# dtypes


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("named", ["bfloat16", "float32", "float16"])
def test_weights_are_cast_to_the_configs_dtype(
    named: str, stored: torch.dtype, fused: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path, dtype=stored, fused=fused)
    edit_config(tmp_path, dtype=named)
    dtype = getattr(torch, named)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # said once, however often it is opened
            assert Checkpoint(tmp_path).dtype == dtype
    assert_reads(tmp_path, model.to(dtype))
    if stored == dtype:
        assert not caplog.records
        return
    code = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}[stored]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}: 2 layers store experts in another dtype than the model's "
        f"({4 if fused else 48} tensors as {code}); they are cast to {dtype} while they are read"
    )


def test_experts_of_mixed_dtypes_are_cast(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    rewrite(tmp_path, lambda tensors: {n: t.float() if ".experts.3." in n else t for n, t in tensors.items()})
    with caplog.at_level(logging.WARNING):
        assert_reads(tmp_path, model)
    (record,) = caplog.records
    assert "(6 tensors as F32); they are cast to torch.bfloat16" in record.getMessage()


def test_a_value_beyond_float16_is_named(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {GATE: torch.full_like(tensors[GATE], 1e6)})
    edit_config(tmp_path, dtype="float16")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match=re.escape(f"tensor {GATE} has values beyond float16, as 1e+06")
    ):
        checkpoint.experts(1, [3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_without_a_key_the_weights_have_the_dtype(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path, dtype=dtype)
    edit_config(tmp_path, dtype=None, torch_dtype=None)
    with caplog.at_level(logging.WARNING):
        assert_reads(tmp_path, model)
    assert Checkpoint(tmp_path).dtype == dtype
    (record,) = caplog.records
    assert f"config.json has no key dtype; {dtype} is taken" in record.getMessage()


def test_scales_do_not_decide_the_dtype(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    quantize_fp8_block(tmp_path)  # float32 scales stand first in the file
    edit_config(tmp_path, dtype=None, torch_dtype=None)
    assert Checkpoint(tmp_path).dtype == torch.bfloat16


# configs


@pytest.mark.parametrize(
    "keys",
    [
        ("text_config",),
        ("llm_config",),
        ("language_config",),
        ("thinker_config", "text_config"),
        ("llm_config", "text_config"),
    ],
)
def test_a_nested_config_is_found(keys: tuple[str, ...], tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    file = tmp_path / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    dtype = config.pop("dtype")
    for key in reversed(keys):
        config = {key: config, "model_type": "some_omni", "vision_config": {"model_type": "some_vit"}}
    file.write_text(json.dumps(config | {"dtype": dtype, "architectures": ["SomeOmni"]}))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.model_type == "qwen3_moe"
    assert checkpoint.architecture == "SomeOmni"
    assert checkpoint.gate(0).top_k == 2
    assert_reads(tmp_path, model)


def test_a_quantization_in_between_is_found(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    quantize_fp8_block(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    quantization = config.pop("quantization_config")
    middle = {"text_config": config, "model_type": "thinker", "quantization_config": quantization}
    file.write_text(json.dumps({"thinker_config": middle, "model_type": "omni"}))
    assert Checkpoint(tmp_path).scheme(0).weights.name == "fp8_block128"


def renamed(change: Callable[[str], str]) -> Change:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("prefix", ["thinker.model.", "llm.model.", "model.text.decoder.", "backbone.", ""])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_any_prefix_is_found(family: str, prefix: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path)
    rewrite(tmp_path, renamed(lambda name: name.replace("model.", prefix, 1)))
    assert_reads(tmp_path, model)
    biased = Checkpoint(tmp_path).gate(1).bias is not None
    assert biased == (family == "deepseek_v3")


@pytest.mark.parametrize("beside", ["talker.model", "mtp", "model.mtp", "vision_tower.encoder", "visual"])
def test_experts_of_other_parts_are_left_alone(beside: str, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path)
    name = GATE.replace("model", beside)
    rewrite(tmp_path, lambda tensors: tensors | {name: torch.zeros(3, 3)})
    assert list(expert_layers([name])) == []
    assert_reads(tmp_path, model)


@pytest.mark.parametrize("frequency", [[0, 1], [0, 1, 1]])
def test_a_list_says_which_layers_have_experts(frequency: list[int], tmp_path: Path) -> None:
    model = make_checkpoint("deepseek_v3", tmp_path)  # layer 0 is dense
    edit_config(tmp_path, moe_layer_freq=frequency, first_k_dense_replace=None)
    assert Checkpoint(tmp_path).layers == (1,)
    assert_reads(tmp_path, model)


def test_a_list_of_too_few_layers_is_told(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    edit_config(tmp_path, moe_layer_freq=[0])
    assert told(tmp_path) == "config.json: moe_layer_freq has 1 entries, and layer 1 needs one: one a layer"


@pytest.mark.parametrize(
    "spelling", ["experts.0.w1.weight", "experts.0.own_proj.weight", "experts.9.up_proj"]
)
def test_layers_that_predict_further_tokens_are_ignored(spelling: str, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path)
    more = {
        f"model.layers.2.mlp.{spelling}": torch.zeros(1),
        "model.layers.2.mlp.experts.0.up_proj.weight": torch.ones(1),
    }
    rewrite(tmp_path, lambda tensors: tensors | more)
    assert Checkpoint(tmp_path).layers == (0, 1)
    assert_reads(tmp_path, model)


# what is there instead of a tensor


def test_a_missing_tensor_names_what_is_in_its_place(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    packed = f"{GATE}_packed"
    rewrite(tmp_path, renamed(lambda name: packed if name == GATE else name))
    assert told(tmp_path).startswith(f"layer 1 (fp32) misses tensor {GATE}; nearest that is there: {packed}")


def test_a_missing_layer_names_what_is_in_its_place(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    rewrite(tmp_path, renamed(lambda name: name.replace("layers.1.mlp.experts", "layers.1.mlp.expert_list")))
    assert told(tmp_path).startswith(
        "layer 1 misses tensor model.layers.1.mlp.experts.0.gate_proj.weight, and all its experts; nearest "
        "that is there: model.layers.1.mlp.expert_list.0.gate_proj.weight, "
    )


def test_a_missing_stack_names_what_is_in_its_place(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, fused=True)
    down = "model.layers.0.mlp.experts.down_proj"
    rewrite(tmp_path, renamed(lambda name: f"{down}_weight" if name == down else name))
    assert told(tmp_path) == (f"layer 0 (fp32) misses tensor {down}; nearest that is there: {down}_weight")


def test_nothing_alike_is_told(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    rewrite(tmp_path, lambda _: {"a": torch.ones(1)})
    assert told(tmp_path).endswith("and all its experts; nothing there has a name like it")
