"""AMD Quark: MXFP4, MXFP6 and MXFP8 of OCP, FP8 and INT8, by layer patterns and dtype descriptors.

A layer has the descriptor of the first pattern that fits it, or else that of the whole model. MX weights and
inputs make an OCP MX scheme; a per-tensor FP8 input of MX weights is static. Quark does not quantize experts
that a model holds in one tensor, whatever the config says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from moeserve.checkpoints.dialects import forms
from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, StaticScale, Storage
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.quant.format import Format
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.formats.fp8 import FP8_CHANNEL, FP8_GROUP, FP8_STATIC, FP8_TOKEN
from moeserve.quant.formats.int8 import INT8_CHANNEL, INT8_TOKEN
from moeserve.quant.formats.mx import MXFP4, MXFP6_E2M3, MXFP6_E3M2
from moeserve.quant.schemes import OCP_MX

INPUT_SCALE = StaticScale("input_scale")
MX_DTYPES = {"fp4": MXFP4, "fp6_e3m2": MXFP6_E3M2, "fp6_e2m3": MXFP6_E2M3}
MX_SCHEMES = {(scheme.weights, scheme.activations) for scheme in OCP_MX.values()}
EIGHT_BITS = {"fp8_e4m3": (FP8_CHANNEL, FP8_TOKEN), "int8": (INT8_CHANNEL, INT8_TOKEN)}
CLASS_NAME = "Linear"

Descriptor = Mapping[str, Any]


def _claims(quantization: Quantization) -> bool:
    return quantization is not None and quantization.get("quant_method") == "quark"


def _config(settings: Settings, module: str) -> Mapping[str, Any] | None:
    """Returns the config of `module`: by pattern, by class, or that of the whole model."""
    for pattern, config in (settings.get("layer_quant_config") or {}).items():
        if fnmatchcase(module, pattern) if "*" in pattern else module in pattern:
            return config or None
    of_class = (settings.get("layer_type_quant_config") or {}).get(CLASS_NAME)
    return of_class or settings.get("global_quant_config") or None


def _excluded(settings: Settings, module: str) -> bool:
    return any(
        re.match(entry[3:], module)
        if entry.startswith("re:")
        else entry == module or fnmatchcase(module, entry)
        for entry in settings.get("exclude") or []
    )


def _of_layer(settings: Settings, names: LayerNames) -> Mapping[str, Any] | None:
    if "export" not in settings:
        raise CheckpointError(
            "Quark's quantization_config has no key export; quantize with an exporting release"
        )
    if _excluded(settings, f"{names.module}.experts"):
        return None
    every = names.modules()
    found = {module: None if _excluded(settings, module) else _config(settings, module) for module in every}
    for module in every[1:]:
        if found[module] != found[every[0]]:
            listed = f"{every[0]} and {module}"
            raise CheckpointError(f"experts of a layer must be quantized alike; these are not: {listed}")
    config = found[every[0]]
    for key in ("output_tensors", "bias"):
        if config and config.get(key):
            raise CheckpointError(f"Quark's {key}={config[key]!r} is not supported, only null")
    return config if config and config.get("weight") else None


def _skips(settings: Settings, names: LayerNames) -> bool:
    return _of_layer(settings, names) is None or _left_whole(names)


def _left_whole(names: LayerNames) -> bool:
    """Whether the experts are one tensor without scales, which Quark leaves unquantized."""
    return names.stacked and names.tensors <= set(names.stacks())


def _storage(settings: Settings, dtype: torch.dtype, names: LayerNames) -> Storage:
    config = _of_layer(settings, names)
    if config is None:
        raise ValueError(f"{names.module} is not quantized")
    weight, inputs = config["weight"], config.get("input_tensors")
    if not isinstance(weight, Mapping) or not isinstance(inputs, Mapping | None):
        found = f"weight={weight!r} and input_tensors={inputs!r}"
        raise CheckpointError(f"Quark's {found} are not supported, only one descriptor each")
    plain = FLOATS[dtype]
    found_storage = _mx(weight, inputs, plain) or _eight_bits(weight, inputs)
    if found_storage is None:
        raise CheckpointError(
            f"Quark's weight {_described(weight)} with input_tensors {_described(inputs)} is not supported; "
            f"supported: per_group 32 e8m0 of {', '.join(MX_DTYPES)} as in {', '.join(OCP_MX)}; "
            "fp8_e4m3 and int8 per_tensor or per_channel; fp8_e4m3 per_block [128, 128]"
        )
    return found_storage


def _is_mx(descriptor: Descriptor) -> bool:
    blocks = (descriptor.get("qscheme"), descriptor.get("group_size"), descriptor.get("scale_format"))
    return blocks == ("per_group", 32, "e8m0") and descriptor.get("dtype") in MX_DTYPES


def _mx(weight: Descriptor, inputs: Descriptor | None, plain: Format) -> Storage | None:
    if not _is_mx(weight):
        return None
    form = MX_DTYPES[weight["dtype"]]
    if inputs is None:
        return forms.mx(form, plain)
    if inputs.get("dtype") == "fp8_e4m3":
        if inputs.get("qscheme") != "per_tensor" or inputs.get("is_dynamic"):
            return None
        return forms.mx(form, FP8_STATIC, static=INPUT_SCALE)
    if not _is_mx(inputs) or not inputs.get("is_dynamic"):
        return None
    activations = MX_DTYPES[inputs["dtype"]]
    return forms.mx(form, activations) if (form, activations) in MX_SCHEMES else None


def _eight_bits(weight: Descriptor, inputs: Descriptor | None) -> Storage | None:
    kind = weight.get("dtype")
    if kind not in EIGHT_BITS or inputs is None or inputs.get("dtype") != kind:
        return None
    form, dynamic = EIGHT_BITS[kind]
    scheme = (weight.get("qscheme"), inputs.get("qscheme"), bool(inputs.get("is_dynamic")))
    if scheme == ("per_tensor", "per_tensor", True):
        return forms.per_tensor(form, dynamic)
    if scheme == ("per_tensor", "per_tensor", False) and kind == "fp8_e4m3":
        return forms.per_tensor(form, FP8_STATIC, INPUT_SCALE)
    if scheme == ("per_channel", "per_channel", True):
        return forms.per_channel(form, dynamic)
    blocks = scheme[0] == "per_block" and list(weight.get("block_size") or []) == [128, 128]
    if (
        blocks
        and kind == "fp8_e4m3"
        and scheme[1:] == ("per_group", True)
        and inputs.get("group_size") == 128
    ):
        return forms.fp8_block(FP8_GROUP, "weight_scale")
    return None


def _described(descriptor: Descriptor | None) -> str:
    keys = ("dtype", "qscheme", "group_size", "block_size", "scale_format", "is_dynamic")
    return str({key: descriptor[key] for key in keys if key in descriptor}) if descriptor else "null"


ENTRY = Dialect(
    name="quark",
    reads="quant_method quark",
    claims=_claims,
    storage=_storage,
    skips=_skips,
)
