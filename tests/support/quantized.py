"""Small quantized checkpoints as producers write them: `PRODUCERS`, `write`.

The model is a Qwen3-MoE of which only the experts are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantized_configs import (
    AWQ,
    BLOCK,
    CHANNEL,
    CT,
    DYNAMIC,
    F8,
    FP8,
    GPTQ,
    I4,
    I8,
    MX4,
    MX8,
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
from quantized_tensors import (
    Draw,
    Projection,
    awq,
    compressed_ints,
    fp8_block,
    fp8_block_powers,
    fp8_channel,
    fp8_tensor,
    gptq,
    int4_bytes,
    int8_channel,
    int8_tensor,
    mxfp4,
    mxfp6,
    mxfp8,
    nvfp4,
    nvfp4_divided,
    static_mxfp4,
)
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, EXPERTS, LAYERS = 256, 256, 3, 2


@dataclass(frozen=True)
class Producer:
    """A producer's config, how it stores a projection, and what must be made of it."""

    dialect: str
    scheme: str
    config: Mapping[str, Any] | None
    make: Callable[[Draw], Projection]
    config_file: str | None = None  # instead of config.json's quantization_config
    own_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    block: str = "mlp"
    model: Mapping[str, Any] = field(default_factory=dict)


PRODUCERS: dict[str, Producer] = {
    "fp8 tensor dynamic": Producer("fp8_tensor", "fp8_channel x fp8_token", FP8, fp8_tensor),
    "fp8 tensor static": Producer(
        "fp8_tensor",
        "fp8_channel x fp8_static",
        FP8 | {"activation_scheme": "static"},
        lambda draw: fp8_tensor(draw, static="input_scale"),
    ),
    "fp8 block": Producer(
        "fp8_block",
        "fp8_block128 x fp8_group128",
        FP8 | {"weight_block_size": [128, 128]},
        lambda draw: fp8_block(draw, "weight_scale_inv", dtype=torch.float32),
    ),
    "fp8 block with powers of two": Producer(
        "fp8_block",
        "fp8_block128 x fp8_group128",
        FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        fp8_block_powers,
        model={"expert_dtype": "fp8"},
    ),
    "ct FP8": Producer(
        CT,
        "fp8_channel x fp8_static",
        compressed("float-quantized", F8 | TENSOR, F8 | TENSOR),
        lambda draw: fp8_tensor(draw, (1,), static="input_scale"),
    ),
    "ct FP8 dynamic tensor": Producer(
        CT,
        "fp8_channel x fp8_token",
        compressed("float-quantized", F8 | TENSOR, F8 | TENSOR | DYNAMIC),
        lambda draw: fp8_tensor(draw, (1,)),
    ),
    "ct FP8_DYNAMIC": Producer(
        CT, "fp8_channel x fp8_token", compressed("float-quantized", F8 | CHANNEL, F8 | TOKEN), fp8_channel
    ),
    "ct FP8 weights": Producer(
        CT, "fp8_channel x bf16", compressed("naive-quantized", F8 | CHANNEL), fp8_channel
    ),
    "ct FP8_BLOCK": Producer(
        CT,
        "fp8_block128 x fp8_group128",
        compressed("float-quantized", F8 | BLOCK, F8 | groups_of(128) | DYNAMIC),
        lambda draw: fp8_block(draw, "weight_scale", dtype=torch.bfloat16),
    ),
    "ct W8A8": Producer(
        CT, "int8_channel x int8_token", compressed("int-quantized", I8 | CHANNEL, I8 | TOKEN), int8_channel
    ),
    "ct W8A8 asymmetric inputs": Producer(
        CT,
        "int8_channel x int8_token_asym",
        compressed("int-quantized", I8 | CHANNEL, I8 | TOKEN | {"symmetric": False}),
        int8_channel,
    ),
    "ct W8A8 static": Producer(
        CT,
        "int8_channel x int8_static",
        compressed("int-quantized", I8 | TENSOR, I8 | TENSOR),
        lambda draw: int8_tensor(draw, "input_scale"),
    ),
    "ct NVFP4": Producer(
        CT,
        "nvfp4 x nvfp4_static",
        compressed("nvfp4-pack-quantized", NV, NV | {"dynamic": "local"}),
        nvfp4_divided,
    ),
    "ct NVFP4A16": Producer(
        CT,
        "nvfp4 x bf16",
        compressed("nvfp4-pack-quantized", NV),
        lambda draw: nvfp4_divided(draw, static=False),
    ),
    "ct MXFP4": Producer(
        CT,
        "mxfp4",
        compressed("mxfp4-pack-quantized", MX4, MX4 | DYNAMIC),
        lambda draw: mxfp4(draw, "weight_packed"),
    ),
    "ct MXFP4A16": Producer(
        CT,
        "mxfp4 x bf16",
        compressed("mxfp4-pack-quantized", MX4),
        lambda draw: mxfp4(draw, "weight_packed"),
    ),
    "ct MXFP8": Producer(CT, "mxfp8", compressed("mxfp8-quantized", MX8, MX8 | DYNAMIC), mxfp8),
    **{
        f"ct {name}": Producer(
            CT,
            f"{scheme} x bf16",
            compressed(PACK, I4 | groups_of(group) | {"symmetric": not ints.get("asymmetric")} | order),
            lambda draw, group=group, ints=ints: compressed_ints(draw, 4, group, **ints),
        )
        for name, scheme, group, ints, order in (
            ("W4A16", "int4_group128", 128, {}, {}),
            ("W4A16 32", "int4_group32", 32, {}, {"actorder": "static"}),
            ("W4A16_ASYM", "int4_asym_group128", 128, {"asymmetric": True}, {}),
            ("act order", "int4_group32_act_order", 32, {"order": True}, {"actorder": "group"}),
            (
                "asymmetric act order",
                "int4_asym_group64_act_order",
                64,
                {"asymmetric": True, "order": True},
                {"actorder": "dynamic"},
            ),
        )
    },
    "ct W4A16 channel": Producer(
        CT,
        "int4_channel x bf16",
        compressed(PACK, I4 | CHANNEL),
        lambda draw: compressed_ints(draw, 4, draw.columns),
    ),
    "ct W8A16 channel": Producer(
        CT,
        "int8_channel x bf16",
        compressed(PACK, I8 | CHANNEL | {"group_size": -1}),
        lambda draw: compressed_ints(draw, 8, draw.columns),
    ),
    "ct W8A16 group": Producer(
        CT,
        "int8_group64 x bf16",
        compressed(PACK, I8 | groups_of(64)),
        lambda draw: compressed_ints(draw, 8, 64),
    ),
    **{
        f"ct W8A16 {name}": Producer(
            CT,
            f"{scheme} x bf16",
            compressed(PACK, I8 | groups_of(group) | {"symmetric": not ints.get("asymmetric")} | order),
            lambda draw, group=group, ints=ints: compressed_ints(draw, 8, group, **ints),
        )
        for name, scheme, group, ints, order in (
            ("asymmetric", "int8_asym_group32", 32, {"asymmetric": True}, {}),
            ("act order", "int8_group64_act_order", 64, {"order": True}, {"actorder": "group"}),
            (
                "asymmetric act order",
                "int8_asym_group32_act_order",
                32,
                {"asymmetric": True, "order": True},
                {"actorder": "group"},
            ),
        )
    },
    "ct W4A8 int8": Producer(
        CT,
        "int4_group64 x int8_token",
        compressed(PACK, I4 | groups_of(64), I8 | TOKEN),
        lambda draw: compressed_ints(draw, 4, 64),
    ),
    "ct W4AFP8": Producer(
        CT,
        "int4_group128 x fp8_token",
        compressed(PACK, I4 | groups_of(128), F8 | TOKEN),
        lambda draw: compressed_ints(draw, 4, 128),
    ),
    "ct W4AFP8 bytes": Producer(
        CT,
        "int4_group128 x fp8_token",
        compressed("int-quantized", I4 | groups_of(128), F8 | TOKEN),
        lambda draw: int4_bytes(draw, 128),
    ),
    "ct W4A8 bytes": Producer(
        CT,
        "int4_group32 x int8_token",
        compressed("int-quantized", I4 | groups_of(32), I8 | TOKEN),
        lambda draw: int4_bytes(draw, 32),
    ),
    "ct preset": Producer(
        CT,
        "mxfp8",
        {"quant_method": CT.replace("_", "-"), "config_groups": {"MXFP8": ["Linear"]}, "ignore": []},
        mxfp8,
    ),
    "modelopt FP8": Producer(
        "modelopt",
        "fp8_channel x fp8_static",
        modelopt("FP8", config_groups={"group_0": {"weights": {"num_bits": 4}}}),
        lambda draw: fp8_tensor(draw, static="input_scale"),
    ),
    "modelopt channel": Producer(
        "modelopt",
        "fp8_channel x fp8_token",
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        lambda draw: fp8_channel(draw, dtype=torch.float32, flat=True),
    ),
    "modelopt fp8_pb_wo": Producer(
        "modelopt",
        "fp8_block128 x fp8_group128",
        modelopt("fp8_pb_wo"),
        lambda draw: fp8_block(draw, "weight_scale", dtype=torch.float32, four=True),
    ),
    "modelopt blocks in two dimensions": Producer(
        "modelopt",
        "fp8_block128 x fp8_group128",
        modelopt("FP8_PB_WO"),
        lambda draw: fp8_block(draw, "weight_scale", dtype=torch.float32),
    ),
    "modelopt NVFP4": Producer("modelopt", "nvfp4 x nvfp4_static", modelopt("NVFP4"), nvfp4),
    "modelopt NVFP4 nested": Producer(
        "modelopt",
        "nvfp4 x nvfp4_static",
        nested("NVFP4", group_size="16"),
        nvfp4,
        config_file="hf_quant_config.json",
    ),
    "modelopt W4A16_NVFP4": Producer(
        "modelopt", "nvfp4 x bf16", modelopt("W4A16_NVFP4"), lambda draw: nvfp4(draw, static=False)
    ),
    "modelopt mxfp4": Producer("modelopt", "mxfp4", modelopt("mxfp4"), mxfp4),
    "modelopt MXFP8": Producer("modelopt", "mxfp8", modelopt("MXFP8"), mxfp8),
    "modelopt W4A8": Producer("modelopt", "mxfp4 x fp8_token", modelopt("W4A8_MXFP4_FP8"), mxfp4),
    "modelopt mixed": Producer(
        "modelopt",
        "mxfp8",
        modelopt(
            "MIXED_PRECISION",
            quantized_layers={
                f"model.layers.{layer}.mlp.experts": {"quant_algo": "MXFP8"} for layer in range(LAYERS)
            }
            | {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}},
        ),
        mxfp8,
    ),
    "gptq": Producer("gptq", "int4_group128 x bf16", GPTQ, gptq),
    "gptq v2": Producer(
        "gptq",
        "int4_asym_group64 x bf16",
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False, "group_size": 64},
        lambda draw: gptq(draw, group=64, less=0, sym=False),
    ),
    "gptq asymmetric": Producer(
        "gptq", "int4_asym_group128 x bf16", GPTQ | {"sym": False}, lambda draw: gptq(draw, sym=False)
    ),
    "gptq act order": Producer(
        "gptq",
        "int4_group32_act_order x bf16",
        GPTQ | {"desc_act": True, "group_size": 32},
        lambda draw: gptq(draw, group=32, order=True),
    ),
    "gptq 8 bits": Producer(
        "gptq",
        "int8_group32 x bf16",
        GPTQ | {"bits": 8, "group_size": 32},
        lambda draw: gptq(draw, 8, 32),
    ),
    "gptq 8 bits act order": Producer(
        "gptq",
        "int8_group64_act_order x bf16",
        GPTQ | {"bits": 8, "group_size": 64, "desc_act": True},
        lambda draw: gptq(draw, 8, 64, order=True),
    ),
    "gptq channel": Producer(
        "gptq",
        "int4_channel x bf16",
        GPTQ | {"group_size": -1, "desc_act": True},
        lambda draw: gptq(draw, group=draw.columns),
    ),
    "gptq of its own file": Producer(
        "gptq",
        "int4_group128 x bf16",
        {key: value for key, value in GPTQ.items() if key != "quant_method"},
        gptq,
        config_file="quantize_config.json",
    ),
    "awq": Producer("awq", "int4_asym_group64 x bf16", AWQ, awq),
    "awq of its own file": Producer(
        "awq",
        "int4_asym_group64 x bf16",
        {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
        awq,
        config_file="quant_config.json",
    ),
    "deepseek fp4": Producer(
        "deepseek_fp4",
        "mxfp4 x bf16",
        FP8 | {"weight_block_size": [128, 128], "store_dtype": "mxfp4"},
        lambda draw: mxfp4(draw, scale_name="scale"),
    ),
    "deepseek fp4 by the model's key": Producer(
        "deepseek_fp4",
        "mxfp4 x bf16",
        FP8 | {"weight_block_size": [128, 128]},
        lambda draw: mxfp4(draw, scale_name="scale"),
        model={"expert_dtype": "fp4"},
    ),
    **{
        f"quark {dtype}": Producer(
            "quark",
            f"mxfp6_{dtype[4:]}",
            quark(QUARK_MX | {"dtype": dtype}, QUARK_MX | {"dtype": dtype, "is_dynamic": True}),
            lambda draw, exponent=exponent: mxfp6(draw, exponent),
        )
        for dtype, exponent in (("fp6_e3m2", 3), ("fp6_e2m3", 2))
    },
    "quark fp4": Producer("quark", "mxfp4 x bf16", quark(QUARK_MX | {"dtype": "fp4"}, None), mxfp4),
    "quark fp4 static fp8": Producer(
        "quark",
        "mxfp4 x fp8_static",
        quark(
            QUARK_MX | {"dtype": "fp4"}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
        ),
        static_mxfp4,
    ),
    "quark fp8": Producer(
        "quark",
        "fp8_channel x fp8_static",
        quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}),
        lambda draw: fp8_tensor(draw, static="input_scale"),
    ),
}
"""Every way to store experts that a dialect reads, by name."""

