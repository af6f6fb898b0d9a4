"""FP8 with one scale a projection: E4M3 `weight` and a `weight_scale`, activations static or dynamic.

With static activations every projection has an `input_scale`. A dynamic scale per tensor is computed per
token here. Checkpoints that transformers quantized have one scale for gate and up of an expert, and those of
all experts in one tensor, `gate_up_proj_scale_inv`.
"""

from __future__ import annotations

import torch

from moeserve.checkpoints.dialects import forms
from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, StaticScale, Storage
from moeserve.checkpoints.dialects.fp8_block import skips
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import StoredTensor
from moeserve.quant.format import WHOLE
from moeserve.quant.formats.fp8 import FP8_CHANNEL, FP8_STATIC, FP8_TOKEN

ACTIVATIONS = {
    "static": (FP8_STATIC, StaticScale("input_scale")),
    "dynamic": (FP8_TOKEN, None),
}

BESIDE = StoredTensor("weight_scale_inv", (torch.float32,), WHOLE, WHOLE, scale=True, beside=True)


def _claims(quantization: Quantization) -> bool:
    if quantization is None or quantization.get("quant_method") != "fp8":
        return False
    return quantization.get("weight_block_size") is None and quantization.get("store_dtype") is None


def _storage(settings: Settings, _: torch.dtype, names: LayerNames) -> Storage:
    known = ", ".join(map(repr, ACTIVATIONS))
    if "activation_scheme" not in settings:
        raise CheckpointError(f"quantization_config has no key activation_scheme; FP8 needs one of {known}")
    scheme = settings["activation_scheme"]
    if scheme not in ACTIVATIONS:
        raise CheckpointError(f"FP8 with activation_scheme={scheme!r} is not supported, only {known}")
    if names.scales_beside and scheme == "dynamic":
        return forms.per_tensor(FP8_CHANNEL, FP8_TOKEN, scale=BESIDE)
    return forms.per_tensor(FP8_CHANNEL, *ACTIVATIONS[scheme])


ENTRY = Dialect(
    name="fp8_tensor",
    reads="quant_method fp8 without weight_block_size, activation_scheme static or dynamic",
    claims=_claims,
    storage=_storage,
    skips=skips,
)
