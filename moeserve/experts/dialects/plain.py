"""Unquantized checkpoints: one tensor a projection, in the model's dtype."""

from __future__ import annotations

import torch

from moeserve.experts.dialects.dialect import Dialect, Quantization, Storage, StoredTensor
from moeserve.experts.dialects.store import CheckpointError
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import FLOATS


def _claims(quantization: Quantization) -> bool:
    return quantization is None


def plain_storage(_: Quantization, dtype: torch.dtype) -> Storage:
    """Weights and activations of a model in `dtype`."""
    if dtype not in FLOATS:
        raise CheckpointError(f"unquantized experts must be {', '.join(map(str, FLOATS))}, found {dtype}")
    return Storage(Scheme(FLOATS[dtype], FLOATS[dtype]), (StoredTensor("weight", (dtype,)),))


ROW = Dialect("plain", "no quantization_config", _claims, plain_storage)
