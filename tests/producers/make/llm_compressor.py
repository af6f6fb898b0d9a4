"""Quantizes a source with llm-compressor: every scheme that its presets and modifiers can bring experts to.

    python llm_compressor.py SOURCE OUT [RECIPE ...]

Writes `OUT / <source>-ct_<recipe>`. Needs llmcompressor 0.14.0.1, compressed-tensors 0.19.0, torch 2.13.0 and
transformers 5.17.0. A recipe that fails is reported, and the others go on.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer

Recipe = Callable[[], Any]

IGNORE = [
    "lm_head",
    r"re:.*mlp\.gate$",
    r"re:.*block_sparse_moe\.gate$",
    r"re:.*router$",
    r"re:.*shared_expert_gate$",
]
ROWS, LENGTH = 8, 64


def args(bits: int, kind: str, strategy: str, **keys: Any) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, **keys)


def group(weights: QuantizationArgs, inputs: QuantizationArgs | None = None, *targets: str) -> Any:
    """One config group."""
    return QuantizationScheme(targets=list(targets or ("Linear",)), weights=weights, input_activations=inputs)


def rounded(modifier: Any = QuantizationModifier, **keys: Any) -> Recipe:
    return lambda: modifier(**{"ignore": IGNORE} | keys)


def preset(name: str, modifier: Any = QuantizationModifier, **keys: Any) -> Recipe:
    return rounded(modifier, targets="Linear", scheme=name, **keys)


def groups(*each: Any, modifier: Any = QuantizationModifier, **keys: Any) -> Recipe:
    return rounded(modifier, config_groups={f"group_{i}": one for i, one in enumerate(each)}, **keys)


def integers(bits: int, size: int, **keys: Any) -> QuantizationArgs:
    if size < 0:
        return args(bits, "int", "channel", **keys)
    return args(bits, "int", "group", group_size=size, **keys)


TOKEN8 = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
EXPERTS, ATTENTION = r"re:.*experts\.\d+\..*", r"re:.*self_attn\..*"
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}

RECIPES: dict[str, Recipe] = {
    "fp8": preset("FP8"),
    "fp8_dynamic": preset("FP8_DYNAMIC"),
    "fp8_block": preset("FP8_BLOCK"),
    "w8a8": preset("W8A8"),
    "w8a8_gptq": preset("W8A8", GPTQModifier),
    "w8a8_smooth": lambda: [SmoothQuantModifier(smoothing_strength=0.5), preset("W8A8", GPTQModifier)()],
    "w8a16": preset("W8A16"),
    "w8a16_g32": groups(group(integers(8, 32))),
    "w8a16_g64": groups(group(integers(8, 64))),
    "w8a16_asym": groups(group(integers(8, 64, symmetric=False))),
    "w4a16": preset("W4A16"),
    "w4a16_asym": preset("W4A16_ASYM"),
    "w4a16_g32": groups(group(integers(4, 32))),
    "w4a16_g64": groups(group(integers(4, 64))),
    "w4a16_g16": groups(group(integers(4, 16))),
    "w4a16_g32_asym": groups(group(integers(4, 32, symmetric=False))),
    "w4a16_channel": groups(group(integers(4, -1))),
    "w4a16_channel_asym": groups(group(integers(4, -1, symmetric=False))),
    "w4a16_gptq": preset("W4A16", GPTQModifier),
    "w4a16_gptq_weight": preset("W4A16", GPTQModifier, actorder="weight"),
    "w4a16_gptq_static": preset("W4A16", GPTQModifier, actorder="static"),
    "w4a16_gptq_asym": preset("W4A16_ASYM", GPTQModifier),
    "w3a16": groups(group(integers(3, 64))),
    "w4a8": preset("W4A8"),
    "w4a8_g128": groups(group(integers(4, 128), QuantizationArgs(**TOKEN8, type="int"))),
    "w4afp8": preset("W4AFP8"),
    "nvfp4": preset("NVFP4"),
    "nvfp4a16": preset("NVFP4A16"),
    "nvfp4_gptq": preset("NVFP4", GPTQModifier),
    "mxfp4": preset("MXFP4"),
    "mxfp4a16": preset("MXFP4A16"),
    "mxfp8": preset("MXFP8"),
    "mxfp8a16": preset("MXFP8A16"),
    "fp8_channel_tensor": groups(
        group(args(8, "float", "channel"), args(8, "float", "tensor", dynamic=False))
    ),
    "fp8_tensor_token": groups(group(args(8, "float", "tensor"), args(8, "float", "token", dynamic=True))),
    "fp8_tensor_dynamic": groups(group(args(8, "float", "tensor"), args(8, "float", "tensor", dynamic=True))),
    "fp8_weights": groups(group(args(8, "float", "channel"))),
    "fp8_tensor_weights": groups(group(args(8, "float", "tensor"))),
    "w8a8_tensor": groups(group(args(8, "int", "tensor"), args(8, "int", "tensor", dynamic=False))),
    "w8a8_asym": groups(
        group(
            args(8, "int", "channel"),
            QuantizationArgs(**TOKEN8 | {"symmetric": False}, type="int"),
        )
    ),
    "mixed": groups(
        group(integers(4, 32), None, EXPERTS),
        group(args(8, "float", "channel"), QuantizationArgs(**TOKEN8, type="float"), ATTENTION),
    ),
    "mixed_nvfp4_fp8": lambda: [
        QuantizationModifier(
            config_groups={
                "group_0": group(
                    args(8, "float", "channel"), QuantizationArgs(**TOKEN8, type="float"), ATTENTION
                ),
                "group_1": QuantizationScheme(
                    targets=[EXPERTS],
                    weights=args(
                        4,
                        "float",
                        "tensor_group",
                        group_size=16,
                        scale_dtype=torch.float8_e4m3fn,
                        zp_dtype=torch.float8_e4m3fn,
                        observer="memoryless_minmax",
                    ),
                    input_activations=args(
                        4,
                        "float",
                        "tensor_group",
                        group_size=16,
                        dynamic="local",
                        scale_dtype=torch.float8_e4m3fn,
                        zp_dtype=torch.float8_e4m3fn,
                        observer="static_minmax",
                    ),
                ),
            },
            ignore=IGNORE,
        )
    ],
    "ignored": preset("FP8_DYNAMIC", ignore=["lm_head", r"re:.*layers\.0\.", r"re:.*gate$"]),
    "ignored_experts": preset("FP8_DYNAMIC", ignore=[*IGNORE, r"re:.*experts.*"]),
    "half_ignored": preset("FP8_DYNAMIC", ignore=[*IGNORE, r"re:.*down_proj$"]),
    "cache": preset("FP8_DYNAMIC", kv_cache_scheme=CACHE),
    "awq": lambda: [AWQModifier(), preset("W4A16_ASYM")()],
    "awq_sym": lambda: [AWQModifier(), preset("W4A16")()],
    "awq_g32": lambda: [AWQModifier(), groups(group(integers(4, 32, symmetric=False)))()],
}
"""Recipes by name."""


def samples() -> Dataset:
    """Random tokens to calibrate with."""
    source = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 250, (ROWS, LENGTH), generator=source).tolist()
    return Dataset.from_list([{"input_ids": row, "attention_mask": [1] * LENGTH} for row in rows])


def make(source: Path, out: Path, name: str) -> None:
    """Writes one recipe's checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    oneshot(
        model=model,
        recipe=RECIPES[name](),
        dataset=samples(),
        max_seq_length=LENGTH,
        num_calibration_samples=ROWS,
        moe_calibrate_all_experts=True,
    )
    target = out / f"{source.name}-ct_{name}"
    model.save_pretrained(target, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def _unpinned(_: object, *__: object, **___: object) -> None:
    """In place of pinning memory, which a machine without an accelerator cannot."""


if __name__ == "__main__":
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = _unpinned
    for each in sys.argv[3:] or RECIPES:
        try:
            make(Path(sys.argv[1]), Path(sys.argv[2]), each)
            print("OK", each, flush=True)
        except Exception as error:
            print("FAIL", each, type(error).__name__, str(error)[:300], flush=True)
            traceback.print_exc(limit=-3)
