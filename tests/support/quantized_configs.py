"""Quantization configs as producers write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compressed(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **keys: Any
) -> dict[str, Any]:
    """A config of compressed-tensors with one group."""
    whole = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "symmetric": True,
    }
    whole |= {"observer": None, "observer_kwargs": {}, "scale_dtype": None, "zp_dtype": None}
    group = {
        "targets": ["Linear"],
        "weights": whole | dict(weights),
        "input_activations": None if inputs is None else whole | dict(inputs),
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "model.layers.0.mlp.gate", "re:.*self_attn.*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
        "global_compression_ratio": None,
    } | keys


def modelopt(algorithm: str, **keys: Any) -> dict[str, Any]:
    """ModelOpt's flat config."""
    ignore = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.self_attn*"]
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore} | keys


def nested(algorithm: str, **keys: Any) -> dict[str, Any]:
    """ModelOpt's hf_quant_config.json."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization | keys}


def quark(weight: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Quark's config with one descriptor for the whole model."""
    whole = {"weight": dict(weight), "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "order"},
        "global_quant_config": whole,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "re:.*mlp.gate$"],
    }


F8, F4, I8, I4 = (
    {"num_bits": bits, "type": kind} for bits, kind in ((8, "float"), (4, "float"), (8, "int"), (4, "int"))
)
TENSOR, CHANNEL, TOKEN = (
    {"strategy": "tensor"},
    {"strategy": "channel"},
    {"strategy": "token", "dynamic": True},
)
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
NV = F4 | {"strategy": "tensor_group", "group_size": 16}
MX4 = F4 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MX8 = F8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
DYNAMIC = {"dynamic": True}


def groups_of(size: int, **keys: Any) -> dict[str, Any]:
    return {"strategy": "group", "group_size": size} | keys


QUARK_MX = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PACK = "pack-quantized"
CT = "compressed_tensors"