W_NAMES = ("w1", "w3", "w2")


def write(
    path: Path, producer: Producer, size: tuple[int, int] = (HIDDEN, INNER)
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Writes the checkpoint with H and I of `size`; returns gate_up `[2I, H]` and down `[H, I]` by layer and
    expert.
    """
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": size[0],
        "moe_intermediate_size": size[1],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
    } | dict(producer.model)
    if producer.config is not None and producer.config_file is None:
        config["quantization_config"] = producer.config
    elif producer.config_file is not None:
        (path / producer.config_file).write_text(json.dumps(producer.config))
    (path / "config.json").write_text(json.dumps(config))
    tensors, meant = {}, {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            stored, meant[layer, expert] = expert_of(producer, layer, expert, size)
            tensors |= stored
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return meant


def expert_of(
    producer: Producer, layer: int, expert: int, size: tuple[int, int] = (HIDDEN, INNER)
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """An expert's tensors by name, and the gate_up `[2I, H]` and down `[H, I]` that they mean."""
    hidden, inner = size
    tensors, matrices = {}, []
    for role, name in enumerate(producer.own_names):
        seeds = (layer, expert, role), (layer, expert, min(role, 1) if role == 2 else 0)
        own, common = (np.random.default_rng(seed) for seed in seeds)
        shape = (hidden, inner) if role == 2 else (inner, hidden)
        stored, matrix = producer.make(Draw(*shape, own, common))
        stem = f"model.layers.{layer}.{producer.block}.experts.{expert}.{name}"
        tensors |= {f"{stem}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
        matrices.append(matrix)
    return tensors, (torch.cat(matrices[:2]), matrices[2])
