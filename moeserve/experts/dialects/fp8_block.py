"""DeepSeek's FP8: E4M3 weights with a float32 scale a 128x128 block, activations in 1x128 groups.

The scale, `weight_scale_inv`, multiplies despite its name. MiniMax-M2 and Qwen's own FP8 releases are stored
so too. `fmt` and `scale_fmt` only inform: the tensors' dtypes say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moeserve.experts.dialects.dialect import Dialect, Quantization, Storage, StoredTensor
from moeserve.experts.dialects.store import CheckpointError
from moeserve.quant.format import Scheme
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

BLOCK = [128, 128]


def _claims(quantization: Quantization) -> bool:
    if quantization is None or quantization.get("quant_method") != "fp8":
        return False
    return quantization.get("weight_block_size") is not None and quantization.get("store_dtype") is None


def _storage(quantization: Quantization, _: torch.dtype) -> Storage:
    settings = quantization or {}
    if "activation_scheme" not in settings:
        raise CheckpointError("quantization_config has no key activation_scheme; block FP8 needs 'dynamic'")
    for key, only in (("weight_block_size", BLOCK), ("activation_scheme", "dynamic")):
        if settings.get(key, only) != only:
            raise CheckpointError(f"block FP8 with {key}={settings[key]!r} is not supported, only {only!r}")
    codes = StoredTensor("weight", (torch.float8_e4m3fn,))
    scale_dtypes = (torch.float32, torch.bfloat16)
    scale = StoredTensor("weight_scale_inv", scale_dtypes, rows=BLOCK[0], columns=BLOCK[1], scale=True)
    return Storage(Scheme(FP8_BLOCK, FP8_GROUP), (codes, scale))


def _skips(quantization: Mapping[str, Any], module: str) -> bool:
    listed = quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or []
    return any("experts" in entry and module in entry for entry in listed)


ROW = Dialect(
    name="fp8_block",
    reads="quant_method fp8 with weight_block_size [128, 128] and activation_scheme dynamic",
    claims=_claims,
    storage=_storage,
    skips=_skips,
)
