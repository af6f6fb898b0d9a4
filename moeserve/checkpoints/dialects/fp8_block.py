"""DeepSeek's FP8: E4M3 weights with a float32 scale a 128x128 block, activations in 1x128 groups.

The scale, `weight_scale_inv`, is multiplied despite its name. MiniMax-M2 and Qwen's own FP8 releases are
stored in the same way. DeepSeek-V4 calls the scale `scale`; it and transformers may store it as an E8M0 byte.
Checkpoints that transformers quantized have the scales of all experts in one tensor, and weights by expert.
`fmt` and `scale_fmt` are not read: the dtypes of the tensors say the same.
"""

from __future__ import annotations

import torch

from moeserve.checkpoints.dialects import forms
from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, Storage
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.quant.formats.fp8 import FP8_GROUP

BLOCK = [128, 128]
LONG, SHORT = "weight_scale_inv", "scale"
SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


def _claims(quantization: Quantization) -> bool:
    if quantization is None or quantization.get("quant_method") != "fp8":
        return False
    return quantization.get("weight_block_size") is not None and quantization.get("store_dtype") is None


def _storage(settings: Settings, _: torch.dtype, names: LayerNames) -> Storage:
    if "activation_scheme" not in settings:
        raise CheckpointError("quantization_config has no key activation_scheme; block FP8 needs 'dynamic'")
    for key, only in (("weight_block_size", BLOCK), ("activation_scheme", "dynamic")):
        if settings.get(key, only) != only:
            raise CheckpointError(f"block FP8 with {key}={settings[key]!r} is not supported, only {only!r}")
    scale = SHORT if any(name.endswith(f".{SHORT}") for name in names.tensors) else LONG
    return forms.fp8_block(FP8_GROUP, scale, dtypes=SCALES, beside=names.scales_beside)


def skips(settings: Settings, names: LayerNames) -> bool:
    """Whether an entry of the ignore list names the layer's experts, or anything in them."""
    listed = settings.get("ignored_layers") or settings.get("modules_to_not_convert") or []
    return any("experts" in entry and f"{names.module}.experts" in entry for entry in listed)


ENTRY = Dialect(
    name="fp8_block",
    reads="quant_method fp8 with weight_block_size [128, 128] and activation_scheme dynamic",
    claims=_claims,
    storage=_storage,
    skips=skips,
)
