"""DeepSeek-V4's experts under `quant_method` fp8: MXFP4 `weight` bytes and an E8M0 `scale` for 32 columns.

`store_dtype` mxfp4, or the model's `expert_dtype` fp4, tells them from FP8 experts. Their inputs stay in the
model's dtype.
"""

from __future__ import annotations

import torch

from moeserve.checkpoints.dialects import forms
from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, Storage
from moeserve.checkpoints.dialects.fp8_block import skips
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.formats.mx import MXFP4

STORED = "mxfp4"


def _claims(quantization: Quantization) -> bool:
    if quantization is None or quantization.get("quant_method") != "fp8":
        return False
    return quantization.get("store_dtype") is not None


def _storage(settings: Settings, dtype: torch.dtype, _: LayerNames) -> Storage:
    if settings["store_dtype"] != STORED:
        found = f"store_dtype={settings['store_dtype']!r}"
        raise CheckpointError(f"FP8 with {found} is not supported, only {STORED!r} or null")
    return forms.mx(MXFP4, FLOATS[dtype], scale="scale")


ENTRY = Dialect(
    name="deepseek_fp4",
    reads="quant_method fp8 with store_dtype mxfp4",
    claims=_claims,
    storage=_storage,
    skips=skips,
)
