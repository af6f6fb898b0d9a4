"""The error catalogue: what a quantized checkpoint must not say, named by its key or tensor and value."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import PRODUCERS, Producer, write
from quantized_configs import (
    AWQ,
    BLOCK,
    CHANNEL,
    DYNAMIC,
    F4,
    F8,
    FP8,
    GPTQ,
    I4,
    I8,
    MX4,
    NV,
    PACK,
    QUARK_MX,
    TENSOR,
    TOKEN,
    compressed,
    groups_of,
    modelopt,
    nested,
    quark,
)
from safetensors.torch import load_file, save_file

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError

Config = dict[str, Any]


def two_groups() -> Config:
    config = compressed("mxfp4-pack-quantized", MX4)
    first = config["config_groups"]["group_0"]
    own = first | {"targets": ["re:.*experts.1.up_proj"]}
    return config | {"config_groups": {"group_0": first, "group_1": own}}


FORMAT = "float-quantized"

DOWN_ROTATED = {
    "config_groups": {
        "R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]},
        "R4": {
            "type": "hadamard",
            "apply": [{"targets": ["re:.*down_proj$"], "location": "input", "ignore": []}],
        },
    }
}

REFUSED: dict[str, tuple[str, Config, str]] = {
    "ct no groups": (
        "ct FP8",
        {"config_groups": None},
        "config_groups must be a non-empty object, found None",
    ),
    "ct sparsity": (
        "ct FP8",
        {"sparsity_config": {"format": "dense"}},
        "sparsity_config={'format': 'dense'} is",
    ),
    "ct unknown preset": (
        "ct FP8",
        {"config_groups": {"FP5": ["Linear"]}},
        "config_groups.FP5 is no known preset",
    ),
    "ct partly ignored": (
        "ct FP8",
        {"ignore": ["model.layers.1.mlp.experts.2.up_proj"]},
        "these are not: model.layers.1.mlp.experts.0.gate_proj (group_0) and "
        "model.layers.1.mlp.experts.2.up_proj (unquantized)",
    ),
    "ct ignore no list": ("ct FP8", {"ignore": "lm_head"}, "ignore must be a list, found 'lm_head'"),
    "ct two schemes": (
        "ct MXFP4",
        two_groups(),
        "experts.0.gate_proj (group_0) and model.layers.0.mlp.experts.1.up_proj (group_1)",
    ),
    "ct unknown key": (
        "ct FP8",
        compressed(FORMAT, F8 | TENSOR | {"rounding": 1}),
        "config_groups.group_0.weights has the unknown key 'rounding'; known: actorder, block_structure",
    ),
    "ct strategy": (
        "ct FP8",
        compressed(FORMAT, F8 | {"strategy": "row"}),
        "strategy='row' is not valid; known",
    ),
    "ct group size": ("ct FP8", compressed(FORMAT, F8 | groups_of(-3)), "group_size=-3 is not valid"),
    "ct group without size": (
        "ct FP8",
        compressed(FORMAT, F8 | {"strategy": "group"}),
        "group_size=None is not valid; strategy group needs a size",
    ),
    "ct size without group": (
        "ct FP8",
        compressed(FORMAT, F8 | TENSOR | {"group_size": 32}),
        "group_size=32 is not valid; strategy tensor has no groups",
    ),
    "ct block": ("ct FP8", compressed(FORMAT, F8 | {"strategy": "block"}), "strategy block needs it"),
    "ct dynamic channel": (
        "ct FP8",
        compressed(FORMAT, F8 | CHANNEL | DYNAMIC),
        "dynamic=True is not valid; strategy channel is static",
    ),
    "ct static token": (
        "ct FP8",
        compressed(FORMAT, F8 | CHANNEL, F8 | {"strategy": "token"}),
        "dynamic=False is not valid; strategy token is dynamic",
    ),
    "ct bits": ("ct FP8", compressed(FORMAT, F8 | TENSOR | {"num_bits": 0}), "num_bits=0 is not valid"),
    "ct format": (
        "ct W4A16",
        compressed("float-quantized", I4 | groups_of(128)),
        "static int4 per group 128 in format 'float-quantized' are not supported, only in pack-quantized",
    ),
    "ct transform": (
        "ct W4A16",
        compressed(PACK, I4 | groups_of(128)) | {"transform_config": DOWN_ROTATED},
        "transform_config.R4 rotates the input of model.layers.0.mlp.experts.0.down_proj while it is served",
    ),
    "ct packed bits": (
        "ct W4A16",
        compressed(PACK, I4 | groups_of(128) | {"num_bits": 3}),
        "need 4 or 8 bits",
    ),
    "ct packed group": (
        "ct W4A16",
        compressed(PACK, I4 | groups_of(48)),
        "need groups of 32, 64, 128, or per",
    ),
    "ct asymmetric bytes": (
        "ct W4A16",
        compressed("int-quantized", I8 | groups_of(128) | {"symmetric": False}),
        "static asymmetric int8 per group 128 with inputs None are not supported; packed integer weights "
        "need no inputs and format pack-quantized where they have zero points or an activation order",
    ),
    "ct group of 16": (
        "ct W4A16",
        compressed(PACK, I4 | groups_of(16)),
        "static int4 per group 16 with inputs None are not supported; packed integer weights need groups of",
    ),
    "ct fp8 tensor, inputs per token": (
        "ct FP8",
        compressed(FORMAT, F8 | TENSOR, F8 | TOKEN),
        "dynamic float8 per token are not supported; FP8 weights (float8) need inputs per tensor where",
    ),
    "ct nvfp4 inputs": (
        "ct NVFP4",
        compressed("nvfp4-pack-quantized", NV, F8 | TOKEN),
        "with inputs dynamic float8 per token are not supported; NVFP4 weights (float4 per tensor_group 16) "
        "need no inputs, or NVFP4 inputs",
    ),
    "ct fp8 channel, static inputs": (
        "ct FP8",
        compressed(FORMAT, F8 | CHANNEL, F8 | TENSOR),
        "dynamic inputs per token where weights are per channel",
    ),
    "ct fp8 other blocks": (
        "ct FP8",
        compressed(FORMAT, F8 | BLOCK | {"block_structure": "64x64"}, F8 | groups_of(128) | DYNAMIC),
        "weights static float8 per block (64, 64)",
    ),
    "ct int8 static inputs with zero points": (
        "ct W8A8",
        compressed("int-quantized", I8 | CHANNEL, I8 | TENSOR | {"symmetric": False}),
        "with inputs static asymmetric int8 per tensor are not supported; INT8 weights with inputs need "
        "dynamic int8 inputs per token, or symmetric int8 inputs per tensor",
    ),
    "ct int8 groups with inputs": (
        "ct W8A8",
        compressed("int-quantized", I8 | groups_of(64), I8 | TOKEN),
        "static int8 per group 64 with inputs dynamic int8 per token are not supported; INT8 weights with "
        "inputs need symmetric weights per channel or per tensor",
    ),
    "ct no such weights": (
        "ct FP8",
        compressed(FORMAT, F4 | TENSOR),
        "are not supported; supported: MXFP4 weights",
    ),
    "modelopt no algorithm": (
        "modelopt FP8",
        {"quant_algo": None},
        "no quant_algo, found None; supported: FP8, ",
    ),
    "modelopt algorithm": (
        "modelopt FP8",
        modelopt("NVFP4_AWQ"),
        "quant_algo='NVFP4_AWQ' is not supported; sup",
    ),
    **{
        f"modelopt {algorithm}": (
            "modelopt FP8",
            modelopt(algorithm),
            f"quant_algo={algorithm!r} is not supported; supported: FP8, FP8_PER_CHANNEL_PER_TOKEN",
        )
        for algorithm in ("W8A8_SQ_PER_CHANNEL", "W8A16", "W4A8_NVFP4_FP8", "W4A8_AWQ")
    },
    "modelopt listed group": (
        "modelopt W4A16_NVFP4",
        modelopt("W4A16_NVFP4", config_groups={"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}),
        "W4A16_NVFP4 with config_groups.group_0.weights.group_size=32 is not supported, only 16",
    ),
    "modelopt cache": (
        "modelopt FP8",
        {"kv_cache_quant_algo": 8},
        "kv_cache_quant_algo must be a string, found 8",
    ),
    "modelopt excludes": ("modelopt FP8", {"exclude_modules": "lm_head"}, "exclude_modules must be a list"),
    "modelopt group": (
        "modelopt NVFP4",
        {"group_size": "many"},
        "group_size must be an integer, found 'many'",
    ),
    "modelopt other group": (
        "modelopt NVFP4",
        {"group_size": 32},
        "NVFP4 with group_size=32 is not supported, only 16",
    ),
    "modelopt mixed": (
        "modelopt mixed",
        {"quantized_layers": {}},
        "MIXED_PRECISION needs a non-empty object",
    ),
    "modelopt mixed experts": (
        "modelopt mixed",
        {
            "quantized_layers": {
                "model.layers.0.mlp.experts.0.gate_proj": {"quant_algo": "MXFP8"},
                "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "FP8"},
            }
        },
        "model.layers.0.mlp.experts.0.gate_proj (MXFP8) and model.layers.0.mlp.experts.0.up_proj (FP8)",
    ),
    "fp8 scheme": (
        "fp8 tensor dynamic",
        {"activation_scheme": "none"},
        "activation_scheme='none' is not supported",
    ),
    "fp8 no scheme": (
        "fp8 tensor dynamic",
        {"activation_scheme": None},
        "activation_scheme=None is not supported",
    ),
    "fp8 block static": (
        "fp8 block",
        {"activation_scheme": "static"},
        "block FP8 with activation_scheme='static' is not supported, only 'dynamic'",
    ),
    "fp8 block size": (
        "fp8 block",
        {"weight_block_size": [1, 32]},
        "block FP8 with weight_block_size=[1, 32] is not supported, only [128, 128]",
    ),
    "fp8 stored": (
        "deepseek fp4",
        {"store_dtype": "nvfp4"},
        "store_dtype='nvfp4' is not supported, only 'mxfp4'",
    ),
    "gptq key": ("gptq", {"desc_act": None}, "GPTQ's config needs desc_act (bool), found None"),
    "gptq pair": (
        "gptq",
        {"bits": 8, "sym": False},
        "(bits, sym)=(8, False) is not supported, only (4, True)",
    ),
    "gptq bits": ("gptq", {"bits": 3}, "(bits, sym)=(3, True) is not supported"),
    "gptq group": ("gptq", {"group_size": 16}, "group_size=16 is not supported, only 32, 64, 128, -1"),
    "gptq format": (
        "gptq",
        {"checkpoint_format": "marlin"},
        "checkpoint_format='marlin' is not supported, only gptq",
    ),
    "gptq dynamic": (
        "gptq",
        {"dynamic": {r"-:.*experts\.1\.": {}}},
        "model.layers.0.mlp.experts.1.gate_proj (unquantized)",
    ),
    "awq bits": ("awq", {"bits": 3}, "AWQ with bits=3 is not supported, only 4"),
    "awq version": ("awq", {"version": "gemv"}, "AWQ with version='gemv' is not supported, only 'gemm'"),
    "awq symmetric": ("awq", {"zero_point": False}, "AWQ with zero_point=False is not supported, only True"),
    "awq no group": ("awq", {"group_size": None}, "AWQ's config needs group_size or q_group_size"),
    "awq partly": (
        "awq",
        {"modules_to_not_convert": ["experts.1.up_proj"]},
        "leaves out model.layers.0.mlp.experts.1",
    ),
    "quark export": ("quark fp4", {"export": None}, "quantization_config has no key export"),
    "quark pair": (
        "quark fp4",
        quark(QUARK_MX | {"dtype": "fp6_e3m2"}, QUARK_MX | {"dtype": "fp4", "is_dynamic": True}),
        "supported: per_group 32 e8m0 of fp4, fp6_e3m2, fp6_e2m3 as in w_mxfp4, ",
    ),
    "quark outputs": (
        "quark fp4",
        {
            "global_quant_config": {
                "weight": QUARK_MX | {"dtype": "fp4"},
                "output_tensors": {"dtype": "fp8_e4m3"},
            }
        },
        "output_tensors={'dtype': 'fp8_e4m3'} is not supported, only null",
    ),
}


@pytest.mark.parametrize(("name", "changed", "message"), REFUSED.values(), ids=REFUSED)
def test_a_config_that_is_not_supported_is_named(
    name: str, changed: Config, message: str, tmp_path: Path
) -> None:
    entry = PRODUCERS[name]
    config = {
        k: v for k, v in (dict(entry.config or {}) | changed).items() if v is not None or k in MEANT_NULL
    }
    write(tmp_path, replace(entry, config=config))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint(tmp_path)


MEANT_NULL = ("activation_scheme", "config_groups")


def test_the_nested_form_needs_its_keys(tmp_path: Path) -> None:
    row = PRODUCERS["modelopt NVFP4 nested"]
    write(tmp_path, replace(row, config=nested("NVFP4")))
    with pytest.raises(
        CheckpointError, match="quantization of NVFP4 misses the keys group_size; null is allowed"
    ):
        Checkpoint(tmp_path)
    write(tmp_path, replace(row, config={"quantization": "NVFP4"}))
    with pytest.raises(CheckpointError, match="quantization must be an object, found 'NVFP4'"):
        Checkpoint(tmp_path)


UP = "model.layers.1.mlp.experts.2.up_proj"
Change = Callable[[torch.Tensor], torch.Tensor]

SPOILED: dict[str, tuple[str, str, Change, str]] = {
    "ct globals differ": (
        "ct NVFP4",
        "weight_global_scale",
        lambda t: t * 2,
        r"gate_proj.weight_global_scale=\S+ and \S+up_proj.weight_global_scale=\S+ disagree; gate and up of",
    ),
    "modelopt globals differ": (
        "modelopt NVFP4",
        "weight_scale_2",
        lambda t: t * 2,
        r"gate_proj.weight_scale_2=\S+ and \S+up_proj.weight_scale_2=\S+ disagree; gate and up of an",
    ),
    "a divisor without a reciprocal": (
        "ct NVFP4",
        "weight_global_scale",
        lambda tensor: torch.full_like(tensor, 1e-40),
        "divides, and 9.99995e-41 has no reciprocal in float32",
    ),
    "an input divisor without a reciprocal": (
        "ct NVFP4",
        "input_global_scale",
        lambda tensor: torch.full_like(tensor, 1e-40),
        "divides, and 9.99995e-41 has no reciprocal in float32",
    ),
    "a divisor of zero": ("ct NVFP4", "weight_global_scale", torch.zeros_like, "must be positive, found 0.0"),
    "a static scale of zero": (
        "modelopt FP8",
        "input_scale",
        torch.zeros_like,
        "must be positive, found 0.0",
    ),
    "ct inputs differ": (
        "ct FP8",
        "input_scale",
        lambda t: t + 1,
        "input_scale of gate and up of an expert in",
    ),
    "shape": (
        "ct W4A16",
        "weight_shape",
        lambda t: t + 1,
        r"weight_shape must hold \[256, 256\], found \[257, 257\]",
    ),
    "gptq zero": ("gptq", "qzeros", lambda t: t + 1, "qzeros holds the zero point 9, and sym=True needs 8"),
    "gptq order": (
        "gptq",
        "g_idx",
        lambda t: t.flip(0),
        "g_idx does not count groups of 128, and desc_act=False",
    ),
    "gptq orders differ": (
        "gptq act order",
        "g_idx",
        lambda t: t.flip(0),
        r"g_idx=\S+ and \S+g_idx=\S+ disagree",
    ),
    "gptq order too large": (
        "gptq act order",
        "g_idx",
        lambda t: t + 1,
        "g_idx holds the group 8, and there are 8",
    ),
}


@pytest.mark.parametrize(("name", "suffix", "change", "message"), SPOILED.values(), ids=SPOILED)
def test_values_that_contradict_are_named(
    name: str, suffix: str, change: Change, message: str, tmp_path: Path
) -> None:
    write(tmp_path, PRODUCERS[name])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensor = f"{UP}.{suffix}"
    save_file(tensors | {tensor: change(tensors[tensor]).contiguous()}, file)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path).experts(1, [2])


def test_a_bias_of_experts_that_have_none_must_be_zero(tmp_path: Path) -> None:
    write(tmp_path, PRODUCERS["gptq"])
    file = tmp_path / "model.safetensors"
    bias = f"{UP}.bias"
    tensors = load_file(file) | {bias: torch.zeros(256, dtype=torch.float16)}
    save_file(tensors, file)
    Checkpoint(tmp_path).experts(1, [2])
    save_file(tensors | {bias: torch.ones(256, dtype=torch.float16)}, file)
    with pytest.raises(CheckpointError, match=f"{bias} is not zero, and the model's experts have no bias"):
        Checkpoint(tmp_path).experts(1, [2])


@pytest.mark.parametrize(("name", "size"), [("ct MXFP4", 32), ("ct W4A16", 128), ("modelopt NVFP4", 16)])
def test_groups_that_do_not_divide_are_named(name: str, size: int, tmp_path: Path) -> None:
    write(tmp_path, replace(PRODUCERS[name], model={"hidden_size": 256 - size // 2}))
    found = f"H={256 - size // 2} must be a multiple of {size}, a group of"
    with pytest.raises(CheckpointError, match=found):
        Checkpoint(tmp_path)


def test_expert_dtype_must_be_known(tmp_path: Path) -> None:
    row: Producer = PRODUCERS["deepseek fp4 by the model's key"]
    write(tmp_path, replace(row, model={"expert_dtype": "fp2"}))
    with pytest.raises(CheckpointError, match="expert_dtype must be 'fp4' or 'fp8', found 'fp2'"):
        Checkpoint(tmp_path)


def test_configs_of_the_catalogue_are_those_of_producers() -> None:
    for config in (AWQ, GPTQ, FP8):
        assert config["quant_method"] in ("awq", "gptq", "fp8")
